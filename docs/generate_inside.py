"""Draws the plan of the rooms, docs/images/house.svg, and their list on the page inside.md, from the table in rooms.py.

With --check it only says whether one of them is stale. tests/test_house.py holds the table against the imports.
"""

import sys
from html import escape
from pathlib import Path

from rooms import ROOMS, UP
from sections import write_section

DOCS = Path(__file__).parent
PLAN = DOCS / "images" / "house.svg"
WIDE, HIGH, ACROSS, DOWN = 130, 34, 22, 46  # of a box, and between boxes


GROUND = ("errors", "disk")  # which nearly all use: drawn without arrows
COLUMNS = {  # places across, where the middle of a level is not the best one
    "convert": 1, "training": 3, "factory": 1, "export": 2.2, "weights": 1, "speed": 2.2, "draw": 4, "bulk": 5,
    "model": 3, "costs": 0, "positions": 1, "stem": 2, "pooling": 3, "inputs": 4, "folders": 5,
    "speed.cpu": 5.8, "speed.threads": 7, "speed.verdicts": 5, "speed.onednn": 4.9, "predict": 6.4,
    "config": 2.3, "images": 6.1, "decode": 6, "cli": 2.2, "schema": 3.6, "errors": 1.8, "disk": 3.2, "versions": 4.6,
    "habits": 0.6, "vectors": 5, "fingerprint": 0.9, "headers": 8, "tiff": 6, "jpeg2000": 7,
}  # fmt: skip


def levels() -> dict[str, int]:
    """How high each room stands: above all that it uses."""
    found: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in found:
            found[room] = 1 + max((level(used) for used in ROOMS[room].uses.split()), default=-1)
        return found[room]

    for room in ROOMS:
        level(room)
    return found


def reachable(room: str) -> set[str]:
    """All rooms that one uses, directly or by way of others."""
    found: set[str] = set()
    for used in ROOMS[room].uses.split():
        found |= {used} | reachable(used)
    return found


def drawn_arrows() -> list[tuple[str, str]]:
    """Each arrow, but for those that the others imply: who uses weights uses what weights stands on."""
    arrows = []
    for room, what in ROOMS.items():
        used = [name for name in what.uses.split() if name not in GROUND]
        for target in used:
            if not any(target in reachable(other) for other in used if other != target):
                arrows.append((room, target))
    return arrows


def places() -> dict[str, tuple[float, float]]:
    """The left upper corner of each box; the highest level on top."""
    level_of = levels()
    highest = max(level_of.values())
    found = {}
    for room, level in level_of.items():
        found[room] = (10 + COLUMNS[room] * (WIDE + ACROSS), 10 + (highest - level) * (HIGH + DOWN))
    return found


def plan() -> str:
    """The drawing: a box a room, an arrow from who uses to what is used, dashed where only a function does."""
    at = places()
    width = max(x for x, _ in at.values()) + WIDE + ACROSS
    height = max(y for _, y in at.values()) + HIGH + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="13">',
        "<title>The rooms of vitlite, and who uses whom</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5c6bc0"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for (start, end), dashed in [
        *((arrow, False) for arrow in drawn_arrows()),
        *((arrow, True) for arrow in sorted(UP)),
    ]:
        (x1, y1), (x2, y2) = at[start], at[end]
        y1, y2 = (y1, y2 + HIGH) if dashed and y1 > y2 else (y1 + HIGH, y2)
        x1, x2 = x1 + WIDE / 2, x2 + WIDE / 2
        middle = (y1 + y2) / 2
        style = ' stroke-dasharray="4 4" opacity=".55"' if dashed else ""
        lines.append(
            f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}" fill="none" '
            f'stroke="#5c6bc0" stroke-width="1.2" marker-end="url(#tip)"{style}/>'
        )
    for room, (x, y) in at.items():
        folder = (DOCS.parent / "src" / "vitlite" / room).is_dir()
        fill = "#e8eaf6" if folder else "#fffde7"
        lines.append(
            f'<g><title>{escape(ROOMS[room].does)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" '
            f'rx="6" fill="{fill}" stroke="#3949ab"/><text x="{x + WIDE / 2:.0f}" y="{y + HIGH / 2 + 4:.0f}" '
            f'text-anchor="middle" fill="#1a237e">{room}{"/" if folder else ""}</text></g>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def table() -> list[str]:
    """The rooms as a table, the highest first."""
    level_of = levels()
    lines = ["", "| room | what it does | what it uses |", "|---|---|---|"]
    for room in sorted(ROOMS, key=lambda room: -level_of[room]):
        uses = ROOMS[room].uses.replace(" ", ", ")
        lines.append(f"| `{room}` | {ROOMS[room].does} | {uses} |")
    return [*lines, ""]


def main() -> int:
    """Writes both, or with --check compares them."""
    if "--check" in sys.argv:
        if not PLAN.exists() or PLAN.read_text(encoding="utf-8") != plan():
            print("images/house.svg is stale. Write it: python docs/generate_inside.py", file=sys.stderr)
            return 1
    else:
        PLAN.write_text(plan(), encoding="utf-8")
    return write_section(DOCS / "inside.md", "<!-- rooms -->", "<!-- end of rooms -->", table())


if __name__ == "__main__":
    sys.exit(main())

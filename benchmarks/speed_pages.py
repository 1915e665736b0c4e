"""What `libraries.py` measured, as a table in Markdown and as a plot."""

import math
from pathlib import Path
from typing import Any

EVERYWHERE = ("timm", "ONNX Runtime", "OpenVINO")  # measured in every row, and drawn
WIDTH = 5.25  # inches of the plot, as of vitlite.plots's: its letters can be read also on a phone
INTRODUCTION = (
    "Each number is a time divided by that of `vitlite.optimize`, whose milliseconds are in the column *ms*. Above 1, "
    "`vitlite.optimize` is faster. *vitlite* is the model before `optimize`. *All tokens* is vitlite without the "
    "shortcut in its last block, which the other engines do not take. *Products* is the matrix products alone."
)


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: each one's time over that of the optimized model."""
    lines = [
        "# Speed beside other libraries",
        "",
        "*Explanation · for people who want every measured time.*",
        "",
        _origin(report["machine"]),
        "",
        INTRODUCTION,
        "",
        *_ratios(report["cells"]),
    ]
    if report["left_out"]:
        reasons = [f"{name}: {reason}" for name, reason in report["left_out"].items()]
        lines += ["", f"Left out: {'; '.join(reasons)}."]
    if report["creation"]:
        lines += ["", "| ViT-B/16 from a local file | create, s | peak over torch, MB | import beyond torch, s |"]
        lines += ["|---|---|---|---|"]
        for name, (seconds, megabytes, importing) in report["creation"].items():
            lines.append(f"| {name} | {seconds:.2f} | {megabytes:.0f} | {importing:.2f} |")
    return "\n".join(lines) + "\n"


def _origin(machine: dict[str, Any]) -> str:
    """On what, and when."""
    load = f", load {machine['load'][0]} at the start" if "load" in machine else ""
    return (
        f"One run of `python benchmarks/libraries.py` on {machine['cores']} cores of {machine['cpu']} "
        f"({', '.join(machine['instructions'])}), {machine['threads']} threads, torch {machine['torch']}, "
        f"{machine['date']}{load}."
    )


def _ratios(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each row of measurements."""
    names: dict[str, None] = {}  # in the order in which they first come
    for cell in cells:
        names |= dict.fromkeys(cell["seconds"])
    others = [name for name in names if name != "optimized"]
    lines = [f"| model | px | batch | dtype | ms | {' | '.join(others)} |", "|---" * (5 + len(others)) + "|"]
    for cell in cells:
        seconds = cell["seconds"]
        optimized = seconds.get("optimized", math.nan)
        ratios = [f"{seconds[name] / optimized:.2f}" if name in seconds else "" for name in others]
        row = [cell["model"], cell["size"], cell["batch"], cell["dtype"], f"{optimized * 1e3:.1f}", *ratios]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return lines


def need_matplotlib() -> Any:
    """matplotlib, or what to install."""
    try:
        import matplotlib.figure
        import matplotlib.ticker
    except ModuleNotFoundError as error:
        raise SystemExit("Drawing the measurements needs matplotlib: pip install matplotlib") from error
    return matplotlib


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws the ratios, and how cost grows beside what the multiply-adds predict."""
    matplotlib = need_matplotlib()
    growth = report["growth"]
    heights = [6.0] + [2.4] * len(growth)  # inches, one below the other
    figure = matplotlib.figure.Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    _plot_ratios(figure.add_subplot(grid[0]), report["cells"])
    for row, (axis, points) in enumerate(growth.items(), 1):
        axes = figure.add_subplot(grid[row])
        _plot_growth(axes, axis, points)
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    machine = report["machine"]
    figure.suptitle(
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, {machine['date']}", fontsize="medium"
    )
    with matplotlib.rc_context({"svg.hashsalt": "vitlite"}):
        figure.savefig(file)


def _plot_ratios(axes: Any, cells: list[dict[str, Any]]) -> None:
    """A line for each row of measurements, a dot for each engine."""
    rows = [cell for cell in cells if "optimized" in cell["seconds"]]
    labels = [f"{cell['model'][4:]} {cell['size']} px, {cell['batch']}, {cell['dtype']}" for cell in rows]
    for name in EVERYWHERE:
        ratios, lines = [], []
        for i, cell in enumerate(rows):
            if name in cell["seconds"]:
                ratios.append(cell["seconds"][name] / cell["seconds"]["optimized"])
                lines.append(i)
        axes.plot(ratios, lines, "o", label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlabel="time / time of vitlite.optimize")
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(EVERYWHERE), frameon=False, columnspacing=1)


def _plot_growth(axes: Any, axis: str, points: list[tuple[int, float, float]]) -> None:
    """Measured times, and times in proportion to the multiply-adds, equal at the last point."""
    values, gmacs, seconds = zip(*points, strict=True)
    expected = [seconds[-1] * work / gmacs[-1] for work in gmacs]
    axes.loglog(values, [s * 1e3 for s in seconds], "o-", label="measured")
    axes.loglog(values, [s * 1e3 for s in expected], "--", color="gray", label="as the multiply-adds")
    axes.set(xlabel=axis, ylabel="ms")
    axes.set_xticks(values, labels=[str(value) for value in values])
    axes.minorticks_off()
    axes.legend(loc="lower right", frameon=False)

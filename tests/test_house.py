"""What a reader can rely on: functions that fit in the head, rooms whose arrows point one way, and a quick import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from rooms import ROOMS, UP, room_of

import vitlite
from vitlite.cli.main import COMMANDS

SOURCE = Path(vitlite.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_DECISIONS = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef


def decisions(function: Function) -> int:
    """Every decision a reader has to make, those of functions within it included."""
    total = 1  # the function itself
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def functions(file: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, Function))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_a_function_fits_in_the_head(file: Path) -> None:
    dense = {function.name: n for function in functions(file) if (n := decisions(function)) > MOST_DECISIONS}
    assert not dense, f"more than {MOST_DECISIONS} decisions: {dense}"


def test_decisions_are_counted() -> None:
    text = """
def f(a, b):
    if a and b or not a:
        return [x for x in a if x if not x]
    try:
        while a:
            pass
    except ValueError:
        return a if b else [y for x in a for y in x]
"""
    (function,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    assert decisions(function) == 1 + 1 + 2 + 3 + 1 + 1 + 1 + 2


@pytest.mark.parametrize("comment", ["noqa: C901", "noqa: PLR0915", "noqa: C", "noqa: PLR"])
def test_no_function_is_excused(comment: str) -> None:
    assert not [file.name for file in FILES if comment in file.read_text("utf-8")]


# ---- rooms


def modules() -> list[str]:
    """All modules but the package itself, by their dotted names: "weights.zoo"."""
    names = []
    for file in FILES:
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts not in ((), ("__main__",)):
            names.append(".".join(parts))
    return names


MODULES = modules()


class Arrow(NamedTuple):
    """One module imports another; `later` where a function does it when it runs."""

    start: str
    end: str
    later: bool


def arrows(module: str) -> Iterator[Arrow]:
    """What a module of vitlite imports of vitlite when it runs."""
    place = SOURCE.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")

    def visit(node: ast.AST, later: bool) -> Iterator[Arrow]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vitlite":
            origin = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{origin}.{alias.name}".lstrip(".")
                end = inner if inner in MODULES else origin
                if end:
                    yield Arrow(module, end, later)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vitlite."):
                    yield Arrow(module, alias.name.partition(".")[2], later)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, later or isinstance(node, (ast.FunctionDef, ast.Lambda)))

    return visit(ast.parse(file.read_text("utf-8")), False)


ARROWS = [arrow for module in MODULES for arrow in arrows(module)]


def between_rooms(arrow: Arrow) -> tuple[str, str] | None:
    start, end = room_of(arrow.start), room_of(arrow.end)
    return None if start == end else (start, end)


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module) for module in MODULES} == ROOMS.keys()


@pytest.mark.parametrize("module", MODULES)
def test_arrows_between_rooms_are_those_of_the_table(module: str) -> None:
    for arrow in ARROWS:
        between = between_rooms(arrow)
        if arrow.start == module and between is not None:
            start, end = between
            assert end in ROOMS[start].uses.split() or (arrow.later and between in UP), f"{module} imports {arrow.end}"


def test_every_arrow_of_the_table_is_there() -> None:
    there = {between_rooms(arrow) for arrow in ARROWS}
    wanted = {(start, end) for start, room in ROOMS.items() for end in room.uses.split()}
    assert not wanted - there, "the table has arrows that no module needs"
    assert {between_rooms(arrow) for arrow in ARROWS if arrow.later} >= UP


def test_arrows_point_one_way() -> None:
    """Between rooms, and between the modules of a room: whoever is imported does not import back, by any way."""
    order = TopologicalSorter({room: set(use.uses.split()) for room, use in ROOMS.items()})
    order.prepare()  # raises CycleError
    graph: dict[str, set[str]] = {}
    for arrow in ARROWS:
        if between_rooms(arrow) not in UP:
            graph.setdefault(arrow.start, set()).add(arrow.end)
    TopologicalSorter(graph).prepare()


PAGE = Path(__file__).parents[1].joinpath("docs", "inside.md").read_text("utf-8")


@pytest.mark.parametrize("module", [module for module in MODULES if "." in module])
def test_the_page_on_the_house_names_every_module_in_its_room(module: str) -> None:
    room, *_, name = module.split(".")
    _, start, after = PAGE.partition(f"**`{room}/`.**")
    assert start
    told = after.partition("\n**`")[0]
    assert f"`{name}`" in told or f"`{name}/`" in told or (room == "cli" and name in COMMANDS)


@pytest.mark.parametrize(("package", "room"), [("argparse", "cli"), ("ray", "bulk"), ("pyarrow", "bulk")])
def test_what_only_one_room_knows(package: str, room: str) -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == package for name in names):
                assert file.relative_to(SOURCE).parts[0] == room, f"{file} imports {package}"


# ---- imports cost next to nothing


def test_public_names_are_these() -> None:
    names = ["ViT", "ViTConfig", "VitliteError", "create", "info", "list_models", "load", "optimize"]
    assert vitlite.__all__ == names
    assert [getattr(vitlite, name).__name__ for name in names] == names
    assert {*names, "__version__"} <= set(dir(vitlite))
    with pytest.raises(AttributeError, match="module 'vitlite' has no attribute 'vit_base_16'"):
        vitlite.vit_base_16  # noqa: B018


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


GAINED = """
import sys{first}
before = set(sys.modules)
{code}
gained = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(gained - sys.stdlib_module_names - {{"vitlite", "coverage"}}))
"""


@pytest.mark.parametrize("code", ["import vitlite", "from vitlite import ViT, ViTConfig, VitliteError"])
def test_importing_brings_einops_and_the_standard_library(code: str) -> None:
    assert fresh(GAINED.format(first=", torch", code=code)).split() in (["einops"], [])


@pytest.mark.parametrize(
    "code",
    [
        "import vitlite, vitlite.config, vitlite.presets, vitlite.errors, vitlite.cli.main",
        "import vitlite; vitlite.list_models(); vitlite.info('vit_base_16')",
        "import vitlite.cli.main as c; assert c.main(['list']) == 0; sys.stdout.write('\\x00')",
        "import vitlite.cli.main as c; assert c.main(['info', 'vit_base_16']) == 0; sys.stdout.write('\\x00')",
        "import vitlite.cli.main as c; assert c.main(['--help']) == 0; sys.stdout.write('\\x00')",
    ],
)
def test_names_and_help_need_the_standard_library_alone(code: str) -> None:
    assert fresh(GAINED.format(first="", code=code)).rpartition("\0")[2].split() == []


@pytest.mark.usefixtures("uncovered")
def test_importing_costs_at_most_50_ms_beyond_torch() -> None:
    """Processor time, the best of three: the machine may be busy with something else."""
    code = "import time, torch; t = time.process_time(); import vitlite; vitlite.ViT; print(time.process_time() - t)"
    assert min(float(fresh(code)) for _ in range(3)) <= 0.05


WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("numpy", "PIL", "torchvision", "matplotlib", "timm", "transformers"))  # as if not there
import warnings, torch
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import vitlite
model = vitlite.create("vit_tiny_16", weights=None, image_size=32, num_classes=5).eval()
images = torch.randn(2, 3, 48, 32)
model.save(sys.argv[1])
again = vitlite.load(sys.argv[1])
assert torch.equal(again.embed(images), model.embed(images))
assert torch.equal(again(images), model(images))

from pathlib import Path
from vitlite.training.datasets import Pictures
from vitlite.images import Preprocess, TransformConfig
from vitlite.training.settings import Settings
from vitlite.training.loop import train
sides, half = (32, 32), (0.5, 0.5, 0.5)
recipe = TransformConfig(size=sides, resize=sides, mode="squash", interpolation="bilinear", mean=half, std=half)
model.preprocess = Preprocess(recipe, model)
data = Pictures(torch.randint(0, 256, (8, 3, *sides), dtype=torch.uint8), torch.arange(8) % 5, tuple("abcde"))
for _ in range(2):  # the second reads what the first wrote
    history = train(model, data, Path(sys.argv[1] + "-run"), Settings(epochs=1, batch=4), validation=data)
assert len(history) == 1
"""


def test_commands_do_not_pass_on_what_torch_says_of_a_missing_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; from vitlite.cli.main import main; main(sys.argv[1:])"
    words = ("eval", "none", "--model", "vit_nano_4")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stderr.startswith("vitlite: error: ")


def test_works_without_numpy_pillow_and_torchvision(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

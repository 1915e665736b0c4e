"""Modules depend on each other in one direction, few lines carry the core, and importing costs next to nothing."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitlite

SOURCE = Path(vitlite.__file__).parent

# What each module of the core may import. A newcomer reads from factory to model and meets nothing else.
CORE = {
    "errors": set(),
    "config": {"errors"},
    "onednn": set(),
    "model": {"config", "errors", "onednn"},
    "sizes": {"config"},
    "zoo": {"config", "errors", "sizes"},
    "transfer": {"errors"},
    "hub": {"errors", "transfer"},
    "layouts": {"config", "errors"},
    "describe": {"errors"},
    "checkpoint": {"model", "layouts", "describe", "config", "errors"},
    "images": {"errors"},
    "factory": {"zoo", "hub", "images", "checkpoint", "describe", "model", "config", "errors"},
}
# What stands on it, lowest first: each may import the core and those before it.
ON_TOP = [
    "fast", "predict", "save", "report", "weights", "vectors", "plots", "bulk", "ray", "maps", "export", "peers",
    "bench", "ranks", "augment", "muon", "datasets", "evaluate", "train", "cli", "__main__",
]  # fmt: skip
# The only arrows up, each inside a function: two for the reader's convenience, one where a command picks its engine.
UPWARD = {("model", "images"), ("model", "predict"), ("model", "save"), ("bulk", "ray")}


def imports(name: str) -> Iterator[tuple[str, bool]]:
    """The modules of vitlite that one imports when it runs, and whether inside a function."""
    tree = ast.parse((SOURCE / f"{name}.py").read_text())

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module == "vitlite":
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitlite."):
            yield node.module.partition(".")[2], inside
        elif isinstance(node, ast.Import):
            yield from ((a.name.partition(".")[2], inside) for a in node.names if a.name.split(".")[0] == "vitlite")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside or isinstance(node, (ast.FunctionDef, ast.Lambda)))

    return ((module, inside) for module, inside in visit(tree, False) if module not in ("", "__version__"))


def test_every_module_has_its_place() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert modules == {*CORE, *ON_TOP}


@pytest.mark.parametrize("name", [*CORE, *ON_TOP])
def test_imports_point_one_way(name: str) -> None:
    allowed = CORE[name] if name in CORE else {*CORE, *ON_TOP[: ON_TOP.index(name)]}
    for module, inside in imports(name):
        assert module in allowed or (inside and (name, module) in UPWARD), f"{name} imports {module}"


def test_the_arrows_up_are_still_there() -> None:
    assert {(name, module) for name, module in UPWARD if (module, True) in imports(name)} == UPWARD


def code_lines(name: str) -> int:
    """Logical lines: a statement spread over several counts once; comments and docstrings do not count."""
    text = (SOURCE / f"{name}.py").read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = sum(
        isinstance(node, documented) and ast.get_docstring(node) is not None for node in ast.walk(ast.parse(text))
    )
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NEWLINE for token in tokens) - docstrings


def test_the_core_is_read_in_an_evening() -> None:
    eight = ("config", "model", "zoo", "hub", "layouts", "checkpoint", "images", "factory")
    assert sum(code_lines(name) for name in eight) <= 1_700


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
        "import vitlite, vitlite.config, vitlite.errors, vitlite.cli",
        "import vitlite; vitlite.list_models(); vitlite.info('vit_base_16')",
        "import vitlite.cli as c; assert c.main(['list']) == 0; sys.stdout.write('\\x00')",
        "import vitlite.cli as c; assert c.main(['info', 'vit_base_16']) == 0; sys.stdout.write('\\x00')",
        "import vitlite.cli as c; assert c.main(['--help']) == 0; sys.stdout.write('\\x00')",
    ],
)
def test_names_and_help_need_the_standard_library_alone(code: str) -> None:
    assert fresh(GAINED.format(first="", code=code)).rpartition("\0")[2].split() == []


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
from vitlite.images import Preprocess, Recipe
from vitlite.training.settings import Settings
from vitlite.training.loop import train
sides, half = (32, 32), (0.5, 0.5, 0.5)
recipe = Recipe(size=sides, resize=sides, mode="squash", interpolation="bilinear", mean=half, std=half)
model.preprocess = Preprocess(recipe, model)
data = Pictures(torch.randint(0, 256, (8, 3, *sides), dtype=torch.uint8), torch.arange(8) % 5, tuple("abcde"))
for _ in range(2):  # the second reads what the first wrote
    history = train(model, data, Path(sys.argv[1] + "-run"), Settings(epochs=1, batch=4), validation=data)
assert len(history) == 1
"""


def test_commands_do_not_pass_on_what_torch_says_of_a_missing_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; from vitlite import cli; cli.main(sys.argv[1:])"
    words = ("eval", "none", "--model", "vit_nano_4")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stderr.startswith("vitlite: error: ")


def test_works_without_numpy_pillow_and_torchvision(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

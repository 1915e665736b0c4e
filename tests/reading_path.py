"""Count what a reader has to follow from a model's name to a label, in vitlite, timm and torchvision.

    python tests/reading_path.py

Every library loads a file of random weights, prepares one photo and names its classes. Counted are the functions of the
library that run, their modules and their distinct lines. What runs while a module is imported is not counted. A package
whose file is only a docstring is not counted as an imported module.
"""

import ast
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

PHOTO = Path(__file__).parents[1] / "examples" / "photos" / "chelsea.png"
PARTS_OF_FUNCTIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class ReadingPath(NamedTuple):
    """What runs, and how many of the library's modules are imported for it."""

    functions: list[str]
    modules: list[str]
    lines: int
    imported: int


def with_vitlite(file: Path) -> None:
    """Name the classes of the photo with vitlite."""
    from vitlite import create

    model = create("vit_tiny_16.deit_fb_in1k", weights=file)
    print(model.predict(PHOTO)[0].label)


def with_timm(file: Path) -> None:
    """Do the same with timm."""
    import torch
    from peers import timm
    from PIL import Image

    model = timm.create_model("deit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    model.eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = Image.open(PHOTO).convert("RGB")
    with torch.inference_mode():
        best = model(transform(image)[None]).softmax(-1).topk(1).indices.item()
    print(timm.data.ImageNetInfo().index_to_description(best))


def with_torchvision(file: Path) -> None:
    """Do the same with torchvision, whose smallest ViT is vit_b_32. Its weights are random: it loads no local file."""
    import torch
    from peers import torchvision
    from PIL import Image

    weights = torchvision.models.ViT_B_32_Weights.DEFAULT
    model = torchvision.models.vit_b_32().eval()
    image = weights.transforms()(Image.open(PHOTO).convert("RGB"))
    with torch.inference_mode():
        best = model(image[None]).softmax(-1).topk(1).indices.item()
    print(weights.meta["categories"][best])


LIBRARIES: dict[str, Callable[[Path], None]] = {
    "vitlite": with_vitlite, "timm": with_timm, "torchvision": with_torchvision
}  # fmt: skip


def imported(library: str) -> list[str]:
    """Return the modules of a library that are imported now."""
    return sorted(name for name in sys.modules if name.partition(".")[0] == library)


def has_code(module: str) -> bool:
    """Return False for a package whose file is only a docstring."""
    file = getattr(sys.modules[module], "__file__", None)
    if not str(file).endswith(".py"):
        return True
    return len(ast.parse(Path(str(file)).read_text("utf-8")).body) > 1


def trace(library: str, file: Path, modules: list[str]) -> ReadingPath:
    """Run with all modules imported before, and see what runs."""
    from importlib import import_module

    for module in (["peers"] if library != "vitlite" else []) + modules:
        import_module(module)
    if library == "vitlite":
        from vitlite import create  # noqa: F401  # looked up when it is first imported
    root = str(Path(sys.modules[library].__file__ or "").parent)
    functions: set[CodeType] = set()
    lines: set[tuple[str, int]] = set()

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(root) or frame.f_code.co_name == "<module>":
            return None
        if frame.f_code.co_name not in PARTS_OF_FUNCTIONS:
            functions.add(frame.f_code)
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return follow

    threading.settrace(follow)
    sys.settrace(follow)
    LIBRARIES[library](file)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    names = sorted(f"{Path(code.co_filename).relative_to(root)}: {code.co_qualname}" for code in functions)
    counted = sum(map(has_code, modules))
    return ReadingPath(names, sorted({name.partition(":")[0] for name in names}), len(lines), counted)


def run(library: str, file: Path, modules: list[str] | None = None) -> Any:
    """Call this file in a process of its own."""
    words = [sys.executable, __file__, library, str(file), json.dumps(modules)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def reading_path(library: str, file: Path) -> ReadingPath:
    """Return what runs from a name to a label: a first process finds the modules, a second one is traced."""
    return ReadingPath(*run(library, file, run(library, file)))


def write_weights(folder: Path) -> Path:
    """Write random weights of DeiT-Tiny, with timm's keys."""
    import torch
    from safetensors.torch import save_file

    from vitlite import create

    model = create("vit_tiny_16.deit_fb_in1k", weights=None)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), folder / "deit_tiny.safetensors")
    return folder / "deit_tiny.safetensors"


def main() -> None:
    """Print a row for each library; with --functions also what runs in vitlite."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_weights(Path(folder))
        print(f"{'':12} functions  modules  lines  imported modules")
        for library in LIBRARIES:
            path = reading_path(library, file)
            print(
                f"{library:12} {len(path.functions):9}  {len(path.modules):7}  {path.lines:5}  {path.imported:16}",
                flush=True,
            )
            if library == "vitlite" and "--functions" in sys.argv:
                print("\n".join(path.functions))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        library, file, modules = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
        if modules is None:
            LIBRARIES[library](file)
            print(json.dumps(imported(library)))
        else:
            print(json.dumps(trace(library, file, modules)))
    else:
        main()

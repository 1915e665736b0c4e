"""Errors say what to do in the words of the command line, where the command line meets them."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run
from PIL import Image

import vitlite

SOURCE = Path(vitlite.__file__).parent
PYTHONIC = re.compile(r"vitlite\.[a-z]|\bmodel\.(?!safetensors)[a-z]|\w\(|\b[a-z_]+=|ViTConfig|\blayers has")
# What requests says, by which older clients of the Hub ask.
CLIENT = re.compile(r"\(ConnectionError: .*?\. It is not in")

# Errors in the words of Python alone, by what their text holds, and why no command needs other words.
OF_PYTHON_ALONE = {
    "The config of a model says what it was built of": "set by a program of one's own",
    "arrow tables with a column path": "a pipeline of one's own on Ray",
    "ViTConfig: ": "names a field, as the option or as config.json has it",
    "ViTConfig has no field": "names a field, as config.json has it",
    "A ViTConfig has no": "read from a config, which no command does",
    "This model has no position embeddings": "names a field, as config.json has it",
    "in training mode would be exported": "the command's models are in eval mode",
    "no plain tensor, which alone can be packed": "a file's tensors are plain",
    "To draw on a picture, model.preprocess must be": "a file's preprocessing is one, or the model says it has none",
    "weights=: give a path": "the command's weights are a path",
    "is a name of the zoo, not a place": "the command gives names to create",
    "config= takes a vitlite.ViTConfig": "no option is a config",
    "Leave pool out": "there is no --pool",
    "pool= changes": "there is no --pool",
    "channels= cannot change": "there is no --channels",
    "A picture is a path": "the command's pictures are files",
    "model.preprocess is a": "a file's preprocessing is a Preprocess, or the model says it has none",
    "it is open as text": "the command opens its files itself",
    "A picture has all its pixels": "the command's pictures are files",
    "A picture must be a dense tensor": "the command's pictures are files",
    "The model takes a tensor": "the command prepares its pictures",
    "The model takes dense tensors": "the command prepares its pictures",
    "ViT takes a ViTConfig": "no option is a config",
    "The model takes normalised floats": "the command prepares its pictures",
    "Images are on": "the command prepares its pictures",
    "Convert one: images.to": "the command prepares its pictures",
    "do not divide into patches of . ": "the command prepares its pictures",
    "attention_maps got no layers": "--layer has a default",
    "model.labels has": "a file has as many labels as classes, or none that count",
    "model.labels takes a list": "a file's labels are texts, or refused where they are read",
    "its head was replaced": "the command replaces no head",
    "The head knows the classes": "a file's head is linear",
    "The model is trained in float32": "the command's models are, whatever their files are",
    "optimized, nothing is ever dropped": "the command's models are in eval mode, all of them",
    "optimize needs them in one place": "the command's models are in one place and dtype",
    "An optimized model gives no gradients": "the command computes none of them",
    "Pictures takes images": "the command reads pictures",
    "Pictures has": "the command reads pictures",
    "The pictures are of": "the command prepares its pictures",
    "The pictures' classes are not the model's": "the command gives them in the model's order",
    "classes and the model's head": "the command gives the model as many classes as the data have",
}


def pythonic(text: str) -> bool:
    """Whether this names what only somebody who writes Python can use."""
    return PYTHONIC.search(text) is not None


@pytest.fixture
def workplace(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a picture, data to train on, and models each of which lacks something."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 30)).save("a.png")
    for name in ("data/train/a", "data/train/b", "data/val/a", "data/val/b"):
        Path(name).mkdir(parents=True)
        shutil.copy("a.png", name)
    shutil.copy(model / "model.safetensors", "bare.safetensors")
    vitlite.create("vit_nano_4", weights=None, image_size=16).save("small")
    shutil.copy("small/model.safetensors", "small.safetensors")
    vitlite.create("vit_nano_4", weights=None, num_classes=0).save("headless")
    unprepared = vitlite.ViT(vitlite.load(model).config)
    unprepared.labels = ("one", "two", "three")
    unprepared.save("unprepared")
    relabelled = vitlite.create("vit_nano_4")
    relabelled.labels = ("ant", *relabelled.labels[1:])
    relabelled.save("relabelled")
    return tmp_path


CLASSIFY = "classify a.png --model "


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (CLASSIFY + "nonsense", "All names: `vitlite list`."),
        (CLASSIFY + "nonsense", "of the Hub, a folder or a file: --model PATH, --model OWNER/NAME."),
        (CLASSIFY + "vit_base_14", "For random weights: vitlite train --model vit_base_14 --weights none."),
        (CLASSIFY + "vit_base_patch16_224.bamboo", "`vitlite list`"),
        (CLASSIFY + "vit_base_16", "--model vit_base_16.augreg2_in21k_ft_in1k --weights model.safetensors"),
        (CLASSIFY + "vit_nano_4 --size 17", "error: --size 17 does not divide into patches of 4."),
        (
            CLASSIFY + "bare.safetensors",
            "Say --model NAME --weights PATH, or convert's --like NAME, with the name of a",
        ),
        (CLASSIFY + "vit_nano_4.cifar10 --weights small.safetensors", "To run it at another size: --size."),
        (CLASSIFY + "vit_nano_4.cifar10 --weights relabelled", "own labels and preprocessing: --model PATH."),
        (CLASSIFY + "unprepared", "to prepare pictures. Name a checkpoint like it: --model NAME --weights PATH."),
        (
            CLASSIFY + "small",
            "Name its 10 classes in order in its config.json, or name a checkpoint like it: --model NAME --weights ",
        ),
        (CLASSIFY + "headless", "This model has no head. For vectors: vitlite embed."),
        ("attention a.png --model vit_nano_4 --out a.map.png --layer 7", "error: --layer has 7; the 6 blocks are"),
        (
            "train data --model vit_nano_4 --weights none --epochs 1 --out out --drop-path 2",
            "error: --drop-path must be at least 0 and below 1",
        ),
        (
            "train data --model vit_nano_4 --weights none --epochs 1 --out out --layer-decay 2",
            "error: --layer-decay must be a number from 0.001 to 1, got 2.0.",
        ),
    ],
)
def test_errors_speak_of_the_command_line(run: Run, workplace: Path, line: str, said: str) -> None:
    code, out, err = run(*line.split())
    assert (code, out) == (1, "")
    assert said in err
    assert not pythonic(CLIENT.sub("", err))


def test_errors_of_the_target_begin_with_its_option(run: Run, workplace: Path) -> None:
    (workplace / "there.npz").mkdir()
    for out, said in (
        ("x.csv", "--out x.csv: the name must end in one of .safetensors, .npz, .npy, .jsonl, .parquet."),
        (
            "none/x.npz",
            "--out none/x.npz: there is no folder none. Name a file in a folder that exists and can be written.",
        ),
        ("there.npz", "--out there.npz: it is a folder. Name a file in a folder that exists and can be written."),
    ):
        assert run("embed", "a.png", "--out", out)[2] == f"vitlite: error: {said}\n"


def test_a_file_s_own_mistake_is_not_an_option_s(run: Run, workplace: Path) -> None:
    config = workplace / "small" / "config.json"
    config.write_text(config.read_text().replace('"image_size": 16', '"image_size": 17'))
    err = run(*f"{CLASSIFY} small".split())[2]
    assert "small" in err
    assert "image_size 17 does not divide into patches of 4" in err
    assert "--size" not in err


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the library, but not the command line's own."""
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith("cli/"):
            yield name, ast.parse(file.read_text("utf-8"))


def error_classes() -> set[str]:
    """The names of `VitliteError` and of every class that is made of it, wherever it stands."""
    found = {"VitliteError"}
    bases = {}
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def literal(node: ast.expr | None) -> str:
    """What stands in an expression word by word, with the gaps of an f-string left out."""
    if node is None:
        return ""
    return "".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def only_in_python(tree: ast.Module, classes: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of the errors that tell somebody at the command line to write Python."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
            continue
        remedies = {keyword.arg: keyword.value for keyword in node.keywords}
        text = literal(node.args[0]) if node.args else ""
        shown = text + literal(remedies.get("command", remedies.get("python")))
        if pythonic(shown) and "in Python" not in shown:
            yield node.lineno, text + literal(remedies.get("python"))


def test_no_error_that_a_command_meets_is_in_python_alone() -> None:
    classes, used, wrong = error_classes(), set(), []
    assert {"ConfigError", "DownloadError", "MissingExtraError"} <= classes
    for name, tree in trees():
        for line, text in only_in_python(tree, classes):
            excuses = {snippet for snippet in OF_PYTHON_ALONE if snippet.lower() in text.lower()}
            used |= excuses
            if not excuses:
                wrong.append(f"{name}:{line}: {text}")
    assert not wrong, "no command= for:\n" + "\n".join(wrong)
    assert used == set(OF_PYTHON_ALONE), f"no longer needed: {set(OF_PYTHON_ALONE) - used}"


def test_python_is_recognised() -> None:
    tree = ast.parse(
        """
raise ConfigError(f"The size {size} is wrong: image_size=.")
raise ConfigError("The size is wrong.", python="Say create(..., image_size=384).")
raise ConfigError("The size is wrong.", python="Say image_size=.", command="Say --size.")
raise ConfigError("The size is wrong.", python="Say image_size=.", command="Say, in Python: image_size=.")
raise ValueError("vitlite.create()")
"""
    )
    assert [line for line, _ in only_in_python(tree, {"ConfigError"})] == [2, 3]

"""The command line as a person meets it: what it prints, where, and with which exit code."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model
from PIL import Image

import vitlite
from vitlite import report
from vitlite.cli import main as cli
from vitlite.weights import zoo
from vitlite.errors import ImageError
from vitlite.bulk.journal import Journal, Picture, alone

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there

    def runner(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return runner


def command(*words: object, **options: Any) -> "subprocess.Popen[str]":
    """The command as a process of its own."""
    line = [sys.executable, "-m", "vitlite", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model."""
    return small_model(tmp_path_factory.mktemp("model"), ("one", "two, or more", "three"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures and other files, on two levels."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "inner").mkdir()
    for i, name in enumerate(("a.png", "b.JPG", "inner/c.webp", "inner/d.png")):
        Image.new("RGB", (20 + i, 30), (60 * i, 10, 200 - 60 * i)).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture
def broken(pictures: Path, tmp_path: Path) -> Path:
    """The same folder with a picture cut short between the others."""
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    (folder / "aa.png").write_bytes((folder / "a.png").read_bytes()[:60])
    return folder


# --- starting and ending


def test_every_command_is_there(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert " ".join(cli.COMMANDS) == (
        "list info classify embed attention positions download verify convert export bench train eval"
    )
    for name, entry in cli.COMMANDS.items():
        assert entry.help in out
        code, help_text, _ = run(name, "--help")
        assert code == 0
        assert f"usage: vitlite {name}" in help_text
        assert callable(cli.find(entry.run))


@pytest.mark.parametrize("words", [["--help"], ["list"], ["info", "vit_base_16"]], ids=lambda words: words[0])
def test_quick_commands_do_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from vitlite.cli import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'PIL', 'huggingface_hub', 'tqdm'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"vitlite {vitlite.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "the following arguments are required: COMMAND (see: vitlite --help)"),
        (["clasify"], "No command 'clasify'. Did you mean classify? Commands: list, info,"),
        (["classify"], "the following arguments are required: PATH (see: vitlite classify --help)"),
        (["classify", "x", "--to", "3"], "unrecognized arguments: --to 3 (see: vitlite classify --help)"),
        (["classify", "x", "--top", "0"], "argument --top: a whole number of at least 1, not '0'"),
        (["classify", "x", "--size", "9y9"], "a size is a number of pixels or HEIGHTxWIDTH, such as 384 or 384x512"),
        (["attention", "x", "--out", "y", "--layer", "1", "--rollout"], "not allowed with argument --layer"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run: Run, words: list[str], error: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("vitlite: error: ")
    assert error in err
    assert err.count("\n") == 1


def test_failure_is_one_line_and_1_and_debug_has_the_traceback(run: Run) -> None:
    code, out, err = run("info", "vit_bas_16")
    assert (code, out) == (1, "")
    assert err.startswith("vitlite: error: There is no model 'vit_bas_16'. Did you mean vit_base_16,")
    assert err.count("\n") == 1
    for words in (("info", "vit_bas_16", "--debug"), ("--debug", "info", "vit_bas_16")):
        assert "Traceback" in run(*words)[2]


def pythonic(text: str) -> bool:
    """Whether this names what only somebody who writes Python can use."""
    return bool(re.search(r"vitlite\.[a-z]|\w\(|\w=|ViTConfig|layers has", text))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model nonsense", "checkpoints: `vitlite list`. A repository of the Hub, a folder or a file: --model PATH"),
        ("--model vit_base_14", "For random weights: vitlite train --model vit_base_14 --weights none."),
        ("--model vit_base_patch16_224.bamboo", "`vitlite list` names what is."),
        ("--model vit_base_16", "use that file: --weights PATH or --model PATH"),
        ("--model vit_nano_4 --size 17", "error: --size 17 does not divide into patches of 4."),
        ("--model bare.safetensors", "Say --model NAME --weights PATH, or convert's --like NAME, with the name of a"),
        ("--model vit_nano_4.cifar10 --weights small.safetensors", "To run it at another size: --size."),
        ("--model unprepared", "to prepare pictures. Name a checkpoint like it: --model NAME --weights PATH."),
        ("--model small", "Name its 10 classes in order in its config.json, or name a checkpoint like it: --model "),
        ("--model headless", "This model has no head. For vectors: vitlite embed."),
    ],
)
def test_errors_speak_of_the_command_line(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(model / "model.safetensors", "bare.safetensors")
    vitlite.create("vit_nano_4", weights=None, image_size=16).save("small")
    shutil.copy("small/model.safetensors", "small.safetensors")
    vitlite.create("vit_nano_4", weights=None, num_classes=0).save("headless")
    unprepared = vitlite.ViT(vitlite.load(model).config)
    unprepared.labels = ("one", "two", "three")
    unprepared.save("unprepared")
    code, out, err = run("classify", pictures / "a.png", *words.split())
    assert (code, out) == (1, "")
    assert said in err
    assert not pythonic(err)


def test_errors_of_training_do_so_too(run: Run, tmp_path: Path) -> None:
    for name in ("train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
    words = ("--model", "vit_nano_4", "--weights", "none", "--epochs", 1, "--out", tmp_path / "out", "--drop-path", 2)
    assert "error: --drop-path must be at least 0 and below 1" in run("train", tmp_path, *words)[2]


def test_a_mistake_of_ours_is_told_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "run_list", lambda args: {}["none"])
    assert run("list") == (1, "", "vitlite: error: KeyError: 'none' (--debug shows where)\n")


@pytest.mark.parametrize(
    ("caught", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (KeyError, 1, "error: RuntimeError: one line (--debug shows where)")],
)
def test_ctrl_c_caught_by_a_library_and_an_error_of_many_lines(
    run: Run, monkeypatch: pytest.MonkeyPatch, caught: type[BaseException], code: int, said: str
) -> None:
    def run_list(args: object) -> None:
        try:
            try:
                raise caught
            finally:
                raise AttributeError
        except AttributeError as error:
            kept = error
        raise RuntimeError("one line\nand many more") from kept

    monkeypatch.setattr(report, "run_list", run_list)
    assert run("list") == (code, "", f"vitlite: {said}\n")


def test_ctrl_c_is_130(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.png")  # a picture that never comes
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts with & ignores it
    process = command("classify", tmp_path / "never.png", "--model", model, preexec_fn=heard)
    writer = os.open(tmp_path / "never.png", os.O_WRONLY)  # waits until it is being read
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    os.close(writer)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "vitlite: interrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m vitlite list --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "[\n", "")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("list >&-", 0, ""),
        ("info nothing 2>&-", 1, ""),
        ("classify - <&-", 1, "vitlite: error: There are no pictures: the list is empty.\n"),
        ("list >/dev/full", 1, "vitlite: error: [Errno 28] No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(line: str, code: int, said: str) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m vitlite {line}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"??a?.png"), ("utf-8", b"\xc3\xbca\xe9.png")])
def test_names_and_encodings_that_do_not_fit(
    model: Path, pictures: Path, tmp_path: Path, encoding: str, shown: bytes
) -> None:
    name = "ü".encode() + b"a\xe9.png"  # which is no UTF-8
    shutil.copy(pictures / "a.png", os.path.join(os.fsencode(tmp_path), name))
    line = [sys.executable, "-m", "vitlite", "classify", "-", "--model", str(model), "--format", "csv", "--top", "1"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(line, input=name, capture_output=True, cwd=tmp_path, env=environment)
    assert done.stderr == b""
    assert done.stdout.splitlines()[1].split(b",")[0] == shown


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Iterator[list[str]]:
    """Puts stdout and stderr on a terminal; afterwards the list holds what it showed."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown: list[str] = []

    def read() -> None:
        pieces = []
        with suppress(OSError):  # Linux says that the other end is closed
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        shown.append(b"".join(pieces).decode().replace("\r\n", "\n"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield shown
    finally:
        reader.join()
        os.close(ours)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *words: object, columns: int = 60, code: int = 0, **env: str) -> str:
    """What a command shows on a terminal of so many columns."""
    with terminal(columns, monkeypatch, **env) as shown:
        assert cli.main([str(word) for word in words]) == code
    return shown[0]


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_a_terminal(monkeypatch, "list", "vit_tiny", columns=60)
    rows = [line for line in shown.splitlines() if "vit_tiny_16." in line and not line.startswith("*")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 60
    assert "licence" not in shown
    assert "\033[1m" in shown
    assert "\033" not in on_a_terminal(monkeypatch, "list", "vit_tiny", NO_COLOR="1")
    assert "licence" in on_a_terminal(monkeypatch, "list", "vit_tiny", columns=100)


def test_bars_only_on_a_terminal(model: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "█" in on_a_terminal(monkeypatch, "classify", pictures / "a.png", "--model", model)


def test_a_long_run_has_a_progress_bar(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(60):
        Image.new("RGB", (8, 8), (i, i, i)).save(folder / f"{i}.png")
    (folder / "5.png").write_bytes(b"")
    words = ("embed", folder, "--model", model, "--out", tmp_path / "out.npz")
    shown = on_a_terminal(monkeypatch, *words, columns=100, code=1)
    assert "60/60" in shown
    assert "5.png as a picture" in shown
    few = on_a_terminal(monkeypatch, "embed", folder / "1.png", *words[2:])
    assert few.startswith("wrote ")


# --- list and info


def test_list(run: Run) -> None:
    code, out, _ = run("list", "vit_small_8")
    assert code == 0
    assert out == (
        "name              params   image  GMACs  top-1     licence\n"
        "vit_small_8.dino  21.7 M  224 px   22.4      -  apache-2.0\n"
    )
    names = [row["name"] for row in json.loads(run("list", "--json")[1])]
    assert names == sorted(zoo.RECORDS, key=names.index)
    assert len(names) == len(zoo.RECORDS)
    assert "vit_base_16 is vit_base_16.augreg2_in21k_ft_in1k" in run("list", "vit_base_16*")[1]
    code, _, err = run("list", "vit_smoll")
    assert code == 1
    assert "No model matches 'vit_smoll'. Did you mean vit_small_" in err


def test_info(run: Run) -> None:
    code, out, _ = run("info", "deit_tiny_patch16_224.fb_in1k")
    assert code == 0
    assert out.startswith("vit_tiny_16.deit_fb_in1k\n")
    assert "224 x 224 px, resized for a centre crop of 0.9, bicubic, mean 0.485 0.456 0.406" in out
    *_, last = out.splitlines()
    assert last.split() == ["all", "5.7", "M", "1.254"]
    fields = json.loads(run("info", "vit_base_16", "--json")[1])
    assert fields["params"] == 86567656
    assert fields["config"]["depth"] == 12
    assert sum(layer["params"] for layer in fields["layers"]) == fields["params"]
    assert "registers=4" in run("info", "vit_small_14.reg4_dinov2_lvd142m_518")[1]


# --- classify


def test_classify_gives_what_predict_gives(run: Run, model: Path, pictures: Path) -> None:
    expected = vitlite.load(model).predict([pictures / "a.png", pictures / "b.JPG"], top=2)
    code, out, err = run("classify", pictures / "a.png", pictures / "b.JPG", "--model", model, "--top", 2)
    assert (code, err) == (0, "")
    first, *answers = out.splitlines()[:3]
    assert first == str(pictures / "a.png")
    assert answers == [f"  {100 * score:5.1f} %  {label}" for label, _, score in expected[0]]

    words = ("classify", pictures / "a.png", pictures / "b.JPG", "--model", model, "--top", 2, "--format")
    rows = [json.loads(line) for line in run(*words, "jsonl")[1].splitlines()]
    assert [row["path"] for row in rows] == [str(pictures / "a.png"), str(pictures / "b.JPG")]
    for row, answer in zip(rows, expected, strict=True):
        assert [(p["label"], p["index"]) for p in row["predictions"]] == [(p.label, p.index) for p in answer]
        assert [p["score"] for p in row["predictions"]] == pytest.approx([p.score for p in answer], abs=1e-6)

    table = list(csv.DictReader(io.StringIO(run(*words, "csv")[1])))
    assert [(row["path"], row["rank"]) for row in table][:2] == [
        (str(pictures / "a.png"), "1"),
        (str(pictures / "a.png"), "2"),
    ]
    assert table[0]["label"] == expected[0][0].label


def test_csv_keeps_any_name_in_one_row(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    names = ["a\rb.png", "a\nb.png", 'a "b", c.png', "plain.png"]
    for name in names:
        shutil.copy(pictures / "a.png", tmp_path / name)
    out = run("classify", *(tmp_path / name for name in names), "--model", model, "--top", 1, "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert [row["path"] for row in rows] == [str(tmp_path / name) for name in names]
    assert out.endswith("\n")
    assert f"\n{tmp_path / 'plain.png'},1," in out  # quoted only where it must be
    assert out.count("\r") == 1


def paths_of(out: str) -> list[str]:
    return [json.loads(line)["path"] for line in out.splitlines()]


def test_where_pictures_are_found(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model, "--format", "jsonl")
    all_four = [str(pictures / name) for name in ("a.png", "b.JPG", "inner/c.webp", "inner/d.png")]
    assert paths_of(run("classify", pictures, *words)[1]) == all_four
    assert paths_of(run("classify", f"{pictures}/**/*.png", *words)[1]) == [all_four[0], all_four[3]]
    assert paths_of(run("classify", pictures, pictures / "a.png", *words)[1]) == all_four  # each once
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{all_four[1]}\n\n{all_four[2]}\r\n"))
    assert paths_of(run("classify", "-", *words)[1]) == all_four[1:3]
    odd = tmp_path / "[1] odd.png"  # brackets in a name that exists are no pattern
    shutil.copy(pictures / "a.png", odd)
    assert paths_of(run("classify", odd, *words)[1]) == [str(odd)]
    (tmp_path / "empty").mkdir()
    assert "No pictures in the folder" in run("classify", tmp_path / "empty", *words)[2]
    assert "No file matches" in run("classify", tmp_path / "*.bmp", *words)[2]
    assert "No such file: none.png" in run("classify", "none.png", *words)[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "the list is empty" in run("classify", "-", *words)[2]


def test_a_broken_picture_does_not_stop_the_rest(run: Run, model: Path, broken: Path) -> None:
    code, out, err = run("classify", broken, broken / "missing.png", "--model", model, "--format", "jsonl")
    assert code == 1
    assert [Path(path).name for path in paths_of(out)] == ["a.png", "b.JPG", "c.webp", "d.png"]
    first, second = err.splitlines()
    assert first.startswith(f"vitlite: Cannot read {broken / 'aa.png'} as a picture: ")
    assert second == f"vitlite: Cannot read {broken / 'missing.png'} as a picture: no such file"


def test_a_reason_without_the_name_gets_it(run: Run, model: Path, tmp_path: Path) -> None:
    outcomes = [("x.png", ImageError("is broken")), ("y.png", ImageError("y.png is broken"))]
    from vitlite.cli.progress import Watch

    watch = Watch(2, bar=False)
    assert list(watch.good(item for item in outcomes)) == []
    assert watch.exit_code() == 1


def test_options_reach_the_model(run: Run, model: Path, pictures: Path) -> None:
    words = ("classify", pictures / "a.png", "--format", "jsonl", "--model", model)
    plain = run(*words)[1]
    assert run(*words, "--device", "cpu", "--dtype", "float32", "--batch", 1)[1] == plain
    assert run(*words, "--dtype", "bfloat16")[1] != plain
    assert run(*words, "--size", "32x48")[1] != plain
    assert run(*words, "--size", "17")[0] == 1
    assert "--device tpu cannot be used here. This machine has: cpu" in run(*words, "--device", "tpu")[2]
    [row], [fast] = ([json.loads(line) for line in text.splitlines()] for text in (plain, run(*words, "--fast")[1]))
    assert [p["score"] for p in fast["predictions"]] == pytest.approx(
        [p["score"] for p in row["predictions"]], abs=1e-5
    )


def test_without_a_network_the_error_names_what_needs_none(run: Run, pictures: Path) -> None:
    code, out, err = run("classify", pictures / "a.png")
    assert (code, out) == (1, "")
    assert "--model vit_nano_4.cifar10" in err
    assert "There is no file or folder nothing" in run("classify", pictures / "a.png", "--model", "./nothing")[2]
    assert run("classify", pictures / "a.png", "--model", "vit_nano_4", "--weights", "")[0] == 1


def test_a_missing_pillow_is_said_before_the_model_is_fetched(
    run: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for words in (("classify", pictures), ("embed", pictures, "--out", tmp_path / "out.npz")):
        assert run(*words)[2].endswith("needs an optional package. Install it: pip install 'vitlite[images]'\n")


def test_names_paths_and_repositories() -> None:
    from vitlite.cli.options import is_place

    assert not is_place("vit_base_16")
    assert not is_place("timm/deit_tiny_patch16_224.fb_in1k")  # an alias of the zoo
    assert not is_place("vit_bas_16")  # neither: create says what is near
    assert is_place("google/vit-base-patch16-224")
    assert is_place("./vit_base_16")
    assert is_place(".")


def test_real_weights(run: Run, shared: Path) -> None:
    weights = shared / "weights" / "deit_tiny_16.timm.safetensors"
    photos = [shared / "photos" / "chelsea.png", shared / "photos" / "coffee.png"]
    words = ("classify", *photos, "--model", "vit_tiny_16.deit_fb_in1k", "--weights", weights, "--format", "jsonl")
    cat, coffee = (
        [(p["label"], p["score"]) for p in json.loads(line)["predictions"]] for line in run(*words)[1].splitlines()
    )
    assert [label for label, _ in cat[:2]] == ["Egyptian cat", "tabby"]
    assert cat[0][1] == pytest.approx(0.44, abs=0.01)
    assert coffee[0][0] == "espresso"
    assert coffee[0][1] == pytest.approx(0.82, abs=0.01)


# --- embed


def test_embed_gives_what_embed_gives(run: Run, model: Path, broken: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    out = tmp_path / "out.safetensors"
    code, shown, err = run("embed", broken, "--model", model, "--out", out)
    assert code == 1
    assert "aa.png" in err
    assert shown == f"wrote {out}: 4 vectors of 32\n"
    with safe_open(out, "pt") as file:
        vectors, about = file.get_tensor("vectors"), file.metadata()
    paths = json.loads(about["paths"])
    loaded = vitlite.load(model)
    with torch.no_grad():
        torch.testing.assert_close(vectors, loaded.embed(loaded.preprocess(paths)))
    assert about["sha256"] == loaded.source.sha256


def test_embed_killed_and_continued_gives_the_same_bytes(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    noise = torch.Generator().manual_seed(0)
    for i in range(200):
        pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=noise)
        Image.fromarray(pixels.numpy()).save(folder / f"{i:03}.bmp")
    (folder / "005.bmp").write_bytes(b"BM")  # in the first batch
    whole, out = tmp_path / "whole.npz", tmp_path / "out.npz"
    words = ("embed", folder, "--model", model, "--batch", 8, "--out")
    assert run(*words, whole)[0] == 1

    partial = tmp_path / "out.npz.partial"
    process = command(*words, out)
    while not partial.exists() or partial.stat().st_size < 8_000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists()
    code, _, err = run(*words, out)
    assert code == 1
    assert "continuing" in err
    assert "005.bmp" in err  # said again
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


@pytest.fixture
def interrupted(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A command whose run stopped after four of six pictures, in the folder a of tmp_path."""
    for i, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        for j in range(6):
            Image.new("RGB", (20, 20), (100 * i, 40 * j, 0)).save(tmp_path / folder / f"{j}.bmp")
    monkeypatch.chdir(tmp_path / "a")
    words = ("embed", *(f"{j}.bmp" for j in range(6)), "--model", model, "--batch", 2, "--out", tmp_path / "out.jsonl")
    add, calls = Journal.add, iter(range(3))

    def stops(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stops)
        assert run(*words)[0] == 130
    return words


def test_embed_goes_on_only_where_it_stood(
    run: Run, interrupted: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative names are other pictures in another folder."""
    monkeypatch.chdir(tmp_path / "b")
    code, _, err = run(*interrupted)
    assert code == 1
    assert "out.jsonl.partial was left by a run with another working folder. Repeat that command" in err
    monkeypatch.chdir(tmp_path / "a")
    assert "4 pictures are done" in run(*interrupted)[2]


def test_embed_does_a_changed_picture_again(run: Run, interrupted: tuple[object, ...], tmp_path: Path) -> None:
    shutil.copy(tmp_path / "b" / "2.bmp", tmp_path / "a" / "2.bmp")
    code, shown, err = run(*interrupted)
    assert (code, shown) == (0, f"wrote {tmp_path / 'out.jsonl'}: 6 vectors of 32\n")
    assert "3 pictures are done" in err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == [f"{j}.bmp" for j in range(6)]
    assert run(*interrupted)[0] == 0  # a run of its own
    afresh = {row["path"]: row["vector"] for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for row in rows:
        assert row["vector"] == pytest.approx(afresh[row["path"]], abs=1e-5)
    assert not list(tmp_path.glob("out.jsonl?*"))


def test_embed_leaves_nothing_where_no_picture_can_be_read(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    code, _, err = run("embed", tmp_path / "a.png", "--model", model, "--out", tmp_path / "out.npz")
    assert code == 1
    assert "nothing to write" in err
    assert not list(tmp_path.glob("out*"))


def test_embed_refuses_to_mix_two_runs(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, {"weights": "others"}) as journal:
        journal.add([Picture("a.png", 0, 0, 0)], b"1234")
    code, _, err = run("embed", pictures, "--model", model, "--out", out)
    assert code == 1
    assert re.search("was left by a run with another config, .*preprocessing, .*weights", err)
    assert "must end in one of .safetensors" in run("embed", pictures, "--model", model, "--out", "x.csv")[2]


def test_embed_refuses_a_file_that_another_writes(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    words = ("embed", pictures, "--model", model, "--out", tmp_path / "out.npz")
    with alone(tmp_path / "out.npz"):
        code, shown, err = run(*words)
        assert (code, shown) == (1, "")
        assert re.fullmatch(r"vitlite: error: --out .*out\.npz: another process is writing it\. .*\n", err)
    assert run(*words)[0] == 0
    assert not list(tmp_path.glob("out.npz?*"))


# --- pictures


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_attention_and_positions(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.png"
    code, shown, _ = run("attention", pictures / "a.png", "--model", model, "--out", out)
    assert code == 0
    width, height = size_of(out)
    assert shown == f"wrote {out}, {width} x {height} pixels\n"
    assert run("attention", pictures / "a.png", "--model", model, "--rollout", "--size", 32, "--out", out)[0] == 0
    assert size_of(out)[0] < width
    assert "--layer is 7;" in run("attention", pictures / "a.png", "--model", model, "--layer", 7, "--out", out)[2]
    assert run("positions", model, "--out", out)[0] == 0
    code, _, err = run("positions", model, "--out", tmp_path / "none" / "map.png")
    assert code == 1
    assert "Name a .png file in a folder that exists" in err
    (tmp_path / "folder.png").mkdir()
    assert "Cannot write the picture" in run("positions", model, "--out", tmp_path / "folder.png")[2]
    for name in ("map", "map.txt"):  # said before a model is fetched
        assert "Name a .png file" in run("attention", pictures / "a.png", "--out", tmp_path / name)[2]
    assert run("attention", "none.png", "--out", out)[2] == "vitlite: error: No such file: none.png\n"


# --- weights


def test_download_and_verify(run: Run, tmp_path: Path, model: Path) -> None:
    assert run("download", "vit_nano_4.cifar10")[1] == "vit_nano_4.cifar10: comes with vitlite, nothing to download\n"
    assert "no model 'nothing'" in run("download", "vit_nano_4.cifar10", "nothing")[2]
    assert "Nothing to verify" in run("verify")[2]
    assert run("verify", tmp_path / "none.safetensors")[0] == 1
    weights = model / "model.safetensors"
    assert run("verify", weights)[1].startswith(f"{weights}: good, sha256 ")


def test_verify_knows_what_comes_with_vitlite(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = zoo.find("vit_nano_4")
    code, out, _ = run("verify", "vit_nano_4")
    assert (code, out) == (0, f"vit_nano_4: good, sha256 {record.sha256} (record), {zoo.DATA / record.file}\n")
    (tmp_path / record.file).write_bytes(b"rotten")
    monkeypatch.setattr(zoo, "DATA", tmp_path)
    code, out, _ = run("verify", "vit_nano_4")
    assert code == 1
    assert f"expected hash {record.sha256}" in out


def test_download_from_a_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server import Hub

    record = zoo.find("vit_small_8.dino")
    with Hub() as hub:
        first = hub.publish(record.repo, model_safetensors=b"some bytes")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, out, _ = run("download", record.name, record.alias)
        assert code == 0
        assert out.count("sha256") == 1  # two names for one checkpoint
        assert out.startswith(f"{record.name}: {tmp_path / 'cache'}")
        assert "verified by hub" in out
        assert "nothing newer" in run("download", record.name, "--update")[1]
        second = hub.publish(record.repo, model_safetensors=b"other bytes")
        assert "\n  " + "the pin moved" not in run("download", record.name)[1]
        assert f"the pin moved from commit {first} to {second}" in run("download", record.name, "--update")[1]
    code, out, _ = run("verify")
    assert (code, out.count(f"{record.name}: good")) == (0, 1)
    code, shown, _ = run("verify", record.name)
    path = Path(shown.rsplit(", ", 1)[1].strip())
    path.resolve().write_bytes(b"rotten byte")
    code, out, _ = run("verify", record.name)
    assert code == 1
    assert f"{record.name}: FAILED: " in out


def test_convert(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("convert", model, tmp_path / "there", "--to", "transformers")
    assert (code, out, err) == (0, f"wrote {tmp_path / 'there'}\n", "")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "vit"
    assert run("convert", model, tmp_path / "back", "--to", "vitlite", "--like", "nothing")[0] == 1
    assert run("convert", model, tmp_path / "back")[0] == 2
    assert "no pickles are made" in run("convert", model, tmp_path / "back.pth", "--to", "timm")[2]
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("convert", f"~/{model.name}", tmp_path / "again.safetensors", "--to", "timm")[0] == 0
    for name in ("none.pth", "none"):
        assert f"no file or folder {name}." in run("convert", name, tmp_path / "back", "--to", "timm")[2]
    assert "vit_nano_4 is a name" in run("convert", "vit_nano_4", tmp_path / "back", "--to", "timm")[2]

"""Every command starts, and ends with the right exit code and one line about what went wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Run, start

import vitlite
from vitlite.cli import list as list_command
from vitlite.cli.main import COMMANDS, EXAMPLES, _parse


def test_every_command_has_help(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert " ".join(COMMANDS) == (
        "list info classify embed search duplicates probe pca attention distances positions filters "
        "download verify convert export bench train eval"
    )
    for name, summary in COMMANDS.items():
        assert summary in out
        code, help_text, _ = run(name, "--help")
        assert code == 0
        assert f"usage: vitlite {name}" in help_text
        assert help_text.endswith(f"\nexample: vitlite {EXAMPLES[name]}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_valid(name: str) -> None:
    """The parser accepts the example of each command, and only the example's inputs may be missing."""
    assert _parse(EXAMPLES[name].split(), name).run.__module__ == f"vitlite.cli.{name}"


def test_help_marks_required_options_and_has_groups(run: Run) -> None:
    _, help_text, _ = run("train", "--help")
    lines = help_text.splitlines()
    assert sum(line.endswith("(required)") for line in lines) == 2  # --model and --out
    titles = ["positional arguments", "options", "data", "tables of labels", "model", "optimization"]
    assert [line.rstrip(":") for line in lines if line.rstrip(":") in titles] == titles


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_each_option_on_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, _, arguments = run(name, "--help")[1].partition("\n\n")  # after the usage
    assert not [line for line in arguments.splitlines() if line.startswith("   ")]  # continued from the line above


@pytest.mark.parametrize("words", [["--help"], ["list"], ["info", "vit_base_16"]], ids=lambda words: words[0])
def test_quick_commands_do_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from vitlite.cli.main import main; code = main(sys.argv[1:])\n"
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
        (["classify", "x", "--modle=y"], "unrecognized arguments: --modle=y. Did you mean --model? (see: "),
        (["classify", "x", "--zzzzzz"], "unrecognized arguments: --zzzzzz. (see: vitlite classify --help)"),
        (["classify", "x", "--top", "0"], "argument --top: must be a positive integer, got '0'"),
        (["classify", "x", "--size", "9y9"], "must be pixels or HEIGHTxWIDTH, such as 384 or 384x512"),
        (["attention", "x", "--out", "y", "--layer", "1", "--rollout"], "not allowed with argument --layer"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run: Run, words: list[str], error: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("vitlite: error: ")
    assert error in err
    assert err.count("\n") == 1


def test_failure_is_one_line_and_1_and_debug_shows_the_traceback(run: Run) -> None:
    code, out, err = run("info", "vit_bas_16\x1b[31m")
    assert (code, out) == (1, "")
    assert err.startswith("vitlite: error: There is no model 'vit_bas_16\\x1b[31m'. Did you mean vit_base_16,")
    assert err.count("\n") == 1
    for words in (("info", "vit_bas_16", "--debug"), ("--debug", "info", "vit_bas_16")):
        assert "Traceback" in run(*words)[2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("none"), "KeyError: 'none' (--debug shows the traceback)"),
        (RuntimeError("one line\nand more"), "RuntimeError: one line (--debug shows the traceback)"),
        (
            RuntimeError("can't allocate memory: 9"),
            "There is not enough memory. Use a smaller --size or --batch, or a smaller model. can't allocate memory: 9",
        ),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
    ids=["bug", "long", "memory", "disk"],
)
def test_other_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(args: object) -> None:
        raise error

    monkeypatch.setattr(list_command, "run", fail)
    assert run("list") == (1, "", f"vitlite: error: {message}\n")


def test_ctrl_c_prints_no_traceback(model: Path, tmp_path: Path) -> None:
    process = start("classify", "-", "--model", model, stdin=subprocess.PIPE, preexec_fn=default_sigint)
    assert process.stdin is not None
    process.stdin.write("first.png\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "vitlite: interrupted\n")


def default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m vitlite list --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "[\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_file_names_that_the_terminal_cannot_show(model: Path, images: Path, tmp_path: Path, encoding: str) -> None:
    name = "ü".encode() + b"\xe9.png"  # the second letter is not UTF-8
    (tmp_path / os.fsdecode(name)).write_bytes((images / "a.png").read_bytes())
    words = [sys.executable, "-m", "vitlite", "classify", name, "--model", str(model)]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b".png" in done.stdout

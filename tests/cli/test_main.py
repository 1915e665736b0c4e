"""Every command as a person meets it: how it starts, and how it ends."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from commands import Run, start

import vitlite
from vitlite.cli import list as list_command
from vitlite.cli import main as cli


def test_every_command_is_there(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert " ".join(cli.COMMANDS) == (
        "list info classify embed search probe attention distances positions filters "
        "download verify convert export bench train eval"
    )
    for name, summary in cli.COMMANDS.items():
        assert summary in out
        code, help_text, _ = run(name, "--help")
        assert code == 0
        assert f"usage: vitlite {name}" in help_text
        assert callable(cli.command(name).run)


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
        (
            ["classify", "x", "--to", "3"],
            "unrecognized arguments: --to 3. Did you mean --top? (see: ",
        ),
        (["classify", "x", "--modle=y"], "unrecognized arguments: --modle=y. Did you mean --model? (see: "),
        (["classify", "x", "--zzzzzz"], "unrecognized arguments: --zzzzzz. (see: vitlite classify --help)"),
        (["classify", "x", "--top", "0"], "argument --top: must be a positive integer, got '0'"),
        (["classify", "x", "--batch", 30 * "9"], "argument --batch: a whole number of at most 9 digits, not one of 30"),
        (["probe", "x", "--seed", 13 * "9"], "argument --seed: a whole number of at most 12 digits, not one of 13"),
        (["probe", "x", "--seed", "one"], "argument --seed: a whole number, not 'one'"),
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


def test_a_mistake_of_ours_is_told_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_command, "run", lambda args: {}["none"])
    assert run("list") == (1, "", "vitlite: error: KeyError: 'none' (--debug shows where)\n")


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")])
def test_too_little_memory_is_no_mistake_of_ours(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run_and_fail(args: object) -> None:
        raise error

    monkeypatch.setattr(list_command, "run", run_and_fail)
    said = "There is not enough memory. A smaller --size or --batch, or another model takes less."
    assert run("list") == (1, "", f"vitlite: error: {said} {error}\n")


@pytest.mark.parametrize(
    ("caught", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (KeyError, 1, "error: RuntimeError: one line (--debug shows where)")],
)
def test_ctrl_c_caught_by_a_library_and_an_error_of_many_lines(
    run: Run, monkeypatch: pytest.MonkeyPatch, caught: type[BaseException], code: int, said: str
) -> None:
    def run_and_fail(args: object) -> None:
        try:
            try:
                raise caught
            finally:
                raise AttributeError
        except AttributeError as error:
            kept = error
        raise RuntimeError("one line\nand many more") from kept

    monkeypatch.setattr(list_command, "run", run_and_fail)
    assert run("list") == (code, "", f"vitlite: {said}\n")


def opened_for_writing(pipe: Path, process: "subprocess.Popen[str]") -> int:
    """Waits until the process reads the pipe."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody does yet
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)


def test_ctrl_c_is_130(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.png")  # a picture that never comes
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts with & ignores it
    process = start("classify", tmp_path / "never.png", "--model", model, preexec_fn=heard)
    writer = opened_for_writing(tmp_path / "never.png", process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    os.close(writer)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "vitlite: interrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m vitlite list --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "[\n", "")


CLOSED_ON_WINDOWS = """
import errno, io, sys
from vitlite.cli.main import main

class Pipe(io.RawIOBase):
    def writable(self):
        return True
    def write(self, text):
        raise OSError(errno.EINVAL, "Invalid argument")
    def fileno(self):
        return 1

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Pipe()))
code = main(["list"])
sys.stdout = None
sys.exit(code)
"""


def test_a_closed_pipe_is_quiet_on_windows_too() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED_ON_WINDOWS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (141, ""), done.stderr
    assert "vitlite" not in done.stderr


def test_an_invalid_argument_is_no_closed_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(name: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(cli, "command", invalid)
    assert run("list") == (1, "\n", "vitlite: error: [Errno 22] Invalid argument\n")


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


@pytest.mark.parametrize(("encoding", "kind", "line", "shown"), [
    ("ascii", "table", 0, b"?a\\udce9.png"), ("utf-8", "table", 0, b"\xc3\xbca\\udce9.png"),
    ("ascii", "csv", 1, b"\xc3\xbca\xe9.png"), ("utf-8", "csv", 1, b"\xc3\xbca\xe9.png"),
])  # fmt: skip
def test_names_and_encodings_that_do_not_fit(
    model: Path, pictures: Path, tmp_path: Path, encoding: str, kind: str, line: int, shown: bytes
) -> None:
    """In CSV, which programs read, each name stays another one."""
    name = "ü".encode() + b"a\xe9.png"  # which is no UTF-8
    shutil.copy(pictures / "a.png", os.path.join(os.fsencode(tmp_path), name))
    named = "-" if kind == "csv" else name
    words = [sys.executable, "-m", "vitlite", "classify", named, "--model", str(model), "--format", kind, "--top", "1"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(words, input=name, capture_output=True, cwd=tmp_path, env=environment)
    assert done.stderr == b""
    assert done.stdout.splitlines()[line].split(b",")[0] == shown

"""Training and evaluation in several processes: more than two, two nodes, and failures."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchrun import ENVIRONMENT, history, launcher, same_weights, torchrun, train_command, write_images

from vitlite.cli.main import main

pytestmark = pytest.mark.cluster
HINT = "vitlite: torch may hang when torchrun restarts the processes."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"), train=40, val=10)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("alone")
    assert main(train_command(data, out)) == 0
    return out


@contextmanager
def start(command: list[str], **environment: str) -> "Iterator[subprocess.Popen[str]]":
    """Start a command, and end it if the test fails."""
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def two_nodes() -> tuple[str, ...]:
    """Return the options of torchrun for two nodes on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{port}")


def wait_for(happened: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """Return the process ids of the ranks that torchrun started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def has_saved(out: Path, epochs: int) -> bool:
    """Return whether the log of a run, which is written after its state, has so many epochs."""
    log = out / "log.jsonl"
    return log.exists() and len(log.read_text().splitlines()) >= epochs


def test_three_processes_with_unequal_shares(
    data: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(history(torchrun(3, *train_command(data, tmp_path)).stdout)) == 4
    assert same_weights(alone, tmp_path, 1e-4)
    words = ["eval", str(data), "--model", str(alone / "last"), "--batch", "3"]
    assert main(words) == 0
    answer = capsys.readouterr().out
    assert "10 images" in answer
    assert torchrun(3, *words).stdout == answer


def test_no_thread_of_the_group_outlives_a_run(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # such a thread may abort the process while Python ends
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from vitlite.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "names = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]\n"
        "assert not [name for name in names if 'gloo' in name], names\n"
    )
    options = ("--standalone", "--max-restarts", "1")
    command = launcher(2, *train_command(data, tmp_path), options=options, program=(str(script),))
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(HINT) == 1


def test_two_nodes(data: Path, alone: Path, tmp_path: Path) -> None:
    command = launcher(1, *train_command(data, tmp_path), options=two_nodes())
    with start(command) as first, start(command) as second:
        outputs = [node.communicate(timeout=300) for node in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert sorted(len(printed.splitlines()) for printed, _ in outputs) == [0, 4]  # one of them speaks
    assert same_weights(alone, tmp_path, 1e-4)


def test_a_killed_worker_is_restarted_and_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    torchrun(2, *train_command(data, whole))
    words = train_command(data, killed, "--save-every", "0")
    command = launcher(2, *words, options=("--standalone", "--max-restarts", "1"))
    with start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as run:  # pytorch/pytorch#135712
        wait_for(lambda: has_saved(killed, 2), run)
        before = workers(run)
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: len(set(workers(run)) - set(before)) == 2, run)
        printed, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    epochs = [record["epoch"] for record in history(printed)]
    assert epochs == sorted(epochs)  # a run that goes on says again what it did last, but does nothing twice
    assert set(epochs) == {1, 2, 3, 4}
    assert len((killed / "log.jsonl").read_text().splitlines()) == 4
    assert errors.count("vitlite: error: ") <= 1
    assert HINT not in errors
    assert same_weights(whole, killed)


def test_a_failure_is_reported_once_and_no_process_hangs(data: Path, tmp_path: Path) -> None:
    bad = write_images(tmp_path / "data", train=40, val=10)
    broken = bad / "train" / "lying" / "0.png"
    broken.write_bytes(b"no image")
    with start(launcher(2, *train_command(bad, tmp_path / "out", "--strict"))) as run:
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert errors.count("vitlite: error: ") == 1
    assert f"vitlite: error: Cannot read {broken}" in errors


def test_without_restarts_a_killed_worker_ends_the_run(data: Path, tmp_path: Path) -> None:
    with start(launcher(3, *train_command(data, tmp_path, "--save-every", "0", "--epochs", "500"))) as run:
        wait_for((tmp_path / "last" / "model.safetensors").exists, run)
        os.kill(workers(run)[0], signal.SIGKILL)
        begun = time.monotonic()
        _, errors = run.communicate(timeout=120)
    assert time.monotonic() - begun < 60
    assert run.returncode == 1
    assert errors.count("vitlite: error: ") <= 1


def test_machines_with_different_outputs_are_an_error(data: Path, alone: Path, tmp_path: Path) -> None:
    options = two_nodes()
    commands = [launcher(1, *train_command(data, out), options=options) for out in (alone, tmp_path)]
    with start(commands[0]) as first, start(commands[1]) as second:
        errors = "".join(node.communicate(timeout=120)[1] for node in (first, second))
    assert first.returncode
    assert second.returncode
    assert errors.count("vitlite: error: ") == 1
    assert "differ between processes: epoch. Give all machines" in errors

"""Runs the tests in environments of their own: the oldest versions that pyproject.toml allows, the newest, and others.

    python tests/matrix.py            # all of them, one after the other, and a table at the end
    python tests/matrix.py oldest     # some
    python tests/matrix.py --list

An environment lies in .matrix/NAME and is made once; `--again` makes it anew. A failure does not stop the others. What
an environment cannot have is left out: without the libraries that vitlite is compared with, the tests that compare.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".matrix"
TESTS = ["pytest", "pytest-xdist", "hypothesis", "hatchling", "build"]
EXTRAS = ["pillow", "tqdm", "matplotlib"]
PEERS = ["transformers", "onnx", "onnxscript", "onnxruntime", "scipy", "numpy"]


class Environment(NamedTuple):
    """What is installed, and why."""

    why: str
    packages: list[str]
    peers: bool  # whether the libraries that vitlite is compared with go with it
    python: str = ""  # "": the one that runs this script


ENVIRONMENTS = {
    "oldest": Environment(
        "the lower bounds of pyproject.toml, on the oldest Python",
        ["torch==2.6.0", "einops==0.6.1", "safetensors==0.4.5", "huggingface-hub==0.25.0", "numpy==1.26.4",
         "pillow==10.1.0", "tqdm==4.66.0", "matplotlib==3.9.0"],
        peers=False,
        python="3.10",
    ),
    "torch-2.8": Environment("widely pinned, with numpy 1", ["torch==2.8.0", "numpy==1.26.4", *EXTRAS], peers=True),
    "torch-2.10": Environment("between", ["torch==2.10.0", *EXTRAS], peers=True),
    "pinned": Environment("what constraints.txt pins", ["torch==2.13.0", *EXTRAS], peers=True),
    "newest": Environment("whatever is newest", ["torch", *EXTRAS], peers=True),
    "without-numpy": Environment("no numpy, no Pillow, no peers", ["torch==2.13.0"], peers=False),
}  # fmt: skip


class Result(NamedTuple):
    """How one environment ended."""

    name: str
    versions: str
    passed: int
    failed: int
    skipped: int
    note: str


def interpreter(version: str) -> str | None:
    """A Python of this version, or None where this machine has none."""
    if not version or sys.version.startswith(f"{version}."):
        return sys.executable
    return shutil.which(f"python{version}")


def make(name: str, environment: Environment, again: bool) -> Path:
    """The environment's own Python, its packages installed."""
    folder = HOME / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "ready").exists():
        return python
    base = interpreter(environment.python)
    if base is None:
        raise LookupError(f"there is no Python {environment.python} here")
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    peers = PEERS if environment.peers else []
    if "pinned" in name:
        pip += ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *environment.packages, *TESTS, *peers, "--editable", str(ROOT)], check=True)
    if environment.peers:
        subprocess.run([*pip, "--no-deps", "--requirement", str(ROOT / "tests" / "peers.txt")], check=True)
    (folder / "ready").touch()
    return python


def run(name: str, environment: Environment, arguments: list[str], again: bool) -> Result:
    """Runs the tests in one environment."""
    try:
        python = make(name, environment, again)
    except (subprocess.CalledProcessError, LookupError) as error:
        return Result(name, "", 0, 0, 0, f"could not be made: {error}")
    selected = arguments or ["tests"]
    words = ["-m", "pytest", "-q", "-n", "2", "-m", "not cluster", "-p", "no:cacheprovider", *selected]
    done = subprocess.run([str(python), *words], cwd=ROOT, capture_output=True, text=True, env=variables())
    (HOME / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])
    }
    note = "" if done.returncode == 0 else f"see {HOME.name}/{name}.log"
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return Result(name, versions(python), counts.get("passed", 0), failed, counts.get("skipped", 0), note)


def variables() -> dict[str, str]:
    """The machine's, but for what would lead to another environment's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"OMP_NUM_THREADS": "1"}


def versions(python: Path) -> str:
    """What was installed in the end."""
    code = (
        "import platform; from importlib.metadata import version, PackageNotFoundError\n"
        "def v(n):\n    try: return version(n)\n    except PackageNotFoundError: return '-'\n"
        "print(platform.python_version(), *(v(n) for n in ('torch', 'safetensors', 'huggingface-hub', 'numpy')))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def table(results: list[Result]) -> str:
    """All results in columns."""
    rows = [("environment", "python torch safetensors hub numpy", "passed", "failed", "skipped", "")]
    for result in results:
        numbers = (str(result.passed), str(result.failed), str(result.skipped))
        rows.append((result.name, result.versions, *numbers, result.note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def main() -> int:
    """Runs what the command line names, and prints the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(description="Run the tests in environments of their own.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}; default: all")
    parser.add_argument("--again", action="store_true", help="make the environments anew")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--tests", default="", help="files or folders to run; default: all tests")
    words = parser.parse_args()
    if words.list:
        for name, environment in ENVIRONMENTS.items():
            print(f"{name:<14} {environment.why}: {' '.join(environment.packages)}")
        return 0
    unknown = set(words.names) - ENVIRONMENTS.keys()
    if unknown:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    HOME.mkdir(exist_ok=True)
    results = []
    for name in words.names or ENVIRONMENTS:
        print(f"{name}: {ENVIRONMENTS[name].why}", flush=True)
        results.append(run(name, ENVIRONMENTS[name], words.tests.split(), words.again))
    print("\n" + table(results))
    return int(any(result.failed or result.note for result in results))


if __name__ == "__main__":
    sys.exit(main())

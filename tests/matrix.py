"""Runs the tests in environments of their own: the oldest versions that pyproject.toml allows, the newest, and others.

    python tests/matrix.py            # all of them, one after the other, and a table at the end
    python tests/matrix.py oldest     # some
    python tests/matrix.py --failed   # files again in which a test has failed
    python tests/matrix.py torch-2.8 --python /somewhere/bin/python    # in an environment that is there already
    python tests/matrix.py --list

An environment lies in .matrix/NAME and is made once; `--again` makes it anew, and forgets what was found in it. Files
are run one by one, and what was found in each is kept in .matrix/NAME.json: an interrupted run goes on. A failure stops
nothing. What an environment cannot have is left out: without the libraries that vitlite is compared with, the tests
that compare.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".matrix"
TESTS = ["pytest", "hypothesis", "hatchling", "build"]
EXTRAS = ["pillow", "tqdm", "matplotlib", "pyarrow"]
PEERS = ["transformers", "onnx", "onnxscript", "onnxruntime", "scipy", "numpy"]
LEFT_OUT = "cluster", "test_house.py", "benchmarks"  # whose answer is the same in every environment, or which need more
NUMBERS = re.compile(r"(\d+) (passed|failed|skipped|error)")


class Environment(NamedTuple):
    """What is installed, and why."""

    why: str
    packages: list[str]
    peers: bool  # whether the libraries that vitlite is compared with go with it
    python: str = ""  # "": the one that runs this script


ENVIRONMENTS = {
    "oldest": Environment(
        "the lower bounds of pyproject.toml, on the oldest Python",
        ["torch==2.6.0", "einops==0.7.0", "safetensors==0.4.1", "huggingface-hub==0.25.0", "requests",
         "numpy==1.26.0", "pillow==10.1.0", "tqdm==4.66.0", "matplotlib==3.9.0", "pyparsing==3.1.4",
         "pyarrow==17.0.0"],
        peers=False,
        python="3.10",
    ),
    "torch-2.6": Environment(
        "the oldest torch, with the newest of the rest",
        ["torch==2.6.0", "onnx", "onnxscript", "onnxruntime", *EXTRAS],
        peers=False,
    ),
    "torch-2.8": Environment(
        "widely pinned, with numpy 1, and the lower bounds of what is written for others",
        ["torch==2.8.0", "numpy==1.26.4", "pyarrow==17.0.0", "onnx==1.18.0", "onnxscript==0.7.1", *EXTRAS],
        peers=True,
    ),
    "torch-2.10": Environment("between", ["torch==2.10.0", *EXTRAS], peers=True),
    "pinned": Environment("what constraints.txt pins", ["torch==2.13.0", *EXTRAS], peers=True),
    "newest": Environment("whatever is newest", ["torch", *EXTRAS], peers=True),
    "without-numpy": Environment("no numpy, no peers", ["torch==2.13.0", "pillow", "tqdm"], peers=False),
    "python-3.10": Environment("an older Python", ["torch", *EXTRAS], peers=False, python="3.10"),
    "python-3.12": Environment("a newer Python", ["torch", *EXTRAS], peers=False, python="3.12"),
    "python-3.13": Environment("one more", ["torch", *EXTRAS], peers=False, python="3.13"),
}  # fmt: skip

# What people have installed, none of which installing vitlite may change: the newest of these, and a common old set.
BESIDE = {
    "the newest": ["timm", "transformers", "ultralytics", "lightning", "peft", "accelerate"],
    "torch 2.8, numpy 1.26": ["torch==2.8.0", "numpy==1.26.4", "transformers"],
}


class Result(NamedTuple):
    """How one environment ended."""

    name: str
    versions: str
    passed: int
    failed: int
    skipped: int
    note: str


def interpreter(version: str) -> str | None:
    """A Python of this version, or None where this machine has none. What pyenv has not switched on is only a name."""
    if not version or sys.version.startswith(f"{version}."):
        return sys.executable
    named = [found] if (found := shutil.which(f"python{version}")) else []
    there = [*named, *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    runs = (python for python in there if not subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL))
    return next(runs, None)


def make(name: str, environment: Environment) -> Path:
    """The environment's own Python, its packages installed."""
    folder = HOME / name
    if (folder / "ready").exists():
        return python_of(folder)
    base = interpreter(environment.python)
    if base is None:
        raise LookupError(f"there is no Python {environment.python} here")
    python = venv(folder, base)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    peers = PEERS if environment.peers else []
    if "pinned" in name:
        pip += ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *environment.packages, *TESTS, *peers, "--editable", str(ROOT)], check=True)
    if environment.peers:
        subprocess.run([*pip, "--no-deps", "--requirement", str(ROOT / "tests" / "peers.txt")], check=True)
    (folder / "ready").touch()
    return python


def venv(folder: Path, base: str) -> Path:
    """An empty environment, in place of what is there; its Python."""
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    return python_of(folder)


def python_of(folder: Path) -> Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def files(wanted: list[str]) -> list[str]:
    """The test files to run, by their paths below the project."""
    if wanted:
        return wanted
    found = (file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tests").rglob("test_*.py")))
    return [file for file in found if not any(part in file for part in LEFT_OUT)]


def run(name: str, environment: Environment, wanted: list[str], python: Path | None) -> Result:
    """Runs the tests in one environment, those that were not run there yet."""
    try:
        python = python or make(name, environment)
    except (subprocess.CalledProcessError, LookupError) as error:
        return Result(name, "", 0, 0, 0, f"could not be made: {error}")
    kept = HOME / f"{name}.json"
    known: dict[str, dict[str, int]] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    selected = files(wanted)
    for file in selected:
        if file not in known:
            known[file] = counts(name, python, file)
            print(f"  {file}: {known[file]}", flush=True)
            kept.write_text(json.dumps(known, indent=1), encoding="utf-8")
    totals = {kind: sum(known[file].get(kind, 0) for file in selected) for kind in ("passed", "failed", "skipped")}
    bad = [Path(file).name for file in selected if known[file].get("failed")]
    note = f"{', '.join(bad)}: see {HOME.name}/{name}.log" if bad else ""
    if wanted:
        note = f"{len(selected)} files alone. {note}".strip()
    return Result(name, versions(python), **totals, note=note)


def forget_failures(name: str) -> None:
    """Has those files of an environment run again in which something has failed."""
    kept = HOME / f"{name}.json"
    if kept.exists():
        known = json.loads(kept.read_text("utf-8"))
        kept.write_text(
            json.dumps({file: found for file, found in known.items() if not found["failed"]}, indent=1), "utf-8"
        )


def counts(name: str, python: Path, file: str) -> dict[str, int]:
    """How many tests of a file passed and failed in an environment; a file that cannot be run has failed once."""
    words = ["-m", "pytest", "-q", "-m", "not cluster", "-p", "no:cacheprovider", file]
    done = subprocess.run([str(python), *words], cwd=ROOT, capture_output=True, text=True, env=variables())
    with (HOME / f"{name}.log").open("a", encoding="utf-8") as log:
        log.write(f"==== {file}\n{done.stdout}{done.stderr}")
    found = {word: int(number) for number, word in NUMBERS.findall(done.stdout[-500:])}
    found["failed"] = found.get("failed", 0) + found.pop("error", 0)
    if done.returncode not in (0, 5) and not found["failed"]:  # 5: nothing was collected, all of it being skipped
        found["failed"] = 1
    return found


def variables() -> dict[str, str]:
    """The machine's, but for what would lead to another environment's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "VITLITE_TESTS_MAY_SKIP": "1"}


def versions(python: Path) -> str:
    """What was installed in the end."""
    code = (
        "import platform; from importlib.metadata import version, PackageNotFoundError\n"
        "def v(n):\n    try: return version(n)\n    except PackageNotFoundError: return '-'\n"
        "print(platform.python_version(), *(v(n) for n in ('torch', 'safetensors', 'huggingface-hub', 'numpy')))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def beside(title: str, wanted: str = f"{ROOT}[images]") -> Result:
    """Whether vitlite can be installed where others are, each of which stays as it is: what pip says, doing nothing."""
    there, against = ask_pip(BESIDE[title])
    if there:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, "kept.txt")
            kept.write_text("".join(f"{name}=={version}\n" for name, version in there.items()), encoding="utf-8")
            _, against = ask_pip([wanted, "--constraint", str(kept)])
    note = against or f"{len(there)} packages, none changed"
    return Result(f"beside {title}", "", int(not against), int(bool(against)), 0, note)


def ask_pip(words: list[str]) -> tuple[dict[str, str], str]:
    """The versions that pip would install where there is nothing yet; or none, and what speaks against it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(report), *words]
        done = subprocess.run([str(newest_pip()), *asked], capture_output=True, text=True)
        if done.returncode:
            said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
            conflict = [line for line in said if " depends on " in line or "(constraint)" in line]
            return {}, "; ".join(conflict or said[-2:])
        content = json.loads(report.read_text("utf-8"))
    described = [package["metadata"] for package in content["install"]]
    return {package["name"]: package["version"] for package in described}, ""


def newest_pip() -> Path:
    """A Python whose pip is the newest. Those before 23.3 fetch gigabytes of packages to see what these depend on."""
    folder = HOME / "pip"
    if not (folder / "ready").exists():
        python = venv(folder, sys.executable)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        (folder / "ready").touch()
    return python_of(folder)


def table(results: list[Result]) -> str:
    """All results in a table, as CONTRIBUTING.md shows it."""
    lines = [
        "| environment | python, torch, safetensors, huggingface-hub, numpy | passed | failed | skipped | |",
        "|---|---|--:|--:|--:|---|",
    ]
    for result in results:
        lines.append("| " + " | ".join(str(cell) for cell in result) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs what the command line names, and prints the table; 1 where anything failed."""
    names = [*ENVIRONMENTS, "beside"]
    parser = argparse.ArgumentParser(description="Run the tests in environments of their own.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--again", action="store_true", help="make the environments anew, and run everything again")
    parser.add_argument("--failed", action="store_true", help="run files again in which a test has failed")
    parser.add_argument("--python", type=Path, metavar="PATH", help="that of an environment which is there already")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--tests", default="", help="files to run; default: all")
    words = parser.parse_args()
    if words.list:
        for name, environment in ENVIRONMENTS.items():
            print(f"{name:<14} {environment.why}: {' '.join(environment.packages)}")
        return 0
    unknown = set(words.names) - set(names)
    if unknown:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    HOME.mkdir(exist_ok=True)
    results = []
    for name in words.names or names:
        if name == "beside":
            results += [beside(title) for title in BESIDE]
            continue
        print(f"{name}: {ENVIRONMENTS[name].why}", flush=True)
        if words.again:
            shutil.rmtree(HOME / name, ignore_errors=True)
            for left in (HOME / f"{name}.json", HOME / f"{name}.log"):
                left.unlink(missing_ok=True)
        if words.failed:
            forget_failures(name)
        results.append(run(name, ENVIRONMENTS[name], words.tests.split(), words.python))
    print("\n" + table(results))
    return int(any(result.failed or result.note.startswith("could not") for result in results))


if __name__ == "__main__":
    sys.exit(main())

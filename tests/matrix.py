"""Run the tests with the oldest versions that pyproject.toml allows, the newest, and others.

    python tests/matrix.py                 # every environment, and a table at the end
    python tests/matrix.py oldest newest   # some
    python tests/matrix.py --list

Each environment is made once in .matrix/NAME, where log.txt has the output of its tests; delete the folder to make it
again. Tests that need a library which an environment lacks are skipped.
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
LEFT_OUT = ("tests/benchmarks", "tests/test_package.py")  # their answer is the same in every environment


class Environment(NamedTuple):
    """What is installed, and why."""

    why: str
    packages: list[str]
    peers: bool  # whether to install the libraries that vitlite is compared with
    python: str = ""  # "": the one that runs this script


ENVIRONMENTS = {
    "oldest": Environment(
        "the lower bounds of pyproject.toml, on the oldest Python",
        ["torch==2.6.0", "einops==0.7.0", "safetensors==0.4.1", "huggingface-hub==0.28.0", "requests",
         "numpy==1.26.0", "pillow==10.1.0", "tqdm==4.66.0", "matplotlib==3.9.0", "pyparsing==3.1.4",
         "pyarrow==17.0.0", "tokenizers==0.20.0", "ftfy==6.0.0"],
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
        ["torch==2.8.0", "numpy==1.26.4", "pyarrow==17.0.0", "onnx==1.18.0", "onnxscript==0.7.1",
         "pillow-heif==1.0.0", "pillow==11.1.0", *EXTRAS],
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

# Common sets of packages, none of which installing vitlite may change.
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
    note: str = ""


def find_python(version: str) -> str:
    """Return a Python of this version.

    Raises:
        LookupError: This machine has none.
    """
    if not version or sys.version.startswith(f"{version}."):
        return sys.executable
    named = [found] if (found := shutil.which(f"python{version}")) else []
    for python in (*named, *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
        if subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL) == 0:  # pyenv has stubs that do not run
            return python
    raise LookupError(f"there is no Python {version} here")


def make(name: str, environment: Environment) -> Path:
    """Create an environment unless it exists, and return its Python."""
    folder = HOME / name
    if not (folder / "ready").exists():
        python = venv(folder, find_python(environment.python))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if "pinned" in name:
            pip += ["--constraint", str(ROOT / "constraints.txt")]
        peers = PEERS if environment.peers else []
        subprocess.run([*pip, *environment.packages, *TESTS, *peers, "--editable", str(ROOT)], check=True)
        if environment.peers:
            subprocess.run([*pip, "--no-deps", "--requirement", str(ROOT / "tests" / "peers.txt")], check=True)
        (folder / "ready").touch()
    return python_of(folder)


def venv(folder: Path, base: str) -> Path:
    """Create an empty environment, and return its Python."""
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    return python_of(folder)


def python_of(folder: Path) -> Path:
    """Return the Python of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(name: str, environment: Environment, tests: list[str]) -> Result:
    """Run the tests in one environment."""
    try:
        python = make(name, environment)
    except (subprocess.CalledProcessError, LookupError) as error:
        return Result(name, "", 0, 1, 0, f"could not be made: {error}")
    words = ["-m", "pytest", "-q", "-m", "not cluster", "-p", "no:cacheprovider", *tests]
    words += [f"--ignore={path}" for path in LEFT_OUT]
    done = subprocess.run([str(python), *words], cwd=ROOT, capture_output=True, text=True, env=variables())
    log = HOME / name / "log.txt"
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    counts = {
        kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])
    }
    failed = counts.get("failed", 0) + counts.get("error", 0) or int(done.returncode != 0)
    note = f"see {log.relative_to(ROOT)}" if failed else ""
    return Result(name, versions(python), counts.get("passed", 0), failed, counts.get("skipped", 0), note)


def variables() -> dict[str, str]:
    """Return the environment variables without those that lead to another environment's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "VITLITE_TESTS_MAY_SKIP": "1"}


def versions(python: Path) -> str:
    """Return the versions that were installed."""
    code = (
        "import platform; from importlib.metadata import version, PackageNotFoundError\n"
        "def v(n):\n    try: return version(n)\n    except PackageNotFoundError: return '-'\n"
        "print(platform.python_version(), *(v(n) for n in ('torch', 'safetensors', 'huggingface-hub', 'numpy')))"
    )
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def beside(title: str) -> Result:
    """Check that installing vitlite changes none of the packages that are installed already, with pip's dry run."""
    installed, problem = resolve(BESIDE[title])
    if not problem:
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text("".join(f"{name}=={version}\n" for name, version in installed.items()), "utf-8")
            _, problem = resolve([f"{ROOT}[images]", "--constraint", str(constraints)])
    note = problem or f"{len(installed)} packages, none changed"
    return Result(f"beside {title}", "", int(not problem), int(bool(problem)), 0, note)


def resolve(words: list[str]) -> tuple[dict[str, str], str]:
    """Return the versions that pip would install into an empty environment, or why it cannot."""
    pip = HOME / "pip"  # the newest: before 23.3, pip downloads gigabytes of packages to read their metadata
    if not (pip / "ready").exists():
        subprocess.run([str(venv(pip, sys.executable)), "-m", "pip", "install", "-q", "--upgrade", "pip"], check=True)
        (pip / "ready").touch()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(report)]
        done = subprocess.run([str(python_of(pip)), *options, *words], capture_output=True, text=True)
        if done.returncode:
            return {}, "; ".join((done.stdout + done.stderr).strip().splitlines()[-2:])
        packages = [package["metadata"] for package in json.loads(report.read_text("utf-8"))["install"]]
    return {package["name"]: package["version"] for package in packages}, ""


def main() -> int:
    """Run the environments that the command line names, and print a table; return 1 if a test failed."""
    names = [*ENVIRONMENTS, "beside"]
    parser = argparse.ArgumentParser(description="Run the tests in several environments.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--list", action="store_true", help="list the environments")
    parser.add_argument("--tests", default="tests", help="files to run; default: all")
    args = parser.parse_args()
    if args.list:
        for name, environment in ENVIRONMENTS.items():
            print(f"{name:<14} {environment.why}: {' '.join(environment.packages)}")
        return 0
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    HOME.mkdir(exist_ok=True)
    results: list[Result] = []
    for name in args.names or names:
        print(f"running {name}", flush=True)
        if name == "beside":
            results += [beside(title) for title in BESIDE]
        else:
            results.append(run(name, ENVIRONMENTS[name], args.tests.split()))
    print("\n| environment | python, torch, safetensors, huggingface-hub, numpy | passed | failed | skipped | |")
    print("|---|---|--:|--:|--:|---|")
    for result in results:
        print("| " + " | ".join(str(cell) for cell in result) + " |")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""The matrix of versions: what it runs, that it goes on, and that what an environment lacks is skipped, not failed."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import matrix
import pytest

HERE = Path(__file__).parent


def test_all_tests_are_run_but_those_whose_answer_is_the_same_everywhere() -> None:
    files = matrix.files([])
    assert "tests/test_versions.py" in files
    assert "tests/weights/test_files.py" in files
    assert not [file for file in files if "cluster" in file]


def test_every_lower_bound_is_run_in_some_environment() -> None:
    project = (matrix.ROOT / "pyproject.toml").read_text("utf-8").split("[project.scripts]")[0]
    run = {
        tuple(package.split("=="))
        for environment in matrix.ENVIRONMENTS.values()
        for package in environment.packages
        if "==" in package
    }
    pinned = (matrix.ROOT / "constraints.txt").read_text("utf-8")
    run |= {tuple(line.split("==")) for line in pinned.splitlines() if line.startswith("ray==")}  # make test-cluster
    bounds = set(re.findall(r'"([a-z-]+)(?:\[\w+\])?>=([\d.]+)"', project))
    assert {"torch", "numpy", "pillow", "pyarrow", "onnx"} <= {name for name, _ in bounds}
    for name, version in bounds:
        exact = (name, ".".join([*version.split("."), "0", "0"][:3]))
        assert exact in run, f"no environment has {name} {version}"


@pytest.mark.usefixtures("uncovered")
def test_pip_is_asked_whether_others_can_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, needs in (
        ("old", "1.26", ""),
        ("old", "2.0", ""),
        ("alike", "1", "Requires-Dist: old>=1.26\n"),
        ("unlike", "1", "Requires-Dist: old>=2.0\n"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            about = f"{name}-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(matrix, "newest_pip", lambda: Path(sys.executable))
    monkeypatch.setitem(matrix.BESIDE, "an old one", ["old==1.26"])
    kept, changed = matrix.beside("an old one", "alike"), matrix.beside("an old one", "unlike")
    assert (kept.passed, kept.failed, kept.note) == (1, 0, "1 packages, none changed")
    assert (changed.passed, changed.failed) == (0, 1)
    assert "unlike 1 depends on old>=2.0" in changed.note
    assert "old==1.26" in changed.note


@pytest.mark.skipif(os.name == "nt", reason="a script of the shell passes for Python")
def test_a_python_that_is_only_a_name_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / ".pyenv" / "versions" / "3.1.4" / "bin" / "python"
    for python, ends in ((tmp_path / "python3.1", 127), (real, 0)):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\nexit {ends}\n", encoding="utf-8")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert matrix.interpreter("3.1") == str(real)
    real.unlink()
    assert matrix.interpreter("3.1") is None


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    run = []

    def counts(name: str, python: Path, file: str) -> dict[str, int]:
        run.append(file)
        return {"passed": 2, "failed": int(file == "b.py")}

    monkeypatch.setattr(matrix, "counts", counts)
    (tmp_path / "newest.json").write_text(json.dumps({"a.py": {"passed": 5, "failed": 0, "skipped": 1}}))
    result = matrix.run("newest", matrix.ENVIRONMENTS["newest"], ["a.py", "b.py"], Path(sys.executable))
    assert run == ["b.py"]
    assert (result.passed, result.failed, result.skipped) == (7, 1, 1)
    assert "b.py: see" in result.note
    matrix.forget_failures("newest")
    assert list(json.loads((tmp_path / "newest.json").read_text())) == ["a.py"]
    assert matrix.table([result]).splitlines()[-1].startswith("| newest | 3.")


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize(
    ("line", "allowed", "outcome"),
    [
        ("import a_library_that_is_not_there", True, "1 skipped"),
        ("import a_library_that_is_not_there", False, "1 error"),
        ("import vitlite.nothing_of_the_kind", True, "1 error"),
        ("def test_too() -> None:\n    import a_library_that_is_not_there", True, "1 passed, 1 skipped"),
        ("def test_too() -> None:\n    import a_library_that_is_not_there", False, "1 failed, 1 passed"),
    ],
)
def test_what_an_environment_lacks_is_skipped(line: str, allowed: bool, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text("utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"{line}\n\ndef test() -> None:\n    pass\n", encoding="utf-8")
    variables = {name: value for name, value in matrix.variables().items() if name != "VITLITE_TESTS_MAY_SKIP"}
    if allowed:
        variables["VITLITE_TESTS_MAY_SKIP"] = "1"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert outcome in done.stdout

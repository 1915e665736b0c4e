"""The matrix of versions: what it runs, that it goes on, and that what an environment lacks is skipped, not failed."""

import json
import subprocess
import sys
from pathlib import Path

import matrix
import pytest

HERE = Path(__file__).parent


def test_all_tests_are_run_but_those_whose_answer_is_the_same_everywhere() -> None:
    files = matrix.files([])
    assert "tests/test_versions.py" in files
    assert "tests/weights/test_files.py" in files
    assert not [file for file in files if "cluster" in file]


def test_the_bounds_are_those_of_the_metadata() -> None:
    metadata = (matrix.ROOT / "pyproject.toml").read_text("utf-8")
    for package in matrix.ENVIRONMENTS["oldest"].packages:
        name, version = package.split("==") if "==" in package else (package, "")
        bound = f"{name}>={version.removesuffix('.0')}"
        assert name in ("numpy", "requests") or bound in metadata, f"{bound} is not in pyproject.toml"


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
    assert matrix.table([result]).splitlines()[-1].startswith("| newest | 3.")


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize(
    ("line", "allowed", "outcome"),
    [
        ("import a_library_that_is_not_there", True, "1 skipped"),
        ("import a_library_that_is_not_there", False, "1 error"),
        ("import vitlite.nothing_of_the_kind", True, "1 error"),
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

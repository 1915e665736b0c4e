"""`--engine`, as far as it goes without Ray; tests/cluster has the rest."""

import sys
from pathlib import Path

import pytest

from vitlite.cli.main import main


def test_without_ray_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # import fails
    for command in ("embed", "classify"):
        assert main([command, str(tmp_path), "--engine", "ray", "--out", str(tmp_path / "out")]) == 1
        assert capsys.readouterr().err == (
            "vitlite: error: --engine ray needs an optional package. Install it: pip install 'vitlite[ray]'\n"
        )


def test_what_belongs_to_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", str(tmp_path), "--out", "labels"]) == 1
    assert "--out belongs to --engine ray" in capsys.readouterr().err
    assert main(["classify", str(tmp_path), "--engine", "ray"]) == 1
    assert main(["embed", "a.png", "b.png", "--engine", "ray", "--out", "vectors"]) == 1
    assert capsys.readouterr().err.count("takes one folder, list or Parquet file as PATH, and --out with a folder") == 2

"""`--engine` without Ray. The other tests are in tests/cluster."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run

import vitlite
from vitlite.cli.main import main
from vitlite.cluster import jobs, sources


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


def test_options_of_the_other_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", str(tmp_path), "--out", "labels"]) == 1
    assert "--out needs --engine ray" in capsys.readouterr().err
    for words in (["classify"], ["embed", "--out", "vectors.npz"]):
        assert main([*words, str(tmp_path), "--workers", "3"]) == 1
        assert "--workers needs --engine ray" in capsys.readouterr().err
    assert main(["classify", str(tmp_path), "--format", "table", "--engine", "ray", "--out", "labels"]) == 1
    assert "--format cannot be used with --engine ray, which writes Parquet" in capsys.readouterr().err
    assert main(["classify", str(tmp_path), "--engine", "ray"]) == 1
    assert main(["embed", "a.png", "b.png", "--engine", "ray", "--out", "vectors"]) == 1
    assert capsys.readouterr().err.count("needs exactly one PATH and a folder for the results") == 2


@pytest.mark.parametrize(
    ("words", "function", "given"),
    [
        (["embed", "--fast"], "embed_images", {}),
        (["classify", "--top", "2"], "classify_images", {"top": 2}),
    ],
    ids=["embed", "classify"],
)
def test_the_engine_gets_the_options_and_its_result_is_printed(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], function: str, given: dict[str, Any]
) -> None:
    def work(model: Any, source: Any, out: Any, actors: Any, *, on_resume: Any, **options: Any) -> jobs.Summary:
        assert (type(model), model.dtype) == (vitlite.ViT, torch.float32)  # the actors optimize it, in their dtype
        assert (source, out) == (sources.Source("list.txt", None, Counter()), "folder")
        assert actors == jobs.Actors(batch=4, dtype="bfloat16", device="cpu", count=3)
        assert options == given
        on_resume(7)
        return jobs.Summary(images=9, broken=broken, new=2)

    name, broken = str(model), 1
    monkeypatch.setattr(jobs, "check_installed", lambda: None)
    monkeypatch.setattr(sources, "find_source", lambda name: sources.Source(name, None, Counter()))
    monkeypatch.setattr(jobs, function, work)
    words += ["list.txt", "--engine", "ray", "--out", "folder", "--model", name, "--batch", "4", "--workers", "3"]
    code, out, err = run(*words, "--dtype", "bfloat16", "--device", "cpu")
    assert code == 1
    assert err.startswith("vitlite: resuming folder: 7 ")
    assert out == "folder: 9 images, 2 of them new in 0 s; 1 could not be read (see the column error)\n"
    broken = 0
    assert run(*words, "--dtype", "bfloat16", "--device", "cpu")[0] == 0

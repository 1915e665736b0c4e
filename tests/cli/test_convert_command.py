"""`vitlite convert`."""

import json
from pathlib import Path

import pytest
from commands import Run


def test_convert(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("convert", model, tmp_path / "there", "--to", "transformers")
    assert (code, out, err) == (0, f"wrote {tmp_path / 'there'}\n", "")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "vit"
    assert run("convert", model, tmp_path / "back", "--to", "vitlite", "--like", "nothing")[0] == 1
    assert run("convert", model, tmp_path / "back")[0] == 2
    assert "no pickles are made" in run("convert", model, tmp_path / "back.pth", "--to", "timm")[2]
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("convert", f"~/{model.name}", tmp_path / "again.safetensors", "--to", "timm")[0] == 0
    for name in ("none.pth", "none"):
        assert f"no file or folder {name}." in run("convert", name, tmp_path / "back", "--to", "timm")[2]
    assert "vit_nano_4 is a name" in run("convert", "vit_nano_4", tmp_path / "back", "--to", "timm")[2]

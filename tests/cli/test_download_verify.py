"""`vitlite download` and `vitlite verify`."""

from pathlib import Path

import pytest
from commands import Run

from vitlite.zoo import registry


def test_download_and_verify(run: Run, tmp_path: Path, model: Path) -> None:
    assert run("download", "vit_nano_4.cifar10")[1] == "vit_nano_4.cifar10: comes with vitlite, nothing to download\n"
    assert "no model 'nothing'" in run("download", "vit_nano_4.cifar10", "nothing")[2]
    assert run("verify")[1].count(": good, sha256 ") == 1  # the checkpoint that comes with vitlite
    assert run("verify", tmp_path / "none.safetensors")[0] == 1
    weights = model / "model.safetensors"
    assert run("verify", weights)[1].startswith(f"{weights}: good, sha256 ")


def test_verify_knows_what_comes_with_vitlite(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = registry.find("vit_nano_4")
    code, out, _ = run("verify", "vit_nano_4")
    assert (code, out) == (0, f"vit_nano_4: good, sha256 {record.sha256} (record), {registry.DATA / record.file}\n")
    (tmp_path / record.file).write_bytes(b"rotten")
    monkeypatch.setattr(registry, "DATA", tmp_path)
    code, out, _ = run("verify", "vit_nano_4")
    assert code == 1
    assert f"expected {record.sha256}" in out


def test_download_from_a_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server import Hub

    record = registry.find("vit_small_8.dino")
    with Hub() as hub:
        first = hub.publish(record.repo, model_safetensors=b"some bytes")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, out, _ = run("download", record.name, record.alias)
        assert code == 0
        assert out.count("sha256") == 1  # two names for one checkpoint
        assert first in out
        assert out.startswith(f"{record.name}: {tmp_path / 'cache'}")
        assert "verified by hub" in out
        hub.publish(record.repo, model_safetensors=b"other bytes")
        assert run("download", record.name)[1].startswith(out)
        newer = run("download", record.name, "--update")[1]
        assert newer != out
        assert run("download", record.name)[1] == newer
    code, out, _ = run("verify")
    assert (code, out.count(f"{record.name}: good")) == (0, 1)
    code, shown, _ = run("verify", record.name)
    path = Path(shown.rsplit(", ", 1)[1].strip())
    path.resolve().write_bytes(b"rotten byte")
    code, out, _ = run("verify", record.name)
    assert code == 1
    assert f"{record.name}: FAILED: " in out

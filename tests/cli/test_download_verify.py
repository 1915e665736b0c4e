"""`vitlite download` and `vitlite verify`."""

from pathlib import Path

import pytest
from commands import Run

from vitlite.zoo import registry


def test_download_and_verify(run: Run, tmp_path: Path, model: Path) -> None:
    assert run("download", "vit_nano_4.cifar10")[1] == "vit_nano_4.cifar10: comes with vitlite, nothing to download\n"
    assert "no model 'nothing'" in run("download", "vit_nano_4.cifar10", "nothing")[2]
    assert "Nothing to verify" in run("verify")[2]
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
    assert f"expected hash {record.sha256}" in out


def test_download_from_a_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server import Hub

    record = registry.find("vit_small_8.dino")
    with Hub() as hub:
        first = hub.publish(record.repo, model_safetensors=b"some bytes")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, out, _ = run("download", record.name, record.alias)
        assert code == 0
        assert out.count("sha256") == 1  # two names for one checkpoint
        assert out.startswith(f"{record.name}: {tmp_path / 'cache'}")
        assert "verified by hub" in out
        assert "nothing newer" in run("download", record.name, "--update")[1]
        second = hub.publish(record.repo, model_safetensors=b"other bytes")
        assert "\n  " + "the pin moved" not in run("download", record.name)[1]
        assert f"the pin moved from commit {first} to {second}" in run("download", record.name, "--update")[1]
    code, out, _ = run("verify")
    assert (code, out.count(f"{record.name}: good")) == (0, 1)
    code, shown, _ = run("verify", record.name)
    path = Path(shown.rsplit(", ", 1)[1].strip())
    path.resolve().write_bytes(b"rotten byte")
    code, out, _ = run("verify", record.name)
    assert code == 1
    assert f"{record.name}: FAILED: " in out


def test_a_bad_pin_is_said_and_mended(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command that the error names, and without standing in the way of other models."""
    from server import Hub

    bad, good = registry.find("vit_small_8.dino"), registry.find("vit_small_16.dino")
    with Hub() as hub:
        for record in (bad, good):
            hub.publish(record.repo, model_safetensors=record.name.encode())
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert run("download", bad.name, good.name)[0] == 0
        pin = next(tmp_path.rglob(f"{bad.name}.json"))
        pin.write_text('{"repo": ' + "9" * 5000)
        code, out, _ = run("verify")
        assert code == 1
        assert f"{bad.name}: FAILED: The pin of {bad.name} cannot be used. {pin} cannot be read as JSON" in out
        assert f"{good.name}: good" in out
        assert run("download", good.name, "--update")[0] == 0
        code, _, err = run("download", bad.name)
        assert code == 1
        assert f"`vitlite download {bad.name} --update`" in err
        assert run("download", bad.name, "--update")[0] == 0
        assert run("verify")[0] == 0


def test_a_wrong_pin_costs_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from server import Hub

    record = registry.find("vit_small_8.dino")
    with Hub() as hub:
        hub.publish(record.repo, model_safetensors=b"some bytes")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        out = run("download", record.name)[1]
        pin = next(tmp_path.rglob(f"{record.name}.json"))
        sha256 = out.partition("sha256 ")[2][:64]
        pin.write_text(pin.read_text().replace(sha256, "0" * 64))
        code, _, err = run("download", record.name)
        assert code == 1
        assert f"expected hash {'0' * 64}, got {sha256}" in err
        assert next(tmp_path.rglob("model.safetensors")).read_bytes() == b"some bytes"
        assert run("download", record.name, "--update")[0] == 0
        assert run("verify", record.name)[0] == 0

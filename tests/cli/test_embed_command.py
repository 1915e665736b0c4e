"""`vitlite embed`."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run, start
from PIL import Image

import vitlite
from vitlite.errors import InputError
from vitlite.fast import kernels, verdicts
from vitlite.inference.journal import Journal, Picture, open_journal


def test_embed_gives_what_embed_gives(run: Run, model: Path, broken: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    out = tmp_path / "out.safetensors"
    code, shown, err = run("embed", broken, "--model", model, "--out", out)
    assert code == 1
    assert "aa.png" in err
    assert shown == f"wrote {out}: 4 vectors of 32\n"
    with safe_open(out, "pt") as file:
        vectors, about = file.get_tensor("vectors"), file.metadata()
    paths = json.loads(about["paths"])
    loaded = vitlite.load(model)
    with torch.no_grad():
        torch.testing.assert_close(vectors, loaded.embed(loaded.preprocess(paths)))
    assert about["sha256"] == loaded.source.sha256


def test_embed_killed_and_continued_gives_the_same_bytes(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_known", {})  # of another cache
    folder = tmp_path / "many"
    folder.mkdir()
    noise = torch.Generator().manual_seed(0)
    for i in range(200):
        pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=noise)
        Image.fromarray(pixels.numpy()).save(folder / f"{i:03}.bmp")
    (folder / "005.bmp").write_bytes(b"BM")  # in the first batch
    whole, out = tmp_path / "whole.npz", tmp_path / "out.npz"
    words = ("embed", folder, "--model", model, "--batch", 8, "--out")
    assert run(*words, whole)[0] == 1

    partial = tmp_path / "out.npz.partial"
    process = start(*words, out)
    while not partial.exists() or partial.stat().st_size < 8_000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists()
    code, _, err = run(*words, out)
    assert code == 1
    assert "continuing" in err
    assert "005.bmp" in err  # said again
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


@pytest.fixture
def interrupted(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A command whose run stopped after four of six pictures, in the folder a of tmp_path."""
    for i, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        for j in range(6):
            Image.new("RGB", (20, 20), (100 * i, 40 * j, 0)).save(tmp_path / folder / f"{j}.bmp")
    monkeypatch.chdir(tmp_path / "a")
    words = ("embed", *(f"{j}.bmp" for j in range(6)), "--model", model, "--batch", 2, "--out", tmp_path / "out.jsonl")
    add, calls = Journal.add, iter(range(3))

    def stops(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stops)
        assert run(*words)[0] == 130
    return words


def test_embed_goes_on_only_where_it_stood(
    run: Run, interrupted: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative names are other pictures in another folder."""
    monkeypatch.chdir(tmp_path / "b")
    code, _, err = run(*interrupted)
    assert code == 1
    assert "out.jsonl.partial was left by a run with another working folder. Repeat that command" in err
    monkeypatch.chdir(tmp_path / "a")
    assert "4 images are done" in run(*interrupted)[2]


def test_embed_goes_on_only_with_the_same_kernels(
    run: Run, interrupted: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        other = verdicts.Verdict(not kernels.unpacked_pays(), "as somebody says")
        patch.setattr(verdicts, "_known", {("float32 linear layers", torch.get_num_threads()): other})
        code, _, err = run(*interrupted)
    assert code == 1
    names = r"linear layers by (torch|oneDNN)"
    assert re.search(
        f"another choice of kernels. It had {names}, and this machine now takes {names}: vectors would", err
    )
    assert "VITLITE_KERNELS. Repeat that command" in err
    assert "4 images are done" in run(*interrupted)[2]


def test_embed_does_a_changed_picture_again(run: Run, interrupted: tuple[object, ...], tmp_path: Path) -> None:
    shutil.copy(tmp_path / "b" / "2.bmp", tmp_path / "a" / "2.bmp")
    code, shown, err = run(*interrupted)
    assert (code, shown) == (0, f"wrote {tmp_path / 'out.jsonl'}: 6 vectors of 32\n")
    assert "3 images are done" in err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == [f"{j}.bmp" for j in range(6)]
    assert run(*interrupted)[0] == 0  # a run of its own
    afresh = {row["path"]: row["vector"] for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for row in rows:
        assert row["vector"] == pytest.approx(afresh[row["path"]], abs=1e-5)
    assert not list(tmp_path.glob("out.jsonl?*"))


def test_embed_of_other_pictures_leaves_the_vectors_of_an_interrupted_run(
    run: Run, interrupted: tuple[object, ...], tmp_path: Path
) -> None:
    """Of a folder that is half mounted, or of a slip: hours of work."""
    embed, first, *others = interrupted
    one = [word for word in others if not str(word).endswith(".bmp")]
    code, shown, err = run(embed, first, *one)
    assert (code, shown) == (0, f"wrote {tmp_path / 'out.jsonl'}: 1 vectors of 32\n")
    assert "out.jsonl.partial stays: it has the vectors of 3 other pictures, such as 1.bmp." in err
    code, shown, err = run(*interrupted)
    assert (code, shown) == (0, f"wrote {tmp_path / 'out.jsonl'}: 6 vectors of 32\n")
    assert "4 images are done" in err
    assert not list(tmp_path.glob("out.jsonl?*"))


def test_embed_leaves_nothing_where_no_picture_can_be_read(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    code, _, err = run("embed", tmp_path / "a.png", "--model", model, "--out", tmp_path / "out.npz")
    assert code == 1
    assert "nothing to write" in err
    assert not list(tmp_path.glob("out*"))


def test_embed_refuses_to_mix_two_runs(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, {"weights": "others"}) as journal:
        journal.add([Picture("a.png", 0, 0, 0, 0)], b"1234")
    code, _, err = run("embed", pictures, "--model", model, "--out", out)
    assert code == 1
    assert re.search("was left by a run with another .*config, .*preprocessing, .*weights", err)
    assert "must end in one of .safetensors" in run("embed", pictures, "--model", model, "--out", "x.csv")[2]


def test_embed_refuses_a_file_that_another_writes(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    words = ("embed", pictures, "--model", model, "--out", tmp_path / "out.npz")
    with open_journal(tmp_path / "out.npz", {}):
        code, shown, err = run(*words)
        assert (code, shown) == (1, "")
        assert re.search(r"vitlite: error: .*out\.npz: another process is writing it\. .*\n\Z", err)
    assert run(*words)[0] == 0
    assert not list(tmp_path.glob("out.npz?*"))


def test_quick_decode_is_part_of_what_identifies_vectors(run: Run, model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    photo = tmp_path / "photo.jpg"
    gradient = torch.arange(512, dtype=torch.int64).mul(37).remainder(256).to(torch.uint8)
    Image.fromarray(gradient.expand(512, 512).contiguous().numpy()).convert("RGB").save(photo)
    found = []
    for options in ((), ("--quick-decode",)):
        out = tmp_path / f"out{len(options)}.safetensors"
        assert run("embed", photo, "--model", model, "--out", out, *options)[0] == 0
        with safe_open(out, "pt") as file:
            found.append((file.get_tensor("vectors"), json.loads(file.metadata()["identity"])))
    assert not torch.equal(found[0][0], found[1][0])
    assert "quick_decode" not in found[0][1]  # as it was before there was a choice
    assert found[1][1] == found[0][1] | {"quick_decode": True}

    partial = tmp_path / "out0.safetensors.partial"
    with open_journal(tmp_path / "out0.safetensors", found[0][1]) as journal:
        journal.add([Picture.at("other.jpg")], b"\0" * 4 * found[0][0].shape[1], [])
    assert partial.exists()
    with pytest.raises(InputError, match="was left by a run with another quick_decode"):
        Journal(tmp_path / "out0.safetensors", found[1][1])


def test_classify_takes_quick_decode(run: Run, model: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (300, 300), "teal").save(photo)  # another format: decoded whole, and the same
    code, whole, _ = run("classify", photo, "--model", model, "--format", "csv")
    assert (code, whole) == run("classify", photo, "--model", model, "--format", "csv", "--quick-decode")[:2]


def test_no_two_pictures_have_one_name_in_parquet(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    for name in (b"a\xe9.png", b"a\\xe9.png"):
        shutil.copy(pictures / "a.png", os.path.join(os.fsencode(folder), name))
    code, _, err = run("embed", folder, "--model", model, "--out", tmp_path / "x.parquet")
    assert code == 1
    assert "is a name that is no Unicode, and paths go into Parquet as text. Rename it, or name a file that" in err
    assert os.listdir(tmp_path) == ["two"]
    assert run("embed", folder, "--model", model, "--out", tmp_path / "x.jsonl")[0] == 0
    names = {json.loads(line)["path"] for line in (tmp_path / "x.jsonl").read_text().splitlines()}
    assert names == {str(folder / os.fsdecode(name)) for name in (b"a\xe9.png", b"a\\xe9.png")}

"""Which pictures words mean, and their vectors in a journal, as a program of one's own would ask for them."""

import glob
import inspect
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from models import small_model
from PIL import Image

import vitlite
from vitlite.checkpoints.fingerprint import hash_of_answers
from vitlite.errors import ImageError
from vitlite.images.decode import SUFFIXES
from vitlite.inference.embed import embed_into, gather, identity_of
from vitlite.inference.journal import Journal, Picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven pictures, the third of them broken."""
    made = tmp_path / "pictures"
    made.mkdir()
    for i in range(7):
        Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(made / f"{i}.bmp")
    (made / "2.bmp").write_bytes(b"BM")
    return made


def test_words_mean_files(folder: Path) -> None:
    first, second = str(folder / "0.bmp"), str(folder / "1.bmp")
    everything = [str(folder / f"{i}.bmp") for i in range(7)]
    assert gather([first, second, first]) == [first, second]
    assert gather([str(folder)]) == everything
    assert gather([str(folder / "[01].bmp"), "none.bmp"]) == [first, second, "none.bmp"]
    assert gather(["-", first], [f"{second}\r\n", " \n"]) == [second, first]


@pytest.mark.parametrize("word", ["album", "album/**", "album/**/*.bmp", "**/inner/*", "album/*/../**/[0-9].bmp"])
def test_patterns_follow_links_and_not_in_circles(
    word: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two links back would make 2 ** 40 paths of each file."""
    (tmp_path / "album" / "inner").mkdir(parents=True)
    (tmp_path / "album" / ".hidden").mkdir()
    for name in ("inner/0.bmp", "inner/1.bmp", ".hidden/2.bmp"):
        shutil.copy(folder / Path(name).name, tmp_path / "album" / name)
    monkeypatch.chdir(tmp_path)
    right = gather([word])
    assert {os.path.realpath(path) for path in right} >= {str(tmp_path / "album" / f"inner/{i}.bmp") for i in (0, 1)}
    if "**" in word:
        assert right == sorted(filter(os.path.isfile, glob.glob(word, recursive=True)))
    for name in ("round", "again"):
        (tmp_path / "album" / "inner" / name).symlink_to(tmp_path / "album")
    assert set(right) <= set(gather([word]))
    assert {os.path.realpath(path) for path in gather([word])} == {os.path.realpath(path) for path in right}
    assert len(gather([word])) <= 3 * len(right)


def test_what_a_pattern_finds_broken_is_named_and_not_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "gone.bmp").symlink_to("nowhere.bmp")
    os.mkfifo(folder / "pipe.bmp")
    skipped: list[Counter[str]] = []
    everything = [*(str(folder / f"{i}.bmp") for i in range(7)), str(folder / "gone.bmp")]
    for word in (str(folder), str(folder / "*.bmp"), str(tmp_path / "**" / "*.bmp")):
        assert sorted(gather([word], on_skip=skipped.append)) == sorted(everything)
    assert skipped == [Counter({"pipe or device": 1})] * 3
    alone = tmp_path / "alone"
    alone.mkdir()
    os.mkfifo(alone / "pipe.bmp")
    with pytest.raises(ImageError, match=r"No pictures in the folder .* There are 1 pipe or device"):
        gather([str(alone)])
    with pytest.raises(ImageError, match="No file matches"):
        gather([str(alone / "*.bmp")])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may look into every folder")
def test_a_closed_folder_ends_a_pattern_too(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0)
    with pytest.raises(ImageError, match=r"Cannot look into the folder .*closed"):
        gather([str(folder / "**")])


def test_a_folder_s_links_to_folders_are_followed_and_not_in_circles(folder: Path, tmp_path: Path) -> None:
    album = tmp_path / "album.png"  # a folder, whatever its name
    (album / "inner").mkdir(parents=True)
    (album / "inner" / "linked").symlink_to(folder)
    (album / "inner" / "round").symlink_to(album)
    (album / "itself").symlink_to("itself")
    (folder / "up").symlink_to(album)
    (album / "gone.bmp").symlink_to("nowhere.bmp")
    below = [str(album / "inner" / "linked" / f"{i}.bmp") for i in range(7)]
    assert gather([str(album)]) == [str(album / "gone.bmp"), *below]


@pytest.mark.skipif(os.name == "nt", reason="paths are at most 260 letters")
def test_folders_may_be_deeper_than_python_calls(folder: Path) -> None:
    deepest = folder.joinpath(*"d" * 300)
    deepest.mkdir(parents=True)
    (deepest / "last.png").touch()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        found = gather([str(folder)])
    finally:
        sys.setrecursionlimit(before)
    assert len(found) == 8


def test_every_suffix_of_pictures_is_found_however_it_is_written(tmp_path: Path) -> None:
    names = sorted(f"a{suffix}" for suffix in SUFFIXES) + sorted(f"b{suffix.upper()}" for suffix in SUFFIXES)
    for name in [*names, "a.txt", "png"]:
        (tmp_path / name).touch()
    assert gather([str(tmp_path)]) == [str(tmp_path / name) for name in names]


def test_words_that_mean_nothing(tmp_path: Path) -> None:
    for words, reason in (
        ([str(tmp_path)], "No pictures in the folder"),
        ([str(tmp_path / "*.png")], r"No file matches .*\*\.png"),
        (["none.png", "neither.png"], "No such file: none.png"),
        (["-"], "the list is empty"),
    ):
        with pytest.raises(ImageError, match=reason):
            gather(words)


def test_vectors_come_batch_by_batch_and_only_as_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    model = vitlite.load(small_model(tmp_path / "model", ("one", "two", "three")))
    pictures = [Picture.at(path) for path in gather([str(folder)])]
    identity = identity_of(model, dtype=None, fast=False)
    with Journal(tmp_path / "out.npz", identity) as journal:
        outcomes = embed_into(journal, model, pictures, 2)
        for _ in range(5):
            next(outcomes)
        outcomes.close()
        assert [len(batch.pictures) for batch in journal.batches] == [2, 1]
        assert journal.broken == [pictures[2].path]

    with Journal(tmp_path / "out.npz", identity) as journal:
        answers = dict(embed_into(journal, model, journal.missing(pictures), 2))
        assert list(answers) == [picture.path for picture in (*pictures[4:], pictures[2])]  # what was tried comes last
        assert isinstance(answers[pictures[2].path], ImageError)
        assert journal.finish(pictures, {}) == 6
    with torch.no_grad():
        torch.testing.assert_close(answers[pictures[4].path], model.embed(model.preprocess(pictures[4].path))[0])
    assert not os.path.exists(journal.path)


def test_what_decides_the_numbers_tells_runs_apart(tmp_path: Path) -> None:
    model = vitlite.load(small_model(tmp_path / "model", ("one", "two", "three")))
    identity = identity_of(model, dtype="bfloat16", fast=True)
    assert identity["weights"] == model.source.sha256
    assert (identity["dtype"], identity["fast"]) == ("bfloat16", True)
    assert identity["config"]["depth"] == 2
    assert identity["preprocessing"] == model.preprocess.transform.to_dict()
    model.source, model.preprocess = None, None
    other = identity_of(model, dtype=None, fast=False)
    assert other["weights"].startswith("in memory ")  # of no file
    assert (other["preprocessing"], other["dtype"]) == (None, None)
    narrow = vitlite.load(tmp_path / "model", dtype=torch.bfloat16)
    assert identity_of(narrow, dtype=None, fast=False)["dtype"] == "bfloat16"


def test_what_decides_the_answers_beside_the_vectors(tmp_path: Path) -> None:
    path = small_model(tmp_path / "model", ("one", "two", "three"))
    model, renamed, trained = (vitlite.load(path) for _ in range(3))
    assert hash_of_answers(model) == hash_of_answers(renamed)
    renamed.labels = ("eins", "zwei", "drei")
    with torch.no_grad():
        trained.head.weight.neg_()
    assert len({hash_of_answers(each) for each in (model, renamed, trained)}) == 3

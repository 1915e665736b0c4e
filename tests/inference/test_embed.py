"""The image files that arguments name, and their vectors in a journal."""

import os
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
from vitlite.inference.embed import embed_into, identity_of
from vitlite.inference.find import find_images
from vitlite.inference.journal import ImageFile, Journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images, the third of them broken."""
    made = tmp_path / "images"
    made.mkdir()
    for i in range(7):
        Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(made / f"{i}.bmp")
    (made / "2.bmp").write_bytes(b"BM")
    return made


def test_files_folders_patterns_and_lists(folder: Path) -> None:
    first, second = str(folder / "0.bmp"), str(folder / "1.bmp")
    everything = [str(folder / f"{i}.bmp") for i in range(7)]
    assert find_images([first, second, first]) == [first, second]
    assert find_images([str(folder)]) == everything
    assert find_images([str(folder / "[01].bmp"), "none.bmp"]) == [first, second, "none.bmp"]
    assert find_images([str(folder.parent / "**/*.bmp")]) == everything
    assert find_images(["-", first], [f"{second}\r\n", " \n"]) == [second, first]


def test_broken_links_are_found_and_other_files_are_counted(folder: Path) -> None:
    (folder / "gone.bmp").symlink_to("nowhere.bmp")
    (folder / "notes.txt").touch()
    (folder / ".hidden").touch()
    skipped: list[Counter[str]] = []
    everything = [*(str(folder / f"{i}.bmp") for i in range(7)), str(folder / "gone.bmp")]
    assert find_images([str(folder)], on_skip=skipped.append) == everything
    assert find_images([str(folder / "*.bmp")], on_skip=skipped.append) == everything
    assert skipped == [Counter({".txt": 1})]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_an_error(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0)
    with pytest.raises(ImageError, match=r"Cannot read the folder .*closed"):
        find_images([str(folder)])


def test_links_to_folders_are_followed_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    album = tmp_path / "album.png"  # a folder, whatever its name
    (album / "inner").mkdir(parents=True)
    (album / "inner" / "linked").symlink_to(folder)
    (album / "inner" / "round").symlink_to(album)
    (folder / "up").symlink_to(album)
    assert find_images([str(album)]) == [str(album / "inner" / "linked" / f"{i}.bmp") for i in range(7)]


def test_every_suffix_is_found_in_any_case(tmp_path: Path) -> None:
    names = sorted(f"a{suffix}" for suffix in SUFFIXES) + sorted(f"b{suffix.upper()}" for suffix in SUFFIXES)
    for name in [*names, "a.txt", "png"]:
        (tmp_path / name).touch()
    assert find_images([str(tmp_path)]) == [str(tmp_path / name) for name in names]


def test_sources_without_images_are_errors(tmp_path: Path) -> None:
    for sources, reason in (
        ([str(tmp_path)], "No images found in the folder"),
        ([str(tmp_path / "*.png")], r"No file matches .*\*\.png"),
        (["none.png", "neither.png"], "No such file: none.png"),
        (["https://host/a.png"], r"is a URL\. Download the image first"),
        (["-"], "The list of images is empty"),
    ):
        with pytest.raises(ImageError, match=reason):
            find_images(sources)


def test_vectors_come_batch_by_batch_as_they_are_consumed(folder: Path, tmp_path: Path) -> None:
    model = vitlite.load(small_model(tmp_path / "model", ("one", "two", "three")))
    images = [ImageFile.at(path) for path in find_images([str(folder)])]
    with Journal(tmp_path / "out.npz", {}, 32) as journal:
        outcomes = embed_into(journal, model, images, 2)
        for _ in range(4):
            next(outcomes)
        outcomes.close()
        assert [image.path for image in journal.rows] == [images[i].path for i in (0, 1, 3)]
        assert journal.failed == {images[2].path}
    with Journal(tmp_path / "out.npz", {}, 32) as journal:
        answers = dict(embed_into(journal, model, images, 2))
        assert list(answers) == [image.path for image in (*images[4:], images[2])]  # failed images come last
        assert isinstance(answers[images[2].path], ImageError)
        assert journal.finish(images, {}) == 6
    with torch.no_grad():
        torch.testing.assert_close(answers[images[4].path], model.embed(model.preprocess(images[4].path))[0])


def test_identity_has_everything_that_determines_vectors(tmp_path: Path) -> None:
    model = vitlite.load(small_model(tmp_path / "model", ("one", "two", "three")))
    identity = identity_of(model, dtype="bfloat16", fast=True)
    assert identity.weights == model.source.sha256
    assert (identity.dtype, identity.fast, identity.quick_decode) == ("bfloat16", True, False)
    assert identity.config["depth"] == 2
    assert identity.preprocessing == model.preprocess.transform.to_dict()
    model.source, model.preprocess = None, None
    other = identity_of(model)
    assert other.weights != identity.weights
    assert (other.preprocessing, other.dtype) == (None, "float32")
    assert identity_of(vitlite.load(tmp_path / "model", dtype=torch.bfloat16)).dtype == "bfloat16"


def test_labels_and_head_determine_the_answers(tmp_path: Path) -> None:
    path = small_model(tmp_path / "model", ("one", "two", "three"))
    model, renamed, trained = (vitlite.load(path) for _ in range(3))
    assert hash_of_answers(model) == hash_of_answers(renamed)
    renamed.labels = ("eins", "zwei", "drei")
    with torch.no_grad():
        trained.head.weight.neg_()
    assert len({hash_of_answers(each) for each in (model, renamed, trained)}) == 3

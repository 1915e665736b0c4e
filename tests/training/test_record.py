"""A run is resumed with the images it began with, although some are gone or broken since."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import Killed, new_model, settings, stop, stripes_in_folders

from vitlite.errors import ImageError, TrainError
from vitlite.training import ImageData, train
from vitlite.training.record import images_of_run
from vitlite.training.split import Split, read_training_data
from vitlite.training.state import IMAGES, STATE

CLASSES = ("lying", "standing")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder per class, of which a part is held out."""
    folders = stripes_in_folders(tmp_path / "made")
    return (folders / "train").rename(tmp_path / "data")


def read(data: Path, seed: int = 0, strict: bool = False) -> Split:
    return read_training_data(data, new_model().preprocess, CLASSES, seed=seed, strict=strict)


def go_on(split: Split, out: Path, **callbacks: object) -> dict[str, torch.Tensor]:
    model = new_model()
    train(model, split.train, out, settings(epochs=3), validation=split.validation, **callbacks)  # type: ignore[arg-type]
    return model.state_dict()


def begin(split: Split, out: Path) -> None:
    with pytest.raises(Killed):
        go_on(split, out, after_epoch=stop)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_with_broken_images_is_resumed_exactly(data: Path, tmp_path: Path) -> None:
    for name in ("lying/2.png", "standing/5.png", "standing/7.png"):
        (data / name).write_bytes(b"broken")
    whole = go_on(read(data), tmp_path / "whole")
    begin(read(data), tmp_path / "run")
    assert equal(go_on(read(data), tmp_path / "run"), whole)


def test_images_that_are_gone_or_broken_since_count_as_broken(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(read(data), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    split = read(data)
    gone, emptied, held_out = split.train.names()[0], split.train.names()[-1], split.held_out[0]
    for name in (gone, held_out):
        (data / name).unlink()
    (data / emptied).write_bytes(b"")
    now = read(data)
    begun = now.of_run(tmp_path / "run")
    assert len(now.train) + len(now.validation) == 22
    assert (begun.train.names(), begun.held_out) == (split.train.names(), split.held_out)
    assert torch.equal(begun.train.labels, split.train.labels)
    assert sorted([*begun.train.broken(), *begun.validation.broken()]) == sorted([gone, emptied, held_out])
    assert all(caplog.text.count(name) == 1 for name in (gone, emptied, held_out))
    weights = go_on(begun, tmp_path / "run")
    assert equal(go_on(read(data), tmp_path / "other"), weights)  # also if `of_run` is left out
    with pytest.raises(ImageError, match=r"Cannot read"):
        read(data, strict=True).of_run(tmp_path / "other")


def test_images_that_are_new_or_different_are_an_error(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    begin(read(data), out)
    with pytest.raises(TrainError, match=r"contains another run: images was '20, "):
        go_on(read(data, seed=1), out)
    shutil.copy(data / "lying" / "0.png", data / "lying" / "new.png")
    with pytest.raises(TrainError, match=r"1 images were added or moved to another class \(.*new\.png\)"):
        read(data).of_run(out)
    (data / "lying" / "new.png").unlink()
    with (data / "lying" / "0.png").open("ab") as file:
        file.write(b"more")
    with pytest.raises(TrainError, match=r"another run: .*0\.png has changed from \d+ to \d+ bytes"):
        read(data).of_run(out)


def test_a_run_that_has_not_taken_a_step_may_begin_anew(data: Path, tmp_path: Path) -> None:
    def kill(run: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        go_on(read(data), tmp_path / "run", after_step=kill)
    (data / "lying" / "0.png").unlink()
    split = read(data)
    assert split.of_run(tmp_path / "run") == split
    go_on(split, tmp_path / "run")
    record = json.loads((tmp_path / "run" / IMAGES).read_text())
    assert record["train"]["names"] == split.train.names()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"train": {}}', '{"train": {"names": ["a"], "labels": [], "sizes": []}}']
)
def test_a_damaged_list_is_an_error(data: Path, tmp_path: Path, content: str) -> None:
    begin(read(data), tmp_path / "run")
    (tmp_path / "run" / IMAGES).write_text(content)
    with pytest.raises(TrainError, match=r"images\.json is damaged"):
        read(data).of_run(tmp_path / "run")


def test_images_in_memory_have_no_list(tmp_path: Path) -> None:
    from tiny_run import stripes

    data: ImageData = stripes(24)
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    assert (tmp_path / STATE).exists()
    assert images_of_run(tmp_path, data) == (data, None)

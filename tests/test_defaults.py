"""Torch's default type and device are for tensors that name none: what vitlite makes does not depend on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from PIL import Image
from tiny_run import new_model, settings, stripes, stripes_in_folders
from torch import Tensor

from vitlite import ViT, optimize, plots
from vitlite.checkpoints.save import write_tensors
from vitlite.inference.embed import identity_of
from vitlite.retrieval import nearest, open_vectors, probe, search
from vitlite.retrieval.probe import held_out, votes
from vitlite.retrieval.search import Match
from vitlite.retrieval.sheet import contact_sheet
from vitlite.training import measure, read_folder, train
from vitlite.training.split import hold_out


def work_with(model: ViT, tmp_path: Path) -> dict[str, Callable[[], Any]]:
    """What gives the same under every default, by name; all that it takes is made before."""
    picture = tmp_path / "a.png"
    Image.linear_gradient("L").convert("RGB").save(picture)
    plain, sums = tiny_model(), json.dumps
    with torch.no_grad():
        vectors = model.embed(model.preprocess(picture))
    about = {"paths": sums([str(picture)]), "identity": sums(identity_of(model, dtype=None, fast=False)), "model": "m"}
    write_tensors(tmp_path / "v.safetensors", {"vectors": vectors}, about)
    opened, images = open_vectors(tmp_path / "v.safetensors"), model.preprocess([picture] * 2)
    x, labels = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    folder = stripes_in_folders(tmp_path / "folders") / "train"
    classifier = new_model()

    def folders() -> Any:
        return read_folder(folder, classifier.preprocess.pixels, ("lying", "standing"))

    return {
        "search": lambda: [[round(found.score, 4) for found in row] for row in search(opened, model, picture)],
        "probe": lambda: probe(x, labels, x, labels, shots=[5]),
        "held out": lambda: held_out(labels, 0).tolist(),
        "sheet": lambda: contact_sheet([str(picture)], [[Match(str(picture), 1.0), Match("none.png", 0.5)]]).tobytes(),
        "measured": lambda: measure(classifier, folders()).predictions.tolist(),
        "parted": lambda: hold_out(folders())[1].names(),
        "attention": lambda: plots.picture_of_attention(model, picture).tobytes(),
        "rollout": lambda: plots.rollout(model, images).numpy().tolist(),
        "distances": lambda: plots.attention_distances(model, images).numpy().tolist(),
        "nearest": lambda: nearest(opened, x.repeat(1, 2)),
        "votes": lambda: votes(x, labels, x, 3).tolist(),
        "similarity": lambda: plots.position_similarity(plain).tolist(),
        "positions": lambda: plots.picture_of_positions(plain).tobytes(),
        "filters": lambda: plots.picture_of_filters(plain).tobytes(),
    }


@pytest.fixture
def work(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    return work_with(tiny_model(), tmp_path)


def test_an_autocast_around_rounds_nothing_outside_of_the_model(tmp_path: Path) -> None:
    """Here not in it either: one that is optimized says itself what it computes in."""
    work = work_with(optimize(tiny_model()), tmp_path)
    right = {name: call() for name, call in work.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = {name: call() for name, call in work.items()}
    different = [name for name, answer in right.items() if found[name] != answer]
    assert not different


@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_answers_do_not_depend_on_torch_s_defaults(default: str, work: dict[str, Callable[[], Any]]) -> None:
    right = {name: call() for name, call in work.items()}
    try:
        if default == "meta":  # as an accelerator would be: whatever is made there by mistake is missed
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, default))
        found = {name: call() for name, call in work.items()}
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for name, answer in right.items():
        assert found[name] == answer, name


@pytest.mark.parametrize("default", ["float64", "meta"])
def test_training_does_not_depend_on_torch_s_defaults(default: str, tmp_path: Path) -> None:
    def losses(out: str, data: Any, model: Any) -> list[float]:
        return [record["loss"] for record in train(model, data, tmp_path / out, settings(balance=True))]

    def head(of: Any) -> Tensor:
        return of.head.weight.detach()

    one, other, data = new_model(), new_model(), stripes(24)
    right = losses("one", data, one)
    try:
        if default == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)
        found = losses("other", data, other)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found == right
    assert torch.equal(head(one), head(other))

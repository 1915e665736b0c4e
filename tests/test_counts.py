"""Arguments that count something are whole numbers of at least 1: of fewer, nothing would be done, and not said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from tiny_run import new_model, stripes

from vitlite import ViT
from vitlite.checkpoints.save import write_tensors
from vitlite.cluster.jobs import Actors
from vitlite.cluster.ray import Classifier, Embedder
from vitlite.errors import InputError
from vitlite.fast.bench import time_model
from vitlite.inference.embed import embed_into, identity_of
from vitlite.inference.predict import classify, embed, predict, work_through
from vitlite.plots import patch_filters
from vitlite.retrieval import nearest, open_vectors, search
from vitlite.retrieval.probe import some_of_each
from vitlite.retrieval.store import Vectors
from vitlite.training import measure

PICTURE = torch.zeros(16, 16, 3, dtype=torch.uint8)


@pytest.fixture(scope="module")
def vit() -> ViT:
    return tiny_model()


def vectors(vit: ViT, folder: Path) -> Vectors:
    identity = json.dumps(identity_of(vit, dtype=None, fast=False))
    about = {"paths": json.dumps([f"{row}.png" for row in range(5)]), "identity": identity, "model": "tiny"}
    write_tensors(folder / "v.safetensors", {"vectors": torch.randn(5, vit.config.embed_dim)}, about)
    return open_vectors(folder / "v.safetensors")


# By what is called and the argument: the model, a folder and a number.
CALLS: dict[str, Callable[[ViT, Path, Any], Any]] = {
    "predict, top": lambda vit, folder, n: predict(vit, [PICTURE], n),
    "classify, top": lambda vit, folder, n: classify(vit, [PICTURE], n),
    "classify, batch": lambda vit, folder, n: classify(vit, [PICTURE], batch=n),
    "embed, batch": lambda vit, folder, n: embed(vit, [PICTURE], n),
    "work_through, batch": lambda vit, folder, n: work_through(vit, [PICTURE], list, n),
    "embed_into, batch": lambda vit, folder, n: list(embed_into(Journal(), vit, [], n)),
    "Actors, batch": lambda vit, folder, n: Actors(batch=n),
    "Actors, count": lambda vit, folder, n: Actors(count=n),
    "Embedder, batch": lambda vit, folder, n: Embedder(vit, batch=n),
    "Embedder, threads": lambda vit, folder, n: Embedder(vit, threads=n),
    "Classifier, top": lambda vit, folder, n: Classifier(vit, top=n),
    "Classifier, batch": lambda vit, folder, n: Classifier(vit, batch=n),
    "Classifier, threads": lambda vit, folder, n: Classifier(vit, threads=n),
    "search, top": lambda vit, folder, n: search(vectors(vit, folder), vit, PICTURE, n),
    "nearest, top": lambda vit, folder, n: nearest(vectors(vit, folder), torch.ones(1, vit.config.embed_dim), n),
    "parts, rows": lambda vit, folder, n: list(vectors(vit, folder).parts(n)),
    "some_of_each, count": lambda vit, folder, n: some_of_each(torch.arange(9) % 3, n, 0),
    "patch_filters, count": lambda vit, folder, n: patch_filters(vit, n),
    "in_whole_patches, patch": lambda vit, folder, n: vit.preprocess.transform.in_whole_patches(n),
    "time_model, batch": lambda vit, folder, n: time_model(vit, "tiny", n, 1),
    "time_model, rounds": lambda vit, folder, n: time_model(vit, "tiny", 1, n),
    "measure, batch": lambda vit, folder, n: measure(new_model(), stripes(8), batch=n),
    "confused, most": lambda vit, folder, n: measure(new_model(), stripes(8)).confused(n),
}


class Journal:
    """As far as `embed_into` asks for it."""

    tried: frozenset[str] = frozenset()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [0, -1, 2.5, True, "8"])
def test_what_counts_nothing_is_refused_in_words(name: str, number: Any, vit: ViT, tmp_path: Path) -> None:
    argument = name.partition(", ")[2]
    with pytest.raises(InputError, match=rf"^{argument} is how .*: a whole number of at least 1, got {number!r}\.$"):
        CALLS[name](vit, tmp_path, number)


def test_a_batch_may_be_larger_than_all_pictures(vit: ViT) -> None:
    assert len(list(embed(vit, [PICTURE] * 3, batch=10**30))) == 3

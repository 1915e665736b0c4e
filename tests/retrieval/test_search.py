"""Search is exact, over any number of vectors, and compares only vectors of the same model."""

import copy
import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import tiny_model
from PIL import Image
from torch import Tensor

from vitlite import ViT, load, optimize
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import ImageError, InputError
from vitlite.inference.embed import identity_of
from vitlite.retrieval import nearest, open_vectors, search


def write(path: Path, vectors: Tensor, model: ViT | None = None, **changes: Any) -> Path:
    """Write a file as `vitlite embed` does."""
    identity = asdict(identity_of(model or tiny_model()))
    paths = [f"{row}.png" for row in range(len(vectors))]
    about = {"paths": json.dumps(paths), "identity": json.dumps(identity), "model": "tiny"}
    write_tensors(path, {"vectors": vectors}, about | changes)
    return path


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_nearest_has_the_largest_cosines(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = noise(500, 24), noise(3, 24, seed=1)
    opened = open_vectors(write(tmp_path / "v.safetensors", vectors))
    parts = type(opened).parts
    monkeypatch.setattr(type(opened), "parts", lambda self: parts(self, rows))
    cosines = F.cosine_similarity(queries[:, None].double(), vectors[None].double(), dim=2)
    for found, right in zip(nearest(opened, queries, top=9), cosines, strict=True):
        scores, order = right.topk(9)
        assert [match.path for match in found] == [f"{row}.png" for row in order.tolist()]
        assert [match.score for match in found] == pytest.approx(scores.tolist(), abs=1e-6)
    assert len(nearest(opened, queries, top=1000)[0]) == 500


def test_queries_that_are_not_valid_are_errors(tmp_path: Path) -> None:
    vectors = open_vectors(write(tmp_path / "v.safetensors", noise(3, 8)))
    for queries, reason in (
        (torch.full((1, 8), float("nan")), "must be finite"),
        (noise(1, 8) * 1j, r"must be real, got torch\.complex64"),
        (noise(1, 9), r"queries must have the shape \(n, 8\), got \(1, 9\)"),
    ):
        with pytest.raises(InputError, match=reason):
            nearest(vectors, queries)


@pytest.mark.parametrize("scale", [1e300, 1e-60, 1.0])
@pytest.mark.parametrize("stored", [1e200, 1e-200, 1.0])
def test_very_long_and_short_vectors_of_float64(scale: float, stored: float, tmp_path: Path) -> None:
    opened = open_vectors(write(tmp_path / "v.safetensors", stored * torch.eye(4, dtype=torch.float64)))
    queries = scale * torch.tensor([[1, 0, 0, 0.1], [0, 0, 0, 0]], dtype=torch.float64)
    found, nothing = nearest(opened, queries, top=2)
    assert [match.path for match in found] == ["0.png", "3.png"]
    assert [match.score for match in found] == pytest.approx([0.995037, 0.099504], abs=1e-6)
    assert [match.score for match in nothing] == [0, 0]


def test_a_search_holds_a_part_of_the_vectors_at_a_time(tmp_path: Path) -> None:
    opened = open_vectors(write(tmp_path / "v.safetensors", noise(200_000, 8)))
    assert max(len(part) for part in opened.parts()) == 2**16
    assert sum(len(part) for part in opened.parts()) == 200_000


def test_a_search_for_many_images_compares_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 10,000 queries with 65,536 vectors at once took 8 GB."""
    opened, queries = open_vectors(write(tmp_path / "v.safetensors", noise(700, 8))), noise(600, 8)
    compared, module = [], import_module("vitlite.retrieval.search")
    update = module._update

    def noted(best: Any, cosines: Tensor, *where: int) -> Any:
        compared.append(len(cosines))
        return update(best, cosines, *where)

    monkeypatch.setattr(module, "_update", noted)
    found = nearest(opened, queries, top=3)
    assert (max(compared), sum(compared)) == (256, 600)
    cosines = F.normalize(queries) @ F.normalize(noise(700, 8)).mT
    assert [match.path for matches in found for match in matches] == [
        f"{row}.png" for row in cosines.topk(3).indices.flatten().tolist()
    ]


def test_images_are_found_by_their_content(tmp_path: Path) -> None:
    model, photos = tiny_model(), []
    for row in range(6):
        Image.frombytes("RGB", (40, 40), bytes((noise(4800, seed=row) * 50 + 128).clamp(0, 255).byte().tolist())).save(
            tmp_path / f"{row}.png"
        )
        photos.append(str(tmp_path / f"{row}.png"))
    with torch.no_grad():
        vectors = model.embed(model.preprocess(photos))
    opened = open_vectors(write(tmp_path / "v.safetensors", vectors))
    assert [match.path for match in search(opened, model, photos[2], top=1)[0]] == ["2.png"]
    assert [found[0].path for found in search(opened, model, photos, top=1)] == [f"{row}.png" for row in range(6)]
    assert search(opened, model, []) == []
    for top in (0, -1, 2.0):
        with pytest.raises(InputError, match=f"top must be a positive integer, got {top}"):
            search(opened, model, photos[2], top=top)  # type: ignore[arg-type]
    with pytest.raises(ImageError, match=r"(?i)no such file"):
        search(opened, model, "none.png")


def test_changed_weights_are_another_model(tmp_path: Path) -> None:
    """Optimizing, copying, narrowing or another head do not change the model."""
    tiny_model().save(tmp_path / "model")
    model = load(tmp_path / "model")
    vectors = open_vectors(write(tmp_path / "v.safetensors", noise(5, 16), model))
    narrowed, headless = load(tmp_path / "model").bfloat16(), load(tmp_path / "model")
    headless.reset_head(5)
    for same in (copy.deepcopy(model), narrowed, headless, optimize(load(tmp_path / "model"))):
        vectors.check_model(same)
    trained = load(tmp_path / "model")
    trained.blocks[1].mlp.fc1.weight.data.mul_(1.01)
    random = tiny_model()
    random.blocks[1].mlp.fc1.weight.data.mul_(1.01)
    for other in (copy.deepcopy(trained), random, optimize(trained)):
        with pytest.raises(InputError, match="this model differs in weights"):
            vectors.check_model(other)


@pytest.mark.parametrize("changes", [{"norm_eps": 1e-5}, {"image_size": 64}, {"pool": "mean"}])
def test_vectors_of_another_model_are_not_compared(changes: dict[str, Any], tmp_path: Path) -> None:
    vectors = open_vectors(write(tmp_path / "v.safetensors", noise(5, 16)))
    with pytest.raises(
        InputError, match=r"were made by tiny, but this model differs in .*config.*\. Use the model that made"
    ):
        search(vectors, tiny_model(**changes), "a.png")
    other = tiny_model()
    other.preprocess = other.preprocess.transform.scaled((64, 64))
    with pytest.raises(InputError, match="differs in preprocessing"):
        search(vectors, other, "a.png")
    vectors.check_model(tiny_model(num_classes=0, drop_path=0.1))  # do not affect vectors


def test_vectors_of_another_decoder_are_not_compared(tmp_path: Path) -> None:
    whole, quick = tiny_model(), tiny_model()
    quick.preprocess = quick.preprocess.with_quick_decode()
    for made_by, other in ((quick, whole), (whole, quick)):
        vectors = open_vectors(write(tmp_path / "v.safetensors", noise(5, 16), made_by))
        assert vectors.quick_decode == (made_by is quick)
        vectors.check_model(made_by)
        with pytest.raises(InputError, match="this model differs in quick_decode"):
            search(vectors, other, "a.png")


def test_files_that_are_not_vectors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "old.safetensors", {"vectors": noise(1, 4)}, {"paths": '["a.png"]', "model": "tiny"})
    write_tensors(tmp_path / "none.safetensors", {"other": noise(1, 4)})
    write(tmp_path / "few.safetensors", noise(3, 4), paths=json.dumps(["a.png"]))
    write(tmp_path / "odd.safetensors", noise(1, 4), paths="[1]")
    write(tmp_path / "whole.safetensors", torch.ones(1, 4, dtype=torch.int32))
    for name in ("old", "none", "few", "odd", "whole"):
        with pytest.raises(InputError, match=rf"{name}\.safetensors is not a valid file of vectors"):
            open_vectors(tmp_path / f"{name}.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"12345678901")
    for name, reason in (
        ("cut.safetensors", r"Cannot read .*embed the images again if it is damaged"),
        ("v.npz", r"is not a \.safetensors file"),
        ("missing.safetensors", r"There is no file .*\. Create it with: vitlite embed"),
    ):
        with pytest.raises(InputError, match=reason):
            open_vectors(tmp_path / name)
    vectors = noise(4, 8)
    vectors[2, 3] = float("nan")
    with pytest.raises(InputError, match="NaN or infinity"):
        nearest(open_vectors(write(tmp_path / "nan.safetensors", vectors)), noise(1, 8))

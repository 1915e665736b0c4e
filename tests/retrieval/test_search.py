"""Search is exact, over any number of vectors, and only among those of the same model."""

import copy
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import IMAGES, tiny_model
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from vitlite import ViT, load, optimize
from vitlite.checkpoints.fingerprint import hash_of_file, hash_of_weights
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import ImageError, InputError
from vitlite.inference.embed import identity_of
from vitlite.retrieval import nearest, open_vectors, search


def written(path: Path, vectors: Tensor, model: ViT | None = None, **changes: Any) -> Path:
    """A file as `vitlite embed` writes it."""
    identity = identity_of(model or tiny_model(), dtype=None, fast=False)
    paths = [f"{row}.png" for row in range(len(vectors))]
    about = {"paths": json.dumps(paths), "identity": json.dumps(identity), "model": "tiny"}
    write_tensors(path, {"vectors": vectors}, about | changes)
    return path


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_nearest_are_those_of_all_cosines(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = noise(500, 24), noise(3, 24, seed=1)
    opened = open_vectors(written(tmp_path / "v.safetensors", vectors))
    parts = type(opened).parts
    monkeypatch.setattr(type(opened), "parts", lambda self: parts(self, rows))
    cosines = F.cosine_similarity(queries[:, None].double(), vectors[None].double(), dim=2)
    for found, right in zip(nearest(opened, queries, top=9), cosines, strict=True):
        scores, order = right.topk(9)
        assert [match.picture for match in found] == [f"{row}.png" for row in order.tolist()]
        assert [match.score for match in found] == pytest.approx(scores.tolist(), abs=1e-6)
    assert len(nearest(opened, queries, top=1000)[0]) == 500


def test_what_is_not_finite_is_near_to_nothing(tmp_path: Path) -> None:
    vectors = open_vectors(written(tmp_path / "v.safetensors", noise(3, 8)))
    with pytest.raises(InputError, match="not finite numbers: nothing is near to them"):
        nearest(vectors, torch.full((1, vectors.dim), float("nan")))


@pytest.mark.parametrize("scale", [1e300, 1e-60, 1.0])
@pytest.mark.parametrize("stored", [1e200, 1e-200, 1.0])
def test_long_and_short_vectors_of_float64_have_the_directions_that_they_have(
    scale: float, stored: float, tmp_path: Path
) -> None:
    opened = open_vectors(written(tmp_path / "v.safetensors", stored * torch.eye(4, dtype=torch.float64)))
    queries = scale * torch.tensor([[1, 0, 0, 0.1], [0, 0, 0, 0]], dtype=torch.float64)
    found, nothing = nearest(opened, queries, top=2)
    assert [match.picture for match in found] == ["0.png", "3.png"]
    assert [match.score for match in found] == pytest.approx([0.995037, 0.099504], abs=1e-6)
    assert [match.score for match in nothing] == [0, 0]


def test_complex_vectors_are_refused(tmp_path: Path) -> None:
    vectors = open_vectors(written(tmp_path / "v.safetensors", noise(3, 8)))
    with pytest.raises(InputError, match=r"Vectors are real numbers, got torch\.complex64"):
        nearest(vectors, noise(1, 8) * 1j)


def test_a_search_holds_a_part_of_the_vectors_at_a_time(tmp_path: Path) -> None:
    opened = open_vectors(written(tmp_path / "v.safetensors", noise(200_000, 8)))
    assert max(len(part) for part in opened.parts()) == 2**16
    assert sum(len(part) for part in opened.parts()) == 200_000


def test_a_search_for_many_pictures_compares_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 10,000 with all of 65,536 at once took 8 GB."""
    opened, queries = open_vectors(written(tmp_path / "v.safetensors", noise(700, 8))), noise(600, 8)
    compared, module = [], import_module("vitlite.retrieval.search")
    better = module._better

    def noted(best: Any, cosines: Tensor, *where: int) -> Any:
        compared.append(len(cosines))
        return better(best, cosines, *where)

    monkeypatch.setattr(module, "_better", noted)
    found = nearest(opened, queries, top=3)
    assert (max(compared), sum(compared)) == (256, 600)
    cosines = F.normalize(queries) @ F.normalize(noise(700, 8)).mT
    assert [match.picture for matches in found for match in matches] == [
        f"{row}.png" for row in cosines.topk(3).indices.flatten().tolist()
    ]


def test_a_file_that_was_written_again_is_not_read_by_the_old_names(tmp_path: Path) -> None:
    opened = open_vectors(written(tmp_path / "v.safetensors", noise(3, 8)))
    assert len(nearest(opened, noise(1, 8))[0]) == 3
    written(tmp_path / "v.safetensors", noise(3, 8, seed=1))
    with pytest.raises(InputError, match=r"was written again since it was opened. Open it again: open_vectors\(path"):
        nearest(opened, noise(1, 8))


def test_photos_are_found_by_what_they_show(tmp_path: Path) -> None:
    model, photos = tiny_model(), []
    for row in range(6):
        Image.frombytes("RGB", (40, 40), bytes((noise(4800, seed=row) * 50 + 128).clamp(0, 255).byte().tolist())).save(
            tmp_path / f"{row}.png"
        )
        photos.append(str(tmp_path / f"{row}.png"))
    with torch.no_grad():
        vectors = model.embed(model.preprocess(photos))
    opened = open_vectors(written(tmp_path / "v.safetensors", vectors))
    assert [match.picture for match in search(opened, model, photos[2], top=1)[0]] == ["2.png"]
    assert [found[0].picture for found in search(opened, model, photos, top=1)] == [f"{row}.png" for row in range(6)]
    assert search(opened, model, []) == []
    for top in (0, -1, 2.0):
        with pytest.raises(InputError, match=f"top must be a positive integer, got {top}"):
            search(opened, model, photos[2], top=top)  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="no such file"):
        search(opened, model, "none.png")


def test_weights_that_were_changed_since_they_were_read_are_others(tmp_path: Path) -> None:
    """Also where the model was optimized, copied, narrowed or given another head in between, which are no changes."""
    tiny_model().save(tmp_path / "model")
    model = load(tmp_path / "model")
    opened = open_vectors(written(tmp_path / "v.safetensors", noise(5, 16), model))
    narrowed, headless = load(tmp_path / "model").bfloat16(), load(tmp_path / "model")
    headless.reset_head(5)
    for same in (copy.deepcopy(model), narrowed, headless, optimize(load(tmp_path / "model"))):
        opened.refuse_other_model(same)
    trained = load(tmp_path / "model")
    trained.blocks[1].mlp.fc1.weight.data.mul_(1.01)  # of which torch's own count of changes knows nothing
    random = tiny_model()
    random.blocks[1].mlp.fc1.weight.data.mul_(1.01)
    for other in (copy.deepcopy(trained), random, optimize(trained)):
        with pytest.raises(InputError, match="this model differs in weights: no distance to them"):
            opened.refuse_other_model(other)


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


OTHERWISE: dict[str, tuple[Callable[[Any], Any], str]] = {  # models that compute otherwise, with the weights as read
    "a parametrization": (
        lambda m: parametrize.register_parametrization(m.blocks[0].ls1, "gamma", Tripled()),
        r"blocks\.0\.ls1 is ParametrizedLayerScale\(.*, and not LayerScale\(\) as its config says",
    ),
    "a mask": (
        lambda m: prune.l1_unstructured(m.blocks[0].ls1, "gamma", 8),
        r"This model has a tensor blocks\.0\.ls1\.gamma_orig, of which its config knows nothing",
    ),
    "eps": (lambda m: setattr(m.norm, "eps", 10.0), r"norm is LayerNorm\(\(16,\), eps=10\.0"),
    "heads": (lambda m: setattr(m.blocks[1].attn, "heads", 1), r"blocks\.1\.attn\.heads is 1, and not 2 as its"),
    "a method": (lambda m: setattr(m, "_pool", lambda x: x[:, 1]), r"_pool is set on it, and not that of its class"),
    "a class": (lambda m: setattr(m, "__class__", FirstPatch), r"This model is a FirstPatch with its own embed"),
}


class FirstPatch(ViT):
    def embed(self, images: Tensor) -> Tensor:
        return self.features(images)[0][:, 1]


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_model_that_computes_otherwise_by_the_same_weights_is_another(kind: str, tmp_path: Path) -> None:
    tiny_model(layer_scale=1.0).save(tmp_path / "model")
    opened = open_vectors(written(tmp_path / "v.safetensors", noise(5, 16), load(tmp_path / "model")))
    change, what = OTHERWISE[kind]
    model = load(tmp_path / "model")
    change(model)
    with pytest.raises(InputError, match=rf"{what}.*: what vectors of it mean, nobody knows later\. Use the model as"):
        opened.refuse_other_model(model)
    if kind in ("eps", "heads"):  # with which optimize computes, too
        with pytest.raises(InputError, match="this model differs in weights: no distance"):
            opened.refuse_other_model(optimize(model))


def test_a_number_of_a_small_weight_or_a_row_of_a_large_one_makes_other_weights(tmp_path: Path) -> None:
    tiny_model(dim=160, mlp_dim=320).save(tmp_path / "model")
    model = load(tmp_path / "model")
    assert model.source
    for name, weight in model.named_parameters():
        large = weight.numel() > 10_000
        rows = weight.data.flatten(1) if large else weight.data.view(-1, 1)
        for row in {0, 1, min(rows.shape[1], len(rows) - 1), len(rows) - 1}:
            before = rows[row].clone()
            rows[row] += 1
            assert hash_of_file(model) == (model.source.sha256 if name.startswith("head.") else None), (name, row)
            rows[row] = before
    assert hash_of_file(model) == model.source.sha256


CHANGES_OF_AN_OPTIMIZED_MODEL: dict[str, Callable[[Any], Any]] = {
    "the last norm's weight": lambda model: model.norm.weight.data.mul_(2),
    "its bias": lambda model: model.norm.bias.data.zero_(),
    "its epsilon": lambda model: setattr(model.norm, "eps", 10.0),
    "no last norm": lambda model: setattr(model, "norm", torch.nn.Identity()),
    "the first norm's bias": lambda model: model.norm_pre.bias.data.add_(1),
    "the hidden layer of the head": lambda model: model.pre_logits.weight.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES_OF_AN_OPTIMIZED_MODEL.values(), ids=CHANGES_OF_AN_OPTIMIZED_MODEL)
def test_what_an_optimized_model_can_still_change_makes_other_weights(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    tiny_model(pre_norm=True, pre_logits=8).save(tmp_path / "model")
    models = [optimize(load(tmp_path / "model")) for _ in range(2)]
    before = hash_of_weights(models[0])
    assert models[0].source
    assert before == models[0].source.sha256
    models[0].head.weight.data.mul_(2)
    assert hash_of_weights(models[0]) == before
    for model in models:
        vectors = model.embed(IMAGES)
        change(model)
        assert not torch.equal(model.embed(IMAGES), vectors)
    found = [hash_of_weights(model) for model in models]
    assert found[0] == found[1] != before
    assert found[0].startswith("in memory ")


def _exchange_blocks(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def _give_it_a_class(model: Any) -> None:
    model.__class__ = type("Another", (type(model),), {"embed": lambda self, x: -super(type(model), self).embed(x)})


NOT_AS_OPTIMIZED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "blocks in another order": (_exchange_blocks, "blocks.0 is another than optimizing made"),
    "a block fewer": (lambda model: model.blocks.pop(1), "blocks.1 is another than optimizing made"),
    "a block that is there twice": (lambda model: model.blocks.insert(1, model.blocks[0]), "blocks.1 is another"),
    "attention of another block": (
        lambda model: setattr(model.blocks[0], "attn", model.blocks[1].attn),
        "blocks.0.attn",
    ),
    "another model's": (
        lambda model: setattr(model, "blocks", optimize(tiny_model()).blocks),
        "blocks is another than",
    ),
    "a method": (lambda model: setattr(model, "embed", lambda x: -x), "embed is set on it"),
    "a method of a block": (lambda model: setattr(model.blocks[1], "forward", lambda x: x), "blocks.1.forward is set"),
    "a class": (_give_it_a_class, "This model is a Another, and not what optimizing made"),
}


@pytest.mark.parametrize("kind", NOT_AS_OPTIMIZED)
def test_an_optimized_model_that_was_put_together_otherwise_is_nobody_s(kind: str, tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "model")
    model = optimize(load(tmp_path / "model"))
    change, what = NOT_AS_OPTIMIZED[kind]
    change(model)
    with pytest.raises(InputError, match=rf"{what}.*: what vectors of it mean, nobody knows later"):
        hash_of_weights(model)


@pytest.mark.parametrize("changes", [{"final_norm": False}, {"class_token": False, "pool": "map"}])
def test_optimized_models_with_few_weights_left_are_known(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(**changes).save(tmp_path / "model")
    model = optimize(load(tmp_path / "model"))
    assert model.source
    assert hash_of_weights(model) == model.source.sha256


@pytest.mark.parametrize("changes", [{"norm_eps": 1e-5}, {"image_size": 64}, {"pool": "mean"}])
def test_another_model_s_vectors_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    opened = open_vectors(written(tmp_path / "v.safetensors", noise(5, 16)))
    with pytest.raises(InputError, match=r"were made by tiny; this model differs in .*config.*: no distance to them"):
        search(opened, tiny_model(**changes), "a.png")
    other = tiny_model()
    other.preprocess = other.preprocess.transform.scaled((64, 64))
    with pytest.raises(InputError, match="differs in preprocessing: no distance"):
        search(opened, other, "a.png")
    opened.refuse_other_model(tiny_model(num_classes=0, drop_path=0.1))  # on which no vector depends


def test_vectors_are_compared_with_those_of_files_decoded_alike(tmp_path: Path) -> None:
    whole, quick = tiny_model(), tiny_model()
    quick.preprocess = quick.preprocess.with_quick_decode()
    for made_by, other, remedy in ((quick, whole, "with_quick_decode()"), (whole, quick, "recipe")):
        opened = open_vectors(written(tmp_path / "v.safetensors", noise(5, 16), made_by))
        assert opened.quick_decode == (made_by is quick)
        opened.refuse_other_model(made_by)
        with pytest.raises(InputError, match="this model differs in quick_decode: no distance to them") as caught:
            search(opened, other, "a.png")
        assert f"Open that model, with model.preprocess = model.preprocess.{remedy}, or embed" in str(caught.value)


def test_files_that_do_not_say_whose_they_are(tmp_path: Path) -> None:
    about = {"paths": json.dumps(["a.png"]), "model": "tiny"}
    write_tensors(tmp_path / "old.safetensors", {"vectors": noise(1, 4)}, about)
    with pytest.raises(InputError, match="does not say which model made it"):
        open_vectors(tmp_path / "old.safetensors")
    written(tmp_path / "few.safetensors", noise(3, 4), paths=json.dumps(["a.png"]))
    with pytest.raises(InputError, match="has 3 vectors of 1 pictures"):
        open_vectors(tmp_path / "few.safetensors")
    written(tmp_path / "odd.safetensors", noise(1, 4), paths="[1]")
    with pytest.raises(InputError, match="paths"):
        open_vectors(tmp_path / "odd.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"12345678901")
    with pytest.raises(InputError, match="cannot be read as a file of vectors"):
        open_vectors(tmp_path / "cut.safetensors")
    with pytest.raises(InputError, match=r"must be a \.safetensors file"):
        open_vectors(tmp_path / "v.npz")
    with pytest.raises(InputError, match=r"There is no file .*\. Make it: vitlite embed"):
        open_vectors(tmp_path / "none.safetensors")
    vectors = noise(4, 8)
    vectors[2, 3] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        nearest(open_vectors(written(tmp_path / "nan.safetensors", vectors)), noise(1, 8))
    with pytest.raises(InputError, match=r"The vectors are \(n, 8\), got \(1, 9\)"):
        nearest(open_vectors(tmp_path / "nan.safetensors"), noise(1, 9))

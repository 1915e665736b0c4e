"""Tests of the network: sizes, cached positions, compilers, precision and training. parity/ compares its numbers."""

import copy
import gc
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from models import FAMILIES, ROTATIONS
from torch import Tensor, nn

from vitlite.config import DINOV3_ROPE, Pool, Rotation, ViTConfig
from vitlite.errors import ConfigError, ImageError, InputError
from vitlite.images import TransformConfig
from vitlite.nn import positions
from vitlite.nn.layers import Attention, DropPath
from vitlite.nn.positions import resample_positions, sincos_positions
from vitlite.nn.vit import Features, ViT
from vitlite.presets import PRESETS

TINY = dict(image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=80, num_classes=5)


def tiny(seed: int = 0, **options: Any) -> ViT:
    """Return a small model in eval mode. No weight is zero: a new model's zero head would hide all others."""
    torch.manual_seed(seed)
    model = ViT(ViTConfig(**TINY | options)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def random_images(batch: int = 2, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


def _block_inputs(model: ViT, images: Tensor) -> tuple[Tensor, ...]:
    tokens, rotations = model._tokens(images)
    return tokens, *rotations[0]


# Sizes and shapes.

PARAMETERS = {
    "vit_base_16": 86_567_656,
    "vit_base_32": 88_224_232,
    "vit_large_16": 304_326_632,
    "vit_large_32": 306_535_400,
    "vit_huge_14": 632_045_800,
    "vit_huge_16": 632_199_400,
    "vit_huge_32": 634_960_360,
    "vit_tiny_16": 5_717_416,
    "vit_small_8": 22_055_272,
    "vit_small_16": 22_050_664,
    "vit_small_32": 22_878_952,
    "vit_base_8": 86_576_872,
    "vit_large_14": 304_203_752,
    "vit_giant_14": 1_012_611_432,
    "vit_giant_16": 1_012_780_392,
    "vit_gigantic_14": 1_844_440_680,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = ViT(PRESETS[name])
    assert sum(tensor.numel() for tensor in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "none"])
@pytest.mark.parametrize("rope", ROTATIONS)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 48), (24, 40), (8, 64)])
def test_image_of_any_size(positions: str, rope: Rotation | None, height: int, width: int) -> None:
    model = tiny(positions=positions, rope=rope)
    images = random_images(3, height, width)
    grid = (height // 8, width // 8)
    assert model(images).shape == (3, 5)
    assert model.embed(images).shape == (3, 48)
    features = model.features(images)
    assert features.grid == grid
    assert features.patches.shape == (3, grid[0] * grid[1], 48)
    assert model.attention_maps(images).shape == (1, 3, 4, 1 + grid[0] * grid[1], 1 + grid[0] * grid[1])


def test_positions_resampled_at_build_equal_those_at_call() -> None:
    model = tiny()
    larger = ViT(model.config.replace(image_size=(48, 24))).eval()
    state = model.state_dict()
    patches = resample_positions(state["pos_embed"][:, 1:], (4, 4), (6, 3), "timm")
    larger.load_state_dict(state | {"pos_embed": torch.cat([state["pos_embed"][:, :1], patches], dim=1)})
    images = random_images(2, 48, 24)
    torch.testing.assert_close(larger(images), model(images))


def test_images_of_any_memory_format() -> None:
    model = tiny()
    images = random_images(2, 48, 24)
    for other in (images.contiguous(memory_format=torch.channels_last), images.repeat(1, 1, 2, 2)[:, :, 48:, 24:]):
        torch.testing.assert_close(model(other), model(images))


def test_patches_are_ordered_by_row() -> None:
    images = random_images(1, 24, 40)
    patches = tiny(positions="none").patch_embed(images)
    first_row = tiny(positions="none").patch_embed(images[:, :, :8])
    torch.testing.assert_close(patches[:, :5], first_row)


# Features, embeddings and attention maps.


PREFIXES = [{}, {"registers": 2, "cls_position": False}, {"class_token": False, "pool": "mean"}, *FAMILIES.values()]


@pytest.mark.parametrize("options", PREFIXES, ids=str)
def test_features_split_all_tokens(options: dict[str, Any]) -> None:
    model = tiny(**options)
    images = random_images()
    features = model.features(images, layers=(-1, 0, 0))
    assert (features.cls is None) == (not model.config.class_token)
    assert (features.registers is None) == (not model.config.registers)
    parts = [features.cls if features.cls is None else features.cls[:, None], features.registers, features.patches]
    tokens = torch.cat([part for part in parts if part is not None], dim=1)
    last, first, again = features.layers
    torch.testing.assert_close(tokens, model.norm(last))
    torch.testing.assert_close(first, model.blocks[0](*_block_inputs(model, images)))
    assert again is first
    tall = model.features(torch.randn(2, 3, 24, 32), layers=(0,))
    with pytest.raises(InputError, match=r"map\(\) takes an index into the 1 selected layers, got 5"):
        tall.map(5)
    for feature_map, tokens in ((tall.map(), tall.patches), (tall.map(0), tall.layers[0][:, -12:])):
        assert feature_map.shape == (2, model.config.dim, 3, 4)
        torch.testing.assert_close(feature_map[:, :, 2, 1], tokens[:, 2 * 4 + 1], rtol=0, atol=0)


@pytest.mark.parametrize("options", PREFIXES, ids=str)
def test_features_with_norm(options: dict[str, Any]) -> None:
    model, images = tiny(**options), random_images()
    plain = model.features(images, layers=(0, -1))
    normed = model.features(images, layers=(0, -1), norm=True)
    for before, after in zip(plain.layers, normed.layers, strict=True):
        torch.testing.assert_close(after, model.norm(before))
    torch.testing.assert_close(normed.patches, plain.patches)
    torch.testing.assert_close(
        model.features(images, layers=1).layers[0], model.features(images, layers=(1,)).layers[0]
    )


READS: dict[str, Callable[[ViT, Features], Tensor]] = {
    "cls": lambda _, features: features.cls,
    "mean": lambda _, features: features.patches.mean(1),
    "mean_with_cls": lambda _, features: (features.cls + features.patches.sum(1)) / 17,
    "cls_and_mean": lambda _, features: torch.cat([features.cls, features.patches.mean(1)], dim=1),
    "cls_and_distillation": lambda _, features: torch.cat([features.cls, features.registers[:, 0]], dim=1),
    "map": lambda model, features: model.attn_pool(features.patches),
    "map_all": lambda model, features: model.attn_pool(
        torch.cat([features.cls[:, None], features.registers, features.patches], dim=1)
    ),
}


@pytest.mark.parametrize("pool", get_args(Pool))
def test_embed_is_the_input_of_the_head(pool: str) -> None:
    model = tiny(pool=pool, **({} if pool == "mean_with_cls" else {"registers": 1, "cls_position": False}))
    images = random_images()
    wanted = READS[pool](model, model.features(images))
    torch.testing.assert_close(model.embed(images), wanted)
    torch.testing.assert_close(model(images), model.head(wanted))
    assert model.config.embed_dim == wanted.shape[1]


def test_model_without_head_returns_embedding() -> None:
    model = tiny(num_classes=0, pre_logits=24)
    assert torch.equal(model(random_images()), model.embed(random_images()))
    assert model.config.embed_dim == model(random_images()).shape[1] == 24
    assert model(random_images()).abs().max() < 1, "a tanh comes last"


def test_attention_map_times_values_equals_fused_attention() -> None:
    for rope in ROTATIONS:
        model = tiny(head_dim=20, rope=rope)
        attention, rotation = model.blocks[1].attn, model._tokens(random_images())[1][1]
        x = torch.randn(2, 17, 48)
        _, _, v = attention.queries_keys_values(x, *rotation)
        by_map = attention.proj((attention.map(x, *rotation) @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(by_map, attention(x, *rotation), rtol=1e-5, atol=1e-5)


def test_a_rotary_block_without_its_rotation_fails() -> None:
    model = tiny(positions="none", rope=DINOV3_ROPE)
    with pytest.raises(TypeError, match="cosines"):
        model.blocks[0](model._tokens(random_images())[0])


def test_order_of_attention_maps() -> None:
    model = tiny()
    images = random_images()
    maps = model.attention_maps(images, layers=(-1, 0))
    assert maps.shape == (2, 2, 4, 17, 17)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 4, 17))
    torch.testing.assert_close(maps[1], model.blocks[0].map(model._tokens(images)[0]))
    torch.testing.assert_close(maps[0], model.blocks[2].map(model.features(images, (1,)).layers[0]))


def test_only_requested_layers_form_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: (calls.append(name), original(*given, **named))[1])

    watch(Attention, "map")
    watch(F, "scaled_dot_product_attention")
    model = tiny()
    with torch.no_grad():
        model.attention_maps(random_images())
        assert calls == ["scaled_dot_product_attention"] * 2 + ["map"]
        calls.clear()
        model.attention_maps(random_images(), layers=(0,))
        assert calls == ["map"], "nothing after the last layer asked for is computed"


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["plain", *FAMILIES])
def test_reset_head(options: dict[str, Any]) -> None:
    model = tiny(**options).double()
    model.labels = ("a", "b", "c", "d", "e")
    embedding = model.embed(random_images().double())
    model.reset_head(7)
    assert model.config.num_classes == 7
    assert model.labels is None
    assert model.head.weight.dtype == torch.float64
    assert torch.equal(model(random_images().double()), torch.zeros(2, 7, dtype=torch.float64))
    assert not model.head.training
    model.reset_head(0)
    assert torch.equal(model(random_images().double()), embedding)


# The cache of position tables.


@pytest.fixture
def resampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The grids for which a table was computed."""
    grids: list[tuple[int, int]] = []

    def count(table: Tensor, old: Any, new: tuple[int, int], method: Any) -> Tensor:
        grids.append(new)
        return resample_positions(table, old, new, method)

    monkeypatch.setattr(positions, "resample_positions", count)
    return grids


def test_positions_are_resampled_once_per_size(resampled: list[tuple[int, int]]) -> None:
    model = tiny()
    for context in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with context():
                model(random_images(1, 48, 48))
                model(random_images(1, 24, 40))
                model(random_images(1, 32, 32))
    assert resampled == [(6, 6), (3, 5)], "none for the native size"


def test_number_of_cached_tables_is_bounded(resampled: list[tuple[int, int]]) -> None:
    model = tiny()
    with torch.no_grad():
        for width in range(8, 8 * 40, 8):
            model(random_images(1, 8, width))
            assert len(model.tables.resampled[1]) <= 16


def test_no_cache_while_positions_are_trained(resampled: list[tuple[int, int]]) -> None:
    model = tiny()
    for _ in range(2):
        model(random_images(1, 48, 48)).sum().backward()
    assert len(resampled) == 2
    assert model.pos_embed.grad.abs().sum() > 0
    model.pos_embed.requires_grad_(False)
    for _ in range(2):
        model(random_images(1, 48, 48)).sum().backward()
    assert len(resampled) == 3, "a frozen table is kept in training as well"


def fresh(model: ViT, images: Tensor) -> Tensor:
    """What a new model with the same weights computes."""
    twin = ViT(model.config).eval().to(model.dtype)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        return twin(images.to(model.dtype))


def load(model: ViT) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def load_by_assignment(model: ViT) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, assign=True)


def step(model: ViT) -> None:
    model(random_images()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def train_and_step(model: ViT) -> None:
    step(model.train())
    model.eval()


def write(model: ViT) -> None:
    with torch.no_grad():
        model.pos_embed.mul_(1.5)


def write_in_inference_mode(model: ViT) -> None:
    with torch.inference_mode():
        model.pos_embed.mul_(1.5)


def write_unseen(model: ViT) -> None:  # as many averages of weights are written
    model.pos_embed.data.mul_(1.5)


def replace_data(model: ViT) -> None:
    model.pos_embed.data = model.pos_embed.data * 1.5


def replace_parameter(model: ViT) -> None:
    model.pos_embed = nn.Parameter(model.pos_embed.detach() * 1.5)


def convert(model: ViT) -> None:
    model.to(torch.float64)


def average(model: ViT) -> None:
    other = tiny(seed=1)
    with torch.no_grad():
        for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            mine.lerp_(theirs, 0.5)


CHANGES = [
    load,
    load_by_assignment,
    step,
    train_and_step,
    write,
    write_in_inference_mode,
    write_unseen,
    replace_data,
    replace_parameter,
    convert,
    average,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_stale_positions_after(change: Callable[[ViT], None], mode: Callable[[], Any]) -> None:
    model = tiny()
    images = random_images(2, 48, 24)
    with mode():
        before = model(images)
    change(model)
    with mode():
        after = model(images.to(model.dtype))
    assert torch.equal(after, fresh(model, images))
    assert change is convert or not torch.allclose(before, after), "the change is one that shows"


def test_inference_then_training() -> None:
    model = tiny()
    images = random_images(2, 48, 24)
    with torch.inference_mode():
        model(images)
    model(images).sum().backward()  # still in eval mode, with gradients
    assert model.pos_embed.grad.abs().sum() > 0
    model.pos_embed.requires_grad_(False)  # the table is now taken from what inference kept
    with torch.inference_mode():
        model(images)
    assert not any(table.is_inference() for table in model.tables.resampled[1].values()), (
        "one would break a later backward"
    )
    model(images).sum().backward()
    model.train()
    model(images).sum().backward()


@pytest.mark.parametrize(
    "options", [{"positions": "learned"}, {"positions": "sincos2d"}, *({"rope": rope} for rope in ROTATIONS)]
)
def test_threads_with_different_sizes(options: dict[str, Any]) -> None:
    model = tiny(**options)
    sizes = [(48, 48), (24, 40), (40, 24), (64, 32)]
    with torch.no_grad():
        wanted = [copy.deepcopy(model)(random_images(1, *size)) for size in sizes]
    wrong: list[Any] = []

    def work(i: int) -> None:
        with torch.inference_mode():
            for turn in range(40):
                j = (i + turn) % 4
                try:
                    if not torch.equal(model(random_images(1, *sizes[j])), wanted[j]):
                        wrong.append(sizes[j])
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copy_has_its_own_cache() -> None:
    model = tiny()
    images = random_images(2, 48, 24)
    with torch.no_grad():
        before = model(images)
        twin = copy.deepcopy(model)
        twin.pos_embed.mul_(1.5)
        assert torch.equal(twin(images), fresh(twin, images))
        assert torch.equal(model(images), before)


def test_pickled_model() -> None:
    model = tiny()
    with torch.no_grad():
        wanted = model(random_images(2, 48, 24))
        again = pickle.loads(pickle.dumps(model))
        assert again.tables.resampled is None, "what can be computed is not written"
        assert torch.equal(again(random_images(2, 48, 24)), wanted)
    assert again.config == model.config


def test_model_created_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny()
        assert torch.equal(model(random_images(2, 48, 24)), fresh(model, random_images(2, 48, 24)))
        model.pos_embed.mul_(1.5)
        assert torch.equal(model(random_images(2, 48, 24)), fresh(model, random_images(2, 48, 24)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_an_ensemble() -> None:
    models = [tiny(seed) for seed in range(3)]
    parameters, _ = torch.func.stack_module_state(models)
    images = random_images(2, 48, 24)
    with torch.no_grad():
        models[0](images)

        def run(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(models[0], weights, (images,))

        together = torch.vmap(run)(parameters)
        for model, logits in zip(models, together, strict=True):
            torch.testing.assert_close(model(images), logits)


@pytest.mark.parametrize("method", ["timm", "transformers", "torchvision", "jax"])
def test_half_precision_positions_are_resampled_in_float32(method: Any) -> None:
    table = torch.randn(1, 16, 8)
    half = resample_positions(table.bfloat16(), (4, 4), (7, 5), method)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, resample_positions(table.bfloat16().float(), (4, 4), (7, 5), method).bfloat16())


def test_sincos_positions_do_not_depend_on_the_grid() -> None:
    large, small = (sincos_positions((side, side), 16).unflatten(1, (side, side)) for side in (9, 4))
    torch.testing.assert_close(large[:, :4, :4], small)
    with torch.device("meta"):  # stands for mps, which has no float64
        assert torch.equal(sincos_positions((4, 4), 16).unflatten(1, (4, 4)), small)


# Compilers.


@pytest.fixture
def forget_graphs() -> Any:
    yield
    torch._dynamo.reset()


COMPILED: list[dict[str, Any]] = [  # all families, in three models; only one of them repeats its block
    {"depth": 2, "registers": 1, "cls_position": False, "pool": "cls_and_distillation", "layer_scale": 0.5},
    {"positions": "none", "rope": DINOV3_ROPE, "registers": 4, "cls_position": False, "mlp": "swiglu", "pool": "map"},
    {"stem": (1, 1), "final_norm": "none"},
]


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiles_without_graph_breaks(options: dict[str, Any]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tiny(**{"depth": 1} | options)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in (8, 4, 1, 2, 5):
            torch.testing.assert_close(compiled(random_images(batch)), model(random_images(batch)))
        assert len(graphs) <= 3
        for size in ((48, 48), (24, 40), (40, 64)):
            torch.testing.assert_close(compiled(random_images(2, *size)), model(random_images(2, *size)))
        assert len(graphs) <= 5


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled_training_equals_eager(options: dict[str, Any]) -> None:
    model, twin = (tiny(**{"depth": 1} | options, checkpointing=True).train() for _ in range(2))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for size in ((32, 32), (48, 24), (24, 40)):
        model(random_images(2, *size)).square().sum().backward()
        compiled(random_images(2, *size)).square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


EXPORTED = [  # every option of FAMILIES, in fewer models
    {},
    {"positions": "sincos2d", "mlp": "swiglu", "inner_norm": "both", "final_norm": "none", "layer_scale": 0.1},
    {"resample": "jax", "input_norm": "patches", "cosine_head": 12},
    {"stem": (1, 1), **FAMILIES["distilled"]},
    *(FAMILIES[name] for name in ("rotation", "EVA-02", "Perception Encoder", "learned rotation", "Qwen3")),
    *(FAMILIES[name] for name in ("AIMv2", "NaFlex")),
]


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("options", EXPORTED, ids=str)
def test_export_with_dynamic_batch_height_and_width(options: dict[str, Any]) -> None:
    model = tiny(depth=2, **options)
    dim = torch.export.Dim
    shapes = {0: dim("batch", max=64), 2: 8 * dim("rows", max=64), 3: 8 * dim("columns", max=64)}
    with torch.no_grad():
        model(random_images(2, 32, 48))  # a kept table must not end in the program
        program = torch.export.export(model, (random_images(2, 32, 48),), dynamic_shapes=(shapes,)).module()
        for shape in ((2, 32, 32), (1, 48, 24), (5, 40, 64)):
            torch.testing.assert_close(program(random_images(*shape)), model(random_images(*shape)))


# What others do to a layer: adapters, pruning and hooks all count on its being called.

LAYERS = [
    {"input_norm": "patches"}, {"pool": "map"}, {"pre_logits": 8}, {"input_norm": "tokens", "inner_norm": "both"},
    *FAMILIES.values(),
]  # fmt: skip


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_every_layer_with_weights_is_called(options: dict[str, Any]) -> None:
    model = tiny(**options)
    wanted = {name for name, layer in model.named_modules() if layer._parameters and not list(layer.children())}
    called = set()
    for name in wanted:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    model(random_images())
    assert called == wanted


def test_a_layer_may_be_replaced_by_another_module() -> None:
    model = tiny()
    with torch.no_grad():
        wanted = model(random_images())
        for attention in [block.attn for block in model.blocks]:
            attention.proj = nn.Sequential(attention.proj, nn.Identity())
        torch.testing.assert_close(model(random_images()), wanted)


# Precision, devices.


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float64, 1e-5)])
@pytest.mark.parametrize("size", [(32, 32), (48, 24)], ids=str)
def test_other_precisions(dtype: torch.dtype, near: float, size: tuple[int, int]) -> None:
    others = [{}, {"positions": "sincos2d", "pool": "mean"}, {"layer_scale": 1.0, "input_norm": "patches"}]
    for options in (*others, *FAMILIES.values()):
        model = tiny(**options)
        with torch.no_grad():
            wanted = model(random_images(2, *size))
            model.to(dtype)
            logits = model(random_images(2, *size).to(dtype))
        assert model.dtype == logits.dtype == dtype
        assert (logits - wanted).abs().max() < near * wanted.abs().max()
        assert model.attention_maps(random_images(2, *size).to(dtype)).dtype == dtype


def test_autocast_takes_full_precision_images_and_weights() -> None:
    model = tiny()
    wanted = model(random_images(2, 48, 24))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(random_images(2, 48, 24))
        assert logits.dtype == torch.bfloat16
        model(random_images(2, 48, 24).bfloat16())
        logits.sum().backward()
    assert (logits - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert model.pos_embed.grad.dtype == torch.float32


DEVICES = [
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    pytest.param("mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(32, 32), (48, 24)], ids=str)
def test_other_devices(device: str, size: tuple[int, int]) -> None:
    model = tiny()
    with torch.no_grad():
        wanted = model(random_images(2, *size))
        model.to(device)
        torch.testing.assert_close(model(random_images(2, *size).to(device)).cpu(), wanted, rtol=1e-3, atol=1e-3)
        with pytest.raises(InputError, match="Images are on cpu, the model on"):
            model(random_images(2, *size))


def test_forward_never_synchronises() -> None:
    with torch.device("meta"):
        model = ViT(ViTConfig(**TINY)).eval()
    with torch.no_grad():
        for size in ((32, 32), (48, 24)):
            for _ in range(2):
                assert model(torch.empty(2, 3, *size, device="meta")).shape == (2, 5)
    assert model.device == torch.device("meta")


# Training.


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["plain", *FAMILIES])
def test_gradient_checkpointing_equals_plain(options: dict[str, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny(checkpointing=checkpointing, dropout=0.2, drop_path=0.3, **options).train()
        calls: list[int] = []
        model.blocks[0].norm1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        logits = model(random_images(8))
        (logits * torch.randn(8, 5, generator=torch.Generator().manual_seed(4))).sum().backward()
        assert len(calls) == 1 + checkpointing, "the block is computed again, or not"
        gradients.append([logits, *(tensor.grad for tensor in model.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_inference_does_not_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputed = lambda *_, **__: pytest.fail("nothing will be computed again")  # noqa: E731
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", recomputed)
    with torch.no_grad():
        tiny(checkpointing=True).train()(random_images())


def test_drop_path_drops_whole_images_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.ones(20_000, 3, 2)
    dropped = DropPath(0.3).train()(x)
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped)), "an image is dropped whole"
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert abs((dropped[:, 0, 0] == 0).float().mean() - 0.3) < 0.01
    assert torch.equal(DropPath(0.3).eval()(x), x)


def test_stochastic_depth_rises_linearly_to_the_last_block() -> None:
    model = tiny(drop_path=0.2, depth=5)
    rates = [getattr(block.drop_path, "rate", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert not isinstance(tiny(drop_path=0.2, depth=1).blocks[0].drop_path, DropPath)


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["plain", *FAMILIES])
def test_dropout_is_where_the_paper_has_it(options: dict[str, Any]) -> None:
    model = tiny(dropout=0.25, **options)
    dropouts = {name for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.p == 0.25}
    assert dropouts == {"drop", *(f"blocks.{i}.{part}.drop" for i in range(3) for part in ("attn", "mlp"))}
    assert torch.equal(model(random_images()), tiny(**options)(random_images())), "no dropout in inference"
    zeros: dict[str, list[float]] = {}
    for name in dropouts:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: zeros.setdefault(name, []).append((out == 0).float().mean().item())
        )
    torch.manual_seed(0)
    model.train()(random_images(16))
    assert all(abs(share - 0.25) < 0.03 for shares in zeros.values() for share in shares)
    assert {name: len(shares) for name, shares in zeros.items()} == {
        name: 2 if "mlp" in name else 1 for name in dropouts
    }, "after the tokens, after attention, and after both layers of the MLP"


def test_initialisation_is_that_of_the_papers_code() -> None:
    torch.manual_seed(0)
    d, inner = 192, 768
    model = ViT(ViTConfig(dim=d, heads=4, mlp_dim=inner, depth=1, pre_logits=d, registers=0))
    block = model.blocks[0]
    for weight, fans in (
        *((part, d + d) for part in block.attn.qkv.weight.chunk(3)),  # apart, not as one matrix three times as wide
        (block.attn.proj.weight, d + d),
        (block.mlp.fc1.weight, d + inner),
        (block.mlp.fc2.weight, d + inner),
    ):
        bound = math.sqrt(6 / fans)
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    for weight in (model.patch_embed.proj.weight, model.pre_logits.weight):  # Flax's default: LeCun, cut at 2 sigma
        wanted = weight[0].numel() ** -0.5
        assert weight.std().item() == pytest.approx(wanted, rel=0.02)
        assert weight.abs().max().item() == pytest.approx(2 * wanted / 0.8796, rel=0.02)
    for bias in (block.mlp.fc1.bias, block.mlp.fc2.bias):
        assert bias.std().item() == pytest.approx(1e-6, rel=0.2)
    for name in ("attn.qkv", "attn.proj", "norm1", "norm2"):
        assert not block.get_submodule(name).bias.any()
    assert not model.patch_embed.proj.bias.any()
    assert not model.cls_token.any()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.02)
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    assert model.training


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["plain", *FAMILIES])
def test_new_model_learns(options: dict[str, Any]) -> None:
    if "cosine_head" in options:
        pytest.skip("the weights of this head are the vectors of labels")
    torch.manual_seed(0)
    model = ViT(ViTConfig(**TINY | {"depth": 1} | options))
    images, targets = torch.randn(16, 3, 32, 32), torch.arange(16) % 5
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert all(tensor.grad is not None for tensor in model.parameters())


def test_calls_leak_no_tensors() -> None:
    model = tiny()

    def tensors() -> int:
        gc.collect()
        return sum(type(thing) in (Tensor, nn.Parameter) for thing in gc.get_objects())

    model(random_images())
    before = tensors()
    for _ in range(3):
        model(random_images()), model.features(random_images(), (0, 1)), model.attention_maps(random_images())
    assert tensors() == before


# Errors, raised before anything is computed.

WRONG_IMAGES = [
    (torch.zeros(3, 32, 32), r"shape \(batch, 3, height, width\), got \(3, 32, 32\)\. Add a batch dimension"),
    (torch.zeros(2, 5), r"shape \(batch, 3, height, width\), got \(2, 5\)\.$"),
    (torch.zeros(2, 32, 32, 3), r"got \(2, 32, 32, 3\)\. Move the channels with images\.permute\(0, 3, 1, 2\)"),
    (torch.zeros(2, 1, 32, 32), r"got \(2, 1, 32, 32\)\.$"),
    (
        torch.zeros(2, 3, 35, 32),
        r"35 x 32 pixels do not divide into patches of 8.*nearest sizes that fit: height 32 or 40\.",
    ),
    (torch.zeros(2, 3, 32, 30), r"nearest sizes that fit: width 24 or 32\."),
    (torch.zeros(2, 3, 5, 30), r"nearest sizes that fit: height 8, width 24 or 32\."),
    (torch.zeros(2, 3, 0, 32), r"0 x 32 pixels do not divide .* nearest sizes that fit: height 8\."),
    (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), r"normalised floats, got torch\.uint8.*model\.preprocess\(images\)"),
    ("cat.jpg", r"must be a tensor, got str\. For a file, call model\.predict"),
]


@pytest.mark.parametrize(("images", "text"), WRONG_IMAGES)
@pytest.mark.parametrize("method", ["forward", "embed", "features", "attention_maps"])
def test_wrong_images(images: Any, text: str, method: str) -> None:
    model = tiny()
    model.patch_embed.register_forward_pre_hook(lambda *_: pytest.fail("something was computed first"))
    with pytest.raises(InputError, match=text):
        getattr(model, method)(images)


@pytest.mark.parametrize("layer", [3, -4, 1.0, "0", None, True])
@pytest.mark.parametrize("method", ["features", "attention_maps"])
def test_wrong_layers(layer: Any, method: str) -> None:
    with pytest.raises(InputError, match=rf"must be block indices from -3 to 2, got {layer!r}\."):
        getattr(tiny(), method)(random_images(), layers=[layer])


def test_layers_of_a_truncated_model() -> None:
    model = tiny()
    whole = model.features(random_images(), layers=(1,)).layers[0]
    model.blocks = model.blocks[:2]
    assert torch.equal(model.features(random_images(), layers=(-1,)).layers[0], whole)
    assert model.attention_maps(random_images()).shape[0] == 1
    with pytest.raises(InputError, match="from -2 to 1, got 2"):
        model.features(random_images(), layers=2)


@pytest.mark.parametrize("config", [None, {}, {"dim": 64}, "vit_base_16", ViTConfig], ids=repr)
def test_vit_takes_a_config(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"ViT expects a ViTConfig, got .*vitlite\.create"):
        ViT(config)


def test_no_layers() -> None:
    with pytest.raises(InputError, match=r"got no layers\. Pass at least one block index, such as layers=\(-1,\)"):
        tiny().attention_maps(random_images(), layers=())
    assert tiny().features(random_images(), layers=()).layers == ()


def test_representations_are_short() -> None:
    model = tiny()
    features = model.features(random_images(), layers=(0, 1))
    assert repr(features) == (
        "Features(cls=(2, 48), patches=(2, 16, 48), registers=None, grid=(4, 4), layers=[(2, 17, 48), (2, 17, 48)])"
    )
    half = (0.5,)
    model.preprocess = TransformConfig(
        size=(32, 32), resize=(32, 32), mode="squash", interpolation="bilinear", mean=half, std=half
    )
    assert repr(model.preprocess) == f"Preprocess(transform={model.preprocess.transform!r}, quick_decode=False)"


def test_wrong_number_of_classes() -> None:
    with pytest.raises(ConfigError, match="num_classes must be an integer from 0"):
        tiny().reset_head(-1)


def test_model_without_preprocessing() -> None:
    with pytest.raises(ImageError, match=r"came without preprocessing.*model.preprocess = "):
        tiny().preprocess("cat.jpg")


def test_stacked_matrices_are_initialised_one_by_one() -> None:
    model = ViT(ViTConfig(**TINY | {"pool": "map", "class_token": False, "mlp": "swiglu", "dim": 64, "mlp_dim": 64}))
    block, pool = model.blocks[0], model.attn_pool
    for layer, parts in ((block.attn.qkv, 3), (block.mlp.fc1, 2), (pool.kv, 2), (pool.mlp.fc1, 1)):
        bound = math.sqrt(6 / (layer.in_features + layer.out_features // parts))
        assert 0.9 * bound < layer.weight.abs().max().item() <= bound


@pytest.mark.filterwarnings("ignore")  # torch advises against traces
def test_trace_is_the_same_with_and_without_gradients() -> None:
    model, images = tiny(), random_images()
    traced = torch.jit.trace(model, images)
    torch.testing.assert_close(traced(images), model(images))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", [{}, {"image_size": (8, 32)}, {"image_size": 8, "class_token": False}])
def test_a_traced_model_refuses_another_grid(fields: dict[str, Any]) -> None:
    model = tiny(pool="mean", **fields)
    height, width = model.config.size
    traced = torch.jit.trace(model, torch.randn(2, 3, height, width), check_trace=False)
    for size in ((height, width), (8, 32), (16, 16), (32, 8), (16, 64), (8, 128), (16, 32)):
        images = torch.randn(3, 3, *size)
        if size == (height, width):
            torch.testing.assert_close(traced(images), model(images))
        else:
            with pytest.raises(RuntimeError):
                traced(images)


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"])
def test_hooks_of_linear_layers_are_called(name: str) -> None:
    model = tiny()
    shapes = []
    handle = model.get_submodule(name).register_forward_hook(lambda layer, inputs, output: shapes.append(output.shape))
    with torch.inference_mode():
        model(random_images())
    handle.remove()
    assert len(shapes) == 1
    assert type(model.get_submodule(name)) is nn.Linear

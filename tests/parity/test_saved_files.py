"""Files that the reference libraries write, or that have their format, give the logits that the libraries give."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from einops import rearrange
from files_made import completed
from peers import timm, transformers, vit_pytorch
from references import REFERENCES, Reference, distance, spread
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitlite import ViT, ViTConfig, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.formats.transformers import DEPTH, FAMILIES, HEAD_WIDTH, TOWERS
from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.config import DINOV3_ROPE
from vitlite.errors import CheckpointError, ConfigError

LOGITS = 1e-5


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def of(library: str) -> list[Any]:
    return [pytest.param(each, id=str(each)) for each in REFERENCES if each.library == library]


def images(config: ViTConfig) -> Tensor:
    return torch.randn(2, config.channels, *config.size, generator=torch.Generator().manual_seed(1))


def untold(reference: Reference, *names: str) -> dict[str, Any]:
    """Return what a bare file does not tell."""
    return {name: getattr(reference.config, name) for name in names}


def assert_equal(source: Path, reference: Reference, theirs: nn.Module, fields: dict[str, Any] | None = None) -> ViT:
    ours = load(source, config=completed(source, **fields) if fields else None)
    with torch.no_grad():
        assert distance(ours(images(ours.config)), reference.logits(theirs, images(ours.config))) < LOGITS
    return ours


NAMED = ["EVA", "attention pooling beside a class token and registers"]  # of which the tensors alone are not enough
POOLS = {"cls": "token", "mean": "avg", "map": "map"}  # as timm calls them


def named_by_timm(
    state: Mapping[str, Tensor], architecture: str, config: ViTConfig, folder: Path, **options: Any
) -> Path:
    """A folder of timm's: these tensors beside a config.json that names their network, of which no field tells."""
    save_file(dict(state), folder / "bare.safetensors")
    with pytest.raises(ConfigError, match="do not determine the network"):
        load(folder / "bare.safetensors", config=config)
    (folder / "bare.safetensors").rename(folder / "model.safetensors")
    args = {"img_size": config.image_size, "patch_size": config.patch_size, "num_heads": config.heads}
    args |= {"embed_dim": config.dim, "depth": config.depth, "mlp_ratio": config.mlp_dim / config.dim}
    said = {"architecture": architecture, "model_args": args | options, "global_pool": POOLS[config.pool]}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_a_folder_of_timm_s_eva(tmp_path: Path) -> None:
    reference = find("timm", "EVA")
    theirs = spread(reference.build())
    state = theirs.state_dict()
    folder = named_by_timm(state, "eva_giant_patch14_224", reference.config, tmp_path)
    assert assert_equal(folder, reference, theirs).config.to_dict() == reference.config.to_dict()


def test_a_folder_of_timm_s_whose_pool_by_attention_looks_at_the_patches(tmp_path: Path) -> None:
    reference = find("timm", "attention pooling beside a class token and registers")
    theirs = spread(reference.build())
    options = {"reg_tokens": 3, "no_embed_class": True}
    folder = named_by_timm(theirs.state_dict(), "vit_base_patch16_224", reference.config, tmp_path, **options)
    assert assert_equal(folder, reference, theirs).config.to_dict() == reference.config.to_dict()


@pytest.mark.parametrize("reference", [case for case in of("timm") if case.values[0].option not in NAMED])
def test_a_timm_state_dict(reference: Reference, tmp_path: Path) -> None:
    theirs = spread(reference.build())
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    ask = ["image_size", "heads", "norm_eps", "mlp"]
    if reference.config.pool != "cls_and_distillation":
        ask += ["pool"]
    if reference.config.positions == "none":
        ask += ["positions"]
    if reference.config.rope is not None:
        ask += ["rope"]
    if reference.config.resample == "naflex":  # whose patches are flattened
        ask += ["patch_size"]
    if reference.config.final_norm == "none":
        ask += ["final_norm"]
    if not reference.config.cls_position and not reference.config.registers:
        ask += ["cls_position"]
    ours = assert_equal(tmp_path / "vit.safetensors", reference, theirs, untold(reference, *ask))
    expected = reference.config.to_dict()
    if reference.config.layer_scale:
        expected["layer_scale"] = ours.config.layer_scale  # which it began with does not show
    if not reference.config.class_token or reference.config.positions == "none":  # then it means nothing
        expected["cls_position"] = ours.config.cls_position
    assert ours.config.to_dict() == expected


def format_of(reference: Reference, theirs: nn.Module) -> str:
    """Which of timm's spellings its own model has."""
    names = theirs.state_dict()
    if "dist_token" in names:
        return "timm-distilled"
    if "blocks.0.attn.q_proj.weight" in names:
        return "timm-eva02"
    if "blocks.0.norm1.bias" not in names and "encoder.pos_embed" not in names:
        return "timm-aimv2"
    if "blocks.0.mlp.fc1_g.weight" in names:
        return "timm-eva-gated"
    if "encoder.pos_embed" in names:
        return "timm-qwen3"
    if "embeds.pos_embed" in names:
        return "timm-naflex"
    if isinstance(theirs, timm.models.Eva) and isinstance(theirs.blocks[0].attn, timm.layers.AttentionRope):
        return "timm-rope"
    return "timm-eva" if isinstance(theirs, timm.models.Eva) else "timm"


@pytest.mark.parametrize("reference", of("timm"))
def test_timm_takes_our_tensors_and_answers_the_same(reference: Reference) -> None:
    theirs = reference.build().eval()
    ours = spread(ViT(reference.config))
    format = format_of(reference, theirs)
    if format.startswith("timm-eva"):  # which has no bias for keys
        for name, tensor in ours.named_parameters():
            if name.endswith("qkv.bias"):
                tensor.data.view(3, -1)[1] = 0
    prefix = "encoder." if format == "timm-qwen3" else ""
    state = dict(rename_tensors(FORMATS[format], prefix, ours.state_dict()))
    if reference.folded and format == "timm":  # it has rows for tokens, to which ours were added
        rows = sum(ours.get_parameter(name).shape[1] for name in reference.folded)
        state["pos_embed"] = nn.functional.pad(state["pos_embed"], (0, 0, rows, 0))
    theirs.load_state_dict(state)
    for size in (reference.config.size, *reference.image_sizes):
        pixels = torch.randn(2, reference.config.channels, *size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert distance(ours(pixels), theirs(pixels)) < LOGITS


LANGUAGE_TOWERS = [case for case in of("transformers") if re.match("Qwen3|AIMv2", case.values[0].option)]


@pytest.mark.parametrize("reference", LANGUAGE_TOWERS)
def test_folders_of_towers_whose_files_are_read_by_timm_s_names_are_refused(
    reference: Reference, tmp_path: Path
) -> None:
    reference.build().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model_type (qwen|aimv2)\w+ is not supported"):
        load(tmp_path)


@pytest.mark.parametrize("original", [True, False], ids=["legacy names", "names of 5.x"])
@pytest.mark.parametrize("reference", [case for case in of("transformers") if case not in LANGUAGE_TOWERS])
def test_a_folder_of_transformers(reference: Reference, original: bool, tmp_path: Path) -> None:
    if reference.option == "ViT, pooler":
        pytest.skip("the pooler is dropped: see below")
    theirs = spread(reference.build())
    theirs.save_pretrained(tmp_path, save_original_format=original)
    legacy = any("attention.attention.query" in key for key in load_file(tmp_path / "model.safetensors"))
    assert legacy == original or re.search("CLIP|SigLIP|DINOv3", reference.option)
    ours = assert_equal(tmp_path, reference, theirs)
    if reference.option == "DINOv2, registers" and original:
        assert ours.config.resample == "timm"
    for size in reference.image_sizes:
        pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert distance(ours(pixels), reference.logits(theirs, pixels)) < LOGITS


class Hybrid(nn.Module):
    """transformers' ViTHybrid, which version 5 left out, of the parts that it was made of."""

    BACKBONE: ClassVar = dict(
        depths=[1, 2], layer_type="bottleneck", global_padding="same", embedding_dynamic_padding=True
    )

    def __init__(self) -> None:
        super().__init__()
        self.vit = find("transformers", "ViT").build()
        self.config = transformers.BitConfig(**self.BACKBONE, out_features=["stage2"])
        self.backbone = transformers.BitBackbone(self.config)
        self.projection = nn.Conv2d(512, 48, 1)
        table = self.vit.vit.embeddings.position_embeddings
        table.data = table.data[:, :10]  # 3 x 3 cells of 8 pixels

    def forward(self, images: Tensor) -> Tensor:
        patches = self.projection(self.backbone(images).feature_maps[-1]).flatten(2).transpose(1, 2)
        embeddings = self.vit.vit.embeddings
        x = torch.cat([embeddings.cls_token.expand(len(images), -1, -1), patches], dim=1)
        x = x + embeddings.position_embeddings
        for layer in self.vit.vit.layers:
            x = layer(x)
        return self.vit.classifier(self.vit.vit.layernorm(x)[:, 0])

    def save(self, folder: Path, **changes: Any) -> None:
        """As that class did: the names, and what stood in its config.json."""
        self.vit.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if ".patch_embeddings." not in name}
        patches = "vit.embeddings.patch_embeddings."
        tensors |= {f"{patches}projection.{name}": tensor for name, tensor in self.projection.state_dict().items()}
        tensors |= {f"{patches}backbone.{name}": tensor for name, tensor in self.backbone.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | {
            "architectures": ["ViTHybridForImageClassification"], "model_type": "vit-hybrid", "image_size": 24,
            "patch_size": 1, "backbone_config": self.config.to_dict(), "backbone_featmap_shape": [1, 512, 3, 3],
            "backbone": None, "use_pretrained_backbone": False, "use_timm_backbone": False, "backbone_kwargs": None,
        }  # fmt: skip
        for name, value in changes.items():
            (config["backbone_config"] if name in config["backbone_config"] else config)[name] = value
        (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_the_hybrid_that_transformers_had(tmp_path: Path) -> None:
    theirs = spread(Hybrid())
    theirs.save(tmp_path)
    ours = load(tmp_path)
    assert (ours.config.stem, ours.config.patch_size, ours.config.image_size) == ((1, 2), 8, 24)
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    assert distance(ours(images), theirs(images)) < LOGITS
    for block in ours.patch_embed.backbone.stages[1].blocks:
        block.conv2.border = nn.Identity() if block.conv2.stride == (1, 1) else nn.ZeroPad2d((1, 0, 1, 0))
    assert distance(ours(images), theirs(images)) > 100 * LOGITS


@pytest.mark.parametrize(("name", "value", "text"), [
    ("layer_type", "preactivation", "layer_type is 'preactivation', but vitlite supports only 'bottleneck'"),
    ("global_padding", "VALID", "global_padding is 'VALID', but vitlite supports only 'same' or 'SAME'"),
    ("global_padding", None, "backbone_config has no global_padding"),
    ("embedding_dynamic_padding", False, "embedding_dynamic_padding is False, but vitlite supports only True"),
    ("out_features", ["stage1"], r"out_features must contain only the last stage, stage\d, got \['stage1'\]"),
    ("num_groups", 16, "num_groups is 16, but vitlite supports only 32"),
    ("model_type", "resnet", "model_type is 'resnet'"),
    ("sharpness", 2, "sharpness is an unknown key"),
    ("depths", [2, 2], r"stem is \(1, 2\) in the tensors and \(2, 2\) in config.json"),
    ("use_timm_backbone", True, "use_timm_backbone is True, but vitlite supports only False"),
])  # fmt: skip
def test_another_resnet_before_the_patches_is_refused(name: str, value: Any, text: str, tmp_path: Path) -> None:
    Hybrid().save(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path)


@pytest.mark.parametrize(("option", "changes", "text"), [
    ("DINOv3", {"rope_theta": 10000.0}, r"rope_theta is 10000.0, but vitlite supports only 100.0 or 100"),
    ("DINOv3", {"hidden_act": "silu"}, "hidden_act is 'silu', but vitlite supports only gelu,"),
    ("DINOv3", {"use_gated_mlp": True, "hidden_act": "silu"}, "mlp is not gated in the tensors and swiglu in config"),
    ("DINOv3, gated", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but vitlite supports only silu in models"),
    ("DINOv3, gated", {"hidden_act": None}, "hidden_act is None, but vitlite supports only silu in models"),
    ("DINOv3", {"architectures": ["DINOv3ViTBackbone"]}, "architectures contains DINOv3ViTBackbone, which"),
    ("DINOv2, gated", {"use_swiglu_ffn": False}, "mlp is swiglu in the tensors and gelu in config.json"),
    ("SigLIP", {"vision_use_head": False}, "vision_use_head is False, but vitlite supports only True"),
])  # fmt: skip
def test_what_transformers_would_compute_otherwise_is_refused(
    option: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    find("transformers", option).build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path)


def test_the_images_half_of_a_siglip_whose_config_tells_little(tmp_path: Path) -> None:
    """As those of the Hub: what is as in SigLIP-base does not stand there."""
    images = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80, "model_type": "siglip_vision_model"}
    texts = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 80}
    whole = transformers.SiglipConfig(vision_config=images, text_config=texts | {"vocab_size": 50000})
    theirs = spread(transformers.SiglipModel(whole))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vision_config": images}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load(tmp_path)
    assert (ours.config.heads, ours.config.mlp, ours.config.image_size) == (12, "gelu_tanh", 224)
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert distance(ours(pixels), theirs.get_image_features(pixels).pooler_output) < LOGITS
    assert any(name.startswith("text_model.") for name in ours.source.report.dropped)


def test_a_distilled_deit_of_timm_without_heads_is_asked_how_it_pools(tmp_path: Path) -> None:
    """timm gives the mean of its two tokens then, which is no pool of ours."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    theirs = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0, **sizes)
    timm.models._hub.save_for_hf(theirs, tmp_path, model_args=sizes, safe_serialization=True)
    with pytest.raises(ConfigError, match="The tensors do not determine pool"):
        load(tmp_path)


def test_a_head_of_dinov2_that_reads_one_token_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    theirs = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, num_labels=3))
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["classifier.weight"] = state["classifier.weight"][:, :32].clone()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match="pool: the head of transformers' DINOv2 reads two vectors, but this head reads one"
    ):
        load(tmp_path)


@pytest.mark.parametrize("original", [True, False])
def test_vit_msn_with_a_head(original: bool, tmp_path: Path) -> None:
    """Some of its names lack the prefix that others have."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTMSNConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    theirs = spread(transformers.ViTMSNForImageClassification(config)).eval()
    theirs.save_pretrained(tmp_path, save_original_format=original)
    ours = load(tmp_path)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert distance(ours(pixels), theirs(pixels).logits) < LOGITS


@pytest.mark.parametrize("legacy", [False, True], ids=["mlp.0", "mlp.linear_1"])
@pytest.mark.parametrize("reference", of("torchvision"))
def test_a_torchvision_state_dict(reference: Reference, legacy: bool, tmp_path: Path) -> None:
    theirs = spread(reference.build())
    state = theirs.state_dict()
    if legacy:
        names = {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}
        state = {rename(key, names): x for key, x in state.items()}
    save_file(state, tmp_path / "vit.safetensors")
    ours = assert_equal(tmp_path / "vit.safetensors", reference, theirs, untold(reference, "heads"))
    assert ours.config.to_dict() == reference.config.to_dict()


def rename(key: str, names: dict[str, str]) -> str:
    for theirs, other in names.items():
        key = key.replace(theirs, other)
    return key


@pytest.mark.parametrize("reference", of("vit-pytorch"))
def test_a_vit_pytorch_state_dict(reference: Reference, tmp_path: Path) -> None:
    theirs = spread(reference.build())
    state = theirs.state_dict()
    if reference.config.pool == "mean_with_cls":  # before 1.16 the tables had a batch dimension
        state = {key: x[None].contiguous() if key in ("cls_token", "pos_embedding") else x for key, x in state.items()}
        state["cls_token"] = state["cls_token"].reshape(1, 1, -1)
    save_file(state, tmp_path / "vit.safetensors")
    ask = ["patch_size", "image_size", "heads"]
    if reference.config.pool == "mean_with_cls":
        ask += ["pool"]
    ours = assert_equal(tmp_path / "vit.safetensors", reference, theirs, untold(reference, *ask))
    assert ours.config.norm_eps == 1e-5
    assert not ours.config.qkv_bias


def find(library: str, option: str) -> Reference:
    return next(each for each in REFERENCES if (each.library, each.option) == (library, option))


def as_flax(state: Mapping[str, Tensor], heads: int, google: bool) -> dict[str, np.ndarray]:
    """timm's tensors as Google's code writes them, by hand."""
    attention, mlp, norm2 = ("1", "3", "2") if google else ("0", "0", "1")
    flax = {
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding" if google else "pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    if "cls_token" in state:
        flax["cls"] = state["cls_token"]
    for i in range(3):
        ours, theirs = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        for norm, name in (("norm1", "0"), ("norm2", norm2)):
            flax[f"{theirs}LayerNorm_{name}/scale"] = state[f"{ours}{norm}.weight"]
            flax[f"{theirs}LayerNorm_{name}/bias"] = state[f"{ours}{norm}.bias"]
        weights, biases = state[f"{ours}attn.qkv.weight"].chunk(3), state[f"{ours}attn.qkv.bias"].chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            kernel = rearrange(weight, "(h e) d -> d h e", h=heads)
            flax[f"{theirs}MultiHeadDotProductAttention_{attention}/{name}/kernel"] = kernel
            flax[f"{theirs}MultiHeadDotProductAttention_{attention}/{name}/bias"] = bias.view(heads, -1)
        out = rearrange(state[f"{ours}attn.proj.weight"], "d (h e) -> h e d", h=heads)
        flax[f"{theirs}MultiHeadDotProductAttention_{attention}/out/kernel"] = out
        flax[f"{theirs}MultiHeadDotProductAttention_{attention}/out/bias"] = state[f"{ours}attn.proj.bias"]
        for j, name in enumerate(("fc1", "fc2")):
            flax[f"{theirs}MlpBlock_{mlp}/Dense_{j}/kernel"] = state[f"{ours}mlp.{name}.weight"].T
            flax[f"{theirs}MlpBlock_{mlp}/Dense_{j}/bias"] = state[f"{ours}mlp.{name}.bias"]
    return {name: tensor.contiguous().numpy() for name, tensor in flax.items()}


STEM_PARTS = {
    "conv1": "conv1", "norm1": "gn1", "conv2": "conv2", "norm2": "gn2", "conv3": "conv3", "norm3": "gn3",
    "downsample.conv": "conv_proj", "downsample.norm": "gn_proj",
}  # fmt: skip


def as_flax_stem(state: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The ResNet of one of timm's hybrids as Google's code writes it, by hand."""
    flax = {}
    for name, tensor in state.items():
        if not name.startswith("patch_embed.backbone."):
            continue
        name = name.removeprefix("patch_embed.backbone.").removeprefix("stem.")
        part = {"conv.weight": "conv_root", "norm.weight": "gn_root", "norm.bias": "gn_root"}.get(name)
        if part is None:
            stage, unit, inner = re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)\.\w+", name).groups()
            part = f"block{int(stage) + 1}/unit{int(unit) + 1}/{STEM_PARTS[inner]}"
        if tensor.ndim == 4:
            flax[f"{part}/kernel"] = tensor.permute(2, 3, 1, 0)
        else:
            flax[f"{part}/{'bias' if name.endswith('bias') else 'scale'}"] = tensor.view(1, 1, 1, -1)
    return {name: tensor.contiguous().numpy() for name, tensor in flax.items()}


def as_flax_pool(state: Mapping[str, Tensor], heads: int) -> dict[str, np.ndarray]:
    """SigLIP's attention pooling as big_vision writes it, by hand."""
    pool = {name.removeprefix("attn_pool."): tensor for name, tensor in state.items() if name.startswith("attn_pool.")}
    attention = "MAPHead_0/MultiHeadDotProductAttention_0/"
    flax = {
        "MAPHead_0/probe": pool["latent"],
        "MAPHead_0/LayerNorm_0/scale": pool["norm.weight"],
        "MAPHead_0/LayerNorm_0/bias": pool["norm.bias"],
        f"{attention}out/kernel": rearrange(pool["proj.weight"], "d (h e) -> h e d", h=heads),
        f"{attention}out/bias": pool["proj.bias"],
    }
    for end in ("weight", "bias"):
        key, value = pool[f"kv.{end}"].chunk(2)
        for name, part in (("query", pool[f"q.{end}"]), ("key", key), ("value", value)):
            kernel = rearrange(part, "(h e) d -> d h e" if end == "weight" else "(h e) -> h e", h=heads)
            flax[f"{attention}{name}/{'kernel' if end == 'weight' else 'bias'}"] = kernel
    for i in range(2):
        flax[f"MAPHead_0/MlpBlock_0/Dense_{i}/kernel"] = pool[f"mlp.fc{i + 1}.weight"].T
        flax[f"MAPHead_0/MlpBlock_0/Dense_{i}/bias"] = pool[f"mlp.fc{i + 1}.bias"]
    return {name: tensor.contiguous().numpy() for name, tensor in flax.items()}


def read_by_timm(reference: Reference, path: Path, prefix: str = "") -> nn.Module:
    """The model into which timm's own reader of Google's files reads one."""
    model = reference.build().eval()
    with torch.no_grad():
        timm.models.vision_transformer._load_weights(model, str(path), prefix=prefix)
    return model


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
@pytest.mark.parametrize("option", ["hybrid", "hybrid, root alone"])
def test_a_google_npz_of_a_hybrid(option: str, prefix: str, tmp_path: Path) -> None:
    reference = find("timm", option)
    state = spread(reference.build()).state_dict()
    arrays = as_flax(state, 4, google=True) | as_flax_stem(state)
    np.savez(tmp_path / "vit.npz", **{prefix + name: array for name, array in arrays.items()})
    theirs = read_by_timm(reference, tmp_path / "vit.npz")
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    ours = assert_equal(tmp_path / "vit.npz", reference, theirs)
    assert ours.config.to_dict() == reference.config.replace(resample="jax").to_dict()


@pytest.mark.parametrize("stacked", [False, True], ids=["blocks apart", "blocks stacked"])
def test_a_google_npz_of_siglip(stacked: bool, tmp_path: Path) -> None:
    reference = find("timm", "attention pooling")
    reference = replace(reference, config=reference.config.replace(num_classes=0))
    theirs = reference.build()
    theirs.reset_classifier(0)
    state = spread(theirs).state_dict()
    arrays = as_flax(state | {"head.weight": torch.zeros(0, 48), "head.bias": torch.zeros(0)}, 4, google=False)
    arrays = {name: array for name, array in arrays.items() if not name.startswith("head")} | as_flax_pool(state, 4)
    if stacked:
        arrays = with_stacked_blocks(arrays)
    texts = {"params/txt/Embed_0/embedding": np.ones((9, 48)), "params/t": np.ones(1), "params/b": np.ones(1)}
    np.savez(tmp_path / "vit.npz", **{f"params/img/{name}": array for name, array in arrays.items()}, **texts)
    with torch.no_grad():
        timm.models.vision_transformer._load_weights(theirs, str(tmp_path / "vit.npz"))
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    ours = assert_equal(tmp_path / "vit.npz", reference, theirs, untold(reference, "image_size"))
    assert (ours.config.pool, ours.config.mlp) == ("map", "gelu_tanh")
    assert set(ours.source.report.dropped) == set(texts)


def with_stacked_blocks(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The blocks along an axis of their own, as big_vision writes them where it runs them by a loop."""
    rest = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    blocks = {name.replace("_0/", "/", 1) for name in arrays if "encoderblock_0/" in name}
    return rest | {name: np.stack([arrays[name.replace("block/", f"block_{i}/")] for i in range(3)]) for name in blocks}


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_google_npz(prefix: str, save: Any, tmp_path: Path) -> None:
    reference = find("timm", "class token")
    theirs = spread(reference.build())
    arrays = {prefix + name: array for name, array in as_flax(theirs.state_dict(), 4, google=True).items()}
    arrays[prefix + "head/kernel"] = np.asfortranarray(arrays[prefix + "head/kernel"])
    if prefix:
        arrays["opt/state/step"] = np.array(3)
    save(tmp_path / "vit.npz", **arrays)
    ours = assert_equal(tmp_path / "vit.npz", reference, theirs)
    assert ours.config.to_dict() == reference.config.replace(resample="jax").to_dict()


@pytest.mark.parametrize("stacked", [False, True], ids=["blocks apart", "blocks stacked"])
@pytest.mark.parametrize("option", ["mean, no class token", "no position for the class token", "class token"])
def test_a_big_vision_npz(option: str, stacked: bool, tmp_path: Path) -> None:
    reference = find("timm", option)
    theirs = spread(reference.build())
    arrays = as_flax(theirs.state_dict(), 4, google=False)
    if stacked:
        arrays = with_stacked_blocks(arrays)
    np.savez(tmp_path / "vit.npz", **{f"params/{name}": array for name, array in arrays.items()})
    ask = ["image_size"] if reference.config.class_token else ["image_size", "pool"]
    ours = assert_equal(tmp_path / "vit.npz", reference, theirs, untold(reference, *ask))
    assert ours.source.report.format == "big_vision"


def as_meta_s_dinov3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of timm's Eva as Meta's code for DINOv3 names them, by hand."""
    generator = torch.Generator().manual_seed(3)
    meta = {"mask_token": torch.zeros(1, 48), "rope_embed.periods": torch.tensor([1.0, 4.6416, 21.5443]).bfloat16()}
    for name, tensor in state.items():
        name = re.sub(r"gamma_(\d)", r"ls\1.gamma", name).replace("reg_token", "storage_tokens")
        for eva, own in (("fc1_g", "w1"), ("fc1_x", "w2")):
            name = name.replace(eva, own)
        if "blocks.0.mlp.fc1_g.weight" in state:
            name = name.replace("fc2", "w3")
        if name.endswith("q_bias"):
            keys = torch.randn(48, generator=generator)  # which the mask hides
            bias = name.replace("q_bias", "qkv.bias")
            meta[bias] = torch.cat([tensor, keys, state[name.replace("q_bias", "v_bias")]])
            meta[f"{bias}_mask"] = torch.ones(144).index_fill(0, torch.arange(48, 96), 0)
        elif not name.endswith("v_bias"):
            meta[name] = tensor
    return meta


def dinov3_of_meta(option: str) -> tuple[Reference, dict[str, Tensor], nn.Module]:
    """A file as Meta's code writes one, and timm's model into which timm reads it."""
    reference = find("timm", option)
    theirs = spread(reference.build())
    meta = {name: x for name, x in as_meta_s_dinov3(theirs.state_dict()).items() if not name.startswith("head.")}
    theirs.reset_classifier(0, "token")
    read = timm.models.eva.checkpoint_filter_fn(meta, theirs)
    theirs.load_state_dict(read)
    return replace(reference, config=reference.config.replace(num_classes=0, pool="cls")), meta, theirs


META = ["DINOv3", "DINOv3, class token, biases", "DINOv3 plus"]


@pytest.mark.parametrize("wrapped", [None, "teacher"], ids=["safetensors", "pth"])
@pytest.mark.parametrize("option", META)
def test_meta_s_own_dinov3(option: str, wrapped: str | None, tmp_path: Path) -> None:
    reference, meta, theirs = dinov3_of_meta(option)
    ask = untold(reference, "image_size", "norm_eps")
    if wrapped:
        norm = {f"local_cls_norm.{name}": torch.ones(48) for name in ("weight", "bias")}  # of training alone
        backbone = {f"backbone.{name}": x for name, x in (meta | norm).items()}
        torch.save({wrapped: backbone | {"dino_head.last_layer.weight": torch.ones(3)}}, tmp_path / "vit.pth")
        with pytest.raises(CheckpointError, match=r"\+ dino_head.last_layer.weight"):
            convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "vitlite", config=reference.config)
        torch.save({wrapped: backbone}, tmp_path / "vit.pth")
        convert(tmp_path / "vit.pth", tmp_path / "ours", "vitlite", config=reference.config)
        ours = assert_equal(tmp_path / "ours", reference, theirs)
    else:
        save_file(meta, tmp_path / "vit.safetensors")
        ours = assert_equal(tmp_path / "vit.safetensors", reference, theirs, ask)
        assert ours.source.report.format == "dinov3"
    assert ours.config.rope == DINOV3_ROPE
    for size in reference.image_sizes:
        pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert distance(ours(pixels), theirs(pixels)) < LOGITS


def test_what_meta_s_own_dinov3_may_not_have(tmp_path: Path) -> None:
    reference, meta, _ = dinov3_of_meta("DINOv3, class token, biases")
    masked = {name: torch.full((144,), torch.nan) for name in meta if name.endswith("bias_mask")}
    wrong = {
        r"rope_embed.periods must be DINOv3's": {"rope_embed.periods": torch.tensor([1.0, 10.0, 100.0])},
        r"qkv.bias_mask contains NaN or infinity": masked,
        r"\+ cls_norm.weight": {"cls_norm.weight": torch.ones(48)},
    }
    for text, tensors in wrong.items():
        save_file(meta | tensors, tmp_path / "vit.safetensors")
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path / "vit.safetensors", config=reference.config)
    save_file(meta, tmp_path / "vit.safetensors")
    for positions in ("learned", "sincos2d"):
        with pytest.raises(CheckpointError, match=f"positions is none in the tensors and {positions} in config="):
            load(tmp_path / "vit.safetensors", config=reference.config.replace(positions=positions))
    with pytest.raises(CheckpointError, match=r"rope is Rotation.* in the tensors and None in config="):
        load(tmp_path / "vit.safetensors", config=reference.config.replace(rope=None))
    del meta["rope_embed.periods"]
    save_file(meta, tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match=r"rope is Rotation.* in the dinov3 format and None in config="):
        load(tmp_path / "vit.safetensors", config=reference.config.replace(rope=None))


def as_openai(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of transformers' CLIP as OpenAI's and open_clip's code name them, by hand."""
    tower = {"proj": state["visual_projection.weight"].T}
    names = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding": "conv1",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layrnorm": "ln_pre",
        "post_layernorm": "ln_post",
        "encoder.layers": "transformer.resblocks",
        "layer_norm": "ln_",
        "self_attn.out_proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for key, tensor in state.items():
        name = rename(key.removeprefix("vision_model."), names)
        if ".q_proj." in name:
            parts = [state[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            tower[name.replace("self_attn.q_proj.", "attn.in_proj_")] = torch.cat(parts)
        elif not re.search("[kv]_proj|visual_projection", name):
            tower[name] = tensor
    return {name: tensor.contiguous() for name, tensor in tower.items()}


@pytest.mark.parametrize("whole", [False, True], ids=["the tower", "the whole CLIP"])
def test_an_openai_tower(whole: bool, tmp_path: Path) -> None:
    reference = find("transformers", "CLIP")
    theirs = spread(reference.build())
    tower = as_openai(theirs.state_dict())
    if whole:
        text = {name: tower[name] for name in tower if name.startswith("transformer")}
        text |= {"token_embedding.weight": torch.ones(9, 48), "logit_scale": torch.ones(())}
        tower = {f"visual.{name}": tensor for name, tensor in tower.items()} | {k: x.clone() for k, x in text.items()}
    save_file(tower, tmp_path / "clip.safetensors")
    ask = untold(reference, "image_size", "heads", "mlp", "pool")
    ours = assert_equal(tmp_path / "clip.safetensors", reference, theirs, ask)
    assert set(ours.source.report.dropped) == (set(text) if whole else set())
    assert ours.source.report.supplied == {"head.bias": (7,)}


def test_a_whole_clip_of_transformers(tmp_path: Path) -> None:
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    text = transformers.CLIPTextConfig(**sizes, vocab_size=30, max_position_embeddings=8)
    kind = transformers.CLIPConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=6)
    theirs = spread(transformers.CLIPModel(kind))
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    pixels = images(ours.config)
    with torch.no_grad():
        output = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        assert distance(ours(pixels), output) < LOGITS
    assert "logit_scale" in ours.source.report.dropped


def test_a_transformers_model_without_its_pooler(tmp_path: Path) -> None:
    reference = find("transformers", "ViT, pooler")
    theirs = spread(reference.build())
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        ours = load(source)
        pixels = images(ours.config)
        with torch.no_grad():
            assert distance(ours(pixels), theirs(pixels).last_hidden_state[:, 0]) < LOGITS
        assert ours.source.report.dropped == {"pooler.dense.bias": (48,), "pooler.dense.weight": (48, 48)}


def test_a_masked_autoencoder_loses_its_decoder(tmp_path: Path) -> None:
    kind = transformers.ViTMAEConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=32, patch_size=8,
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=16, mask_ratio=0.0,
    )  # fmt: skip
    theirs = spread(transformers.ViTMAEForPreTraining(kind))
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    pixels = images(ours.config)
    with torch.no_grad():
        output = theirs.vit(pixels, noise=torch.arange(16.0).expand(2, -1)).last_hidden_state[:, 0]
        assert distance(ours(pixels), output) < LOGITS
    assert all(name.startswith("decoder.") for name in ours.source.report.dropped)


def test_one_of_two_heads_of_a_distilled_deit_is_refused(tmp_path: Path) -> None:
    theirs = spread(find("transformers", "DeiT, distilled, two heads").build())
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["cls_classifier.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="not a plain ViT: it has a second head, and not all that a distilled DeiT"
    ):
        load(tmp_path)


def test_a_folder_of_timm(tmp_path: Path) -> None:
    sizes = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=3)
    theirs = spread(timm.create_model("vit_tiny_patch16_224", **sizes, global_pool="avg", fc_norm=False))
    names = {"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n1": "ant", "n2": "bee", "n3": "cow"}}
    timm.models.save_for_hf(theirs, tmp_path, model_config=names, safe_serialization=True)
    ours = load(tmp_path)
    with torch.no_grad():
        assert distance(ours(images(ours.config)), theirs(images(ours.config))) < LOGITS
    assert ours.config.pool == "mean"
    assert ours.labels == ("ant", "bee", "cow")
    assert ours.preprocess.transform.size == (32, 32)


def test_meta_names_of_deit_iii_and_headless_files(tmp_path: Path) -> None:
    reference = find("timm", "layer scale")
    theirs = spread(reference.build())
    state = {
        rename(name, {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}): x for name, x in theirs.state_dict().items()
    }
    folder = named_by_timm(state, "deit3_small_patch16_224", reference.config, tmp_path, no_embed_class=False)
    assert_equal(folder, reference, theirs)
    theirs.reset_classifier(0)
    save_file(theirs.state_dict(), tmp_path / "dino.safetensors")
    ask = untold(reference, "image_size", "heads", "norm_eps", "mlp", "pool")
    assert_equal(tmp_path / "dino.safetensors", reference, theirs, ask)


OLD = {  # vit-pytorch's names by version, for ours
    "1.0 to 1.3": {
        "norm1": "transformer.layers.#.0.norm", "attn.qkv": "transformer.layers.#.0.fn.to_qkv",
        "attn.proj": "transformer.layers.#.0.fn.to_out.0", "norm2": "transformer.layers.#.1.norm",
        "mlp.fc1": "transformer.layers.#.1.fn.net.0", "mlp.fc2": "transformer.layers.#.1.fn.net.3",
    },
    "before 0.10": {
        "norm1": "transformer.layers.#.0.fn.norm", "attn.qkv": "transformer.layers.#.0.fn.fn.to_qkv",
        "attn.proj": "transformer.layers.#.0.fn.fn.to_out.0", "norm2": "transformer.layers.#.1.fn.norm",
        "mlp.fc1": "transformer.layers.#.1.fn.fn.net.0", "mlp.fc2": "transformer.layers.#.1.fn.fn.net.3",
    },
}  # fmt: skip
OLD["0.10 to 0.40"] = OLD["1.0 to 1.3"]


@pytest.mark.parametrize("pool", ["cls", "mean_with_cls"])
@pytest.mark.parametrize("version", OLD)
def test_older_vit_pytorch(version: str, pool: str, tmp_path: Path) -> None:
    """No peer is installed for these: a model of ours, renamed. Checked by hand with 0.40.2, 1.2.0 and 1.4.0."""
    config = find("vit-pytorch", "class token").config.replace(
        final_norm="pooled", pool=pool, input_norm="patches" if version.startswith("1.") else "none", head_dim=None
    )
    theirs = spread(ViT(config))
    state = {}
    for name, tensor in theirs.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        block = stem.split(".")[1] if stem.startswith("blocks.") else ""
        old = OLD[version].get(stem.partition(f".{block}.")[2], "").replace("#", block)
        first = 2 if config.input_norm == "patches" else 1
        old = old or {
            "patch_embed.norm_in": "to_patch_embedding.1", "patch_embed.proj": f"to_patch_embedding.{first}",
            "patch_embed.norm": "to_patch_embedding.3", "fc_norm": "mlp_head.0", "head": "mlp_head.1",
        }.get(stem, "")  # fmt: skip
        if name == "patch_embed.proj.weight":
            tensor = rearrange(tensor, "d c p q -> d (p q c)")
        elif stem == "patch_embed.norm_in":
            tensor = rearrange(tensor, "(c p q) -> (p q c)", c=3, p=8)
        state[f"{old}.{leaf}" if old else name.replace("pos_embed", "pos_embedding")] = tensor.contiguous()
    save_file(state, tmp_path / "vit.safetensors")
    path = tmp_path / "vit.safetensors"
    with pytest.raises(ConfigError, match=r"do not determine patch_size, image_size, heads, pool \("):
        load(path)
    ours = load(path, config=completed(path, image_size=32, patch_size=8, heads=4, pool=pool))
    with torch.no_grad():
        assert distance(ours(images(config)), theirs(images(config))) < LOGITS
    assert ours.config.to_dict() == config.to_dict()
    with pytest.raises(CheckpointError, match="format must have cls or mean_with_cls"):
        load(path, config=config.replace(pool="mean"))


def test_a_single_head_of_vit_pytorch_has_no_projection(tmp_path: Path) -> None:
    theirs = spread(
        vit_pytorch.ViT(image_size=32, patch_size=8, num_classes=3, dim=48, depth=2, heads=1, mlp_dim=80, dim_head=48)
    )
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    path = tmp_path / "vit.safetensors"
    ours = load(path, config=completed(path, image_size=32, patch_size=8, pool="cls"))
    with torch.no_grad():
        assert distance(ours(images(ours.config)), theirs(images(ours.config))) < LOGITS
    assert ours.source.report.supplied["blocks.0.attn.proj.weight"] == (48, 48)


def test_patches_of_other_than_three_channels_need_their_size(tmp_path: Path) -> None:
    theirs = spread(
        vit_pytorch.ViT(image_size=32, patch_size=4, num_classes=3, dim=48, depth=1, heads=4, mlp_dim=80, channels=12)
    )
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    path = tmp_path / "vit.safetensors"
    with pytest.raises(ConfigError, match="do not determine patch_size"):  # 192 = 12 * 4² = 3 * 8²
        load(path)
    with pytest.raises(CheckpointError, match=r"image_size is 32 in config=, but .* has 65 rows"):
        completed(path, image_size=32, heads=4, patch_size=8)
    ours = load(path, config=completed(path, image_size=32, heads=4, patch_size=4, pool="cls"))
    with torch.no_grad():
        assert distance(ours(images(ours.config)), theirs(images(ours.config))) < LOGITS


SWAPS = {
    "timm": ("blocks.0.norm1.weight", "blocks.0.norm2.weight"),
    "transformers": (
        "vit.encoder.layer.0.attention.attention.query.weight", "vit.encoder.layer.0.attention.attention.key.weight"
    ),
    "torchvision": ("encoder.layers.encoder_layer_0.ln_1.bias", "encoder.layers.encoder_layer_0.ln_2.bias"),
    "vit-pytorch": ("transformer.layers.0.0.norm.weight", "transformer.layers.0.1.net.0.weight"),
}  # fmt: skip


@pytest.mark.parametrize("library", SWAPS)
def test_a_swapped_pair_is_noticed(library: str, tmp_path: Path) -> None:
    reference = next(each for each in REFERENCES if each.library == library)
    theirs = spread(reference.build())
    if library == "transformers":
        theirs.save_pretrained(tmp_path)
    else:
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    first, second = SWAPS[library]
    state[first], state[second] = state[second], state[first]
    save_file(state, tmp_path / "model.safetensors")
    ask = {
        "timm": ["image_size", "heads", "norm_eps", "mlp", "pool"],
        "torchvision": ["heads"],
        "vit-pytorch": ["patch_size", "image_size", "heads"],
    }.get(library, [])
    ours = load(tmp_path, config=completed(tmp_path, **untold(reference, *ask)) if ask else None)
    with torch.no_grad():
        assert distance(ours(images(ours.config)), reference.logits(theirs, images(ours.config))) > 100 * LOGITS


DINOV3_LAYER, SIGLIP_LAYER = "layer.0.", "encoder.layers.0."
MIXED_UP = {  # in files of transformers: what is another's, by the option that has it
    "DINOv3": [
        (f"{DINOV3_LAYER}attention.q_proj.weight", f"{DINOV3_LAYER}attention.k_proj.weight"),
        (f"{DINOV3_LAYER}attention.q_proj.bias", f"{DINOV3_LAYER}attention.v_proj.bias"),
        (f"{DINOV3_LAYER}layer_scale1.lambda1", f"{DINOV3_LAYER}layer_scale2.lambda1"),
        (f"{DINOV3_LAYER}norm1.weight", f"{DINOV3_LAYER}norm2.weight"),
        (f"{DINOV3_LAYER}norm1.bias", "norm.bias"),
    ],
    "DINOv3, gated": [
        (f"{DINOV3_LAYER}mlp.gate_proj.weight", f"{DINOV3_LAYER}mlp.up_proj.weight"),
        (f"{DINOV3_LAYER}mlp.gate_proj.bias", f"{DINOV3_LAYER}mlp.up_proj.bias"),
        (f"{DINOV3_LAYER}mlp.down_proj.weight", "layer.1.mlp.down_proj.weight"),
        (f"{DINOV3_LAYER}mlp.down_proj.bias", f"{DINOV3_LAYER}attention.o_proj.bias"),
        (f"{DINOV3_LAYER}attention.v_proj.weight", f"{DINOV3_LAYER}attention.k_proj.weight"),
    ],
    "SigLIP": [
        (f"{SIGLIP_LAYER}self_attn.q_proj.weight", f"{SIGLIP_LAYER}self_attn.v_proj.weight"),
        ("head.layernorm.weight", "post_layernorm.weight"),
        ("head.layernorm.bias", "post_layernorm.bias"),
        ("head.attention.out_proj.weight", f"{SIGLIP_LAYER}self_attn.out_proj.weight"),
        ("head.mlp.fc2.bias", "head.attention.out_proj.bias"),
        ("head.mlp.fc1.weight", f"{SIGLIP_LAYER}mlp.fc1.weight"),
    ],
}
THIRDS = {"keys and values": [0, 2, 1], "queries and keys": [1, 0, 2], "queries and values": [2, 1, 0]}


@pytest.mark.parametrize(("option", "first", "second"), [(name, *two) for name in MIXED_UP for two in MIXED_UP[name]])
def test_two_tensors_mixed_up_are_noticed(option: str, first: str, second: str, tmp_path: Path) -> None:
    theirs = spread(find("transformers", option).build())
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state[first], state[second] = state[second], state[first]
    assert_noticed(tmp_path, find("transformers", option), theirs, state)


@pytest.mark.parametrize("order", THIRDS.values(), ids=THIRDS)
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_thirds_of_siglip_s_pooling_mixed_up_are_noticed(kind: str, order: list[int], tmp_path: Path) -> None:
    theirs = spread(find("transformers", "SigLIP").build())
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = f"head.attention.in_proj_{kind}"
    state[name] = state[name].unflatten(0, (3, -1))[order].flatten(0, 1).contiguous()
    assert_noticed(tmp_path, find("transformers", "SigLIP"), theirs, state)


def assert_noticed(folder: Path, reference: Reference, theirs: nn.Module, state: dict[str, Tensor]) -> None:
    """A file with a mistake gives a model that the comparison tells from the right one."""
    save_file(state, folder / "model.safetensors")
    ours = load(folder)
    with torch.no_grad():
        assert distance(ours(images(ours.config)), reference.logits(theirs, images(ours.config))) > 10 * LOGITS


def test_a_swapped_pair_in_flax_and_in_clip_is_noticed(tmp_path: Path) -> None:
    reference = find("timm", "class token")
    theirs = spread(reference.build())
    for google, first, second in (
        (True, "MultiHeadDotProductAttention_1/query/kernel", "MultiHeadDotProductAttention_1/value/kernel"),
        (False, "LayerNorm_0/scale", "LayerNorm_1/scale"),
    ):
        arrays = as_flax(theirs.state_dict(), 4, google)
        first, second = (f"Transformer/encoderblock_0/{name}" for name in (first, second))
        arrays[first], arrays[second] = arrays[second], arrays[first]
        np.savez(tmp_path / "vit.npz", **arrays)
        ours = load(tmp_path / "vit.npz", config=completed(tmp_path / "vit.npz", **untold(reference, "image_size")))
        with torch.no_grad():
            assert distance(ours(images(ours.config)), theirs(images(ours.config))) > 100 * LOGITS
    reference = find("transformers", "CLIP")
    theirs = spread(reference.build())
    tower = as_openai(theirs.state_dict())
    tower["ln_pre.weight"], tower["ln_post.weight"] = tower["ln_post.weight"], tower["ln_pre.weight"]
    save_file(tower, tmp_path / "clip.safetensors")
    fields = untold(reference, "image_size", "heads", "mlp", "pool")
    ours = load(tmp_path / "clip.safetensors", config=completed(tmp_path / "clip.safetensors", **fields))
    with torch.no_grad():
        assert distance(ours(images(ours.config)), reference.logits(theirs, images(ours.config))) > 100 * LOGITS


def test_what_transformers_takes_where_a_config_says_nothing() -> None:
    """Its heads, epsilon and activation, and the width and depth that go with them."""
    compared = []
    for kind, family in FAMILIES.items():
        if kind in TOWERS or not hasattr(transformers, family.classes[0]):  # a tower is asked itself; hybrids are gone
            continue
        usual = getattr(transformers, family.classes[0]).config_class()
        assert (usual.hidden_size, usual.num_hidden_layers) == (family.heads * HEAD_WIDTH, DEPTH), kind
        assert usual.num_attention_heads == family.heads, kind
        assert (usual.layer_norm_eps, usual.hidden_act) == (family.norm_eps, family.activation), kind
        compared.append(kind)
    assert len(compared) >= 10

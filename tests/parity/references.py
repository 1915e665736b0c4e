"""The same tiny Vision Transformer as four other libraries build it, and how to read their weights into ours.

The renaming here is written apart from vitlite.checkpoints.key_mapping on purpose: two hands, one answer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from peers import timm, torchvision, transformers, vit_pytorch
from torch import Tensor, nn

from vitlite.config import DINOV3_ROPE, Rotation, ViTConfig

SIZES = dict(image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=80, num_classes=7)
Rules = Mapping[str, str]


@dataclass(frozen=True)
class Reference:
    """One option of one library: what ours is called, theirs, and what to call on it."""

    library: str
    option: str
    config: ViTConfig
    build: Callable[[], nn.Module]
    rules: Rules  # patterns of their keys -> our keys
    blocks: str  # where their layers are
    logits: Callable[[nn.Module, Tensor], Tensor]
    image_sizes: tuple[tuple[int, int], ...] = ()  # beside the native one
    folded: tuple[str, ...] = ()  # tokens whose rows of the position table are added to them
    # their tokens, and the images, to (b, n, d) with the patches of each image in row-major order
    tokens: Callable[[Tensor, Tensor], Tensor] = lambda tokens, images: tokens

    def __str__(self) -> str:
        return f"{self.library}: {self.option}"

    def to_ours(self, theirs: Mapping[str, Tensor], gradients: bool = False) -> dict[str, Tensor]:
        """Their tensors under our keys, in our shapes; gradients move as weights do, but do not add up."""
        found: dict[str, Tensor] = {}
        for key, tensor in theirs.items():
            for pattern, ours in self.rules.items():
                if re.fullmatch(pattern, key):
                    found[re.sub(pattern, ours, key)] = tensor
                    break
            else:
                raise KeyError(key)
        found.pop("unused", None)
        for key in [key for key in found if ".attn.q." in key]:
            q, v = found.pop(key), found.pop(key.replace(".q.", ".v."))
            k = found.pop(key.replace(".q.", ".k."), torch.zeros_like(q))  # Eva has no bias for keys
            found[key.replace(".q.", ".qkv.")] = torch.cat([q, k, v])
        for key in [key for key in found if ".fc1_g." in key]:
            found[key.replace("_g", "")] = torch.cat([found.pop(key), found.pop(key.replace("_g", "_x"))])
        for key in [key for key in found if ".mlp.fc1_x." in key]:  # DINOv3's name for the first layer of a plain MLP
            found[key.replace("_x", "")] = found.pop(key)
        for key in [key for key in found if key.startswith("attn_pool")]:
            if self.config.pool not in ("map", "map_all"):  # a classifier of SigLIP has it, and does not use it
                del found[key]
        for key in [key for key in found if key.startswith("attn_pool.qkv.")]:
            q, kv = found[key].split([len(found[key]) // 3, 2 * len(found.pop(key)) // 3])
            found[key.replace("qkv", "q")], found[key.replace("qkv", "kv")] = q, kv
        for key in [key for key in found if key.startswith("head_dist.")]:
            both, other = [found.pop(key.replace("_dist", "")), found.pop(key)], 1 if key.endswith("weight") else 0
            share = 0.5  # of each head in the answer
            if gradients:  # a head of half the weight has twice the gradient; of two biases, both gradients are halves
                share = 2.0 if other else 1.0
            found[key.replace("_dist", "")] = share * (torch.cat(both, dim=1) if other else both[0] + both[1])
        if "pos_embed" in found and found["pos_embed"].ndim == 4:  # NaFlex
            found["pos_embed"] = found["pos_embed"].flatten(1, 2)
        for key in ("cls_token", "reg_token", "pos_embed"):
            if key in found:
                found[key] = found[key].reshape((1,) * (3 - found[key].ndim) + found[key].shape)
        for key in ("cls_token", "reg_token"):  # vit-pytorch and transformers' DINOv3 keep an empty one
            if key in found and found[key].numel() == 0:
                del found[key]
        for token in self.folded:
            rows = found[token].shape[1]
            first, found["pos_embed"] = found["pos_embed"].tensor_split([rows], dim=1)
            found[token] = found[token] if gradients else found[token] + first
        order = dict(c=self.config.channels, p=self.config.patch_size, q=self.config.patch_size)
        kernel = found["patch_embed.proj.weight"]
        if kernel.ndim == 5:  # Qwen3-VL sees an image as two equal frames, whose kernels have equal gradients
            found["patch_embed.proj.weight"] = kernel[:, :, 0] if gradients else kernel.sum(2)
        if kernel.ndim == 2:  # vit-pytorch and NaFlex
            found["patch_embed.proj.weight"] = rearrange(kernel, "d (p q c) -> d c p q", **order)
        if self.config.input_norm == "patches":
            for key in ("patch_embed.norm_in.weight", "patch_embed.norm_in.bias"):
                found[key] = rearrange(found[key], "(p q c) -> (c p q)", **order)
        return found

    def layers(self, module: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Their logits, and what each of their layers hands on."""
        outputs: list[Tensor] = []
        handles = []
        for block in module.get_submodule(self.blocks).children():
            if isinstance(block, nn.ModuleList):  # vit-pytorch adds the residual outside
                handles.append(block[1].register_forward_hook(lambda _, inputs, out: outputs.append(inputs[0] + out)))
            else:
                handles.append(block.register_forward_hook(lambda _, __, out: outputs.append(out)))
        logits = self.logits(module, images)
        for handle in handles:
            handle.remove()
        return logits, [self.tokens(out[0] if isinstance(out, tuple) else out, images) for out in outputs]


def rotation_of(model: Any) -> Rotation | None:
    """The rotation of a model of timm's, read from its module."""
    rope = getattr(getattr(model, "encoder", model), "rope", None)
    if rope is None:
        return None
    kind, order = type(rope).__name__, {"ij": "yx", "xy": "xy"}[rope.grid_indexing]
    if kind == "RotaryEmbeddingMixed":
        return Rotation(temperature=rope.temperature, order=order, learned=True)
    pairs = "halves" if rope.rotate_half else "adjacent"
    if kind == "RotaryEmbeddingDinoV3":
        assert (rope.normalize_coords, rope.min_period, rope.grid_offset) == ("separate", None, 0)
        return Rotation(temperature=rope.temperature, unit="image", order=order, pairs=pairs)
    assert (kind, rope.grid_type) == ("RotaryEmbeddingCat", "index")
    reference = rope.ref_feat_shape
    assert reference is None or reference[0] == reference[1]
    return Rotation(
        temperature=rope.temperature, offset=rope.grid_offset, order=order, pairs=pairs,
        reference=None if reference is None else reference[0],
    )  # fmt: skip


def mlp_of(mlp: Any) -> str:
    """The kind of an MLP of timm's, in our words."""
    if type(mlp).__name__ != "Mlp":
        assert isinstance(mlp.act, nn.SiLU)
        return "swiglu"
    tanh = type(mlp.act).__name__ == "GELUTanh" or getattr(mlp.act, "approximate", "none") == "tanh"
    return {"QuickGELU": "quick_gelu"}.get(type(mlp.act).__name__, "gelu_tanh" if tanh else "gelu")


def norm_of(norm: nn.Module) -> str:
    """The kind of a norm of timm's, in our words."""
    if isinstance(norm, timm.layers.RmsNorm):
        assert norm.elementwise_affine
        return "rms"
    assert isinstance(norm, nn.LayerNorm)
    return "layer"


def final_norm_of(model: Any) -> str:
    """Where a model of timm's has its final norm, in our words."""
    if hasattr(model, "encoder"):
        assert not model.norm.elementwise_affine
        return "pooled_plain"
    norms = (nn.LayerNorm, timm.layers.RmsNorm)
    if isinstance(model.fc_norm, norms):
        return "pooled"
    return "tokens" if isinstance(model.norm, norms) else "none"


def spread(module: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every tensor values of its own, of the size that training leaves.

    Zeros, ones and tiny biases would hide swapped tensors; large embeddings would hide a wrong eps.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if re.search(r"pos|token|class_embedding|latent", name):
                tensor.copy_(0.03 * noise)
            elif tensor.ndim > 1:
                patches = re.search(r"patch_embed|conv_proj|to_patch|embeds", name)
                tensor.copy_(noise * (0.03 if patches else 1.5) * tensor[0].numel() ** -0.5)
            elif name.endswith("bias"):
                tensor.copy_((0.01 if re.search(r"(proj|patch_embed)\w*\.bias", name) else 0.3) * noise)
            else:  # scales of norms and residuals
                tensor.copy_(1 + 0.3 * noise)
    return module.eval()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """max |difference| / max |reference|."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


TIMM_RULES = {
    r"(blocks\.\d+)\.gamma_([12])": r"\1.ls\2.gamma",
    r"(blocks\.\d+\.attn)\.([qv])_bias": r"\1.\2.bias",
    r"(blocks\.\d+\.attn)\.([qkv])_proj\.(weight|bias)": r"\1.\2.\3",
    r"dist_token": r"reg_token",
    r"(.+)": r"\1",
}


def _timm(
    option: str,
    image_size: Any = 32,
    config: Mapping[str, Any] = {},
    folded: tuple[str, ...] = (),
    kind: Any = timm.models.VisionTransformer,
    **theirs: Any,
) -> Reference:
    usual: dict[str, Any] = dict(
        img_size=image_size, patch_size=8, embed_dim=48, depth=3, num_heads=4, mlp_ratio=80 / 48, num_classes=7,
        dynamic_img_size=True,
    )  # fmt: skip
    if kind is not timm.models.Eva:
        usual["fc_norm"] = False
    return Reference(
        library="timm",
        option=option,
        config=ViTConfig(**SIZES | {"image_size": image_size} | config),
        build=lambda: kind(**usual | theirs),
        rules=TIMM_RULES,
        blocks="blocks",
        logits=lambda model, images: model(images),
        image_sizes=((48, 48), (24, 40), (16, 16)),
        folded=folded,
    )


def _hybrid(option: str, units: tuple[int, ...], kernel: int) -> Reference:
    def build(**theirs: Any) -> nn.Module:
        backbone = timm.models.vision_transformer_hybrid._resnetv2(units)
        return timm.models.VisionTransformer(embed_layer=partial(timm.layers.HybridEmbed, backbone=backbone), **theirs)

    return _timm(option, config={"stem": units}, kind=build, patch_size=kernel)


def _rotary(option: str, rope: Rotation, config: Mapping[str, Any] = {}, **theirs: Any) -> Reference:
    """A model of timm's Eva with the rotation of EVA-02, the Perception Encoder or RoPE-ViT."""
    return _timm(
        option,
        config={"rope": rope} | config,
        kind=timm.models.Eva,
        use_rot_pos_emb=True,
        rope_type="mixed" if rope.learned else "cat",
        rope_temperature=rope.temperature,
        rope_grid_offset=rope.offset,
        rope_grid_indexing="ij" if rope.order == "yx" else "xy",
        ref_feat_shape=rope.reference,
        **theirs,
    )


def _qwen3() -> Reference:
    def build(**theirs: Any) -> nn.Module:
        return timm.models.qwen3_vit.Qwen3VitClassifier(
            img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, mlp_ratio=80 / 48, num_classes=7,
            pos_embed_grid_size=4, **theirs,
        )  # fmt: skip

    config = {
        "rope": Rotation(pairs="halves"), "class_token": False, "pool": "mean", "final_norm": "pooled_plain",
        "mlp": "gelu_tanh", "resample": "jax",
    }  # fmt: skip
    return Reference(
        library="timm",
        option="Qwen3",
        config=ViTConfig(**SIZES | {"image_size": 32} | config),
        build=build,
        rules={r"encoder\.(.+)": r"\1", **TIMM_RULES},
        blocks="encoder.blocks",
        logits=lambda model, images: model(images),
        image_sizes=((48, 48), (24, 40), (16, 16)),
    )


def _naflex() -> Reference:
    def build() -> nn.Module:
        return timm.models.NaFlexVit(
            patch_size=8, embed_dim=48, depth=3, num_heads=4, mlp_ratio=80 / 48, num_classes=7, act_layer="gelu_tanh",
            global_pool="map", pos_embed_grid_size=(4, 4), pos_embed_interp_mode="bilinear",
        )  # fmt: skip

    return Reference(
        library="timm",
        option="NaFlex",
        config=ViTConfig(**SIZES | siglip | {"resample": "naflex"}),
        build=build,
        rules={r"embeds\.pos_embed": "pos_embed", r"embeds\.proj\.(.+)": r"patch_embed.proj.\1", **TIMM_RULES},
        blocks="blocks",
        logits=lambda model, images: model(images),
        image_sizes=((48, 48), (24, 40), (16, 16), (8, 56)),
    )


def _naflex_of_transformers(name: str, option: str, config: Mapping[str, Any], **theirs: Any) -> Reference:
    """SigLIP 2 NaFlex: its input are patches in a row, a mask of the padding, and the shape of the image."""
    kind = dict(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, patch_size=8, num_patches=16,
        attn_implementation="eager",
    )  # fmt: skip
    kind_of_model = getattr(transformers, name)

    def build() -> nn.Module:
        options = kind | theirs
        if kind_of_model.config_class.model_type == "siglip2":
            options = {"vision_config": options, "num_labels": 7}
        return kind_of_model(kind_of_model.config_class(**options))

    def run(model: nn.Module, images: Tensor) -> Tensor:
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8)
        padding = 0 if images.shape[2] == 32 else 3  # which must not change anything
        mask = torch.ones(patches.shape[:2], dtype=torch.int32)
        padded = nn.functional.pad(patches, (0, 0, 0, padding), value=1.0)
        shapes = torch.tensor([[images.shape[2] // 8, images.shape[3] // 8]] * len(images))
        output = model(padded, nn.functional.pad(mask, (0, padding)), shapes)
        return output.logits if hasattr(output, "logits") else output.pooler_output

    ours = ViTConfig(**SIZES | siglip_alone | {"resample": "naflex"} | config)
    blocks = "encoder.layers" if name.endswith("VisionModel") else "vision_model.encoder.layers"
    sizes = ((48, 48), (24, 40), (16, 16), (8, 56))
    return Reference("transformers", option, ours, build, TRANSFORMERS_RULES, blocks, run, sizes)


def _qwen3_of_transformers(name: str, option: str) -> Reference:
    """The tower of Qwen3-VL or Qwen3.5: its input are patches of two equal frames, ordered in squares of 2 x 2."""

    def run(model: nn.Module, images: Tensor) -> Tensor:
        frames = images[:, :, None].expand(-1, -1, 2, -1, -1)
        patches = rearrange(frames, "b c t (h m p) (w l q) -> (b h w m l) (c t p q)", m=2, l=2, p=8, q=8)
        grids = torch.tensor([[1, images.shape[2] // 8, images.shape[3] // 8]] * len(images))
        return tokens(model(patches, grids).last_hidden_state, images).mean(1)

    def tokens(rows: Tensor, images: Tensor) -> Tensor:
        h, w = (side // 16 for side in images.shape[2:])
        return rearrange(rows, "(b h w m l) d -> b (h m w l) d", h=h, w=w, m=2, l=2)

    kind = getattr(transformers, name)
    theirs = dict(
        depth=3, hidden_size=48, intermediate_size=80, num_heads=4, patch_size=8, out_hidden_size=48,
        num_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    if name == "Qwen3VLVisionModel":
        theirs["deepstack_visual_indexes"] = []
    ours = {
        "rope": Rotation(pairs="halves"), "class_token": False, "pool": "mean", "final_norm": "none",
        "mlp": "gelu_tanh", "resample": "jax", "num_classes": 0,
    }  # fmt: skip
    return Reference(
        library="transformers",
        option=option,
        config=ViTConfig(**SIZES | ours),
        build=lambda: kind(kind.config_class(**theirs)),
        rules={r"merger\..+": "unused", r"pos_embed\.weight": "pos_embed",
               r"(.+\.mlp)\.linear_(.+)": r"\1.\2", r"(.+)": r"\1"},
        blocks="blocks",
        logits=run,
        image_sizes=((48, 48), (32, 48), (16, 64)),
        tokens=tokens,
    )  # fmt: skip


def _dinov3(option: str, config: Mapping[str, Any] = {}, **theirs: Any) -> Reference:
    ours = dict(
        positions="none",
        rope=DINOV3_ROPE,
        registers=4,
        cls_position=False,
        layer_scale=1e-5,
        norm_eps=1e-5,
        pool="mean",
        qkv_bias=False,
    )
    return _timm(
        option,
        config=ours | config,
        kind=timm.models.Eva,
        rope_type="dinov3",
        rope_temperature=100,
        rope_rotate_half=True,
        use_rot_pos_emb=True,
        use_abs_pos_emb=False,
        num_reg_tokens=4,
        use_fc_norm=False,
        init_values=1e-5,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
        **{"qkv_bias": False} | theirs,
    )


# transformers 5 in memory; the names on disk are the concern of vitlite.checkpoints.key_mapping and its tests
TRANSFORMERS_RULES = {
    r"(?:\w+\.)?embeddings\.cls_token": "cls_token",
    r"(?:\w+\.)?embeddings\.class_embedding": "cls_token",
    r"(?:\w+\.)?embeddings\.(?:register_tokens|distillation_token)": "reg_token",
    r"(?:\w+\.)?embeddings\.position_embeddings": "pos_embed",
    r"(?:\w+\.)?embeddings\.position_embedding\.weight": "pos_embed",
    r"embeddings\.patch_embed\.(.+)": r"patch_embed.proj.\1",
    r"embeddings\.rms_norm\.(.+)": r"patch_embed.norm.\1",
    r"encoder\.layers\.(\d+)\.attention\.out_proj\.(.+)": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.(\d+)\.rms_norm([12])\.(.+)": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.(\d+)\.ffn\.gate_proj\.(.+)": r"blocks.\1.mlp.fc1_g.\2",
    r"encoder\.layers\.(\d+)\.ffn\.up_proj\.(.+)": r"blocks.\1.mlp.fc1_x.\2",
    r"encoder\.layers\.(\d+)\.ffn\.down_proj\.(.+)": r"blocks.\1.mlp.fc2.\2",
    r"rms_norm\.(.+)": r"norm.\1",
    r"(?:\w+\.)?embeddings\.mask_token": "unused",
    r"(?:\w+\.)?embeddings\.patch_embeddings\.projection\.(.+)": r"patch_embed.proj.\1",
    r"(?:\w+\.)?embeddings\.patch_embeddings?\.(weight|bias)": r"patch_embed.proj.\1",
    r"(?:\w+\.)?pre_layrnorm\.(.+)": r"norm_pre.\1",
    r"(?:\w+\.)*layers?\.(\d+)\.(?:attention|self_attn)\.([qkv])_proj\.(.+)": r"blocks.\1.attn.\2.\3",
    r"(?:\w+\.)*layers?\.(\d+)\.(?:attention\.o_proj|self_attn\.out_proj)\.(.+)": r"blocks.\1.attn.proj.\2",
    r"(?:\w+\.)*layers?\.(\d+)\.(?:layernorm_before|layer_norm1|norm1)\.(.+)": r"blocks.\1.norm1.\2",
    r"(?:\w+\.)*layers?\.(\d+)\.(?:layernorm_after|layer_norm2|norm2)\.(.+)": r"blocks.\1.norm2.\2",
    r"(?:\w+\.)*layers?\.(\d+)\.layer_scale([12])\.lambda1": r"blocks.\1.ls\2.gamma",
    r"(?:\w+\.)*layers?\.(\d+)\.mlp\.(fc[12])\.(.+)": r"blocks.\1.mlp.\2.\3",
    r"(?:\w+\.)*layers?\.(\d+)\.mlp\.gate_proj\.(.+)": r"blocks.\1.mlp.fc1_g.\2",
    r"(?:\w+\.)*layers?\.(\d+)\.mlp\.up_proj\.(.+)": r"blocks.\1.mlp.fc1_x.\2",
    r"(?:\w+\.)*layers?\.(\d+)\.mlp\.down_proj\.(.+)": r"blocks.\1.mlp.fc2.\2",
    r"(?:vision_model\.)?head\.probe": "attn_pool.latent",
    r"(?:vision_model\.)?head\.attention\.in_proj_(.+)": r"attn_pool.qkv.\1",
    r"(?:vision_model\.)?head\.attention\.out_proj\.(.+)": r"attn_pool.proj.\1",
    r"(?:vision_model\.)?head\.layernorm\.(.+)": r"attn_pool.norm.\1",
    r"(?:vision_model\.)?head\.mlp\.(.+)": r"attn_pool.mlp.\1",
    r"(?:\w+\.)?(?:layernorm|post_layernorm|norm)\.(.+)": r"norm.\1",
    r"pooler\.dense\.(.+)": r"pre_logits.\1",
    r"distillation_classifier\.(.+)": r"head_dist.\1",
    r"(?:classifier|cls_classifier|visual_projection)\.(.+)": r"head.\1",
}


def _transformers(
    name: str,
    option: str,
    blocks: str,
    config: Mapping[str, Any] = {},
    logits: Callable[[Any], Tensor] = lambda output: output.logits,
    folded: tuple[str, ...] = (),
    inputs: Mapping[str, Any] = {},
    image_sizes: tuple[tuple[int, int], ...] = ((48, 48), (24, 40), (16, 16)),
    model_options: Mapping[str, Any] = {},
    **theirs: Any,
) -> Reference:
    kind = dict(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, image_size=32, patch_size=8,
        num_labels=7, attn_implementation="eager",
    )  # fmt: skip
    ours = ViTConfig(**SIZES | {"norm_eps": 1e-12, "resample": "transformers"} | config)

    def build() -> nn.Module:
        kind_of_model = getattr(transformers, name)
        options = kind | theirs
        if kind_of_model.config_class.model_type == "siglip":  # which has a config for its part for images
            options = {"vision_config": options, "num_labels": 7}
        return kind_of_model(kind_of_model.config_class(**options), **model_options)

    def run(model: nn.Module, images: Tensor) -> Tensor:
        resized = {"interpolate_pos_encoding": True} if tuple(images.shape[2:]) != (32, 32) else {}
        if "DINOv3" in name:  # has nothing to interpolate
            resized = {}
        return logits(model(images, **resized, **inputs))

    return Reference("transformers", option, ours, build, TRANSFORMERS_RULES, blocks, run, image_sizes, folded)


def _aimv2_of_transformers(option: str, is_native: bool) -> Reference:
    """AIMv2 without its attention pooling, which only models trained with text have."""

    def build() -> nn.Module:
        config = transformers.models.aimv2.configuration_aimv2.Aimv2VisionConfig(
            hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, image_size=32,
            patch_size=8, use_head=False, is_native=is_native, attn_implementation="eager",
        )  # fmt: skip
        return transformers.Aimv2VisionModel(config)

    return Reference(
        library="transformers",
        option=option,
        config=ViTConfig(**SIZES | aimv2 | {"num_classes": 0, "positions": "sincos2d" if is_native else "learned"}),
        build=build,
        rules=TRANSFORMERS_RULES,
        blocks="encoder.layers",
        logits=lambda model, images: model(images).last_hidden_state.mean(1),
        image_sizes=((48, 48), (24, 40), (16, 16)) if is_native else (),
    )


TORCHVISION_RULES = {
    r"class_token": "cls_token",
    r"conv_proj\.(.+)": r"patch_embed.proj.\1",
    r"encoder\.pos_embedding": "pos_embed",
    r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.(.+)": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(.+)": r"blocks.\1.attn.qkv.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(.+)": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.0\.(.+)": r"blocks.\1.mlp.fc1.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.3\.(.+)": r"blocks.\1.mlp.fc2.\2",
    r"encoder\.ln\.(.+)": r"norm.\1",
    r"heads\.pre_logits\.(.+)": r"pre_logits.\1",
    r"heads\.head\.(.+)": r"head.\1",
}


def _torchvision(option: str, config: Mapping[str, Any] = {}, **theirs: Any) -> Reference:
    kind = dict(patch_size=8, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=80, num_classes=7) | theirs
    build = torchvision.models.VisionTransformer

    def run(model: nn.Module, images: Tensor) -> Tensor:
        if images.shape[2] == 32:
            return model(images)
        resized = build(image_size=images.shape[2], **kind).eval()  # its own way to another size: a new model
        state = torchvision.models.vision_transformer.interpolate_embeddings(images.shape[2], 8, model.state_dict())
        resized.load_state_dict(state)
        return resized(images)

    return Reference(
        library="torchvision",
        option=option,
        config=ViTConfig(**SIZES | {"resample": "torchvision"} | config),
        build=lambda: build(image_size=32, **kind),
        rules=TORCHVISION_RULES,
        blocks="encoder.layers",
        logits=run,
        image_sizes=((48, 48), (16, 16)),
    )


VIT_PYTORCH_RULES = {
    r"cls_token": "cls_token",
    r"pos_embedding": "pos_embed",
    r"to_patch_embedding\.1\.(.+)": r"patch_embed.norm_in.\1",
    r"to_patch_embedding\.2\.(.+)": r"patch_embed.proj.\1",
    r"to_patch_embedding\.3\.(.+)": r"patch_embed.norm.\1",
    r"transformer\.layers\.(\d+)\.0\.norm\.(.+)": r"blocks.\1.norm1.\2",
    r"transformer\.layers\.(\d+)\.0\.to_qkv\.(.+)": r"blocks.\1.attn.qkv.\2",
    r"transformer\.layers\.(\d+)\.0\.to_out\.0\.(.+)": r"blocks.\1.attn.proj.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.0\.(.+)": r"blocks.\1.norm2.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.1\.(.+)": r"blocks.\1.mlp.fc1.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.4\.(.+)": r"blocks.\1.mlp.fc2.\2",
    r"transformer\.norm\.(.+)": r"norm.\1",
    r"mlp_head\.(.+)": r"head.\1",
}


def _vit_pytorch(option: str, pool: str, config: Mapping[str, Any], head_dim: int = 12) -> Reference:
    def build() -> nn.Module:
        first = "cls" if pool == "mean_with_cls" else pool
        model = vit_pytorch.ViT(
            image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=80, num_classes=7, pool=first,
            dim_head=head_dim,
        )  # fmt: skip
        model.pool = pool.partition("_")[0]  # with a class token, its mean counts that too, as before 1.16
        return model

    ours = dict(norm_eps=1e-5, qkv_bias=False, input_norm="patches", head_dim=head_dim, pool=pool)
    return Reference(
        library="vit-pytorch",
        option=option,
        config=ViTConfig(**SIZES | ours | config),
        build=build,
        rules=VIT_PYTORCH_RULES,
        blocks="transformer.layers",
        logits=lambda model, images: model(images),
    )


mean = dict(pool="mean")
clip = dict(input_norm="tokens", mlp="quick_gelu", norm_eps=1e-5)
dinov2 = dict(pool="cls_and_mean", layer_scale=1.0, norm_eps=1e-6, mlp_dim=192)
swiglu = dict(mlp_layer=timm.layers.SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=160 / 48)
siglip = dict(pool="map", class_token=False, mlp="gelu_tanh")
pooled = dict(pool="map", registers=3, cls_position=False)
registers = dict(reg_tokens=3, no_embed_class=True)
siglip_alone = siglip | {"num_classes": 0, "norm_eps": 1e-6}
TANH = "gelu_pytorch_tanh"
dinov3 = dict(
    positions="none",
    rope=DINOV3_ROPE,
    registers=4,
    cls_position=False,
    layer_scale=1.0,
    norm_eps=1e-5,
    num_classes=0,
    qkv_bias=True,
)
eva02 = mean | {"mlp": "swiglu", "final_norm": "pooled"}
separate = dict(swiglu_mlp=True, scale_mlp=True, qkv_fused=False)
PE, PE_WITHOUT_CLS = Rotation(reference=3, offset=1, order="xy"), Rotation(reference=3, order="xy")
pe = {"input_norm": "tokens", "norm_eps": 1e-5}
perception = dict(attn_type="rope", use_pre_transformer_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-5))
pe_pool = dict(global_pool="map", attn_pool_num_heads=8, attn_pool_mlp_ratio=4.0)
pe_mean = dict(global_pool="avg", use_post_transformer_norm=False, use_fc_norm=False)
aimv2 = mean | {
    "norm": "rms", "norm_eps": 1e-5, "input_norm": "projected", "mlp": "swiglu", "qkv_bias": False, "class_token": False
}  # fmt: skip
apple = dict(
    norm_layer=partial(timm.layers.RmsNorm, eps=1e-5), embed_norm_layer=partial(timm.layers.RmsNorm, eps=1e-5),
    mlp_layer=timm.layers.SwiGLU, act_layer=nn.SiLU, qkv_bias=False, proj_bias=False, class_token=False,
    global_pool="avg",
)  # fmt: skip
NAVER, MIXED = Rotation(temperature=100, order="xy"), Rotation(temperature=10, order="xy", learned=True)
naver = dict(attn_type="rope", init_values=1e-5, global_pool="token")
noise = torch.arange(16.0).expand(2, -1)  # ViTMAE masks nothing and shuffles nothing


def pooled_output(output: Any) -> Tensor:
    return output.pooler_output


REFERENCES = [
    _timm("class token"),
    _timm("class token, norm after pooling", config={"final_norm": "pooled"}, fc_norm=True),
    _timm("mean", config=mean, global_pool="avg"),
    _timm("mean, norm after pooling", config=mean | {"final_norm": "pooled"}, global_pool="avg", fc_norm=True),
    _timm("mean, no class token", config=mean | {"class_token": False}, global_pool="avg", class_token=False),
    _timm("no position for the class token", config={"cls_position": False}, no_embed_class=True),
    _timm("registers", config={"registers": 3, "cls_position": False}, reg_tokens=3, no_embed_class=True),
    _timm(
        "mean, registers, no class token",
        config=mean | {"registers": 3, "cls_position": False, "class_token": False},
        global_pool="avg",
        reg_tokens=3,
        no_embed_class=True,
        class_token=False,
    ),
    _timm(
        "norm before the blocks, quick GELU, eps 1e-5",
        config=clip,
        pre_norm=True,
        act_layer="quick_gelu",
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
    ),
    _timm("tanh GELU", config={"mlp": "gelu_tanh"}, act_layer="gelu_tanh"),
    _timm("layer scale", config={"layer_scale": 1e-5}, init_values=1e-5),
    _timm("norms inside attention and MLP", config={"inner_norm": "both"}, scale_attn_norm=True, scale_mlp_norm=True),
    _timm("no bias for q, k and v", config={"qkv_bias": False}, qkv_bias=False),
    _timm("no positions", config={"positions": "none"}, pos_embed="none"),
    _timm("attention pooling", config=siglip, global_pool="map", class_token=False, act_layer="gelu_tanh"),
    _timm("attention pooling beside a class token and registers", config=pooled, global_pool="map", **registers),
    _dinov3("DINOv3"),
    _dinov3("DINOv3, class token, biases", {"pool": "cls", "qkv_bias": True}, global_pool="token", qkv_bias=True),
    _dinov3("DINOv3 plus", {"mlp": "swiglu"}, swiglu_mlp=True, swiglu_align_to=8),
    _rotary("EVA-02 small", Rotation(reference=3), eva02, swiglu_mlp=True),
    _rotary("EVA-02 base", Rotation(reference=3), eva02 | {"inner_norm": "mlp"}, **separate),
    _rotary(
        "EVA-02 CLIP",
        Rotation(reference=3),
        {"mlp": "swiglu", "inner_norm": "both"},
        global_pool="token",
        scale_attn_inner=True,
        **separate,
    ),
    _rotary("PE core", PE, pe | {"pool": "map_all"}, **perception, **pe_pool),
    _rotary(
        "PE core without a class token",
        PE_WITHOUT_CLS,
        pe | {"pool": "map_all", "class_token": False},
        class_token=False,
        **perception,
        **pe_pool,
    ),
    _rotary("PE spatial", PE, pe | mean | {"final_norm": "none"}, **perception, **pe_mean),
    _rotary(
        "PE lang", PE, pe | mean | {"final_norm": "none", "layer_scale": 0.1}, init_values=0.1, **perception, **pe_mean
    ),
    _rotary("RoPE-ViT", NAVER, {"positions": "none", "layer_scale": 1e-5}, use_abs_pos_emb=False, **naver),
    _rotary("RoPE-ViT with a table", NAVER, {"cls_position": False, "layer_scale": 1e-5}, no_embed_class=True, **naver),
    _rotary("RoPE-ViT, mixed", MIXED, {"positions": "none", "layer_scale": 1e-5}, use_abs_pos_emb=False, **naver),
    _rotary(
        "RoPE-ViT, mixed, with a table",
        MIXED,
        {"cls_position": False, "layer_scale": 1e-5},
        no_embed_class=True,
        **naver,
    ),
    _rotary(
        "ViT with rotation and registers",
        Rotation(reference=3),
        mean
        | {
            "positions": "none",
            "class_token": False,
            "registers": 4,
            "cls_position": False,
            "layer_scale": 1e-5,
            "final_norm": "pooled",
        },
        class_token=False,
        num_reg_tokens=4,
        use_abs_pos_emb=False,
        init_values=1e-5,
    ),
    _naflex(),
    _qwen3(),
    _timm("AIMv2", config=aimv2, **apple),
    _timm(
        "AIMv2, class token, norm after pooling, biases of q, k and v",
        config=aimv2 | {"class_token": True, "pool": "cls", "final_norm": "pooled", "qkv_bias": True},
        **apple | {"class_token": True, "global_pool": "token", "qkv_bias": True, "fc_norm": True},
    ),
    _timm("gated MLP", config={"mlp": "swiglu"}, **swiglu),
    _timm(
        "EVA",
        config=mean | {"final_norm": "pooled"},
        kind=timm.models.Eva,
        global_pool="avg",
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    ),
    _timm(
        "DeiT, distilled",
        config={"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
        kind=timm.models.deit.VisionTransformerDistilled,
        folded=("cls_token", "reg_token"),
    ),
    _hybrid("hybrid", (1, 2), kernel=1),
    _hybrid("hybrid, root alone", (), kernel=2),
    _timm("no final norm", config={"final_norm": "none"}, final_norm=False),
    _timm(
        "registers with positions",
        config={"registers": 3, "cls_position": False},
        reg_tokens=3,
        folded=("cls_token", "reg_token"),
    ),
    _timm(
        "mean, registers with positions, no class token",
        config=mean | {"registers": 3, "cls_position": False, "class_token": False},
        global_pool="avg",
        reg_tokens=3,
        class_token=False,
        folded=("reg_token",),
    ),
    _timm("images that are not square", image_size=(32, 48)),
    _timm("one channel, no head", config={"channels": 1, "num_classes": 0}, in_chans=1, num_classes=0),
    _transformers("ViTForImageClassification", "ViT", "vit.layers"),
    _transformers(
        "ViTForImageClassification", "ViT, tanh GELU", "vit.layers", {"mlp": "gelu_tanh"}, hidden_act="gelu_new"
    ),
    _transformers("ViTForImageClassification", "ViT, no bias", "vit.layers", {"qkv_bias": False}, qkv_bias=False),
    _transformers(
        "ViTModel", "ViT, pooler", "layers", {"pre_logits": 48, "num_classes": 0}, lambda output: output.pooler_output
    ),
    _transformers(
        "DeiTForImageClassification",
        "DeiT, distilled",
        "deit.layers",
        {"registers": 1, "cls_position": False},
        folded=("cls_token", "reg_token"),
    ),
    _transformers(
        "DeiTForImageClassificationWithTeacher",
        "DeiT, distilled, two heads",
        "deit.layers",
        {"registers": 1, "cls_position": False, "pool": "cls_and_distillation"},
        folded=("cls_token", "reg_token"),
    ),
    _transformers("IJepaForImageClassification", "I-JEPA", "ijepa.layers", mean | {"class_token": False}),
    _transformers(
        "ViTMAEModel",
        "MAE",
        "layers",
        {"num_classes": 0},
        lambda output: output.last_hidden_state[:, 0],
        inputs={"noise": noise},
        image_sizes=(),
        mask_ratio=0.0,
    ),
    _transformers("Dinov2ForImageClassification", "DINOv2", "dinov2.encoder.layer", dinov2),
    _transformers(
        "Dinov2WithRegistersForImageClassification",
        "DINOv2, registers",
        "dinov2_with_registers.encoder.layer",
        dinov2 | {"registers": 4, "cls_position": False, "resample": "timm"},  # theirs is antialiased here
        folded=("cls_token",),
    ),
    _transformers(
        "Dinov2ForImageClassification",
        "DINOv2, gated",
        "dinov2.encoder.layer",
        dinov2 | {"mlp": "swiglu", "mlp_dim": 128},
        use_swiglu_ffn=True,
    ),
    _transformers(
        "Dinov2WithRegistersForImageClassification",
        "DINOv2, registers, gated",
        "dinov2_with_registers.encoder.layer",
        dinov2 | {"mlp": "swiglu", "mlp_dim": 128, "registers": 4, "cls_position": False, "resample": "timm"},
        folded=("cls_token",),
        use_swiglu_ffn=True,
    ),
    _transformers("DINOv3ViTModel", "DINOv3", "model.layer", dinov3, pooled_output, num_register_tokens=4),
    _transformers(
        "DINOv3ViTModel",
        "DINOv3, gated",
        "model.layer",
        dinov3 | {"mlp": "swiglu"},
        pooled_output,
        num_register_tokens=4,
        use_gated_mlp=True,
        hidden_act="silu",
    ),
    _transformers(
        "DINOv3ViTModel",
        "DINOv3, no registers, a bias for keys",
        "model.layer",
        dinov3 | {"registers": 0},
        pooled_output,
        key_bias=True,
    ),
    _transformers(
        "DINOv3ViTModel",
        "DINOv3, no biases",
        "model.layer",
        dinov3 | {"qkv_bias": False},
        pooled_output,
        num_register_tokens=4,
        query_bias=False,
        value_bias=False,
    ),
    _transformers("SiglipVisionModel", "SigLIP", "encoder.layers", siglip_alone, pooled_output, hidden_act=TANH),
    _transformers(
        "SiglipForImageClassification",
        "SigLIP, classifier",
        "vision_model.encoder.layers",
        siglip_alone | {"pool": "mean", "num_classes": 7, "mlp": "quick_gelu"},  # a mean of few patches hides the other
        hidden_act="quick_gelu",
    ),
    _naflex_of_transformers("Siglip2VisionModel", "SigLIP 2 NaFlex", {}, hidden_act=TANH),
    _naflex_of_transformers(
        "Siglip2ForImageClassification",
        "SigLIP 2 NaFlex, classifier",
        {"pool": "mean", "num_classes": 7, "mlp": "quick_gelu"},
        hidden_act="quick_gelu",
    ),
    _aimv2_of_transformers("AIMv2", is_native=False),
    _aimv2_of_transformers("AIMv2, native resolution", is_native=True),
    _qwen3_of_transformers("Qwen3VLVisionModel", "Qwen3-VL"),
    _qwen3_of_transformers("Qwen3_5VisionModel", "Qwen3.5"),
    _transformers(
        "CLIPVisionModelWithProjection",
        "CLIP",
        "vision_model.encoder.layers",
        clip,
        lambda output: output.image_embeds,
        projection_dim=7,
        hidden_act="quick_gelu",
    ),
    _torchvision("class token"),
    _torchvision("a tanh layer before the head", {"pre_logits": 24}, representation_size=24),
    _vit_pytorch("class token", "cls", {}),
    _vit_pytorch("class token, wide heads", "cls", {}, head_dim=16),
    _vit_pytorch("mean", "mean", {"class_token": False}),
    _vit_pytorch("mean that counts the class token (before 1.16)", "mean_with_cls", {}),
]

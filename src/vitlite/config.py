"""The configuration of a Vision Transformer. This module does not import torch."""

import dataclasses
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vitlite.errors import ConfigError, closest

Pool = Literal["cls", "mean", "mean_with_cls", "cls_and_mean", "cls_and_distillation", "map", "map_all"]
Positions = Literal["learned", "sincos2d", "none"]
Resample = Literal["timm", "transformers", "torchvision", "jax", "tensorflow", "naflex"]
Mlp = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
Norm = Literal["layer", "rms"]
InputNorm = Literal["none", "tokens", "patches", "projected"]
InnerNorm = Literal["none", "mlp", "both"]
FinalNorm = Literal["tokens", "pooled", "pooled_plain", "none"]
LARGEST = 2**31 - 1  # larger integers overflow where tensors are sized


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The configuration of rotary positions: rotations of queries and keys that depend on the position of the patch.

    In each head, half of the channel pairs are rotated by the row of the patch and half by the column. Of the m pairs
    in each half, pair j is rotated by the angle position / temperature ** (j / m).
    """

    temperature: float = 10000.0
    unit: Literal["patches", "image"] = "patches"  # "image": DINOv3's, the centres of patches from -2 pi to 2 pi
    reference: int | None = None  # multiply positions by reference / patches of the side; None: no scaling
    offset: float = 0.0  # position of the first patch
    order: Literal["yx", "xy"] = "yx"  # which of row and column the first pairs use
    pairs: Literal["adjacent", "halves"] = "adjacent"  # "halves": a pair has one channel of each half of the head
    learned: bool = False  # learned frequencies for each block and head, in which row and column mix

    def __post_init__(self) -> None:
        for name in ("temperature", "offset"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= LARGEST:
                raise ConfigError(f"rope.{name} must be a number from 0 to {LARGEST}, got {value!r}.")
            object.__setattr__(self, name, float(value))
        if self.temperature <= 0:
            raise ConfigError("rope.temperature must be greater than 0, got 0.")
        if self.reference is not None and (type(self.reference) is not int or not 1 <= self.reference <= LARGEST):
            raise ConfigError(f"rope.reference must be None or a positive integer, got {self.reference!r}.")
        choices_of = {"unit": ("patches", "image"), "order": ("yx", "xy"), "pairs": ("adjacent", "halves")}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"rope.{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}.")
        if type(self.learned) is not bool:
            raise ConfigError(f"rope.learned must be True or False, got {self.learned!r}.")


DINOV3_ROPE = Rotation(temperature=100.0, unit="image", pairs="halves")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The configuration of a `ViT`.

    Args:
        image_size: Pixels: the side of a square, or (height, width).
        patch_size: Side of a patch in pixels. With a stem, the stem's stride times the projection's kernel size.
        dim: Width of a token.
        depth: Number of blocks.
        heads: Number of attention heads in each block.
        mlp_dim: Hidden width of an MLP. With `mlp="swiglu"`, the width after gating.
        num_classes: Number of outputs of the head. With 0, there is no head, and the model returns the pooled vector.
        pool: "cls": the class token. "mean": the mean of the patch tokens. "mean_with_cls": the mean of all tokens
            (vit-pytorch before 1.16). "cls_and_mean": both vectors, concatenated (DINOv2). "cls_and_distillation": the
            class token and the only register, concatenated (distilled DeiT). "map": attention from a learned query to
            the patches (SigLIP). "map_all": the same to all tokens, with 8 heads and an MLP of width 4 dim (Perception
            Encoder).
        channels: Number of image channels.
        class_token: If True, put a class token before the patches.
        registers: Number of learned tokens between the class token and the patches.
        positions: What is added to the tokens: "learned", "sincos2d" or "none".
        rope: Rotation of queries and keys, in addition to `positions`. Attention then depends on how far apart and in
            which direction two patches lie.
        cls_position: If False, the position table covers only the patches.
        resample: Library that resizes the position table to other image sizes in the same way: "timm", "transformers",
            "torchvision", "jax", "tensorflow" or "naflex".
        head_dim: Width of an attention head. None means dim / heads.
        qkv_bias: If True, queries, keys and values have a bias.
        mlp: Activation of the MLPs: "gelu" (exact), "gelu_tanh" or "quick_gelu". "swiglu": a gated MLP, in which the
            first layer computes two vectors. One passes through SiLU before they are multiplied.
        norm: "layer", or "rms": RMS norms, and linear layers of blocks without biases, except as in `qkv_bias` (AIMv2).
        norm_eps: Number added to the variance in a norm.
        input_norm: "none". "tokens": a norm before the blocks, and no bias of the patch projection (CLIP). "patches":
            norms before and after the patch projection (vit-pytorch). "projected": a norm after the patch projection
            (AIMv2).
        inner_norm: A norm before the output projection of no layer ("none"), of the MLP ("mlp", EVA-02), or of the MLP
            and attention ("both", BEiT-3).
        final_norm: "tokens": before pooling. "pooled": after pooling. "pooled_plain": after pooling, without weights
            (Qwen3). "none".
        stem: For hybrids, the number of units in each stage of the ResNet. () means only its first layers.
        layer_scale: Initial value of the learned scale of each residual branch. None means no scale.
        pre_logits: Width of the tanh layer before the head. 0 means no such layer.
        cosine_head: For labels from text: the head normalises its input (0, SigLIP) or a projection of this width
            (CLIP).
        dropout: Dropout rate in training.
        drop_path: Stochastic depth rate of the last block in training. It rises linearly from 0 in the first block.
        checkpointing: If True, recompute blocks in the backward pass instead of storing them.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    num_classes: int = 1000
    pool: Pool = "cls"
    channels: int = 3
    class_token: bool = True
    registers: int = 0
    positions: Positions = "learned"
    rope: Rotation | None = None
    cls_position: bool = True
    resample: Resample = "timm"
    head_dim: int | None = None
    qkv_bias: bool = True
    mlp: Mlp = "gelu"
    norm: Norm = "layer"
    norm_eps: float = 1e-6
    input_norm: InputNorm = "none"
    inner_norm: InnerNorm = "none"
    final_norm: FinalNorm = "tokens"
    stem: tuple[int, ...] | None = None
    layer_scale: float | None = None
    pre_logits: int = 0
    cosine_head: int | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("image_size", "stem"):
            if isinstance(getattr(self, name), list):  # as read from JSON
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.rope, dict):
            object.__setattr__(self, "rope", _rotation_from(self.rope))
        _check_values(self)
        _check_numbers(self)
        if isinstance(self.image_size, tuple) and self.size[0] == self.size[1]:
            object.__setattr__(self, "image_size", self.size[0])
        _check_shape(self)
        _check_pooling(self)

    @property
    def size(self) -> tuple[int, int]:
        """The height and the width of an image in pixels."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        return self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches along the height and along the width of an image."""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens before the patch tokens: the class token and the registers."""
        return self.class_token + self.registers

    @property
    def tokens(self) -> int:
        """The number of tokens for one image of size `image_size`, including the class token and the registers."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def position_rows(self) -> int:
        """The number of rows in the learned position table."""
        return self.grid[0] * self.grid[1] + (self.class_token and self.cls_position)

    @property
    def attention_dim(self) -> int:
        """The width of all attention heads together: `heads * head_dim`, or `dim` if `head_dim` is None."""
        return self.heads * (self.head_dim or self.dim // self.heads)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.attention_dim // self.heads

    @property
    def pooled_dim(self) -> int:
        """The width of the pooled vector: `dim`, or `2 * dim` if `pool` concatenates two vectors."""
        return self.dim * (2 if self.pool in ("cls_and_mean", "cls_and_distillation") else 1)

    @property
    def pool_heads(self) -> int:
        """The number of heads of the attention pooling layer."""
        return 8 if self.pool == "map_all" else self.heads

    @property
    def pool_mlp_dim(self) -> int:
        """The hidden width of the MLP in the attention pooling layer."""
        return 4 * self.dim if self.pool == "map_all" else self.mlp_dim

    @property
    def embed_dim(self) -> int:
        """The width of the vectors that `model.embed` returns, which are the input of the head."""
        return self.pre_logits or self.pooled_dim

    @property
    def stem_dim(self) -> int:
        """The number of input channels of the patch projection: image channels or, with a stem, feature channels."""
        if not self.stem:
            return self.channels if self.stem is None else 64
        return 256 * 2 ** (len(self.stem) - 1)

    @property
    def kernel_size(self) -> int:
        """The side of the patch projection's kernel, in pixels or, with a stem, in cells of the stem's feature map."""
        return self.patch_size // stem_stride(self.stem)

    def replace(self, **changes: Any) -> "ViTConfig":
        """Return a copy of the config with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the config as a dictionary that can be written as JSON."""
        return asdict(self)


FIELDS = tuple(field.name for field in fields(ViTConfig))


def _rotation_from(values: dict[str, Any]) -> Rotation:
    """Create a `Rotation` from a dictionary of its fields that was read from JSON."""
    unknown = sorted(values.keys() - {field.name for field in fields(Rotation)})
    if unknown:
        known = ", ".join(field.name for field in fields(Rotation))
        raise ConfigError(f"rope has unknown fields: {', '.join(map(str, unknown))}. Valid fields: {known}.")
    return Rotation(**values)


def stem_stride(units: tuple[int, ...] | None) -> int:
    """Return the stride of a ResNet stem in pixels: 4, doubled by each stage after the first, or 1 without a stem.

    Args:
        units: The number of units in each stage of the stem, or None if there is no stem.

    >>> stem_stride((3, 4, 9))
    16
    """
    return 1 if units is None else 4 * 2 ** max(len(units) - 1, 0)


LEAST = {  # the smallest valid value of each integer field
    **dict.fromkeys(("patch_size", "dim", "depth", "heads", "mlp_dim", "channels", "head_dim"), 1),
    **dict.fromkeys(("num_classes", "registers", "pre_logits", "cosine_head"), 0),
}
OPTIONAL = ("head_dim", "cosine_head")  # integers that may be None
CHOICES = {
    "pool": Pool, "positions": Positions, "resample": Resample, "mlp": Mlp, "norm": Norm, "input_norm": InputNorm,
    "inner_norm": InnerNorm, "final_norm": FinalNorm,
}  # fmt: skip
FLAGS = ("class_token", "cls_position", "qkv_bias", "checkpointing")


def _check_values(c: ViTConfig) -> None:
    """Check the values of all fields that are integers, choices or flags."""
    for name, least in LEAST.items():
        value = getattr(c, name)
        if (type(value) is not int or not least <= value <= LARGEST) and not (value is None and name in OPTIONAL):
            raise ConfigError(f"{name} must be an integer from {least} to {LARGEST}, got {value!r}.")
    for name, kind in CHOICES.items():
        value = getattr(c, name)
        if value not in get_args(kind):
            raise ConfigError(
                f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}.{closest(value, get_args(kind))}"
            )
    for name in FLAGS:
        value = getattr(c, name)
        if type(value) is not bool:
            raise ConfigError(f"{name} must be True or False, got {value!r}.")


def _check_numbers(c: ViTConfig) -> None:
    """Check the values of image_size, stem, rope and all fields that are floating-point numbers."""
    sides = c.image_size if isinstance(c.image_size, tuple) else (c.image_size, c.image_size)
    if len(sides) != 2 or any(type(side) is not int or not 1 <= side <= LARGEST for side in sides):
        raise ConfigError(f"image_size must be a positive integer or (height, width), got {c.image_size!r}.")
    stem = () if c.stem is None else c.stem
    if not isinstance(stem, tuple) or len(stem) > 4 or any(type(n) is not int or not 1 <= n <= LARGEST for n in stem):
        raise ConfigError(
            f"stem must be None or a tuple with the number of units in each of up to 4 stages, such as "
            f"(3, 4, 9) or (), got {c.stem!r}."
        )
    for name in ("dropout", "drop_path"):
        value = getattr(c, name)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value!r}.")
    if type(c.norm_eps) is not float or not 0 < c.norm_eps < 1:
        raise ConfigError(f"norm_eps must be a float between 0 and 1, such as 1e-6, got {c.norm_eps!r}.")
    scale = 0 if c.layer_scale is None else c.layer_scale
    if type(scale) not in (int, float) or not abs(scale) <= LARGEST:
        raise ConfigError(f"layer_scale must be None or a number such as 1e-5, got {c.layer_scale!r}.")
    if not isinstance(c.rope, Rotation | None):
        raise ConfigError(f"rope must be None or a Rotation, got {c.rope!r}.")


def _check_shape(c: ViTConfig) -> None:
    """Check that the sizes divide each other, and that the positions fit the tokens."""
    if any(side % c.patch_size for side in c.size):
        raise ConfigError(
            f"image_size {c.image_size} is not a multiple of patch_size {c.patch_size}. {fitting(c.size, c.patch_size)}"
        )
    if c.stem is not None and c.patch_size % stem_stride(c.stem):
        raise ConfigError(
            f"patch_size must be a multiple of {stem_stride(c.stem)}, which is the stride of stem={c.stem}, got "
            f"{c.patch_size}."
        )
    if c.stem is not None and c.input_norm == "patches":
        raise ConfigError(
            f"input_norm='patches' normalises pixels and cannot be combined with stem={c.stem}. Set input_norm='none' "
            "or stem=None."
        )
    if c.head_dim is None and c.dim % c.heads:
        raise ConfigError(f"dim={c.dim} is not divisible by heads={c.heads}. Change heads, or set head_dim.")
    if c.positions == "sincos2d" and c.dim % 4:
        raise ConfigError(f"With positions='sincos2d', dim must be a multiple of 4, got {c.dim}.")
    if c.registers and c.cls_position and c.positions in ("learned", "sincos2d"):
        raise ConfigError(
            f"cls_position=True cannot be combined with registers={c.registers}, because only the patches of a model "
            "with registers have positions. Set cls_position=False."
        )
    if c.rope is not None and c.head_width % 4:
        raise ConfigError(
            f"With rope, the width of a head must be a multiple of 4, got {c.head_width}. Change heads or head_dim."
        )


def _check_pooling(c: ViTConfig) -> None:
    """Check that the model has the tokens that `pool` needs, and that `dim` is divisible by the pooling heads."""
    if c.pool not in ("mean", "map", "map_all") and not c.class_token:
        raise ConfigError(f"pool={c.pool!r} reads the class token, but class_token is False. Use pool='mean'.")
    if c.pool == "cls_and_distillation" and c.registers != 1:
        raise ConfigError(
            "pool='cls_and_distillation' needs exactly one register, which is the distillation token, got "
            f"registers={c.registers}. Set registers=1."
        )
    if c.pool == "mean_with_cls" and c.registers:
        raise ConfigError(
            f"pool='mean_with_cls' does not support registers, got registers={c.registers}. Use pool='mean', or set "
            "registers=0."
        )
    if c.pool in ("map", "map_all") and c.dim % c.pool_heads:
        raise ConfigError(
            f"With pool={c.pool!r}, dim must be divisible by the number of pooling heads, got dim={c.dim} and "
            f"{c.pool_heads} heads. Change dim."
        )


def fitting(size: tuple[int, int], patch: int) -> str:
    """Return a sentence with the nearest image sizes that are multiples of the patch size."""
    options = []
    for side, axis in zip(size, ("height", "width"), strict=True):
        below = max(side // patch, 1) * patch
        if side > below:
            options.append(f"{axis} {below} or {below + patch}")
        elif side < below:
            options.append(f"{axis} {below}")
    return f"The nearest sizes that fit: {', '.join(options)}."

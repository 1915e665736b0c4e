"""`ViTConfig`: every number and choice that defines a Vision Transformer. Nothing here imports torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal, get_args

from vitlite.errors import ConfigError, closest

Pool = Literal["cls", "mean", "mean_with_cls", "cls_and_mean", "cls_and_distillation", "map"]
Positions = Literal["learned", "sincos2d", "rope", "none"]
Resample = Literal["timm", "transformers", "torchvision", "jax", "tensorflow"]
Gelu = Literal["exact", "tanh", "quick"]
Mlp = Literal["gelu", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The shape of one `ViT`: every field is a claim that some public checkpoint needs."""

    image_size: int | tuple[int, int] = 224  # pixels: one side of a square, or (height, width)
    patch_size: int = 16  # pixels of a token; with a stem those of its stride, and of the kernel that projects
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072  # width between the two layers of an MLP; of a gated one, after the gate
    num_classes: int = 1000  # 0: no head, the model returns what a head would have seen
    # "mean" never counts cls or registers; "mean_with_cls" is vit-pytorch before 1.16; "map" is SigLIP's attention with
    # a query of its own; "cls_and_distillation" is DeiT's, whose distillation token is a register.
    pool: Pool = "cls"
    channels: int = 3
    class_token: bool = True
    registers: int = 0
    positions: Positions = "learned"  # "rope" is DINOv3's rotation of queries and keys
    cls_position: bool = True  # False: the position table covers the patches only
    resample: Resample = "timm"  # whose arithmetic stretches the table to another image size
    head_dim: int | None = None  # None: dim / heads
    qkv_bias: bool = True
    mlp: Mlp = "gelu"
    gelu: Gelu = "exact"
    norm_eps: float = 1e-6
    pre_norm: bool = False  # CLIP: a norm before the blocks, and a patch projection without bias
    patch_norm: bool = False  # vit-pytorch: norms around the patch projection
    inner_norm: bool = False  # BEiT-3: a norm before the last projection of attention, and of the MLP
    fc_norm: bool = False  # the norm stands after pooling instead of before
    final_norm: bool = True  # False: none, neither before pooling nor after
    stem: tuple[int, ...] | None = None  # hybrids: units a stage of a ResNet before the patches; (): its root alone
    layer_scale: float | None = None  # the initial scale of each residual branch; None: no scale
    pre_logits: int = 0  # width of the tanh layer before the head; 0: none
    dropout: float = 0.0
    drop_path: float = 0.0  # stochastic depth of the last block, rising linearly from 0 at the first
    checkpointing: bool = False  # recompute blocks in the backward pass instead of storing them
    _given: InitVar[frozenset[str] | None] = None  # dataclasses.replace hands on what its original has here

    def __new__(cls, *, _given: frozenset[str] | None = None, **named: Any) -> "ViTConfig":
        refuse_unknown_fields(named)
        given = set(named)
        if _given is not None:  # dataclasses.replace names every field
            given = {name for name, value in named.items() if name in _given or value != DEFAULTS[name]}
        self = super().__new__(cls)
        object.__setattr__(self, "_given", frozenset(given))
        return self

    def __post_init__(self, _given: frozenset[str] | None) -> None:
        for field in TUPLES:
            if isinstance(getattr(self, field), list):  # as JSON has it
                object.__setattr__(self, field, tuple(getattr(self, field)))
        _check_values(self)
        _check_combinations(self)

    @property
    def given(self) -> frozenset[str]:
        """The fields that the caller set; the others are no claim about a file."""
        return frozenset(self.__dict__["_given"])

    @property
    def size(self) -> tuple[int, int]:
        """Image height and width in pixels."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        return self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return self.class_token + self.registers

    @property
    def tokens(self) -> int:
        """Tokens of one image of the config's own size: those before the patches, and the patches."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table."""
        return self.grid[0] * self.grid[1] + (self.class_token and self.cls_position)

    @property
    def attention_dim(self) -> int:
        """Width of all heads together: `dim`, unless `head_dim` says otherwise."""
        return self.heads * (self.head_dim or self.dim // self.heads)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.attention_dim // self.heads

    @property
    def pooled_dim(self) -> int:
        """Width of what pooling gives: two tokens side by side, or one."""
        return self.dim * (2 if self.pool in ("cls_and_mean", "cls_and_distillation") else 1)

    @property
    def embed_dim(self) -> int:
        """Width of what the head sees, and of `model.embed`."""
        return self.pre_logits or self.pooled_dim

    @property
    def stem_stride(self) -> int:
        """Pixels of one cell of the stem's feature map; 1 without a stem."""
        return stem_stride(self.stem)

    @property
    def stem_dim(self) -> int:
        """Channels of what is projected to tokens: the image's own, or those of the stem's feature map."""
        if not self.stem:
            return self.channels if self.stem is None else 64
        return 256 * 2 ** (len(self.stem) - 1)

    @property
    def kernel_size(self) -> int:
        """Side of the kernel that projects to tokens: of a patch, or of what the stem leaves of it."""
        return self.patch_size // self.stem_stride

    def replace(self, **changes: Any) -> "ViTConfig":
        """A copy with some fields changed; the others stay as given, or not given, as they were."""
        return ViTConfig(**{name: getattr(self, name) for name in self.given} | changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ViTConfig)}


def stem_stride(units: tuple[int, ...] | None) -> int:
    """Pixels of one cell of a stem's feature map: 4 after its root, doubled by each stage but the first.

    >>> stem_stride((3, 4, 9))
    16
    """
    return 1 if units is None else 4 * 2 ** max(len(units) - 1, 0)


def refuse_unknown_fields(names: Iterable[str]) -> None:
    """Makes sure that these are fields of a `ViTConfig`.

    Raises:
        ConfigError: One is not; what comes close, and the list.
    """
    for name in names:
        if name not in DEFAULTS:
            raise ConfigError(
                f"ViTConfig has no field {name!r}.{closest(name, DEFAULTS)} Valid: {', '.join(DEFAULTS)}."
            )


def check_fields(claims: Mapping[str, Any]) -> None:
    """Makes sure that each of these could be a field of a `ViTConfig`, whatever the others are.

    Raises:
        ConfigError: One could not.
    """
    refuse_unknown_fields(claims)
    known = dict(DEFAULTS)
    for name, value in claims.items():
        known[name] = tuple(value) if name in TUPLES and isinstance(value, list) else value
    _check_values(SimpleNamespace(**known))


def _wrong(field: str, sentence: str) -> ConfigError:
    """The error for a field of a config, with what is wrong as a sentence that begins with the field."""
    return ConfigError(f"ViTConfig: {sentence}", field=field)


LEAST = {  # whole numbers, and the least that each may be
    **dict.fromkeys(("patch_size", "dim", "depth", "heads", "mlp_dim", "channels"), 1),
    **dict.fromkeys(("num_classes", "registers", "pre_logits"), 0),
}
MOST = 2**31 - 1  # of any of them: of larger ones no tensor is made, and what is reckoned with them runs over
VALID = {"pool": get_args(Pool), "positions": get_args(Positions), "resample": get_args(Resample),
         "mlp": get_args(Mlp), "gelu": get_args(Gelu)}  # fmt: skip
SWITCHES = (
    "class_token", "cls_position", "qkv_bias", "pre_norm", "patch_norm", "inner_norm", "fc_norm", "final_norm",
    "checkpointing",
)  # fmt: skip
SHARES = ("dropout", "drop_path")
TUPLES = ("image_size", "stem")


def _check_values(c: Any) -> None:
    """Each field by itself, in the order in which mistakes should be mended."""
    _check_tuples(c)
    for name, least in LEAST.items():
        value = getattr(c, name)
        if type(value) is not int or value < least:
            raise _wrong(name, f"{name} must be a whole number of at least {least}, got {value!r}.")
        if value > MOST:
            raise _wrong(name, f"{name} must be at most {MOST}, got {value!r}.")
    for name, valid in VALID.items():
        value = getattr(c, name)
        if value not in valid:
            hint = closest(value, valid)
            raise _wrong(name, f"{name} must be one of {', '.join(valid)}, got {value!r}.{hint}")
    for name in SWITCHES:
        value = getattr(c, name)
        if type(value) is not bool:
            raise _wrong(name, f"{name} must be True or False, got {value!r}.")
    _check_numbers(c)


def _check_tuples(c: Any) -> None:
    if not _is_size(c.image_size):
        raise _wrong("image_size", f"image_size must be a whole number or (height, width), got {c.image_size!r}.")
    if c.stem is not None and not _is_stem(c.stem):
        raise _wrong(
            "stem", f"stem must be None or the units of up to 4 stages, such as (3, 4, 9) or (), got {c.stem!r}."
        )


def _is_stem(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > 4:
        return False
    return all(type(units) is int and 0 < units <= MOST for units in value)


def _is_size(value: Any) -> bool:
    sides = value if isinstance(value, tuple) else (value, value)
    return len(sides) == 2 and all(type(side) is int and side <= MOST for side in sides)  # and not True


def _check_numbers(c: Any) -> None:
    for name in SHARES:
        share = getattr(c, name)
        if not _is_number(share) or not 0 <= share < 1:
            raise _wrong(name, f"{name} must be at least 0 and below 1, got {share!r}.")
    if type(c.norm_eps) is not float or not 0 < c.norm_eps < 1:
        raise _wrong("norm_eps", f"norm_eps must be a small positive number such as 1e-6, got {c.norm_eps!r}.")
    if c.layer_scale is not None and not (_is_number(c.layer_scale) and math.isfinite(c.layer_scale)):
        raise _wrong("layer_scale", f"layer_scale must be None or a number such as 1e-5, got {c.layer_scale!r}.")
    if c.head_dim is not None and (type(c.head_dim) is not int or not 1 <= c.head_dim <= MOST):
        raise _wrong("head_dim", f"head_dim must be None or a whole number of at least 1, got {c.head_dim!r}.")


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MOST)


def _check_combinations(c: ViTConfig) -> None:
    """What goes together, in a config whose single values are right."""
    _check_patches(c)
    if c.head_dim is None and c.dim % c.heads:
        raise _wrong("dim", f"dim {c.dim} does not divide into {c.heads} heads; change heads, or set head_dim.")
    _check_pool(c)
    if c.registers and c.cls_position and c.positions in ("learned", "sincos2d"):
        text = "registers have no position of their own: set cls_position=False, so that the table covers patches only."
        raise _wrong("registers", text)
    if c.positions == "sincos2d" and c.dim % 4:
        raise _wrong("positions", f"sincos2d positions need a dim that 4 divides, got {c.dim}.")
    if c.positions == "rope" and c.head_width % 4:
        raise _wrong("positions", f"positions='rope' needs heads of a width that 4 divides, got {c.head_width}.")
    if c.fc_norm and not c.final_norm:
        raise _wrong(
            "final_norm", "final_norm=False is no norm at the end at all, and fc_norm=True is one after pooling."
        )


def _check_patches(c: ViTConfig) -> None:
    """Image, patches and stem."""
    fits = min(c.size) >= c.patch_size and not any(side % c.patch_size for side in c.size)
    if not fits:
        nearest = fitting(c.size, c.patch_size)
        raise _wrong(
            "image_size", f"image_size {c.image_size} does not divide into patches of {c.patch_size}. {nearest}"
        )
    if c.patch_size % c.stem_stride:
        text = f"a stem of {len(c.stem or ())} stages gives a cell for {c.stem_stride} pixels: patch_size has to be a "
        raise _wrong("patch_size", f"{text}multiple of that, got {c.patch_size}.")
    if c.stem is not None and c.patch_norm:
        raise _wrong("patch_norm", "patch_norm is vit-pytorch's norm of pixels, and a stem leaves none to norm.")


def _check_pool(c: ViTConfig) -> None:
    """What is pooled must be there."""
    if c.pool not in ("mean", "map") and not c.class_token:
        raise _wrong("pool", f"pool={c.pool!r} reads the class token, and class_token is False; use pool='mean'.")
    if c.pool == "cls_and_distillation" and c.registers != 1:
        raise _wrong(
            "pool", "pool='cls_and_distillation' reads the distillation token, which is a register: set registers=1."
        )
    if c.registers and c.pool == "mean_with_cls":
        raise _wrong("pool", "pool='mean_with_cls' is vit-pytorch's, which has no registers; use pool='mean'.")
    if c.pool == "map" and c.dim % c.heads:
        raise _wrong("pool", f"pool='map' cuts dim into heads, and dim {c.dim} does not divide into {c.heads} of them.")


def fitting(size: tuple[int, int], patch: int) -> str:
    """The sentence that names the nearest sizes which patches of `patch` pixels divide."""
    options = []
    for side, axis in zip(size, ("height", "width"), strict=True):
        below = max(side // patch, 1) * patch
        if side > below:
            options.append(f"{axis} {below} or {below + patch}")
        elif side < below:
            options.append(f"{axis} {below}")
    return f"The nearest that fit: {', '.join(options)}."

"""The network, in reading order: PatchEmbed, Attention, MLP, Block, ViT.

Shapes: b images, c channels, h and w pixels (or patches down and across), p patch size, n tokens,
d width of a token, k classes. State-dict keys are timm's.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlite.config import ViTConfig
from vitlite.errors import ConfigError, InputError, UnknownMethodError, shown
from vitlite.fast import kernels
from vitlite.migration import ASKED_FOR, CALL, MODEL
from vitlite.nn.inputs import check_images
from vitlite.nn.pooling import POOLS, AttentionPool
from vitlite.nn.positions import PositionTables, rotate
from vitlite.nn.stem import stem

if TYPE_CHECKING:
    from vitlite.checkpoints.build import Source
    from vitlite.images import TransformConfig
    from vitlite.inference.predict import Predictions


COMPUTING = (  # methods by which a ViT and its layers compute: with another, it is another network
    "forward", "embed", "features", "attention_maps", "_tokens", "_grid", "_positions", "_rotation", "_pool",
    "residuals", "split", "map", "standardised",
)  # fmt: skip
CHANGES_NO_ANSWER = ("training", "checkpointing")  # settings of a layer


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each: (b, c, h, w) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c, p, d = config.stem_dim, config.kernel_size, config.dim
        self.patch_size = p
        self.backbone = stem(config)  # of a hybrid; of others nothing
        self.norm_in = nn.LayerNorm(c * p * p, config.norm_eps) if config.patch_norm else None
        self.proj = nn.Conv2d(c, d, kernel_size=p, stride=p, bias=not config.pre_norm)
        self.norm = nn.LayerNorm(d, config.norm_eps) if config.patch_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.norm_in is not None:
            p = self.patch_size
            patches = self.norm_in(rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=p, q=p))
            images = rearrange(patches, "b h w (c p q) -> b c (h p) (w q)", p=p, q=p)
        return self.norm(rearrange(self.proj(self.backbone(images)), "b d h w -> b (h w) d"))


class Linear(nn.Linear):
    """torch's own, computed by oneDNN in inference where this CPU is faster so: (b, n, d) -> (b, n, k).

    `parts` is how many matrices it holds at once, as that of queries, keys and values does.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, parts: int = 1) -> None:
        super().__init__(inputs, outputs, bias)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        if kernels.serves(x, self.weight):
            return kernels.linear(x, self.weight, self.bias)
        return super().forward(x)


class Attention(nn.Module):
    """Multi-head self-attention: every token reads from every token, (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.attention_dim, bias=config.qkv_bias, parts=3)
        self.norm = nn.LayerNorm(config.attention_dim, config.norm_eps) if config.inner_norm else nn.Identity()
        self.proj = Linear(config.attention_dim, config.dim)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def split(self, x: Tensor, *rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (b, heads, n, head_dim)."""
        q, k, v = rearrange(self.qkv(x), "b n (three heads d) -> three b heads n d", three=3, heads=self.heads)
        return q, k, v

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        q, k, v = self.split(x, *rotation)
        if _plain_is_faster(q):
            x = attention_map(q, k) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.drop(self.proj(self.norm(rearrange(x, "b heads n d -> b n (heads d)"))))

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Who looks at whom, which fused attention never forms: (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x, *rotation)
        return attention_map(q, k)


class RotaryAttention(Attention):
    """DINOv3's: queries and keys are turned by where their token is, which takes the cosines and sines of that."""

    def split(self, x: Tensor, *rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values, each (b, heads, n, head_dim)."""
        cosines, sines = rotation
        q, k, v = super().split(x)
        return rotate(q, cosines, sines), rotate(k, cosines, sines), v


def attention_map(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)): (b, heads, n, d) -> (b, heads, n, n)."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)


def _plain_is_faster(q: Tensor) -> bool:
    """On a CPU the fused kernel's backward is twice as slow; beyond 1,024 tokens, whole maps would take gigabytes."""
    trains_on_cpu = q.requires_grad and q.device.type == "cpu"
    return trains_on_cpu and q.shape[2] <= 1024 and not _is_recorded()


def _is_recorded() -> bool:
    """Whether what is computed now will run again elsewhere, with gradients or without."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    """Two linear layers with a GELU between, on every token alone: (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.dim, config.mlp_dim)
        self.act = QuickGELU() if config.gelu == "quick" else nn.GELU("tanh" if config.gelu == "tanh" else "none")
        self.norm = nn.LayerNorm(config.mlp_dim, config.norm_eps) if config.inner_norm else nn.Identity()
        self.fc2 = Linear(config.mlp_dim, config.dim)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.norm(self.drop(self.act(self.fc1(x))))))


class SwiGLU(nn.Module):
    """A gated MLP, on every token alone: one half of the first layer lets the other through: (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.dim, 2 * config.mlp_dim, parts=2)
        self.norm = nn.LayerNorm(config.mlp_dim, config.norm_eps) if config.inner_norm else nn.Identity()
        self.fc2 = Linear(config.mlp_dim, config.dim)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.norm(self.drop(F.silu(gate) * value))))


class LayerScale(nn.Module):
    """A learned scale for each channel of a residual branch."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, leaves a residual branch out for some images and scales it up for the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """One pre-norm transformer layer: attention between tokens, then an MLP on each, both added to the stream."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        d, scale = config.dim, config.layer_scale
        self.checkpointing = config.checkpointing
        self.norm1 = nn.LayerNorm(d, config.norm_eps)
        self.attn = RotaryAttention(config) if config.positions == "rope" else Attention(config)
        self.ls1 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.norm2 = nn.LayerNorm(d, config.norm_eps)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.ls2 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def residuals(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """The layer itself, (b, n, d) -> (b, n, d)."""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), *rotation)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """The attention map of this layer, (b, n, d) -> (b, heads, n, n)."""
        return self.attn.map(self.norm1(x), *rotation)

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint  # half a second in torch 2.6

            return checkpoint(self.residuals, x, *rotation, use_reentrant=False)
        return self.residuals(x, *rotation)


class PreLogits(nn.Linear):
    """The tanh layer of the paper's ImageNet-21k heads: (b, d) -> (b, r)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Features(NamedTuple):
    """What a model knows of an image before the head."""

    cls: Tensor | None  # (b, d)
    patches: Tensor  # (b, n, d), row by row
    registers: Tensor | None  # (b, r, d)
    grid: tuple[int, int]  # patches down and across
    layers: tuple[Tensor, ...]  # (b, cls + registers + patches, d) each: the outputs of the blocks asked for


class ViT(nn.Module):
    """A Vision Transformer: patches become tokens, blocks mix them, the class token or their mean meets the head.

    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """

    def __init__(self, config: ViTConfig) -> None:
        if not isinstance(config, ViTConfig):
            raise ConfigError(
                f"ViT takes a ViTConfig, got {shown(repr(config))}.",
                python="ViT(ViTConfig(...)), or vitlite.create(name, weights=None) by the name of a preset.",
            )
        super().__init__()
        d, eps = config.dim, config.norm_eps
        self.config = config
        self.labels: Sequence[str] | None = None
        self.source: Source | None = None  # where the weights came from; None: random
        self.preprocess = None

        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, d)) if config.registers else None
        learned = config.positions == "learned"
        self.pos_embed = nn.Parameter(torch.zeros(1, config.position_rows, d)) if learned else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.norm_pre = nn.LayerNorm(d, eps) if config.pre_norm else nn.Identity()
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList(Block(config, config.drop_path * i / last) for i in range(config.depth))
        self.norm = nn.LayerNorm(d, eps) if config.final_norm and not config.fc_norm else nn.Identity()

        self.attn_pool = _attention_pool(config)
        self.fc_norm = nn.LayerNorm(config.pooled_dim, eps) if config.fc_norm else nn.Identity()
        self.pre_logits = PreLogits(config.pooled_dim, config.pre_logits) if config.pre_logits else nn.Identity()
        self.head = _head(config)
        self.tables = PositionTables()
        initialise(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "config" and "config" in self.__dict__:
            raise ConfigError(
                "The config of a model says what it was built of: another would change some of it and not the rest.",
                python="Build another: ViT(config), then load_state_dict; or reset_head, or create(...) with options.",
            )
        if name == "labels":
            value = None if value is None else _texts(value)
        if name == "preprocess":  # of one that is a module, torch would make a part of the network
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in MODEL:  # what a class made of this one has under such a name comes first
                error = InputError if name in ASKED_FOR else UnknownMethodError
                raise error(f"A vitlite {type(self).__name__} has no {name}.", python=MODEL[name]) from None
            raise

    def __call__(self, *images: Any, **options: Any) -> Any:
        if options:
            self._answer(options)
        return super().__call__(*images, **options)

    def _answer(self, options: Iterable[str]) -> None:
        """Answers an option of other libraries' models, unless a class made of this one has it.

        Raises:
            InputError: What to write instead.
        """
        own = inspect.signature(self.forward).parameters
        for option in options:
            if option in CALL and option not in own:
                raise InputError(f"A model takes images, and no option {option}=.", python=CALL[option])

    @property
    def preprocess(self) -> Callable[[Any], Tensor]:
        """Turns a picture, or a list of them, into the images that the model takes: `vitlite.images.Preprocess`."""
        from vitlite.images import Preprocess

        kept: Any = self.__dict__["_preprocess"]
        return kept.of(self) if isinstance(kept, Preprocess) else kept

    @preprocess.setter
    def preprocess(self, way: "Callable[[Any], Tensor] | TransformConfig | None") -> None:
        from vitlite.images.transform import without_model

        self.__dict__["_preprocess"] = without_model(way)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are made of."""
        return self.patch_embed.proj.weight.dtype

    def forward(self, images: Tensor) -> Tensor:
        """Logits, or with num_classes=0 what the head would have seen: (b, c, h, w) -> (b, k)."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """What the head sees: (b, c, h, w) -> (b, d)."""
        x, rotation = self._tokens(images), self._rotation(images)
        for block in self.blocks:
            x = block(x, *rotation)
        return self.pre_logits(self.fc_norm(self._pool(x)))

    def features(self, images: Tensor, layers: Iterable[int] | int = (), norm: bool = False) -> Features:
        """Every token after the final norm, and the outputs of single blocks.

        Args:
            images: (b, c, h, w).
            layers: Which blocks, by their numbers: 4 is block 4, -1 the last, and the last four (-4, -3, -2, -1).
            norm: Whether their outputs go through the final norm too, as DINO's are given.
        """
        wanted = self._layers(layers)
        x, rotation = self._tokens(images), self._rotation(images)
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = block(x, *rotation)
            if i in wanted:
                outputs[i] = self.norm(x) if norm else x
        cls, registers, patches = self.norm(x).split(
            [int(self.config.class_token), self.config.registers, x.shape[1] - self.config.prefix_tokens], dim=1
        )
        return Features(
            cls=cls[:, 0] if self.config.class_token else None,
            patches=patches,
            registers=registers if self.config.registers else None,
            grid=self._grid(images),
            layers=tuple(outputs[i] for i in wanted),
        )

    def attention_maps(self, images: Tensor, layers: Iterable[int] | int = (-1,)) -> Tensor:
        """Who looks at whom in the blocks named: (b, c, h, w) -> (layers, b, heads, n, n).

        Rows are the tokens that look, columns those looked at: cls, registers, patches. A row sums to 1.
        """
        wanted = self._layers(layers)
        if not wanted:
            raise InputError("attention_maps got no layers. Name at least one, such as layers=(-1,).")
        x, rotation = self._tokens(images), self._rotation(images)
        maps = {}
        for i in range(max(wanted) + 1):
            if i in wanted:
                maps[i] = self.blocks[i].map(x, *rotation)  # type: ignore[operator]
            if i < max(wanted):
                x = self.blocks[i](x, *rotation)
        return torch.stack([maps[i] for i in wanted])

    def reset_head(self, num_classes: int) -> None:
        """Puts a new zero head in place, or with 0 none. The labels no longer apply and are dropped."""
        config = self.config.replace(num_classes=num_classes)
        with torch.device(self.device):  # whatever the default is
            head = _head(config).to(self.dtype).train(self.training)
        self.__dict__["config"], self.head = config, head
        self.labels = None

    def predict(self, images: Any, top: int = 5) -> "Predictions":
        """The `top` best labels with their scores: of one picture, of each in a list, or of each from an iterator."""
        from vitlite.inference.predict import (
            predict,  # this and `save`: the only ways up from the network, for convenience
        )

        return predict(self, images, top)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes config, weights, labels and preprocessing into `folder`, which `vitlite.load` opens."""
        from vitlite.checkpoints.save import save

        save(self, folder)

    def _tokens(self, images: Tensor) -> Tensor:
        """Class token, registers and patches, with their positions: (b, c, h, w) -> (b, n, d)."""
        self._check(images)
        self._check_tokens()
        patches = self.patch_embed(images)
        cls: Tensor | None = self.cls_token
        positions = self._positions(self._grid(images))
        if positions is not None:
            rows = patches.shape[1]
            if cls is not None and self.config.cls_position:
                cls = cls + positions[:, :-rows]
            patches = patches + positions[:, -rows:]
        prefix = [token.expand(images.shape[0], -1, -1) for token in (cls, self.reg_token) if token is not None]
        return self.norm_pre(self.drop(torch.cat([*prefix, patches], dim=1)))

    def _check(self, images: Tensor) -> None:
        check_images(images, self.config, self.device, self.dtype)

    def _check_tokens(self) -> None:
        """Makes sure that tokens and positions are those of the config: others would be broadcast, or cut.

        Raises:
            ConfigError: Another was put in the place of one.
        """
        config = self.config
        rows_of = {"cls_token": 1, "reg_token": config.registers, "pos_embed": config.position_rows}
        for name, rows in rows_of.items():
            token: Tensor | None = getattr(self, name)
            if token is not None and token.shape != (1, rows, config.dim):
                raise ConfigError(
                    f"{name} is {tuple(token.shape)}, and by the model's config {(1, rows, config.dim)}.",
                    python="For images of other sizes nothing has to be changed: positions are stretched as they are "
                    "needed. To begin at another size: vitlite.create(..., image_size=...).",
                    command="",
                )

    def _pool(self, x: Tensor) -> Tensor:
        """The final norm, and one vector an image: (b, n, d) -> (b, d)."""
        return POOLS[self.config.pool](self, x)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        p = self.config.patch_size
        return images.shape[2] // p, images.shape[3] // p

    def _positions(self, grid: tuple[int, int]) -> Tensor | None:
        """The position table for a grid, (1, rows, d)."""
        config = self.config
        if self.pos_embed is not None:
            return self.tables.learned(self.pos_embed, config.grid, grid, config.resample)
        if config.positions == "sincos2d":
            cls_row = config.class_token and config.cls_position
            return self.tables.sincos(self.patch_embed.proj.weight, grid, cls_row)
        return None

    def _rotation(self, images: Tensor) -> tuple[Tensor, ...]:
        """The cosines and sines by which attention turns queries and keys, (n, head_dim / 2) each; mostly none."""
        config = self.config
        if config.positions != "rope":
            return ()
        width = config.head_width
        return self.tables.rotation(self.patch_embed.proj.weight, self._grid(images), config.prefix_tokens, width)

    def _layers(self, layers: Iterable[int] | int) -> list[int]:
        depth = len(self.blocks)  # of which somebody may have taken some away
        try:
            wanted = [layers] if isinstance(layers, int) else list(layers)
        except TypeError:  # one thing, and no number
            wanted = [layers]  # type: ignore[list-item]
        for i in wanted:
            if type(i) is not int or not -depth <= i < depth:
                text = f"layers has {i!r}; the {depth} blocks are 0 to {depth - 1}, or -{depth} to -1."
                raise InputError(
                    text,
                    python="They are named, not counted: the last two are layers=(-2, -1).",
                    command="",
                    field="layers",
                )
        return [i % depth for i in wanted]


def _texts(labels: Iterable[Any]) -> tuple[str, ...]:
    """What classes are called.

    Raises:
        ConfigError: One is called by no text, or all by one.
    """
    several = isinstance(labels, Iterable) and not isinstance(labels, (str, bytes, Mapping))
    names = tuple(labels) if several else (labels,)
    if not several or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"model.labels takes a list of texts, one a class in their order, got {shown(repr(labels))}.",
            python="Of a table such as transformers' id2label: [id2label[i] for i in range(len(id2label))].",
            command="",
        )
    return names


def _attention_pool(config: ViTConfig) -> nn.Module:
    """SigLIP's pooling with an MLP like that of its blocks, or none."""
    if config.pool != "map":
        return nn.Identity()
    return AttentionPool(config, MLP(config.replace(mlp="gelu", inner_norm=False, dropout=0.0)))


def _head(config: ViTConfig) -> nn.Module:
    """A head of zeros, or none."""
    if not config.num_classes:
        return nn.Identity()
    head = nn.Linear(config.embed_dim, config.num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def initialise(model: ViT) -> None:
    """As google-research/vision_transformer does: Xavier for q, k and v apart, tiny MLP biases, a zero head."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            _xavier(module, parts=parts_of(module))
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6 if ".mlp." in name else 0.0)
    if isinstance(model.pre_logits, PreLogits):
        _lecun_normal(model.pre_logits.weight)
    kernel = model.patch_embed.proj
    _lecun_normal(kernel.weight)
    if kernel.bias is not None:
        nn.init.zeros_(kernel.bias)
    if model.pos_embed is not None:
        nn.init.normal_(model.pos_embed, std=0.02)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=1e-6)


def model_on_meta(config: ViTConfig) -> ViT:
    """A model without memory for its weights."""
    with torch.device("meta"), _NoInitialValues():
        return ViT(config)


class _NoInitialValues(TorchFunctionMode):
    """Leaves out nn.init: on meta it changes nothing, and costs a tenth of loading ViT-B, and a second of imports."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def replaced_method(module: nn.Module) -> str:
    """The name of a method by which a module computes, and which is its own; nothing where it has none.

    That of its class, set back as accelerate does it, is not its own; one that was put into its class is.
    """
    for name in COMPUTING:
        usual, found = getattr(type(module), name, None), vars(module).get(name)
        if usual is None:
            continue
        if not _stands_in_its_class(type(module), name):
            return name
        if found is not None and found != MethodType(usual, module):
            return name
    return ""


def _stands_in_its_class(kind: type, name: str) -> bool:
    """Whether a class has a method by this name from its own text, or that of a class it is made of."""
    owner = next(owner for owner in kind.__mro__ if name in vars(owner))
    if owner is nn.Module:  # which has none of its own
        return True
    method = vars(owner)[name]
    written = (getattr(method, "__module__", ""), getattr(method, "__qualname__", ""))
    return written == (owner.__module__, f"{owner.__qualname__}.{name}") and not hasattr(method, "__wrapped__")


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook, of this module or of all, sees what goes in or comes out, and may change it."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or is_all_hooked()


def is_all_hooked() -> bool:
    """Whether there is a hook of all modules, as `torch.nn.modules.module.register_module_forward_hook` makes one."""
    of_all = nn.modules.module
    return bool(of_all._global_forward_hooks or of_all._global_forward_pre_hooks)


def order_within(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers that a module runs one after the other, in that order; of others none."""
    return tuple(module._modules) if isinstance(module, (nn.Sequential, nn.ModuleList)) else ()


class Difference(NamedTuple):
    """Where a model is not what its config says: at which name, what is there, and what belongs there."""

    name: str
    found: str
    wanted: str


def differences(model: ViT) -> Iterator[Difference]:
    """By the layers of a new model of the same config: they are all there, no others are, and in the same order."""
    every_name = model.named_modules(remove_duplicate=False)  # a layer that is there twice computes twice
    found: dict[str, nn.Module] = dict(every_name)
    expected: dict[str, nn.Module] = dict(model_on_meta(model.config).named_modules())
    for name, wanted in expected.items():
        yield from _differences_of(name, found.get(name), wanted)
    for name, layer in found.items():
        if name not in expected:
            yield Difference(name, _named(layer), "to be there")
    for name, wanted in expected.items():
        order, its_own = order_within(wanted), order_within(found.get(name, wanted))
        if its_own != order:
            yield Difference(name, f"made of {', '.join(its_own)}", f"of {', '.join(order)}")


def _differences_of(name: str, layer: nn.Module | None, wanted: nn.Module) -> Iterator[Difference]:
    if layer is None or (name and not _is_alike(layer, wanted)):
        yield Difference(name, _named(layer), _named(wanted))
        return
    own = replaced_method(layer)
    if own:
        yield Difference(f"{name}.{own}".lstrip("."), "set on it", "that of its class")
    for setting, value in _settings(wanted):
        its_own = vars(layer).get(setting, value)
        if its_own != value:
            yield Difference(f"{name}.{setting}", repr(its_own), repr(value))


def _settings(layer: nn.Module) -> Iterator[tuple[str, object]]:
    """What a layer computes by beside its tensors, such as how many heads it has."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and name not in CHANGES_NO_ANSWER and isinstance(value, (int, float, str)):
            yield name, value


def _is_alike(layer: nn.Module, wanted: nn.Module) -> bool:
    """Whether a layer is of the class that belongs there, with the same settings; torch's own linear computes alike."""
    kinds = (Linear, nn.Linear) if type(wanted) is Linear else (type(wanted),)
    return type(layer) in kinds and layer.extra_repr() == wanted.extra_repr()


def _named(layer: nn.Module | None) -> str:
    return "missing" if layer is None else f"{type(layer).__name__}({layer.extra_repr()})"


def parts_of(module: nn.Module) -> int:
    """How many matrices the weight of a layer is."""
    parts: int = getattr(module, "parts", 1)
    return parts


def _xavier(linear: nn.Linear, parts: int) -> None:
    """Uniform, with a bound for each of the parts that a layer computes at once."""
    bound = math.sqrt(6 / (linear.in_features + linear.out_features // parts))
    nn.init.uniform_(linear.weight, -bound, bound)


def _lecun_normal(weight: Tensor) -> None:
    """Flax's default: variance 1 / inputs, after a cut at two standard deviations that takes 0.8796 of the spread."""
    if weight.is_meta:  # trunc_normal_ is the one of nn.init that a mode does not see
        return
    std = weight[0].numel() ** -0.5 / 0.87962566
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

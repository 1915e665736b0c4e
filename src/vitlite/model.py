"""The network, in reading order: PatchEmbed, Attention, MLP, Block, ViT.

Shapes: b images, c channels, h and w pixels (or patches down and across), p patch size, n tokens,
d width of a token, k classes. State-dict keys are timm's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitlite.config import Resample, ViTConfig, fitting
from vitlite.errors import ImageError, InputError
from vitlite.speed import onednn

if TYPE_CHECKING:
    from vitlite.predict import Predictions
    from vitlite.weights.checkpoint import Source

# What each library passes to torch's interpolate; big_vision's scipy.ndimage.zoom(order=1) is bilinear on corners.
RESAMPLE: dict[Resample, dict[str, Any]] = {
    "timm": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "transformers": {"mode": "bicubic", "antialias": False, "align_corners": False},
    "torchvision": {"mode": "bicubic", "antialias": False, "align_corners": True},
    "jax": {"mode": "bilinear", "antialias": False, "align_corners": True},
}


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each: (b, c, h, w) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c, p, d = config.channels, config.patch_size, config.dim
        self.patch_size = p
        self.norm_in = nn.LayerNorm(c * p * p, config.norm_eps) if config.patch_norm else None
        self.proj = nn.Conv2d(c, d, kernel_size=p, stride=p, bias=not config.pre_norm)
        self.norm = nn.LayerNorm(d, config.norm_eps) if config.patch_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.norm_in is None:
            return rearrange(self.proj(images), "b d h w -> b (h w) d")
        p = self.patch_size
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p)
        x = F.linear(self.norm_in(patches), self.proj.weight.flatten(1), self.proj.bias)
        return self.norm(x)


class Linear(nn.Linear):
    """torch's own, computed by oneDNN in inference where this CPU is faster so: (b, n, d) -> (b, n, k)."""

    def forward(self, x: Tensor) -> Tensor:
        if onednn.serves(x, self.weight):
            return onednn.linear(x, self.weight, self.bias)
        return super().forward(x)


class Attention(nn.Module):
    """Multi-head self-attention: every token reads from every token, (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.attention_dim, bias=config.qkv_bias)
        self.norm = nn.LayerNorm(config.attention_dim, config.norm_eps) if config.inner_norm else nn.Identity()
        self.proj = Linear(config.attention_dim, config.dim)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (b, heads, n, head_dim)."""
        q, k, v = rearrange(self.qkv(x), "b n (three heads d) -> three b heads n d", three=3, heads=self.heads)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if q.requires_grad and q.device.type == "cpu" and q.shape[2] <= 1024 and not torch.compiler.is_compiling():
            # on a CPU the fused kernel's backward is twice as slow
            x = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.drop(self.proj(self.norm(rearrange(x, "b heads n d -> b n (heads d)"))))

    def map(self, x: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)), which `forward` never forms: (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x)
        return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)


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
        self.attn = Attention(config)
        self.ls1 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.norm2 = nn.LayerNorm(d, config.norm_eps)
        self.mlp = MLP(config)
        self.ls2 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def residuals(self, x: Tensor) -> Tensor:
        """The layer itself, (b, n, d) -> (b, n, d)."""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))

    def map(self, x: Tensor) -> Tensor:
        """The attention map of this layer, (b, n, d) -> (b, heads, n, n)."""
        return self.attn.map(self.norm1(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self.residuals, x, use_reentrant=False)
        return self.residuals(x)


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


class KeptPositions(NamedTuple):
    """Position tables computed from one state of the weights, by grid."""

    source: Tensor
    state: tuple[Any, ...]
    values: Tensor | None  # what the learned table was; on a CPU only, where comparing waits for nothing
    tables: dict[tuple[int, int], Tensor]


class ViT(nn.Module):
    """A Vision Transformer: patches become tokens, blocks mix them, the class token or their mean meets the head.

    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        d, eps = config.dim, config.norm_eps
        self.config = config
        self.labels: Sequence[str] | None = None
        self.source: Source | None = None  # where the weights came from; None: random
        self.preprocess = _no_preprocess

        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, d)) if config.registers else None
        learned = config.positions == "learned"
        self.pos_embed = nn.Parameter(torch.zeros(1, config.position_rows, d)) if learned else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.norm_pre = nn.LayerNorm(d, eps) if config.pre_norm else nn.Identity()
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList(Block(config, config.drop_path * i / last) for i in range(config.depth))
        self.norm = nn.Identity() if config.fc_norm else nn.LayerNorm(d, eps)

        pooled = d * (2 if config.pool == "cls_and_mean" else 1)
        self.fc_norm = nn.LayerNorm(pooled, eps) if config.fc_norm else nn.Identity()
        self.pre_logits = PreLogits(pooled, config.pre_logits) if config.pre_logits else nn.Identity()
        self.head = _head(config)
        self._kept: KeptPositions | None = None
        self._initialise()

    def _initialise(self) -> None:
        """As google-research/vision_transformer does: Xavier for q, k and v apart, tiny MLP biases, a zero head."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name != "head":
                fan_out = module.out_features // (3 if name.endswith("qkv") else 1)
                bound = math.sqrt(6 / (module.in_features + fan_out))
                nn.init.uniform_(module.weight, -bound, bound)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=1e-6 if ".mlp." in name else 0.0)
        if isinstance(self.pre_logits, PreLogits):
            _lecun_normal(self.pre_logits.weight)
        kernel = self.patch_embed.proj
        _lecun_normal(kernel.weight)
        if kernel.bias is not None:
            nn.init.zeros_(kernel.bias)
        for table, std in ((self.pos_embed, 0.02), (self.reg_token, 1e-6)):
            if table is not None:
                nn.init.normal_(table, std=std)

    @property
    def preprocess(self) -> Callable[[Any], Tensor]:
        """Turns a picture, or a list of them, into the images that the model takes: `vitlite.images.Preprocess`."""
        from vitlite.images import Preprocess, Recipe

        kept = self._preprocess
        return Preprocess(kept, self) if isinstance(kept, Recipe) else kept

    @preprocess.setter
    def preprocess(self, way: Callable[[Any], Tensor]) -> None:
        own = getattr(way, "model", None) is self  # then its recipe will do: a circle would outlive the model
        self._preprocess: Any = getattr(way, "recipe", way) if own else way

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
        x = self._tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.pre_logits(self.fc_norm(self._pool(x)))

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        """Every token after the final norm, and the outputs of the blocks named in `layers` before it."""
        wanted = self._layers(layers)
        x = self._tokens(images)
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in wanted:
                outputs[i] = x
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

    def attention_maps(self, images: Tensor, layers: Iterable[int] = (-1,)) -> Tensor:
        """Who looks at whom in the blocks named: (b, c, h, w) -> (layers, b, heads, n, n).

        Rows are the tokens that look, columns those looked at: cls, registers, patches. A row sums to 1.
        """
        wanted = self._layers(layers)
        if not wanted:
            raise InputError("attention_maps got no layers. Name at least one, such as layers=(-1,).")
        x = self._tokens(images)
        maps = {}
        for i in range(max(wanted) + 1):
            if i in wanted:
                maps[i] = self.blocks[i].map(x)  # type: ignore[operator]
            if i < max(wanted):
                x = self.blocks[i](x)
        return torch.stack([maps[i] for i in wanted])

    def reset_head(self, num_classes: int) -> None:
        """Puts a new zero head in place, or with 0 none. The labels no longer apply and are dropped."""
        self.config = self.config.replace(num_classes=num_classes)
        self.head = _head(self.config).to(self.device, self.dtype).train(self.training)
        self.labels = None

    def predict(self, images: Any, top: int = 5) -> "Predictions":
        """The `top` best labels with their scores: of one picture, of each in a list, or of each from an iterator."""
        from vitlite.predict import predict  # this and `save`: the only ways up from the network, for convenience

        return predict(self, images, top)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes config, weights, labels and preprocessing into `folder`, which `vitlite.load` opens."""
        from vitlite.weights.save import save

        save(self, folder)

    def _tokens(self, images: Tensor) -> Tensor:
        """Class token, registers and patches, with their positions: (b, c, h, w) -> (b, n, d)."""
        self._check(images)
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

    def _pool(self, x: Tensor) -> Tensor:
        """The final norm, and one vector an image: (b, n, d) -> (b, d)."""
        pool = self.config.pool
        if pool == "cls":
            return self.norm(x[:, 0])
        x = self.norm(x)
        first = 0 if pool == "mean_with_cls" else self.config.prefix_tokens
        mean = x[:, first:].mean(1)
        return torch.cat([x[:, 0], mean], dim=1) if pool == "cls_and_mean" else mean

    def _grid(self, images: Tensor) -> tuple[int, int]:
        p = self.config.patch_size
        return images.shape[2] // p, images.shape[3] // p

    def _positions(self, grid: tuple[int, int]) -> Tensor | None:
        """The position table for a grid, (1, rows, d); in inference each is computed once and kept."""
        if self.config.positions == "none":
            return None
        learned = self.pos_embed is not None
        source = self.pos_embed if learned else self.patch_embed.proj.weight
        dynamic = isinstance(grid[0], torch.SymInt) or isinstance(grid[1], torch.SymInt)
        if learned and not dynamic and grid == self.config.grid:
            return source
        if (
            torch.compiler.is_compiling()
            or type(source) is not nn.Parameter  # swapped by torch.func, faked or sharded
            or source.is_inference()
            or (learned and source.requires_grad and torch.is_grad_enabled())
        ):
            return self._compute_positions(grid)
        kept, state = self._kept, (source.dtype, source.device, source.data_ptr(), source._version)
        if (
            kept is None
            or kept.source is not source
            or kept.state != state
            or not (kept.values is None or torch.equal(kept.values, source))  # .data writes leave no other trace
            or len(kept.tables) >= 16
        ):
            values = source.detach().clone() if learned and source.device.type == "cpu" else None
            self._kept = kept = KeptPositions(source, state, values, {})
        if grid not in kept.tables:
            with torch.inference_mode(False), torch.no_grad():  # an inference tensor would break a later backward
                kept.tables[grid] = self._compute_positions(grid)
        return kept.tables[grid]

    def _compute_positions(self, grid: tuple[int, int]) -> Tensor:
        if self.pos_embed is None:
            table = sincos_positions(grid, self.config.dim)
            if self.config.class_token and self.config.cls_position:
                table = F.pad(table, (0, 0, 1, 0))  # the class token stands at zero
            return table.to(self.device, self.dtype)
        return resample_positions(self.pos_embed, self.config.grid, grid, self.config.resample)

    def train(self, mode: bool = True) -> "ViT":
        """As in torch; tables kept for inference are dropped, since training may change weights unseen."""
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ViT":
        self._kept = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _layers(self, layers: Iterable[int]) -> list[int]:
        depth = self.config.depth
        wanted = [layers] if isinstance(layers, int) else list(layers)
        for i in wanted:
            if type(i) is not int or not -depth <= i < depth:
                raise InputError(f"layers has {i!r}; the {depth} blocks are 0 to {depth - 1}, or -{depth} to -1.")
        return [i % depth for i in wanted]

    def _check(self, images: Tensor) -> None:
        """Refuses what would fail or mislead further on. Reads shapes and types only, never values."""
        c, p = self.config.channels, self.config.patch_size
        if not isinstance(images, Tensor):
            raise InputError(
                f"The model takes a tensor (batch, {c}, height, width), got {type(images).__name__}. "
                "For pictures: model.predict(picture), or model(model.preprocess(picture))."
            )
        shape = tuple(images.shape)
        wanted = f"(batch, {c}, height, width)"
        if images.ndim != 4:
            hint = " Add the batch: images[None]." if images.ndim == 3 else ""
            raise InputError(f"The model takes {wanted}, got shape {shape}.{hint}")
        if shape[1] != c:
            hint = (
                " Channels come second: images.permute(0, 3, 1, 2)."
                if shape[3] == c
                else f" For other channels: create(..., channels={shape[1]})."
            )
            raise InputError(f"The model takes {wanted}, got shape {shape}.{hint}")
        if shape[0] == 0:
            raise InputError(f"The batch is empty: got shape {shape}. Pass at least one image.")
        if shape[2] % p or shape[3] % p or shape[2] < p or shape[3] < p:
            raise InputError(
                f"Images of {shape[2]} x {shape[3]} pixels do not divide into patches of {p}. "
                f"{fitting((shape[2], shape[3]), p)} Resize or crop them; model.preprocess does."
            )
        if not images.is_floating_point():
            raise InputError(
                f"The model takes normalised floats, got {images.dtype}. "
                "For pictures of whole numbers: model.preprocess(images), which scales and normalises."
            )
        if images.device != self.device:
            raise InputError(
                f"Images are on {images.device}, the model on {self.device}. Move one: images.to(model.device)."
            )
        if images.dtype != self.dtype and not torch.is_autocast_enabled(images.device.type):
            raise InputError(f"Images are {images.dtype}, the model {self.dtype}. Convert one: images.to(model.dtype).")


def resample_positions(table: Tensor, grid: tuple[int, int], new: tuple[int, int], method: Resample) -> Tensor:
    """Stretches a position table to another grid, in float32; rows before the patches' stay: (1, rows, d)."""
    first = table.shape[1] - grid[0] * grid[1]
    image = rearrange(table[:, first:].float(), "1 (h w) d -> 1 d h w", h=grid[0], w=grid[1])
    if image.device.type == "mps":  # has no antialiased bicubic
        image = image.cpu()
    stretched = F.interpolate(image, size=new, **RESAMPLE[method])
    patches = rearrange(stretched, "1 d h w -> 1 (h w) d").to(table.device, table.dtype)
    return torch.cat([table[:, :first], patches], dim=1)


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """Fixed positions, MAE's way: sines and cosines of the column, then of the row: (1, h w, d)."""
    steps = torch.arange(dim // 4, dtype=torch.float64, device="cpu")  # mps has no float64
    frequencies = 10000 ** -(steps / (dim // 4))
    rows, columns = (torch.arange(side, device="cpu")[:, None] * frequencies for side in grid)  # (h or w, d/4)
    columns = columns[None].expand(grid[0], -1, -1)
    rows = rows[:, None].expand(-1, grid[1], -1)
    table = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=-1)
    return rearrange(table, "h w d -> 1 (h w) d").float()


def _head(config: ViTConfig) -> nn.Module:
    if not config.num_classes:
        return nn.Identity()
    head = nn.Linear(config.embed_dim, config.num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _lecun_normal(weight: Tensor) -> None:
    """Flax's default: variance 1 / inputs, after a cut at two standard deviations that takes 0.8796 of the spread."""
    std = weight[0].numel() ** -0.5 / 0.87962566
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _no_preprocess(images: Any) -> Tensor:
    raise ImageError(
        "These weights came without their preprocessing, so pictures cannot be prepared for them. Set it: "
        "model.preprocess = vitlite.images.Preprocess(vitlite.images.Recipe(...), model)."
    )

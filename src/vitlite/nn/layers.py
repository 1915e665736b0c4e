"""The layers of a Vision Transformer, roughly in the order in which they run.

Shapes: b images, c channels, h and w patches down and across, p patch size, n tokens, d width of a token.
The parameters have the same names as in timm, except for those listed in `vit.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite import kernels
from vitlite.config import ViTConfig
from vitlite.nn.positions import rotate, rotation_angles

# Models with RMS norms have linear layers without biases, hence `bias=config.norm == "layer"` in the blocks.
NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer: (b, n, d) -> (b, n, k). Inference uses oneDNN if it is faster on this CPU.

    A layer that does more than multiply, such as an adapter or a layer with hooks, is called as usual.
    """
    return kernels.onednn_linear(x, layer.weight, layer.bias) if kernels.should_use_onednn(layer, x) else layer(x)


class PatchEmbed(nn.Module):
    """Cut images into patches and project each to a token: (b, c, h p, w p) -> (b, h w, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c, p, d = config.channels, config.patch_size, config.dim
        self.backbone: nn.Module = nn.Identity()
        if config.stem is not None:  # a hybrid projects the feature map of a ResNet
            from vitlite.nn.stem import stem

            self.backbone = stem(config)
            c, p = config.stem_dim, config.kernel_size
        self.patch_size = p
        norm, around = NORMS[config.norm], config.input_norm == "patches"
        self.norm_in = norm(c * p * p, config.norm_eps) if around else None
        self.proj = nn.Conv2d(c, d, kernel_size=p, stride=p, bias=config.input_norm != "tokens")
        self.norm = norm(d, config.norm_eps) if around or config.input_norm == "projected" else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.norm_in is not None:
            p = self.patch_size
            patches = self.norm_in(rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=p, q=p))
            images = rearrange(patches, "b h w (c p q) -> b c (h p) (w q)", p=p, q=p)
        return self.norm(rearrange(self.proj(self.backbone(images)), "b d h w -> b (h w) d"))


class Attention(nn.Module):
    """Multi-head self-attention: (b, n, d) -> (b, n, d).

    With rotary positions, `rotation` contains the cosines and sines by which queries and keys are rotated. Otherwise,
    it is empty.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rotary = config.rope is not None
        self.adjacent = config.rope is not None and config.rope.pairs == "adjacent"
        self.qkv = nn.Linear(config.dim, 3 * config.attention_dim, bias=config.qkv_bias)
        normed = config.inner_norm == "both"
        self.norm = NORMS[config.norm](config.attention_dim, config.norm_eps) if normed else nn.Identity()
        self.proj = nn.Linear(config.attention_dim, config.dim, bias=config.norm == "layer")
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def queries_keys_values(self, x: Tensor, *rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (b, heads, n, head_dim)."""
        q, k, v = rearrange(linear(self.qkv, x), "b n (three heads d) -> three b heads n d", three=3, heads=self.heads)
        if self.rotary:
            q, k = rotate(q, self.adjacent, *rotation), rotate(k, self.adjacent, *rotation)
        return q, k, v

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x, *rotation)
        if q.requires_grad and _plain_is_faster(q):
            x = attention_map(q, k) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.drop(linear(self.proj, self.norm(rearrange(x, "b heads n d -> b n (heads d)"))))

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Return the attention map of each head: (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.queries_keys_values(x, *rotation)
        return attention_map(q, k)


def attention_map(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention maps softmax(q k^T / sqrt(d)) of queries and keys: (b, heads, n, d) -> (b, heads, n, n)."""
    scale = q.shape[-1] ** -0.5
    return ((q * scale) @ k.mT).softmax(-1)


def _plain_is_faster(q: Tensor) -> bool:
    """Return True if training should compute attention maps explicitly instead of with torch's fused kernel.

    On CPUs, the backward pass of the fused kernel is slow. Above 1,024 tokens, attention maps would take gigabytes.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return q.device.type == "cpu" and q.shape[2] <= 1024 and not traced


class QuickGELU(nn.Module):
    """An approximation of GELU used by OpenAI's CLIP: x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "quick_gelu": QuickGELU,
}


class MLP(nn.Module):
    """An MLP of two linear layers with a GELU between them, applied to each token: (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, config.mlp_dim, bias=config.norm == "layer")
        self.act = ACTIVATIONS[config.mlp]()
        self.norm = (
            NORMS[config.norm](config.mlp_dim, config.norm_eps) if config.inner_norm != "none" else nn.Identity()
        )
        self.fc2 = nn.Linear(config.mlp_dim, config.dim, bias=config.norm == "layer")
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(linear(self.fc2, self.norm(self.drop(self.act(linear(self.fc1, x))))))


class SwiGLU(nn.Module):
    """A gated MLP: one linear layer computes gate and value, and a second one is applied to silu(gate) * value.

    Each token is processed separately: (b, n, d) -> (b, n, d).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, 2 * config.mlp_dim, bias=config.norm == "layer")  # gate and value, stacked
        self.norm = (
            NORMS[config.norm](config.mlp_dim, config.norm_eps) if config.inner_norm != "none" else nn.Identity()
        )
        self.fc2 = nn.Linear(config.mlp_dim, config.dim, bias=config.norm == "layer")
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = linear(self.fc1, x).chunk(2, dim=-1)
        return self.drop(linear(self.fc2, self.norm(self.drop(F.silu(gate) * value))))


class LayerScale(nn.Module):
    """Layer scale: a learned factor for each channel of a residual branch, (b, n, d) -> (b, n, d)."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drop a residual branch for random images, and rescale it for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """A pre-norm transformer block with attention and an MLP, each on a residual branch: (b, n, d) -> (b, n, d)."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        d, scale = config.dim, config.layer_scale
        self.checkpointing = config.checkpointing
        self.norm1 = NORMS[config.norm](d, config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.norm2 = NORMS[config.norm](d, config.norm_eps)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.ls2 = nn.Identity() if scale is None else LayerScale(d, scale)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, *rotation: Tensor, inside_checkpoint: bool = False) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled() and not inside_checkpoint:
            from torch.utils.checkpoint import checkpoint  # takes half a second to import in torch 2.6

            return checkpoint(self.forward, x, *rotation, inside_checkpoint=True, use_reentrant=False)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), *rotation)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Return the attention maps of this block: (b, n, d) -> (b, heads, n, n)."""
        return self.attn.map(self.norm1(x), *rotation)


class AttentionPool(nn.Module):
    """Attention pooling: a learned query attends to all tokens, and an MLP follows, (b, n, d) -> (b, d)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        d = config.dim
        self.heads = config.pool_heads
        self.latent = nn.Parameter(torch.zeros(1, 1, d))
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.proj = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d, config.norm_eps)
        gelu = "gelu" if config.mlp == "swiglu" else config.mlp
        self.mlp = MLP(
            config.replace(mlp=gelu, mlp_dim=config.pool_mlp_dim, norm="layer", inner_norm="none", dropout=0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(self.latent), "b n (heads d) -> b heads n d", heads=self.heads)
        k, v = rearrange(self.kv(x), "b n (two heads d) -> two b heads n d", two=2, heads=self.heads)
        read = F.scaled_dot_product_attention(q.expand(x.shape[0], -1, -1, -1), k, v)  # (b, heads, 1, head_dim)
        x = self.proj(rearrange(read, "b heads n d -> b n (heads d)"))
        return (x + self.mlp(self.norm(x)))[:, 0]


class CosineHead(nn.Linear):
    """A head that compares the direction of a vector with a weight vector for each class: (b, d) -> (b, k).

    If the classes are described by text, the weight vector of a class is the normalised vector of its text, multiplied
    by the scale of the logits.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.cosine_head or config.embed_dim, config.num_classes)
        self.proj = nn.Linear(config.embed_dim, config.cosine_head) if config.cosine_head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(self.proj(x), dim=-1))


class RopeFrequencies(nn.Module):
    """The learned frequencies of rotary positions.

    For the height and width of a grid of patches, `forward` returns a pair of cosines and sines for each block, with
    the shape (heads, n, head_dim / 2) each.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.freqs = nn.Parameter(torch.zeros(2, config.depth, config.heads, config.head_width // 2))

    def forward(self, grid: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
        c = self.config
        assert c.rope is not None
        freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        angles = F.pad(rotation_angles(grid, c.head_width, c.rope, freqs), (0, 0, c.prefix_tokens, 0))
        return list(zip(angles.cos(), angles.sin(), strict=True))

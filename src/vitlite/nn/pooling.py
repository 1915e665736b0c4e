"""How the tokens become one vector an image, after the final norm: a function for each `pool`, and SigLIP's attention.

Shapes: b images, n tokens (class token, registers, patches), d width of a token.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.config import Pool, ViTConfig

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT


class AttentionPool(nn.Module):
    """SigLIP's: one learned query looks at all patches, and an MLP thinks about what it saw: (b, n, d) -> (b, d)."""

    def __init__(self, config: ViTConfig, mlp: nn.Module) -> None:
        super().__init__()
        d = config.dim
        self.heads = config.heads
        self.latent = nn.Parameter(torch.zeros(1, 1, d))
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.kv.parts = 2  # type: ignore[assignment]  # as of the network's own layers
        self.proj = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d, config.norm_eps)
        self.mlp = mlp
        nn.init.normal_(self.latent, std=d**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(self.latent), "b n (heads d) -> b heads n d", heads=self.heads)
        k, v = rearrange(self.kv(x), "b n (two heads d) -> two b heads n d", two=2, heads=self.heads)
        seen = F.scaled_dot_product_attention(q.expand(x.shape[0], -1, -1, -1), k, v)  # (b, heads, 1, head_dim)
        x = self.proj(rearrange(seen, "b heads n d -> b n (heads d)"))
        return (x + self.mlp(self.norm(x)))[:, 0]


def class_token(model: "ViT", x: Tensor) -> Tensor:
    """The class token alone."""
    return model.norm(x[:, 0])


def class_and_distillation_token(model: "ViT", x: Tensor) -> Tensor:
    """DeiT's two tokens side by side: a head on both is the mean of two heads, its weights halved."""
    return model.norm(x[:, :2]).flatten(1)


def mean(model: "ViT", x: Tensor) -> Tensor:
    """The mean of the patches."""
    return model.norm(x)[:, model.config.prefix_tokens :].mean(1)


def mean_with_class_token(model: "ViT", x: Tensor) -> Tensor:
    """The mean of the patches and the class token."""
    return model.norm(x).mean(1)


def class_token_and_mean(model: "ViT", x: Tensor) -> Tensor:
    """The class token, and beside it the mean of the patches."""
    x = model.norm(x)
    return torch.cat([x[:, 0], x[:, model.config.prefix_tokens :].mean(1)], dim=1)


def attention(model: "ViT", x: Tensor) -> Tensor:
    """What the model's own `AttentionPool` makes of the patches."""
    return model.attn_pool(model.norm(x)[:, model.config.prefix_tokens :])


# The final norm, and one vector an image: (b, n, d) -> (b, d), or (b, 2 d) of two side by side.
POOLS: dict[Pool, Callable[["ViT", Tensor], Tensor]] = {
    "cls": class_token,
    "cls_and_distillation": class_and_distillation_token,
    "mean": mean,
    "mean_with_cls": mean_with_class_token,
    "cls_and_mean": class_token_and_mean,
    "map": attention,
}

"""The text towers of CLIP and SigLIP, which turn the token ids of a sentence into a vector.

The blocks are the same as in the image tower. Shapes: b sentences, n tokens of a padded sentence, d width of a token, e
width of a vector.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.config import Mlp, ViTConfig
from vitlite.errors import InputError
from vitlite.nn.layers import Attention, Block, linear


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The configuration of a text tower."""

    vocabulary: int  # number of token ids
    context: int  # number of tokens of every sentence, after padding
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    mlp: Mlp
    norm_eps: float
    causal: bool  # if True, a token attends only to itself and the tokens before it
    pool: Literal["argmax", "eos", "last"]  # see TextRecord
    eos: int  # the token id for pool="eos"
    embed_dim: int  # width of the vector of a sentence
    projection: Literal["none", "linear", "bias"]  # no projection, or one without or with a bias


class CausalAttention(Attention):
    """Self-attention in which a token attends only to itself and the tokens before it: (b, n, d) -> (b, n, d)."""

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(self.proj, rearrange(x, "b heads n d -> b n (heads d)"))


class TextTower(nn.Module):
    """The text tower of a checkpoint for text and images: (b, n) token ids -> (b, e) vectors."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        d, eps = config.dim, config.norm_eps
        block = ViTConfig(dim=d, heads=config.heads, mlp_dim=config.mlp_dim, mlp=config.mlp, norm_eps=eps)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, d)
        self.pos_embed = nn.Parameter(torch.zeros(config.context, d))
        self.blocks = nn.ModuleList(Block(block, drop_path=0.0) for _ in range(config.depth))
        if config.causal:
            for layer in self.blocks:
                layer.attn = CausalAttention(block)
        self.norm = nn.LayerNorm(d, eps)
        has_projection = config.projection != "none"
        bias = config.projection == "bias"
        self.projection = nn.Linear(d, config.embed_dim, bias) if has_projection else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        """Return one vector per sentence: (b, n) -> (b, e).

        Args:
            ids: The token ids of each sentence, padded to `config.context` tokens.

        Raises:
            InputError: The token ids have another shape.
        """
        if ids.ndim != 2 or ids.shape[1] != self.config.context:
            raise InputError(
                f"Token ids must have the shape (sentences, {self.config.context}), got {tuple(ids.shape)}. Pad each "
                f"sentence to {self.config.context} tokens."
            )
        x = self.token_embedding(ids) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.projection(self._pool(self.norm(x), ids))

    def _pool(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the token that represents each sentence, according to `config.pool`: (b, n, d) -> (b, d)."""
        if self.config.pool == "last":
            return x[:, -1]
        position = ids.argmax(1) if self.config.pool == "argmax" else ids.eq(self.config.eos).int().argmax(1)
        return x[torch.arange(len(x), device=x.device), position]

"""What moves the weights: AdamW, and Muon (Jordan et al. 2024), whose momentum is made orthogonal before it is applied.

Muon is meant for the matrices of the blocks, when training from scratch; everything else stays with AdamW. Steps are
scaled as in Moonlight (Liu et al. 2025, arXiv 2502.16982), so that AdamW's learning rate and weight decay serve both.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitlite.model import ViT
from vitlite.training import distributed as ranks
from vitlite.training.settings import Settings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: drives singular values from (0, 1] to about 1 in 5 rounds


class Muon(torch.optim.Optimizer):
    """For matrices only. In a group with "parts" of 3, each counts as three: queries, keys and values in one."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "parts": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix along its orthogonalised Nesterov momentum."""
        waiting: dict[tuple[int, int], list[tuple[Tensor, Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(state["momentum"], group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                parts = (matrix.chunk(group["parts"]) for matrix in (weight.data, update))
                for part, direction in zip(*parts, strict=True):
                    waiting.setdefault(tuple(part.shape), []).append((part, direction, group))
        for (tall, wide), items in waiting.items():  # one batch a shape
            directions = _shared(torch.stack([direction for _, direction, _ in items]))
            for (part, _, group), direction in zip(items, directions, strict=True):
                part.add_(direction, alpha=-group["lr"] * 0.2 * max(tall, wide) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Each matrix with its singular values set to about 1, by Newton and Schulz's iteration: (b, m, n) as given."""
    turned = x.shape[1] > x.shape[2]
    y = (x.mT if turned else x).bfloat16()
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.mT if turned else y).to(x.dtype)


def _shared(x: Tensor) -> Tensor:
    """`orthogonal`, each matrix by one of the processes that train together: all of them have the same gradients."""
    if ranks.world() == 1:
        return orthogonal(x)
    found, mine = torch.zeros_like(x), ranks.part(len(x))
    if len(mine):
        found[mine] = orthogonal(x[mine])
    ranks.add(found)
    return found


def optimizers(model: ViT, weights: dict[str, nn.Parameter], s: Settings) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon where wanted. Matrices decay; norms, biases, tokens and positions do not."""
    groups: dict[tuple[bool, int, bool, bool], dict[str, Any]] = {}
    for name, weight in weights.items():
        depth, matrix = _depth(name, model.config.depth), weight.ndim in (2, 4)
        muon = s.optimizer == "muon" and matrix and name.startswith("blocks.")
        scale = s.layer_decay ** (model.config.depth + 1 - depth)
        joint = name.endswith("attn.qkv.weight")
        group = {"params": [], "scale": scale, "weight_decay": s.weight_decay if matrix else 0.0}
        group["parts"] = 3 if joint else 1
        groups.setdefault((muon, depth, matrix, joint), group)["params"].append(weight)
    adamw = [group for (muon, *_), group in groups.items() if not muon]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, lr=s.lr, fused=model.device.type in ("cpu", "cuda"))]
    if others := [group for (muon, *_), group in groups.items() if muon]:
        found.append(Muon(others, lr=s.lr))
    return found


def _depth(name: str, depth: int) -> int:
    """How far a weight is from the pixels: 0 the embedding, 1 the first block, depth + 1 the head."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith(("norm.", "fc_norm", "pre_logits", "head")) else 0


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (weight for group in optimizer.param_groups for weight in group["params"])

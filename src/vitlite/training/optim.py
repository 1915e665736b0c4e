"""The optimizers, AdamW and Muon (Jordan et al. 2024), and the learning rate schedule.

Muon updates each matrix with its orthogonalised momentum. It trains only the matrices of the blocks. AdamW trains all
other weights. Muon's steps are scaled as in Moonlight (Liu et al. 2025, arXiv 2502.16982), which lets both optimizers
use the same learning rate and weight decay.
Shapes: b matrices, m rows, n columns.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitlite.nn.vit import ViT, stacked_matrices
from vitlite.training import distributed
from vitlite.training.settings import Settings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic polynomial, which maps (0, 1] to about 1 in five rounds


def learning_rate(settings: Settings, epoch: float) -> float:
    """Return the learning rate after `epoch` epochs, which may be fractional.

    The rate rises linearly, stays constant, and then falls along half a cosine.

    >>> [round(learning_rate(Settings(epochs=10, lr=1.0), epoch), 2) for epoch in (0, 0.5, 1, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = (epoch + 0.001) / settings.warmup  # above 0, because the first step should change the weights
    left = (settings.epochs - epoch) / (settings.decay * settings.epochs)  # falls from 1 to 0 during the decay
    falling = 0.5 - 0.5 * math.cos(math.pi * min(left, 1.0))
    return settings.lr * min(1.0, rising, falling)


class _Update(NamedTuple):
    """A matrix, the direction of its update, and the learning rate."""

    matrix: Tensor  # (m, n)
    direction: Tensor  # (m, n)
    lr: float


class Muon(torch.optim.Optimizer):
    """The Muon optimizer. All weights must be matrices.

    The option "parts" of a group is the number of matrices stacked in each weight, such as 3 for q, k and v.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "parts": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix with its orthogonalised Nesterov momentum."""
        updates: dict[torch.Size, list[_Update]] = {}  # by shape, to orthogonalise matrices of one shape together
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                matrices = weight.data.chunk(group["parts"])
                directions = self._momentum(weight, group["momentum"]).chunk(group["parts"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                for matrix, direction in zip(matrices, directions, strict=True):
                    updates.setdefault(matrix.shape, []).append(_Update(matrix, direction, group["lr"]))
        for alike in updates.values():
            orthogonalised = _orthogonal_on_all_ranks(torch.stack([update.direction for update in alike]))  # (b, m, n)
            for update, direction in zip(alike, orthogonalised, strict=True):
                update.matrix.add_(direction, alpha=-update.lr * 0.2 * max(update.matrix.shape) ** 0.5)

    def _momentum(self, weight: nn.Parameter, keep: float) -> Tensor:
        """Update and return the Nesterov momentum of a weight."""
        gradient, state = cast(Tensor, weight.grad), self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - keep)
        return gradient.lerp(state["momentum"], keep)


def orthogonal(x: Tensor) -> Tensor:
    """Orthogonalise matrices by Newton-Schulz iteration: (b, m, n) -> (b, m, n).

    The singular values of the results are close to 1.
    """
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).bfloat16()  # wide, because y @ y.mT is then the smaller product
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(x.dtype)


def _orthogonal_on_all_ranks(x: Tensor) -> Tensor:
    """Orthogonalise matrices that are the same on all ranks. Each rank computes a share of them."""
    if distributed.world_size() == 1:
        return orthogonal(x)
    found = torch.zeros_like(x)
    mine = distributed.shard(len(x))
    if len(mine):
        found[mine] = orthogonal(x[mine])
    distributed.all_reduce(found)
    return found


def optimizers(model: ViT, weights: dict[str, nn.Parameter], settings: Settings) -> list[torch.optim.Optimizer]:
    """Return AdamW, followed by Muon if `settings.optimizer` is "muon". Only matrices have weight decay."""
    groups: dict[tuple[bool, int, bool, int], dict[str, Any]] = {}
    for name, weight in weights.items():
        is_matrix = weight.ndim in (2, 4) and name != "rope.freqs"
        by_muon = settings.optimizer == "muon" and is_matrix and name.startswith("blocks.")
        depth = depth_of(name, model.config.depth)
        parts = stacked_matrices(name, model.config)
        group = groups.setdefault(
            (by_muon, depth, is_matrix, parts),
            {
                "params": [],
                "scale": settings.layer_decay ** (model.config.depth + 1 - depth),  # factor of the learning rate
                "weight_decay": settings.weight_decay if is_matrix else 0.0,
                "parts": parts,
            },
        )
        group["params"].append(weight)
    muon_groups = [group for (by_muon, *_), group in groups.items() if by_muon]
    adamw_groups = [group for (by_muon, *_), group in groups.items() if not by_muon]
    fused = model.device.type in ("cpu", "cuda")
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw_groups, lr=settings.lr, fused=fused)]
    if muon_groups:
        found.append(Muon(muon_groups, lr=settings.lr))
    return found


def depth_of(name: str, blocks: int) -> int:
    """Return the depth of a weight as in timm: 0 in the embedding, 1 in the first block, `blocks` + 1 in the head.

    The final norm belongs to the last block. Learned rotary frequencies belong to the head.
    """
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    if name.startswith("norm."):
        return blocks
    return 0 if name.startswith(("cls_token", "reg_token", "pos_embed", "patch_embed", "norm_pre")) else blocks + 1


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the weights that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer stores for each weight."""
    return ("momentum",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq")


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state of an optimizer.

    Args:
        optimizer: A new optimizer.
        names: The name of each weight.
        tensors: The saved tensors by "kind.name", such as "step.head.bias".
    """
    state: dict[int, dict[str, Tensor]] = {}
    for i, weight in enumerate(weights_of(optimizer)):
        keys = {kind: f"{kind}.{names[weight]}" for kind in state_names(optimizer)}
        found = {kind: tensors[key] for kind, key in keys.items() if key in tensors}
        if found:
            state[i] = found
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # moves each tensor to the weight's device

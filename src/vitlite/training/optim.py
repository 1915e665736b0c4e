"""What moves the weights: AdamW, and Muon (Jordan et al. 2024), whose momentum is made orthogonal before it is applied.

Muon is meant for the matrices of the blocks, when training from scratch; everything else stays with AdamW. Steps are
scaled as in Moonlight (Liu et al. 2025, arXiv 2502.16982), so that AdamW's learning rate and weight decay serve both.
Shapes: b matrices, m rows, n columns.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitlite.nn.vit import ViT, stacked_matrices
from vitlite.training import distributed
from vitlite.training.settings import Settings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: drives singular values from (0, 1] to about 1 in 5 rounds


class _Move(NamedTuple):
    """A matrix, where it is to go, and how fast."""

    matrix: Tensor  # (m, n)
    direction: Tensor  # (m, n)
    lr: float


class Muon(torch.optim.Optimizer):
    """For matrices only. In a group with "parts" of 3, each counts as three: queries, keys and values in one."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "parts": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix along its orthogonalised Nesterov momentum."""
        moves = self._moves()
        self._decay()
        for alike in _by_shape(moves):
            directions = _orthogonal_by_all_ranks(torch.stack([move.direction for move in alike]))  # (b, m, n)
            for move, direction in zip(alike, directions, strict=True):
                move.matrix.add_(direction, alpha=-move.lr * 0.2 * max(move.matrix.shape) ** 0.5)

    def _moves(self) -> list[_Move]:
        """Where the matrices are to go, the parts of a weight each by itself."""
        moves = []
        for group in self.param_groups:
            for weight in _moved(group):
                matrices = weight.data.chunk(group["parts"])
                directions = self._momentum(weight, group["momentum"]).chunk(group["parts"])
                moves += [_Move(*both, group["lr"]) for both in zip(matrices, directions, strict=True)]
        return moves

    def _decay(self) -> None:
        for group in self.param_groups:
            for weight in _moved(group):
                weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _momentum(self, weight: nn.Parameter, keep: float) -> Tensor:
        """Nesterov's: the gradient, and what is left of those before."""
        gradient, state = cast(Tensor, weight.grad), self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - keep)
        return gradient.lerp(state["momentum"], keep)


def _moved(group: Mapping[str, Any]) -> list[nn.Parameter]:
    """Those that have a gradient, as torch's own optimizers move no others."""
    return [weight for weight in group["params"] if weight.grad is not None]


def _by_shape(moves: Iterable[_Move]) -> list[list[_Move]]:
    """The matrices of a shape together, since one call computes them all."""
    found: dict[torch.Size, list[_Move]] = {}
    for move in moves:
        found.setdefault(move.matrix.shape, []).append(move)
    return list(found.values())


def orthogonal(x: Tensor) -> Tensor:
    """Each matrix with its singular values set to about 1, by Newton and Schulz's iteration: (b, m, n) as given."""
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).bfloat16()  # the smaller of its two products with itself is iterated
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(x.dtype)


def _orthogonal_by_all_ranks(x: Tensor) -> Tensor:
    """`orthogonal`, each matrix by one of the processes that train together: all of them have the same gradients."""
    if distributed.world_size() == 1:
        return orthogonal(x)
    found = torch.zeros_like(x)
    mine = distributed.shard(len(x))
    if len(mine):
        found[mine] = orthogonal(x[mine])
    distributed.all_reduce(found)
    return found


class _Kind(NamedTuple):
    """What weights that are moved alike have in common."""

    muon: bool
    depth: int  # as `depth_of` counts
    matrix: bool
    parts: int  # that a layer computes at once: queries, keys and values; or a gate and what it lets through


def optimizers(model: ViT, weights: dict[str, nn.Parameter], settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon where wanted. Matrices decay; norms, biases, tokens and positions do not."""
    weights_by_kind: dict[_Kind, list[nn.Parameter]] = {}
    for name, weight in weights.items():
        matrix = weight.ndim in (2, 4)
        kind = _Kind(
            muon=settings.optimizer == "muon" and matrix and name.startswith("blocks."),
            depth=depth_of(name, model.config.depth),
            matrix=matrix,
            parts=_parts(name, model),
        )
        weights_by_kind.setdefault(kind, []).append(weight)
    adamw_groups, muon_groups = [], []
    for kind, alike in weights_by_kind.items():
        group = {
            "params": alike,
            "scale": settings.layer_decay ** (model.config.depth + 1 - kind.depth),  # of the learning rate
            "weight_decay": settings.weight_decay if kind.matrix else 0.0,
            "parts": kind.parts,
        }
        if kind.muon:
            muon_groups.append(group)
        else:
            adamw_groups.append(group)
    fused = model.device.type in ("cpu", "cuda")
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw_groups, lr=settings.lr, fused=fused)]
    if muon_groups:
        found.append(Muon(muon_groups, lr=settings.lr))
    return found


def _parts(name: str, model: ViT) -> int:
    """How many matrices are one weight."""
    return stacked_matrices(name, model.config)


def depth_of(name: str, blocks: int) -> int:
    """How far a weight is from the pixels: 0 the embedding, 1 the first block, and after the last block the head."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    if name.startswith(("norm.", "attn_pool", "fc_norm", "pre_logits", "head")):
        return blocks + 1
    return 0


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """All that an optimizer moves."""
    for group in optimizer.param_groups:
        yield from group["params"]


def remembers(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What an optimizer keeps of each weight that has had a gradient."""
    return ("momentum",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq")


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> None:
    """Gives an optimizer what it remembered; by torch's own way, which knows what is to be on which device.

    Args:
        optimizer: New.
        names: Of its weights.
        tensors: By "kind.name", such as "step.head.bias", which fused AdamW wants on the GPU, too.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for i, weight in enumerate(weights_of(optimizer)):
        keys = {kind: f"{kind}.{names[weight]}" for kind in remembers(optimizer)}
        found = {kind: tensors[key] for kind, key in keys.items() if key in tensors}
        if found:
            state[i] = found
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})

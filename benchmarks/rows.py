"""Measure oneDNN's time per token for the linear layers of ViT-B's blocks, by the number of tokens.

    python benchmarks/rows.py

"in a model": each block has its own weights, as in a forward pass, so they are not in the processor's cache.
"the same weights": one block is repeated. Times are the best of several rounds.
"""

import time

import torch
from torch import Tensor

from vitlite.fast.measure import machine
from vitlite.kernels import PackedLinear

DIM, BLOCKS, ROUNDS = 768, 12, 10
ROWS = (128, 192, 197, 256, 257, 261, 272, 384, 512)


class Products:
    """The four linear layers of a block and the operations fused with them."""

    def __init__(self) -> None:
        self.qkv = _layer(3 * DIM, DIM)
        self.proj = _layer(DIM, DIM)
        self.fc1 = _layer(4 * DIM, DIM)
        self.fc2 = _layer(DIM, 4 * DIM)

    def run(self, x: Tensor) -> None:
        """Run them as a block does, on (1, n, d)."""
        self.qkv(x)
        x = self.proj.added(x, x)
        self.fc2.added(self.fc1.activated(x, "none"), x)


def _layer(outputs: int, inputs: int) -> PackedLinear:
    return PackedLinear(torch.randn(outputs, inputs), torch.randn(outputs), torch.float32)


def microseconds(blocks: list[Products], rows: int) -> float:
    """Return the microseconds per row and block."""
    x, best = torch.randn(1, rows, DIM), float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for block in blocks:
            block.run(x)
        best = min(best, time.perf_counter() - begun)
    return best / len(blocks) / rows * 1e6


if __name__ == "__main__":
    print(machine())
    print("\n| rows | in a model, microseconds a row | the same weights |\n|--:|--:|--:|")
    with torch.inference_mode():
        model = [Products() for _ in range(BLOCKS)]
        for rows in ROWS:
            print(f"| {rows} | {microseconds(model, rows):.1f} | {microseconds(model[:1] * BLOCKS, rows):.1f} |")

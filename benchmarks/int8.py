"""What int8 would gain over bfloat16: the linear layers of a block, inputs rounded per token by torch's operators.

    python benchmarks/int8.py [--model vit_base_16] [--batch 1]

oneDNN multiplies unsigned by signed bytes twice as fast as bfloat16, but rounding and scaling each token are passes
over memory of their own, since its operator in torch takes one scale for all tokens. `products` leaves these out.
Whether int8 gives the same answers is what benchmarks/agreement.py prints.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitlite.config import PRESETS
from vitlite.speed.onednn import PackedLinear

ROUNDS = 60


class Int8Linear:
    """A linear layer in int8, weights scaled per channel and inputs per token: (n, k) in bfloat16 -> (n, m)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.scale = weight.abs().amax(1) / 127
        self.weight = torch.ops.onednn.qlinear_prepack((weight / self.scale[:, None]).round().to(torch.int8), None)
        self.zeros, self.bias = torch.zeros(len(bias), dtype=torch.int64), bias.bfloat16()

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input in steps, around 128, and the step of each token."""
        step = x.abs().amax(-1, keepdim=True) / 126
        return (x / step).round_().add_(128).to(torch.uint8), step

    def product(self, x: Tensor) -> Tensor:
        """Without bias and the scale of the tokens."""
        options = (None, 1.0, 0, torch.bfloat16, "none", [], "")
        return torch.ops.onednn.qlinear_pointwise.default(x, 1.0, 128, self.weight, self.scale, self.zeros, *options)

    def __call__(self, x: Tensor) -> Tensor:
        steps, step = self.rounded(x)
        return torch.addcmul(self.bias, self.product(steps), step)


def best(*contestants: Callable[[], object]) -> list[float]:
    """The best time of each in microseconds, in turns."""
    found = [math.inf] * len(contestants)
    for _ in range(ROUNDS):
        for i, run in enumerate(contestants):
            start = time.perf_counter()
            run()
            found[i] = min(found[i], 1e6 * (time.perf_counter() - start))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="vit_base_16", metavar="PRESET")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    config = PRESETS[args.model]
    tokens, d, h = args.batch * (config.prefix_tokens + math.prod(config.grid)), config.dim, config.mlp_dim
    total = torch.zeros(3)
    print("| layer | bfloat16, us | int8, us | products of int8, us | error of int8 |\n|---|---|---|---|---|")
    with torch.inference_mode():
        for name, k, m in (("qkv", d, 3 * d), ("proj", d, d), ("fc1", d, h), ("fc2", h, d)):
            weight, bias, x = torch.randn(m, k), torch.randn(m), torch.randn(tokens, k).bfloat16()
            narrow, byte = PackedLinear(weight, bias, torch.bfloat16), Int8Linear(weight, bias)
            steps, _ = byte.rounded(x)
            right = x.float() @ weight.T + bias
            error = (byte(x) - right).abs().max() / right.abs().max()
            times = best(lambda: narrow(x), lambda: byte(x), lambda: byte.product(steps))  # noqa: B023  # called here
            total += torch.tensor(times)
            print(f"| {name} | {times[0]:.0f} | {times[1]:.0f} | {times[2]:.0f} | {error:.1e} |")
    bf16, int8, products = total.tolist()
    print(
        f"\nAll four: int8 {bf16 / int8:.2f} times as fast as bfloat16, its products alone {bf16 / products:.2f} times"
    )


if __name__ == "__main__":
    main()

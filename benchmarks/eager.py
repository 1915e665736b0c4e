"""A model without `optimize` beside timm's: where a forward pass is short, and where it is not.

python benchmarks/eager.py
"""

import copy

import torch
from peer_models import timm

from vitlite.fast.measure import Benchmark, eager, measure, random_model
from vitlite.presets import preset


def compare(name: str, batch: int) -> None:
    """Prints how long one model takes for one batch."""
    model, images = random_model(preset(name)), torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        ours = eager(model, images, torch.float32)
        theirs = Benchmark("timm", torch.float32, timm(copy.deepcopy(model), images))
        measure([ours, theirs], rounds=20)
    share = ours.best / theirs.best
    print(f"{name}, batch {batch}: vitlite takes {share:.3f} of timm's time ({ours.best * 1e3:.1f} ms)", flush=True)


if __name__ == "__main__":
    compare("vit_base_16", batch=1)
    compare("vit_base_16", batch=8)
    compare("vit_tiny_16", batch=1)

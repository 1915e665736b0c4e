"""The model as created, without `optimize`, beside timm's: where a forward pass is short, and where it is not.

python benchmarks/eager.py
"""

import copy

import torch

from vitlite.bench import Contestant, measure, random_model
from vitlite.config import preset
from vitlite.peers import timm

for name, batch in (("vit_base_16", 1), ("vit_base_16", 8), ("vit_tiny_16", 1)):
    model = random_model(preset(name))
    images = torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        ours = Contestant("vitlite", torch.float32, lambda model=model, images=images: model(images))
        theirs = Contestant("timm", torch.float32, timm(copy.deepcopy(model), images))
        measure([ours, theirs], rounds=20)
    print(
        f"{name}, batch {batch}: vitlite takes {ours.best / theirs.best:.3f} of timm's time ({ours.best * 1e3:.1f} ms)"
    )

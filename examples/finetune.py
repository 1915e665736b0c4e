"""Fine-tune a model on two classes in a plain torch loop: python examples/finetune.py FOLDER

The two classes are random pieces of two photos, so that it runs in seconds. `vitlite train` does the real thing.
"""

import sys

import torch

import vitlite
from vitlite.images.decode import read_image

torch.manual_seed(0)
photos = {"cat": "examples/photos/chelsea.png", "coffee": "examples/photos/coffee.png"}
pixels = [read_image(path) for path in photos.values()]  # uint8 (h, w, c)
model = vitlite.create("vit_nano_4.cifar10", num_classes=len(photos)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random squares of 128 pixels, prepared for the model, and their classes."""
    classes = torch.randint(len(pixels), (count,))
    pieces = []
    for k in classes:
        top, left = (int(torch.randint(side - 128, ())) for side in pixels[k].shape[:2])
        pieces.append(pixels[k][top : top + 128, left : left + 128])
    return model.preprocess(pieces), classes


for step in range(12):
    images, classes = batch(16)
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.3f}")

model.eval().labels = list(photos)  # a new head has no labels
model.save(sys.argv[1] if len(sys.argv) > 1 else "finetuned")
print(f"{photos['coffee']}: {model.predict(photos['coffee'], top=1)[0].label}")

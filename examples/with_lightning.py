"""Train a model with Lightning: python examples/with_lightning.py FOLDER. Needs: pip install lightning

The two classes are two photos, so that it runs in seconds; the data of your own are any DataLoader.
"""

import sys
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import vitlite

photos = {"examples/photos/chelsea.png": 0, "examples/photos/coffee.png": 1}
model = vitlite.create("vit_nano_4.cifar10", num_classes=2)
data: Any = [(model.preprocess.one(path), label) for path, label in photos.items()] * 8


class Classifier(lightning.LightningModule):
    """What Lightning asks for: a loss, and an optimizer."""

    def __init__(self, model: vitlite.ViT) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.05)


trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Classifier(model.train()), DataLoader(data, batch_size=4, shuffle=True))
model.eval().labels = ["cat", "coffee"]
model.save(sys.argv[1] if len(sys.argv) > 1 else "finetuned")
print(model.predict("examples/photos/coffee.png", top=1)[0].label)

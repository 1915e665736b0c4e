"""Fine-tune trained weights on 1,000 images of CIFAR-10, against the same network from scratch.

    python examples/cifar10/finetune.py DATA WEIGHTS

DATA is CIFAR-10's binary version (see prepare.py), WEIGHTS the file of timm's deit_tiny_patch16_224.fb_in1k. Both see
the images at 112 pixels, five times each; 2,000 test images tell how well. Kept in results/finetune.json.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import vitlite
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.images import Preprocess
from vitlite.training import ImageData, Settings, measure, read_cifar10, train
from vitlite.training.augment import shuffled

RESULTS = Path(__file__).parent / "results" / "finetune.json"
NAME, SIZE, COUNT, TESTED, EPOCHS = "vit_tiny_16.deit_fb_in1k", 112, 1000, 2000, 5
SETTINGS = {
    "fine-tuned": Settings(epochs=EPOCHS, batch=50, ema=0.98, lr=5e-4, layer_decay=0.75),
    "from scratch": Settings(epochs=EPOCHS, batch=50, ema=0.98, lr=3e-3, optimizer="muon"),
}


def run(weights: Path | None, folder: Path, settings: Settings) -> float:
    """Train on a few images, and return the accuracy on others."""
    torch.manual_seed(settings.seed)
    model = vitlite.create(NAME, weights=weights, num_classes=10, image_size=SIZE)
    model.preprocess = Preprocess(transform_from_record(vitlite.info(NAME)).scaled(model.config.size), model)
    read = model.preprocess.pixels
    with TemporaryDirectory() as out:
        train(model, some(read_cifar10(folder, "train", read), COUNT), Path(out), settings)
    return measure(model, some(read_cifar10(folder, "test", read), TESTED), bfloat16=True).top1


def some(data: ImageData, count: int) -> ImageData:
    """Return so many of the images, the same ones every time."""
    rows = shuffled(0, 0, len(data))[:count]
    return ImageData(data.images[rows], data.labels[rows], data.classes)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    args = parser.parse_args()
    results = {}
    for name, settings in SETTINGS.items():
        start = time.process_time()
        top1 = run(args.weights if name == "fine-tuned" else None, args.data, settings)
        results[name] = {"top1": round(top1, 4), "cpu_seconds": round(time.process_time() - start)}
        print(name, results[name], flush=True)
    task = {"model": NAME, "pixels": SIZE, "images": COUNT, "epochs": EPOCHS, "test_images": TESTED}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(task | results, indent=1) + "\n")


if __name__ == "__main__":
    main()

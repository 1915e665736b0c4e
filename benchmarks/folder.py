"""How long a folder of JPEGs takes, against the model alone and reading alone, and whether memory stays constant.

    python benchmarks/folder.py --model NAME [--weights PATH] [--images 1000]

Without weights they are random, which are as fast as trained ones; the preprocessing is that of ImageNet's models.

The aim: no more than 1.15 times the model alone plus half of reading on one thread, on a machine with two cores.
The three are measured in turns, a slice of the folder at a time, so that a busy machine slows all of them.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from PIL import Image

import vitlite
from vitlite.images import Preprocess, TransformConfig
from vitlite.inference.predict import classify

PHOTOS = sorted((Path(__file__).parents[1] / "examples" / "photos").glob("*.[jp][pn]g"))
BATCH = 32


def random_model(name: str) -> vitlite.ViT:
    """A preset with random weights and the preprocessing of ImageNet's models."""
    model = vitlite.create(name, weights=None).eval()
    size, resize, half = model.config.size, tuple(side * 8 // 7 for side in model.config.size), (0.5, 0.5, 0.5)
    recipe = TransformConfig(size=size, resize=resize, mode="center", interpolation="bicubic", mean=half, std=half)
    model.preprocess = Preprocess(recipe, model)
    model.labels = [str(i) for i in range(model.config.num_classes)]
    return model


def fill(folder: Path, count: int) -> list[Path]:
    """Writes `count` different JPEGs of 500 x 375 pixels, ImageNet's usual size."""
    paths = []
    for i in range(count):
        with Image.open(PHOTOS[i % len(PHOTOS)]) as photo:
            margin = i % 97 / 4
            box = (margin, margin, photo.width - margin, photo.height - margin)
            paths.append(folder / f"{i:05}.jpg")
            photo.convert("RGB").resize((500, 375), box=box).save(paths[-1], quality=90)
    return paths


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measures in turns, and prints each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name that vitlite.create takes")
    parser.add_argument("--weights", type=Path, help="a file of it")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--slice", type=int, default=256, help="images between turns")
    args = parser.parse_args()
    model = vitlite.create(args.model, weights=args.weights) if args.weights else random_model(args.model)
    threads = torch.get_num_threads()

    def model_alone() -> None:
        with torch.no_grad():
            for _ in range(len(part) // BATCH):
                model(batch).softmax(-1).topk(5)

    def reading_alone() -> None:
        torch.set_num_threads(1)
        for path in part:
            model.preprocess.pixels(path)
        torch.set_num_threads(threads)

    def folder() -> None:
        for _ in classify(model, part, batch=BATCH):
            pass

    turns, memory = [], []
    with tempfile.TemporaryDirectory() as name:
        paths = fill(Path(name), args.images // args.slice * args.slice)
        batch = model.preprocess(paths[:BATCH])
        for start in range(0, len(paths), args.slice):
            part = paths[start : start + args.slice]
            turns.append([seconds(work) for work in (model_alone, reading_alone, folder)])
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            alone, reading, both = turns[-1]
            print(
                f"{len(part)} images: model {alone:6.2f} s, reading {reading:6.2f} s, folder {both:6.2f} s, "
                f"ratio {both / (alone + reading / 2):.3f}, peak memory {memory[-1]:.0f} MB",
                flush=True,
            )
    ratios = [both / (alone + reading / 2) for alone, reading, both in turns]
    print(f"ratio: median {median(ratios):.3f}, best {min(ratios):.3f}; memory grew by {memory[-1] - memory[0]:.0f} MB")


if __name__ == "__main__":
    main()

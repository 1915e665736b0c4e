"""Compute in a process with several threads, then in forked processes: `python tests/forked.py COUNT`.

It is also the application of `gunicorn --preload forked:app`.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import vitlite

PHOTO = Path(__file__).parents[1] / "examples" / "photos" / "chelsea.png"


def compute(model: vitlite.ViT) -> str:
    """Load, optimize and run models, one of which was loaded before the fork."""
    for made in (model, vitlite.create("vit_nano_4.cifar10"), vitlite.optimize(vitlite.create("vit_nano_4.cifar10"))):
        images = model.preprocess([PHOTO] * 2).repeat(4, 1, 1, 1)
        made(images)
        label = made.predict(PHOTO, top=1)[0].label
    x = torch.ones(256, 256)
    assert (x @ x).isfinite().all()  # MKL, and torch's own threads
    assert (x.bfloat16() @ x.bfloat16()).isfinite().all()  # oneDNN
    return str(label)


class Labels(torch.utils.data.Dataset[str]):
    """A data set that runs a model in the workers of a DataLoader."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return compute(MODEL)


MODEL = vitlite.create("vit_nano_4.cifar10")
torch.set_num_threads(2)
compute(MODEL)  # starts the threads of OpenMP


def app(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer each request with a label."""
    start_response("200 OK", [])
    return [f"{compute(MODEL)} {torch.get_num_threads()}".encode()]


def run_process() -> None:
    """Fork once, and compute in the forked process."""
    process = multiprocessing.get_context("fork").Process(target=compute, args=(MODEL,))
    process.start()
    process.join(60)
    if process.exitcode != 0:
        process.kill()
        sys.exit(f"the exit code of the forked process is {process.exitcode}")


def run_loader() -> None:
    """Fork once, and compute in the worker of a DataLoader."""
    assert next(iter(DataLoader(Labels(), num_workers=1, multiprocessing_context="fork"))) == ["cat"]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for _ in range(int(sys.argv[1])):
        run_process()
        run_loader()
    compute(MODEL)  # the threads of this process are as before
    print("done", torch.get_num_threads())

"""Call a model from eight threads first thing in a process: `python tests/first_calls.py eager|fast|create COUNT`.

COUNT processes are forked from one that has only imported torch, which takes most of the time of a start. Each of them
imports vitlite and all that vitlite imports when it is needed, checks kernels and fills caches.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PHOTO = Path(__file__).parents[1] / "examples" / "photos" / "chelsea.png"


def run(kind: str) -> None:
    """Predict in eight threads that begin at the same time."""
    import vitlite

    def create() -> vitlite.ViT:
        return vitlite.create("vit_nano_4.cifar10")

    def fast() -> vitlite.ViT:
        return vitlite.optimize(create())

    photo = PHOTO.read_bytes()
    if kind == "create":
        makers: list[Callable[[], Any]] = [create, fast] * 4
    else:
        model = create() if kind == "eager" else fast()
        makers = [lambda: model] * 8
    images = [photo] * 8 if kind == "fast" else photo
    start, answers = threading.Barrier(8), []

    def call(make: Callable[[], Any]) -> None:
        start.wait()
        answers.append(make().predict(images, top=1))

    threads = [threading.Thread(target=call, args=(make,)) for make in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(answers), torch.get_num_threads(), flush=True)


if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        if not (child := os.fork()):
            run(sys.argv[1])
            os._exit(0)
        os.waitpid(child, 0)

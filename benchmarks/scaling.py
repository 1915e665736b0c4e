"""What a second worker adds, on Ray and under torchrun, and what the engines cost against the bare model.

    python benchmarks/scaling.py [--model vit_small_16] [--images 512] [--rounds 3]

Workers have one thread each, and random weights, which are as fast as trained ones. `bare` feeds prepared batches to
the optimized model, `local` reads and prepares pictures as well, and both also run as two processes that know nothing
of each other: what the machine itself allows. They take turns; the best of the rounds counts. Starting up
(importing torch, packing weights) is left out: it costs the same few seconds whatever the number of pictures.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
import torch
from folder import fill, random_model

from vitlite.cluster.ray import Embedder
from vitlite.fast.optimize import optimize
from vitlite.inference.predict import embed

BATCH = 32
PICTURES = 1024  # to train on; 64 more to validate


def bare(name: str, paths: list[str], wait: Barrier) -> float:
    """The model alone: seconds for as many pictures."""
    torch.set_num_threads(1)
    model = optimize(random_model(name))
    images = torch.rand(BATCH, 3, *model.config.size)
    with torch.inference_mode():
        model.embed(images)
        wait.wait()
        start = time.perf_counter()
        for _ in range(len(paths) // BATCH):
            model.embed(images)
    return time.perf_counter() - start


def local(name: str, paths: list[str], wait: Barrier) -> float:
    """Reading, preparing and the model, without an engine: seconds."""
    torch.set_num_threads(1)
    model = optimize(random_model(name))
    list(embed(model, paths[:BATCH], BATCH))
    wait.wait()
    start = time.perf_counter()
    for _ in embed(model, paths, BATCH):
        pass
    return time.perf_counter() - start


def processes(count: int, work: Any, name: str, paths: list[str]) -> float:
    """Pictures a second of that many processes, which begin together."""
    with get_context("spawn").Manager() as manager, get_context("spawn").Pool(count) as pool:
        wait = manager.Barrier(count)
        shares = [paths[i::count] for i in range(count)]
        seconds = pool.starmap(work, [(name, share, wait) for share in shares], chunksize=1)
    return sum(len(share) / s for share, s in zip(shares, seconds, strict=True))


class Timed(Embedder):
    """Also says when it was at work."""

    def __call__(self, table: pa.Table) -> pa.Table:
        start = time.time()
        table = super().__call__(table)
        for name, value in (("start", start), ("end", time.time()), ("worker", os.getpid())):
            table = table.append_column(name, pa.array([value] * len(table)))
        return table


def on_ray(workers: int, name: str, paths: list[str]) -> float:
    """Pictures a second of Ray's actors, from the first table of each to its last."""
    parts = [pa.table({"path": paths[i : i + 64]}) for i in range(0, len(paths), 64)]
    rows = ray.data.from_arrow(parts).map_batches(
        Timed,
        fn_constructor_args=(ray.put(random_model(name)),),
        batch_format="pyarrow",
        batch_size=64,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )
    done = rows.select_columns(["start", "end", "worker"]).to_pandas()
    spans = done.groupby("worker").agg(start=("start", "min"), end=("end", "max"), count=("start", "size"))
    return float((spans["count"] / (spans["end"] - spans["start"])).sum())


def training(count: int, data: Path) -> float:
    """Pictures a second of `vitlite train` in that many processes, in its second epoch."""
    with tempfile.TemporaryDirectory() as out:
        train = f"-m vitlite train {data} --model vit_nano_4 --weights none --epochs 2 --batch 128 --out {out}".split()
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {count}".split() if count > 1 else []
        command = [sys.executable, *launcher, *train]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return PICTURES / json.loads(done.stdout.splitlines()[-1])["seconds"]


def link_in_classes(paths: list[str], folder: Path, count: int) -> None:
    """So many pictures, some more than once, in folders of two classes."""
    for i in range(count):
        link = folder / "ab"[i % 2] / f"{i}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(paths[i % len(paths)])


def main() -> None:
    """Measures in turns, and prints the best of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_16", help="a preset; default: %(default)s")
    parser.add_argument("--images", type=int, default=512, help="pictures a worker; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init("local", num_cpus=2, object_store_memory=512 << 20, include_dashboard=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    best: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        paths = [str(path) for path in fill(Path(name), 2 * args.images)]
        pictures = Path(name, "pictures")
        link_in_classes(paths, pictures / "train", PICTURES)
        link_in_classes(paths, pictures / "val", 64)
        speeds = {
            "bare": lambda count: processes(count, bare, args.model, paths[: count * args.images]),
            "local": lambda count: processes(count, local, args.model, paths[: count * args.images]),
            "ray": lambda count: on_ray(count, args.model, paths[: count * args.images]),
            "train": lambda count: training(count, pictures),
        }
        for _ in range(args.rounds):
            for count in (1, 2):
                for what, speed in speeds.items():
                    found = speed(count)
                    print(f"{what} {count}: {found:.1f} images/s", file=sys.stderr, flush=True)
                    best[what, count] = max(best.get((what, count), 0.0), found)
    titles = {
        "bare": "the model alone",
        "local": "reading and the model",
        "ray": "the same on Ray",
        "train": "`vitlite train`, vit_nano_4",
    }
    print(f"| {args.model}, a thread a worker, images/s | 1 worker | 2 workers | efficiency |\n|---|---|---|---|")
    for what, title in titles.items():
        one, two = best[what, 1], best[what, 2]
        print(f"| {title} | {one:.1f} | {two:.1f} | {two / one / 2:.2f} |")
    for count in (1, 2):
        cost, engine = (1 - best["ray", count] / best[what, count] for what in ("bare", "local"))
        print(f"\nRay with {count}: {cost:.1%} less than the model alone, {engine:.1%} less than the same without Ray")


if __name__ == "__main__":
    main()

"""The classic experiments with small ViTs, one row of a table at a time; all but one have the same budget of images.

    python examples/cifar10/ablation.py DATA ROW [ROW ...]     # rows: see ROWS below; "all" for all
    python examples/cifar10/ablation.py --table

DATA is CIFAR-10's binary version (see prepare.py). Results are kept in results/ablation.json, and what is there already
is not run again. Learning rates are compared on held-out training images; `test` is only reported.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cnn import accuracy, stem, train_cnn
from torch import Tensor, nn

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.checkpoints.save import write_tensors
from vitlite.images import Preprocess, TransformConfig
from vitlite.nn.layers import Attention
from vitlite.training import STRENGTHS, Augmentation, ImageData, Optimizer, Settings, measure, read_cifar10, train
from vitlite.zoo import registry

RESULTS = Path(__file__).parent / "results" / "ablation.json"
SEEDS = (0, 1)
EPOCHS, BATCH = 1, 128
LIGHT = Augmentation(**{**vars(STRENGTHS["none"]), "flip": 0.5, "shift": 0.125})
SMALL = ViTConfig(image_size=32, patch_size=8, dim=96, depth=3, heads=3, mlp_dim=384, num_classes=10)


class Variation(ViT):
    """A ViT with something that no config describes: only its tensors are saved."""

    def save(self, folder: str | PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_tensors(Path(folder) / "model.safetensors", self.state_dict())


class TwoTables(Variation):
    """Positions as the sum of a learned vector for the row and one for the column."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.replace(positions="none"))
        rows, columns = config.grid
        self.rows = nn.Parameter(0.02 * torch.randn(1, rows, 1, config.dim))
        self.columns = nn.Parameter(0.02 * torch.randn(1, 1, columns, config.dim))

    def _positions(self, grid: tuple[int, int], tokens: Tensor) -> Tensor:
        table = (self.rows + self.columns).flatten(1, 2)
        return torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)  # the class token has no place


class RelativeAttention(Attention):
    """Attention with a learned bias for each offset between two patches, as in Swin; none for the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        h, w = config.grid
        self.offsets = nn.Parameter(torch.zeros(config.heads, (2 * h - 1) * (2 * w - 1)))
        rows = torch.arange(h).repeat_interleave(w)  # of each patch
        columns = torch.arange(w).repeat(h)
        down = rows[:, None] - rows + h - 1  # from each patch to each, from 0
        right = columns[:, None] - columns + w - 1
        self.register_buffer("which", down * (2 * w - 1) + right, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        bias = nn.functional.pad(self.offsets[:, self.which], (1, 0, 1, 0))
        weights = (q * q.shape[-1] ** -0.5 @ k.mT + bias).softmax(-1).to(v.dtype)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Relative(Variation):
    """No position table: attention knows the offsets."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.replace(positions="none"))
        for block in self.blocks:
            block.attn = RelativeAttention(config)


class Hybrid(Variation):
    """A CNN's feature map into a plain ViT, whose patches are single places of the map."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.replace(image_size=7, patch_size=1, channels=64))
        self.stem = stem()

    def embed(self, images: Tensor) -> Tensor:
        return super().embed(self.stem(images))


@dataclass(frozen=True)
class Row:
    """One line of the table, for one or more learning rates."""

    title: str
    config: ViTConfig | None  # None: the CNN
    kind: Callable[[ViTConfig], ViT] = ViT
    rates: tuple[float, ...] = (3e-3,)
    optimizer: Optimizer = "muon"
    epochs: int = EPOCHS


RATES, WIDE_RATES = (1e-3, 3e-3, 1e-2), (1e-4, 3e-4, 1e-3)
ONE_BLOCK = ViTConfig(image_size=32, patch_size=16, dim=768, depth=1, heads=12, mlp_dim=3072, num_classes=10)
ROWS = {
    "one-block": Row("one block, 768 wide, patch 16 (AdamW)", ONE_BLOCK, rates=WIDE_RATES, optimizer="adamw"),
    "one-block-8": Row("… eight passes", ONE_BLOCK, rates=WIDE_RATES, optimizer="adamw", epochs=8),
    "none": Row("position embedding: none", SMALL.replace(positions="none")),
    "cls": Row("position embedding: 1-D learned", SMALL, rates=RATES),
    "sincos": Row("position embedding: sin-cos", SMALL.replace(positions="sincos2d")),
    "two-tables": Row("position embedding: 2-D learned", SMALL, TwoTables),
    "relative": Row("position embedding: relative", SMALL, Relative),
    "mean": Row("mean pooling instead of the class token", SMALL.replace(pool="mean"), rates=RATES),
    "cnn": Row("small CNN", None),
    "hybrid": Row("the CNN's feature map into the same ViT", SMALL, Hybrid),
}


def run(row: Row, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """Train and measure one row with one learning rate and seed."""
    transform = transform_from_record(registry.find("vit_nano_4.cifar10"))
    parts = {split: read_cifar10(folder, split) for split in ("train", "val", "test")}
    start = time.process_time()
    if row.config is None:
        model: nn.Module = train_cnn(parts["train"], transform, LIGHT, epochs=row.epochs, seed=seed, batch=BATCH)
        scores = {split: accuracy(model, parts[split], transform) for split in ("val", "test")}
    else:
        model = train_vit(row, rate, seed, parts["train"], transform)
        scores = {split: measure(model, parts[split]).top1 for split in ("val", "test")}
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "cpu_seconds": round(time.process_time() - start),
        "val": round(scores["val"], 4),
        "test": round(scores["test"], 4),
    }


def train_vit(row: Row, rate: float, seed: int, data: ImageData, transform: TransformConfig) -> ViT:
    """Train a model of that row."""
    torch.manual_seed(seed)
    model = row.kind(row.config)
    model.preprocess = Preprocess(transform, model)
    settings = Settings(
        epochs=row.epochs,
        batch=BATCH,
        lr=rate,
        seed=seed,
        warmup=0.3,
        decay=0.6,
        ema=0.99,
        augmentation=LIGHT,
        optimizer=row.optimizer,
    )
    with TemporaryDirectory() as out:
        train(model, data, Path(out), settings)
    return model


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown: mean and range over the seeds, at the learning rate that is best on `val`."""
    lines = ["| | learning rate | weights | test accuracy, mean (each seed) |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        rate, runs = best_runs(results, name, row)
        if not runs:
            continue
        scores = [100 * run["test"] for run in runs]
        each = ", ".join(f"{score:.1f}" for score in scores)
        shown_rate = "SGD, 0.1" if row.config is None else f"{rate:g}"
        millions = runs[0]["weights"] / 1e6
        lines.append(f"| {row.title} | {shown_rate} | {millions:.2f} M | **{mean(scores):.1f}** ({each}) |")
    return "\n".join(lines)


def best_runs(results: dict[str, Any], name: str, row: Row) -> tuple[float, list[dict[str, Any]]]:
    """Return the learning rate that is best on `val` and its runs, one per seed; no runs if there are none yet."""
    best_rate, best = 0.0, []
    for rate in row.rates:
        keys = [f"{name} {rate} {seed}" for seed in SEEDS]
        runs = [results[key] for key in keys if key in results]
        if runs and (not best or mean(run["val"] for run in runs) > mean(run["val"] for run in best)):
            best_rate, best = rate, runs
    return best_rate, best


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, "all"], metavar="ROW")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = list(ROWS) if "all" in args.rows else args.rows
    wanted = [(name, rate, seed) for seed in args.seeds for name in names for rate in ROWS[name].rates]
    for name, rate, seed in wanted:
        key = f"{name} {rate} {seed}"
        if key in results:
            continue
        results[key] = run(ROWS[name], rate, seed, args.data)
        print(key, results[key], file=sys.stderr, flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if args.table:
        print(table(results))


if __name__ == "__main__":
    main()

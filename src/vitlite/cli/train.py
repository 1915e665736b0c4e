"""`vitlite train`: train or fine-tune on a folder of pictures."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import cast

import torch

from vitlite.cli.options import image_size, is_place, positive
from vitlite.config import ViTConfig
from vitlite.draw import draw_curves, need_matplotlib
from vitlite.errors import TrainError
from vitlite.factory import create, load
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.training import distributed as ranks
from vitlite.training.augment import STRENGTHS
from vitlite.training.datasets import class_names, is_cifar10, read_cifar10, read_folder
from vitlite.training.evaluate import cifar10_reader, preprocess_of
from vitlite.training.loop import train
from vitlite.training.run import History
from vitlite.training.settings import Optimizer, Settings
from vitlite.weights import zoo


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite train`."""
    default, add = Settings(epochs=1), parser.add_argument
    add(
        "data",
        type=Path,
        metavar="DATA",
        help="train/ and val/ with a folder per class in each, or CIFAR-10's .bin files",
    )
    add("--model", required=True, help="a name of `vitlite list`, a folder or a file; with --weights none a preset too")
    add("--weights", metavar="none|PATH", help="what to begin with, none being random; default: the model's own")
    add("--out", type=Path, required=True, metavar="DIR", help="for checkpoints, log and state; a killed run goes on")
    add("--epochs", type=positive, required=True, metavar="N", help="how often to see every picture")
    add("--batch", type=positive, default=default.batch, metavar="N", help="default: %(default)s")
    add("--optimizer", choices=("adamw", "muon"), help="default: muon with random weights, otherwise adamw")
    add("--lr", type=float, metavar="X", help="default: 3e-3 for muon, 3e-4 for adamw, 1e-3 with --frozen")
    add("--layer-decay", type=float, metavar="X", help="default: 1 with random weights, otherwise 0.75")
    add("--weight-decay", type=float, default=default.weight_decay, metavar="X", help="default: %(default)s")
    add("--drop-path", type=float, default=0.0, metavar="X", help="stochastic depth; default: %(default)s")
    add("--smoothing", type=float, default=default.smoothing, metavar="X", help="of labels; default: %(default)s")
    add("--clip", type=float, default=default.clip, metavar="X", help="largest gradient; default: %(default)s")
    add("--ema", type=float, default=default.ema, metavar="X", help="of averaged weights; default: %(default)s")
    add("--augment", choices=tuple(STRENGTHS), default="weak", help="changes to pictures; default: %(default)s")
    add("--accumulate", type=positive, default=1, metavar="N", help="parts of a batch, to save memory")
    add("--frozen", action="store_true", help="train the head alone")
    add("--size", type=image_size, metavar="PIXELS", help="image size other than the model's")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: %(default)s")
    add("--device", help="such as cpu, cuda, mps; default: cpu")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--save-every", type=float, default=60.0, metavar="SECONDS", help="how often, at most; default: %(default)s")


def run(args: Namespace) -> int:
    """Trains, and draws the curves after each epoch."""
    with ranks.together(args.device):
        return _run(args)


def _run(args: Namespace) -> int:
    need_matplotlib()  # says at once if it is missing

    cifar = is_cifar10(args.data)
    classes = read_cifar10(args.data, "val").classes if cifar else class_names(args.data / "train")
    if len(classes) < 2:
        raise TrainError(f"{args.data / 'train'} has one class only, {classes[0]}. Training needs at least two.")
    model = _model(args, len(classes))
    prepare = cast(Preprocess, model.preprocess)
    if cifar:
        data, validation = (read_cifar10(args.data, split, cifar10_reader(prepare)) for split in ("train", "val"))
    else:
        data, validation = (read_folder(args.data / split, prepare.pixels, classes) for split in ("train", "val"))
    fresh = args.weights == "none"
    optimizer: Optimizer = args.optimizer or ("muon" if fresh and not args.frozen else "adamw")
    settings = Settings(
        epochs=args.epochs,
        batch=args.batch,
        optimizer=optimizer,
        lr=(3e-3 if optimizer == "muon" else 1e-3 if args.frozen else 3e-4) if args.lr is None else args.lr,
        layer_decay=(1.0 if fresh else 0.75) if args.layer_decay is None else args.layer_decay,
        weight_decay=args.weight_decay,
        smoothing=args.smoothing,
        clip=args.clip,
        ema=args.ema,
        accumulate=args.accumulate,
        frozen=args.frozen,
        bfloat16=args.dtype == "bfloat16",
        seed=args.seed,
        augmentation=STRENGTHS[args.augment],
    )

    def show(history: History) -> None:
        print(json.dumps(history[-1]), flush=True)
        draw_curves(history, args.out / "curves.png")

    train(model, data, args.out, settings, validation=validation, after_epoch=show, save_every=args.save_every)
    return 0


def _model(args: Namespace, classes: int) -> ViT:
    """The model to begin with, with its preprocessing: its weights' own, or with random ones what is usual."""
    options = {"num_classes": classes, "image_size": args.size, "device": args.device}
    torch.manual_seed(args.seed)
    if args.weights == "none":
        model = create(args.model, weights=None, **options)
        model.preprocess = Preprocess(_usual_recipe(args.model, model.config), model)
    elif args.weights is not None:
        model = create(args.model, weights=args.weights, **options)
    elif is_place(args.model):
        model = load(args.model, **options)
    else:
        model = create(args.model, **options)
    preprocess_of(model, args.weights or args.model)
    if args.drop_path:
        model = _with_drop_path(model, args.drop_path)
    return model


def _usual_recipe(name: str, config: ViTConfig) -> Recipe:
    """That of the zoo's record of this name, else the whole picture."""
    if name in zoo.NAMES:
        return Recipe.from_record(zoo.find(name), config.size)
    half = (0.5,) * config.channels
    return Recipe(size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half)


def _with_drop_path(model: ViT, rate: float) -> ViT:
    """The same weights, and what is known of them, in a model with stochastic depth."""
    changed = ViT(model.config.replace(drop_path=rate)).to(model.device)
    changed.load_state_dict(model.state_dict())
    changed.labels, changed.source = model.labels, model.source
    changed.preprocess = Preprocess(cast(Preprocess, model.preprocess).recipe, changed)
    return changed

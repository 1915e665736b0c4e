"""`vitlite train`: train or fine-tune on a folder of pictures."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from vitlite.cli.options import (
    check_device,
    create_or_load,
    expanded,
    expanded_path,
    image_size,
    positive,
    refuse_inside,
    seed,
)
from vitlite.cli.run_report import CURVES, Report
from vitlite.errors import InputError, shown
from vitlite.nn.vit import ViT
from vitlite.plots import is_plot_of_ours
from vitlite.training import distributed
from vitlite.training.augment import STRENGTHS
from vitlite.training.evaluate import Measured, preprocess_of
from vitlite.training.loop import check_place, train
from vitlite.training.run import BEST, LAST, STATE
from vitlite.training.settings import (
    FEW,
    Settings,
    usual_batch,
    usual_epochs,
    usual_layer_decay,
    usual_lr,
    usual_optimizer,
)
from vitlite.training.split import SHARE, SPLIT, is_split, read_to_train, training_classes
from vitlite.training.start import random_model


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite train`."""
    default, add = Settings(epochs=1), parser.add_argument
    add(
        "data",
        type=expanded_path,
        metavar="DATA",
        help="a folder per class; or train/ and val/ with such folders in each; or CIFAR-10's .bin files",
    )
    model = "a name of `vitlite list`, a folder or a file; with --weights none a preset too"
    weights = "what to begin with, none being random; default: the model's own"
    out = "for checkpoints, log and state; a killed run goes on"
    add("--model", type=expanded, required=True, help=model)
    add("--weights", type=expanded, metavar="none|PATH", help=weights)
    add("--out", type=expanded_path, required=True, metavar="DIR", help=out)
    held = f"of each class, to hold out where there is no val/; default: {SHARE}"
    epochs = f"how often to see every picture; default: {usual_epochs(FEW)}, of few pictures {usual_epochs(1)}"
    batch = f"pictures of a step at most; default: {usual_batch(FEW)}, of few pictures {usual_batch(1)}"
    add("--val-share", type=float, metavar="X", help=held)
    add("--epochs", type=positive, metavar="N", help=epochs)
    add("--patience", type=positive, default=0, metavar="EPOCHS", help="end after as many without a better one")
    add("--batch", type=positive, metavar="N", help=batch)
    add("--optimizer", choices=("adamw", "muon"), help="default: muon with random weights, otherwise adamw")
    add("--lr", type=float, metavar="X", help="default: 3e-3 for muon, 3e-4 for adamw, 1e-3 with --frozen")
    add("--layer-decay", type=float, metavar="X", help="default: 1 with random weights, otherwise 0.75")
    add("--weight-decay", type=float, default=default.weight_decay, metavar="X", help="default: %(default)s")
    add("--drop-path", type=float, metavar="X", help="stochastic depth; default: the model's own, mostly 0")
    add("--smoothing", type=float, default=default.smoothing, metavar="X", help="of labels; default: %(default)s")
    add("--clip", type=float, default=default.clip, metavar="X", help="largest gradient; default: %(default)s")
    add("--ema", type=float, default=default.ema, metavar="X", help="of averaged weights; default: %(default)s")
    add("--augment", choices=tuple(STRENGTHS), default="weak", help="changes to pictures; default: %(default)s")
    add("--accumulate", type=positive, default=1, metavar="N", help="parts of a batch, to save memory")
    add("--balance", action="store_true", help="count classes of unequal size alike")
    add("--checkpointing", action="store_true", help="compute blocks again instead of storing them, to save memory")
    add("--frozen", action="store_true", help="train the head alone")
    add("--size", type=image_size, metavar="PIXELS", help="image size other than the model's")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: %(default)s")
    add("--device", help="such as cpu, cuda, mps; default: cpu")
    add("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")
    add("--format", choices=("table", "jsonl"), default="table", help="of an epoch; default: %(default)s")
    add("--save-every", type=float, default=60.0, metavar="SECONDS", help="how often, at most; default: %(default)s")


def run(args: Namespace) -> int:
    """Trains, and says what came of it."""
    with distributed.process_group(args.device):
        check_device(args.device)
        return _train(args)


def _train(args: Namespace) -> int:
    _refuse_what_frozen_leaves_out(args)
    _check_out(args)
    classes = training_classes(args.data)  # a wrong DATA is said before the model is fetched
    model = _model(args, len(classes))
    split = read_to_train(args.data, preprocess_of(model), classes, share=args.val_share, seed=args.seed)
    settings = _settings(args, len(split.train))
    report = Report(args.data, split, settings, args.out, as_json=args.format == "jsonl")
    if distributed.is_main():
        report.begin()
    found: list[Measured] = []
    history = train(
        model,
        split.train,
        args.out,
        settings,
        validation=split.validation,
        after_resume=report.resumed,
        after_step=report.step,
        after_epoch=report.epoch,
        after_best=found.append,
        save_every=args.save_every,
    )
    if distributed.is_main():
        report.end(history, found[0])
    return 0


def _refuse_what_frozen_leaves_out(args: Namespace) -> None:
    """Makes sure that nothing is asked for about blocks which --frozen leaves as they are.

    Raises:
        InputError: Something is.
    """
    about_blocks = {
        "--layer-decay": args.layer_decay is not None,
        "--drop-path": args.drop_path is not None,
        "--checkpointing": args.checkpointing,
    }
    asked = [option for option, is_given in about_blocks.items() if is_given]
    if args.frozen and asked:
        raise InputError(f"--frozen trains the head alone, and {asked[0]} is about the blocks. Leave one of them out.")


def _check_out(args: Namespace) -> None:
    """Makes sure that training does not write over what it begins with, nor among the pictures, nor over others' files.

    Raises:
        InputError, TrainError, CheckpointError: It would, or nothing can be written there.
    """
    refuse_inside(args.out, args.data)
    for word in (args.model, args.weights):
        if word and _writes_over(args.out.resolve(), Path(word).resolve()):
            raise InputError(
                f"--out {args.out} would write over the model to begin with, {shown(word)}. Name another folder."
            )
    check_place(args.out, (SPLIT, CURVES))
    split, curves = args.out / SPLIT, args.out / CURVES
    for file, is_ours in ((split, is_split(split)), (curves, is_plot_of_ours(curves))):
        if file.exists() and not is_ours:
            raise InputError(
                f"{shown(str(file))} was not written by vitlite, and stays. Move it away, or name another --out."
            )


def _writes_over(out: Path, place: Path) -> bool:
    """Whether a run that writes to `out` would change what is at a place."""
    written = {out / LAST, out / BEST, out / STATE}
    return place.exists() and (place == out or not written.isdisjoint((place, *place.parents)))


def _settings(args: Namespace, pictures: int) -> Settings:
    random_weights = args.weights == "none"
    optimizer = args.optimizer or usual_optimizer(random_weights=random_weights, frozen=args.frozen)
    lr = usual_lr(optimizer, frozen=args.frozen) if args.lr is None else args.lr
    layer_decay = usual_layer_decay(random_weights=random_weights) if args.layer_decay is None else args.layer_decay
    return Settings(
        epochs=args.epochs or usual_epochs(pictures),
        patience=args.patience,
        batch=args.batch or usual_batch(pictures),
        optimizer=optimizer,
        lr=lr,
        layer_decay=layer_decay,
        weight_decay=args.weight_decay,
        smoothing=args.smoothing,
        clip=args.clip,
        ema=args.ema,
        accumulate=args.accumulate,
        balance=args.balance,
        frozen=args.frozen,
        bfloat16=args.dtype == "bfloat16",
        seed=args.seed,
        augmentation=STRENGTHS[args.augment],
    )


def _model(args: Namespace, classes: int) -> ViT:
    """The model to begin with, with its preprocessing: its weights' own, or with random ones what is usual."""
    torch.manual_seed(args.seed)
    model = _open_model(args, classes)
    preprocess_of(model, args.weights or args.model)
    return model


def _open_model(args: Namespace, classes: int) -> ViT:
    options: dict[str, Any] = {
        "num_classes": classes,
        "drop_path": args.drop_path,
        "checkpointing": args.checkpointing or None,
        "device": args.device,
    }
    if args.weights == "none":
        return random_model(args.model, image_size=args.size, **options)
    return create_or_load(args, **options)

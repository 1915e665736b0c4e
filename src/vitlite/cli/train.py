"""`vitlite train`: train or fine-tune on labelled images."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import torch

from vitlite.checkpoints.metadata import transform_from_record
from vitlite.cli.options import (
    add_background,
    add_device,
    add_strict,
    add_table_arguments,
    check_device,
    check_outside,
    create_or_load,
    expanded,
    expanded_path,
    given_table_options,
    image_size,
    open_data,
    positive,
    set_background,
)
from vitlite.cli.progress import say_broken
from vitlite.cli.run_report import CURVES, Report
from vitlite.config import ViTConfig
from vitlite.factory import create
from vitlite.images import Preprocess, TransformConfig
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import preprocess_of
from vitlite.inference.threads import set_threads
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.settings import (
    STRENGTHS,
    Settings,
    usual_batch,
    usual_epochs,
    usual_layer_decay,
    usual_lr,
    usual_optimizer,
)
from vitlite.training.split import (
    SHARE,
    SPLIT,
    Data,
    Split,
    read_class_list,
    read_training_data,
    stand_for,
    training_classes,
)
from vitlite.training.trainer import check_folder, train
from vitlite.zoo import registry

CLASSES = "file with the class folders or labels, in the model's order"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite train`."""
    default, add = Settings(epochs=1), parser.add_argument
    add(
        "data",
        type=expanded_path,
        metavar="DATA",
        help="folder with a folder per class, or train/ and val/, or a table",
    )
    out = "folder of the run; an interrupted run is resumed"
    add("--out", type=expanded_path, required=True, metavar="DIR", help=out)
    add("--format", choices=("table", "jsonl"), default="table", help="format of the output; default: %(default)s")
    add(
        "--save-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="minimum time between saves of the state; default: %(default)s",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of all random numbers; default: %(default)s")

    group = parser.add_argument_group("data")
    add = group.add_argument
    held = f"share of each class held out without val images; default: {SHARE}"
    add("--val-share", type=float, metavar="X", help=held)
    add("--classes", type=expanded_path, metavar="FILE", help=CLASSES)
    add_strict(group)
    add_table_arguments(parser)

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", type=expanded, required=True, help="name, folder or file; a preset with --weights none")
    add(
        "--weights",
        type=expanded,
        metavar="none|PATH",
        help="initial weights, or none for random ones; default: the model's",
    )
    add("--frozen", action="store_true", help="train the head only")
    add("--size", type=image_size, metavar="PIXELS", help="image size, such as 384 or 384x512 (height x width)")
    add("--drop-path", type=float, metavar="X", help="stochastic depth; default: the model's, usually 0")
    add_background(group)

    add = parser.add_argument_group("optimization").add_argument
    epochs = f"epochs; default: {usual_epochs(300)} for 300 images, {usual_epochs(30_000)} for 30,000"
    batch = f"images per step; default: {usual_batch(300)} for 300 images, {usual_batch(30_000)} for 30,000"
    add("--epochs", type=positive, metavar="N", help=epochs)
    add("--patience", type=positive, default=0, metavar="N", help="stop after N epochs without improvement")
    add("--batch", type=positive, metavar="N", help=batch)
    add("--optimizer", choices=("adamw", "muon"), help="default: adamw, or muon with random weights")
    add("--lr", type=float, metavar="X", help="learning rate; default: adamw 3e-4, muon 3e-3, --frozen 1e-3")
    add(
        "--layer-decay",
        type=float,
        metavar="X",
        help="learning-rate factor per block; default: 0.75 (random weights: 1)",
    )
    add(
        "--weight-decay",
        type=float,
        default=default.weight_decay,
        metavar="X",
        help="weight decay; default: %(default)s",
    )
    add("--smoothing", type=float, default=default.smoothing, metavar="X", help="label smoothing; default: %(default)s")
    add(
        "--clip",
        type=float,
        default=default.clip,
        metavar="X",
        help="maximum gradient norm; default: %(default)s",
    )
    add(
        "--ema",
        type=float,
        default=default.ema,
        metavar="X",
        help="decay of the averaged weights; default: %(default)s",
    )
    add(
        "--augment", choices=tuple(STRENGTHS), default="weak", metavar="LEVEL", help="%(choices)s; default: %(default)s"
    )
    add("--balance", action="store_true", help="predict small classes as readily as large ones")

    group = parser.add_argument_group("speed and memory")
    add = group.add_argument
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        metavar="TYPE",
        help="%(choices)s; default: %(default)s",
    )
    add_device(group)
    add(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help="compute each batch in N parts, to save memory",
    )
    add("--checkpointing", action="store_true", help="recompute activations instead of storing them, to save memory")


def run(args: Namespace) -> int:
    """Train, and report the result."""
    with distributed.process_group(args.device):
        check_device(args.device)
        set_threads()
        return _train(args)


def _train(args: Namespace) -> int:
    check_outside(args.out, args.data)
    check_folder(args.out, (SPLIT, CURVES))
    data = open_data(args)
    names = read_class_list(args.classes) if args.classes else training_classes(data)
    model = _model(args, len(names))
    split = _read_data(args, data, model, names).of_run(args.out)
    settings = _settings(args, len(split.train))
    report = Report(data, split, settings, args.out, as_json=args.format == "jsonl", options=given_table_options(args))
    if distributed.is_main():
        report.begin()
    history = train(
        model,
        split.train,
        args.out,
        settings,
        validation=split.validation,
        after_resume=report.resumed,
        after_step=report.step,
        after_epoch=report.epoch,
        save_every=args.save_every,
    )
    broken = split.train.broken() + split.validation.broken()
    if distributed.is_main():
        report.end(history)
        say_broken(broken)
    return int(len(broken) > 0)


def _read_data(args: Namespace, data: Data, model: ViT, names: Sequence[str]) -> Split:
    """Read the images. If the names of the data match the model's labels, use the labels as the classes."""
    preprocess, share, seed = preprocess_of(model), args.val_share, args.seed
    split = read_training_data(data, preprocess, names, share=share, seed=seed, strict=args.strict)
    if model.labels is None:
        return split
    if args.classes:
        return split.renamed(model.labels)
    return split.with_classes(model.labels) if stand_for(names, model.labels) else split


def _settings(args: Namespace, images: int) -> Settings:
    random_weights = args.weights == "none"
    optimizer = args.optimizer or usual_optimizer(random_weights=random_weights, frozen=args.frozen)
    lr = usual_lr(optimizer, frozen=args.frozen) if args.lr is None else args.lr
    layer_decay = usual_layer_decay(random_weights=random_weights) if args.layer_decay is None else args.layer_decay
    return Settings(
        epochs=args.epochs or usual_epochs(images),
        patience=args.patience,
        batch=args.batch or usual_batch(images),
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
    """Create or load the model to train, with preprocessing."""
    torch.manual_seed(args.seed)
    options: dict[str, Any] = {
        "num_classes": classes,
        "drop_path": args.drop_path,
        "checkpointing": args.checkpointing or None,
        "device": args.device,
    }
    if args.weights != "none":
        model = create_or_load(args, **options)
    else:
        model = create(args.model, weights=None, image_size=args.size, **options)
        model.preprocess = Preprocess(_usual_transform(args.model, model.config), model)
        set_background(model, args)
    transform = preprocess_of(model).transform  # raises an error if the model has no preprocessing
    if isinstance(transform, NaFlexTransform):
        model.preprocess = transform.squashed()
    return model


def _usual_transform(name: str, config: ViTConfig) -> TransformConfig:
    """Return the transform for a model with random weights: the one in the zoo for this name, or a centre crop."""
    if name in registry.NAMES:
        return transform_from_record(registry.find(name)).scaled(config.size)
    half = (0.5,) * config.channels
    return TransformConfig(
        size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half
    )

"""`vitlite convert`: convert weights to the format of another library."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import expanded, label_list, positive
from vitlite.errors import ConfigError
from vitlite.images.transform import Margin
from vitlite.zoo import registry


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite convert`."""
    parser.add_argument(
        "source", type=expanded, metavar="IN", help="weights file (.safetensors, .pth, .bin or .npz) or folder"
    )
    parser.add_argument(
        "target",
        type=expanded,
        metavar="OUT",
        help="folder or .safetensors file to write, replaced if it exists",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("timm", "transformers", "torchvision", "vitlite"),
        metavar="LIBRARY",
        help="%(choices)s",
    )
    parser.add_argument(
        "--like",
        metavar="NAME",
        help="checkpoint that IN contains or was fine-tuned from",
    )
    parser.add_argument(
        "--num-classes", type=positive, metavar="N", help="number of classes of a fine-tuned model, with --like"
    )
    parser.add_argument(
        "--labels",
        type=label_list,
        metavar="LABELS",
        help="names of the classes, such as 'cat,dog', or a file with one per line",
    )
    parser.add_argument("--key", metavar="KEY", help="network to read from a pickle with several, such as teacher")
    parser.add_argument(
        "--margin",
        choices=get_args(Margin),
        help="rounding of odd crop margins; some crops move by a pixel",
    )


def run(args: Namespace) -> int:
    """Convert weights to the format of another library."""
    from vitlite.checkpoints.convert import convert

    if args.source in registry.NAMES and not Path(args.source).exists():
        raise ConfigError(
            f"{args.source} is a model name, but convert needs a file or a folder. Save the model first, in Python: "
            f"vitlite.create({args.source!r}).save('FOLDER')."
        )
    convert(
        args.source,
        args.target,
        args.to,
        like=args.like,
        num_classes=args.num_classes,
        labels=args.labels,
        margin=args.margin,
        key=args.key,
    )
    note = ""
    if Path(args.target).suffix == ".safetensors":
        note = ": only the tensors, without config.json"
    elif args.margin:
        note = f": half of an odd margin is rounded {args.margin}, so the crop of some images moves by a pixel"
    print(f"wrote {args.target}{note}")
    return 0

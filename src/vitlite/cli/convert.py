"""`vitlite convert`: convert weights to the format of another library."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import expanded, positive
from vitlite.errors import ConfigError
from vitlite.images.transform import Margin
from vitlite.zoo import registry


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite convert`."""
    parser.add_argument(
        "source", type=expanded, metavar="IN", help="a weights file (also .pth, .pth.tar, .bin or .npz) or a folder"
    )
    parser.add_argument(
        "target",
        type=expanded,
        metavar="OUT",
        help="the folder or .safetensors file to write; an existing file is replaced",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("timm", "transformers", "torchvision", "vitlite"),
        help="the library to write for",
    )
    parser.add_argument(
        "--like",
        metavar="NAME",
        help="the checkpoint from `vitlite list` that IN contains or was fine-tuned from; supplies the settings, "
        "preprocessing and labels that IN lacks",
    )
    parser.add_argument(
        "--num-classes", type=positive, metavar="N", help="with --like: the number of classes of a fine-tuned model"
    )
    parser.add_argument(
        "--key", metavar="KEY", help="the network to read from a pickle with several networks, such as teacher"
    )
    parser.add_argument(
        "--margin",
        choices=get_args(Margin),
        help="how to round odd crop margins that OUT cannot express exactly; some crops then move by a pixel",
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

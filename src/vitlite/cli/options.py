"""Options that several commands share."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitlite
from vitlite.errors import CheckpointError, ConfigError, InputError
from vitlite.zoo import registry

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT
    from vitlite.training.split import Data

CALIBRATION_IMAGES = 32
TEMPLATE = "a photo of a {}"


def add_model_arguments(parser: ArgumentParser, *, named: bool = False, default: str = "") -> None:
    """Add the options that select a model.

    Args:
        parser: The parser of a command.
        named: If True, the model is the first argument of the command instead of the option --model.
        default: A description of the model that the command uses without --model.
    """
    group = parser.add_argument_group("model")
    what = "name, folder, file or Hub repository"
    if named:
        parser.add_argument("model", type=expanded, metavar="MODEL", help=f"{what} (owner/name)")
    elif default:
        group.add_argument("--model", type=expanded, help=f"{what}; default: {default}")
    else:
        group.add_argument("--model", type=expanded, default="vit_base_16", help=f"{what}; default: %(default)s")
    add_weights(group)
    if not named:
        add_background(group)
        group.add_argument(
            "--max-patches",
            type=int,
            metavar="N",
            help="maximum number of patches per image, for NaFlex models",
        )
    group.add_argument(
        "--size", type=image_size, metavar="PIXELS", help="image size, such as 384 or 384x512 (height x width)"
    )
    add_device(group)


def add_device(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add --device."""
    group.add_argument("--device", help="torch device, such as cpu, cuda or mps; default: cpu")


def add_layer(parser: ArgumentParser) -> None:
    """Add --layer, which selects the block whose output a command uses."""
    parser.add_argument(
        "--layer",
        dest="last_block",
        type=int,
        metavar="N",
        help="block to use, counted from 0, with the final norm; default: the last",
    )


def add_background(group: _ArgumentGroup) -> None:
    """Add --background."""
    group.add_argument(
        "--background",
        metavar="COLOUR",
        help="colour behind transparent images: white, black or #rrggbb",
    )


def set_background(model: "ViT", args: Namespace) -> None:
    """Apply --background to the preprocessing of a model."""
    if getattr(args, "background", None):
        from vitlite.images.transform import preprocess_of

        model.preprocess = preprocess_of(model).with_background(args.background)


def add_weights(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add --weights."""
    group.add_argument(
        "--weights", type=expanded, metavar="PATH", help="file to load instead of the model's own weights"
    )


def add_speed_arguments(parser: ArgumentParser) -> None:
    """Add the options for speed and precision."""
    group = parser.add_argument_group("speed")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "int8"),
        metavar="TYPE",
        help="%(choices)s; default: float32",
    )
    group.add_argument("--batch", type=positive, default=32, metavar="N", help="images per batch; default: %(default)s")
    group.add_argument("--fast", action="store_true", help="optimize the model first; worthwhile from about 100 images")
    group.add_argument(
        "--calibrate",
        type=expanded,
        metavar="FOLDER",
        help=f"folder of typical images for --fast --dtype int8 ({CALIBRATION_IMAGES} are used)",
    )


def add_paths(parser: ArgumentParser, *, at_least: int = 1) -> None:
    """Add the arguments that name images."""
    parser.add_argument(
        "paths",
        type=image_path,
        nargs="+" if at_least else "*",
        metavar="PATH",
        help="image, folder, pattern ('**/*.jpg'), - (list on stdin) or sample",
    )


def add_strict(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add --strict."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first unreadable image instead of skipping it",
    )


def add_table_arguments(parser: ArgumentParser) -> None:
    """Add the options that say how to read a table of labels."""
    group = parser.add_argument_group("tables of labels", "DATA may be a .csv, .tsv or .parquet file")
    group.add_argument("--path-column", metavar="NAME", help="column of paths; default: path, file, image, ...")
    group.add_argument(
        "--label-column",
        action="append",
        default=[],
        metavar="NAME",
        help="column of labels, or repeat for 0/1 columns; default: label, ...",
    )
    group.add_argument("--split-column", metavar="NAME", help="column of train, val and test; default: split, ...")
    group.add_argument(
        "--separator",
        metavar="X",
        help="character between the labels of an image; default: | or ;",
    )


def open_data(args: Namespace) -> "Data":
    """Return the folder DATA, or the table with the options of `add_table_arguments`."""
    from vitlite.training import tables

    labels = tuple(args.label_column)
    return tables.open_data(args.data, tables.Columns(args.path_column, labels, args.split_column, args.separator))


def given_table_options(args: Namespace) -> list[str]:
    """Return the given table options as command-line arguments, to repeat them in a suggested command."""
    options = [("--path-column", args.path_column), *(("--label-column", name) for name in args.label_column)]
    options += [("--split-column", args.split_column), ("--separator", args.separator)]
    return [word for option, value in options if value is not None for word in (option, value)]


def open_model(args: Namespace) -> "ViT":
    """Return the model that the options of `add_model_arguments` and `add_speed_arguments` describe."""
    import torch

    dtype = getattr(args, "dtype", None)
    fast = getattr(args, "fast", False)
    calibrate = getattr(args, "calibrate", None)
    if dtype == "int8" and not (fast and calibrate):
        raise ConfigError(
            "--dtype int8 needs --fast and --calibrate. Add --fast --calibrate FOLDER, where the folder contains about "
            f"{CALIBRATION_IMAGES} typical images."
        )
    if calibrate and dtype != "int8":
        raise ConfigError("--calibrate is only used with --fast --dtype int8. Add these options, or omit --calibrate.")
    torch_dtype = getattr(torch, dtype) if dtype else None
    if not fast:
        return create_or_load(args, device=args.device, dtype=torch_dtype)

    from vitlite.fast.optimize import optimize

    images = _calibration_images(calibrate) if calibrate else None
    return optimize(create_or_load(args, device=args.device), dtype=torch_dtype, calibrate=images)


def _calibration_images(folder: str) -> list[str]:
    """Return images spread evenly over a folder. The first images might all belong to one class."""
    from vitlite.inference.find import find_images

    paths = find_images([folder])
    count = min(len(paths), CALIBRATION_IMAGES)
    return [paths[i * len(paths) // count] for i in range(count)]


def create_or_load(args: Namespace, **options: Any) -> "ViT":
    """Create or load the model that --model, --weights and --size describe.

    Args:
        args: The arguments of the command.
        options: Other options of `create` and `load`.
    """
    from vitlite.factory import create, load
    from vitlite.inference.threads import set_threads
    from vitlite.zoo.text import text_record

    set_threads()
    options["image_size"] = args.size
    if args.weights is not None:  # `create` raises an error for an empty string
        model = create(args.model, weights=args.weights, **options)
    elif is_place(args.model):
        model = load(args.model, **options)
    else:
        if getattr(args, "labels", None):
            text_record(registry.find(args.model).name)  # raises an error before anything is downloaded
        model = create(args.model, **options)
    if getattr(args, "labels", None):
        from vitlite.text.labels import with_labels

        model = with_labels(model, args.labels, args.template or TEMPLATE)
    if getattr(args, "last_block", None) is not None:
        from vitlite.inference.embed import keep_blocks

        keep_blocks(model, args.last_block)
    set_background(model, args)
    if getattr(args, "max_patches", None) is not None:
        from vitlite.images.transform import preprocess_of

        model.preprocess = preprocess_of(model).with_max_patches(args.max_patches)
    if getattr(args, "quick_decode", False):
        from vitlite.images.transform import preprocess_of

        model.preprocess = preprocess_of(model).with_quick_decode()
    return model


def is_place(model: str) -> bool:
    """Return True if --model is a path or a repository for `load`, False if it is a name for `create`."""
    return model not in registry.NAMES and (Path(model).exists() or "/" in model)


def check_not_an_input(out: Path, args: Namespace, images: Iterable[str] = ()) -> None:
    """Check that an output file is not one of the files that a command reads.

    Args:
        out: The file to write.
        args: The arguments of the command. The paths, the model and the weights are inputs.
        images: Paths of other inputs.

    Raises:
        InputError: The output file is also an input.
    """
    if not out.exists():
        return
    inputs = [Path(path) for path in (*args.paths, *images)]
    for place in (args.model, args.weights):
        if place and Path(place).exists():
            inputs += _weights_files(Path(place))
    if any(file.exists() and out.samefile(file) for file in inputs):
        raise InputError(f"--out {out} is also an input, which would be overwritten. Choose another file.")


def _weights_files(place: Path) -> list[Path]:
    """Return a path, followed by the weights files if the path is a folder."""
    from vitlite.checkpoints.reader import files_of

    with suppress(CheckpointError, OSError):
        return [place, *files_of(place)[1]]
    return [place]


def check_outside(out: Path, data: Path, option: str = "--out") -> None:
    """Check that an output is not in the data folder, where the next run would read it as data.

    Raises:
        InputError: The output is the data folder, or inside it.
    """
    if data.resolve() == out.resolve():
        raise InputError(f"{option} {out} is the data folder. Choose another path.")
    if data.resolve() in out.resolve().parents:
        raise InputError(f"{option} {out} is inside the data folder {data}. Choose a path outside it.")


def check_device(device: str | None) -> None:
    """Check that torch can use a device.

    Raises:
        ConfigError: torch cannot use the device.
    """
    from vitlite import factory  # imports torch

    factory.as_device(device)


def expanded(text: str) -> str:
    """Return a path with ~ expanded. Shells do not expand it in `--out=~/run`."""
    return os.path.expanduser(text)


def image_path(text: str) -> str:
    """Return a path with ~ expanded. Unless a file has this name, "sample" is the image that comes with vitlite."""
    return vitlite.sample if text == "sample" and not os.path.exists(text) else expanded(text)


def expanded_path(text: str) -> Path:
    """Return a path with ~ expanded. An empty string is an error, because `Path("")` is the current folder."""
    if not text:
        raise ArgumentTypeError("the path is empty (is a variable unset?); for the current folder, pass '.'")
    return Path(expanded(text))


def image_size(text: str) -> int | tuple[int, int]:
    """Parse the value of --size: the side of a square, or HEIGHTxWIDTH.

    >>> image_size("384"), image_size("384x512")
    (384, (384, 512))
    """
    try:
        sides = [int(side) for side in text.split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ArgumentTypeError(f"must be pixels or HEIGHTxWIDTH, such as 384 or 384x512, got {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    """Parse a list of positive integers, such as "1,8"."""
    return [positive(part) for part in text.split(",")]


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return number


def label_list(text: str) -> list[str]:
    """Parse the value of --labels: labels with commas between them, or a file with one label per line.

    >>> label_list("cat, rusty bolt")
    ['cat', 'rusty bolt']
    """
    path = expanded(text)
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            parts = file.read().splitlines()
    elif text.endswith(".txt"):
        raise ArgumentTypeError(f"there is no file {text}")
    else:
        parts = text.split(",")
    labels = [part.strip() for part in parts if part.strip()]
    if not labels:
        raise ArgumentTypeError(f"{text!r} contains no labels")
    return labels

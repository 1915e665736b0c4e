"""What several commands share: which model, how fast, which pictures, and the values of their options."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlite.errors import CheckpointError, ConfigError, InputError, shown
from vitlite.inference.find import folders_below
from vitlite.zoo import registry

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

CALIBRATION = 32  # pictures


def add_model_arguments(parser: ArgumentParser, *, named: bool = False, default: str = "") -> None:
    """Which model a command uses, and how; with `named` it is the command's first word instead of an option.

    `default` are the words for a default that the command itself works out where `args.model` is None.
    """
    what = "a name of `vitlite list`, a folder, a file, or a repository of the Hub (owner/name)"
    if named:
        parser.add_argument("model", type=expanded, metavar="MODEL", help=what)
    elif default:
        parser.add_argument("--model", type=expanded, help=f"{what}; default: {default}")
    else:
        parser.add_argument("--model", type=expanded, default="vit_base_16", help=f"{what}; default: %(default)s")
    add_weights(parser)
    parser.add_argument(
        "--size", type=image_size, metavar="PIXELS", help="image size other than the model's: 384, 384x512"
    )
    parser.add_argument("--device", help="such as cpu, cuda, mps; default: cpu")


def add_weights(parser: ArgumentParser) -> None:
    """Whose weights a named model gets."""
    parser.add_argument(
        "--weights", type=expanded, metavar="PATH", help="a file to fill the named model with, in place of its own"
    )


def add_speed_arguments(parser: ArgumentParser) -> None:
    """How fast, and with which precision, a command runs its model."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "int8"), help="default: float32")
    parser.add_argument(
        "--batch", type=positive, default=32, metavar="N", help="pictures at once; default: %(default)s"
    )
    parser.add_argument(
        "--fast", action="store_true", help="optimize the model first: quicker from some 100 pictures on"
    )
    parser.add_argument(
        "--calibrate",
        type=expanded,
        metavar="FOLDER",
        help=f"for --fast --dtype int8: pictures like those to come, of which {CALIBRATION} are looked at",
    )


def add_paths(parser: ArgumentParser) -> None:
    """Which pictures a command takes."""
    parser.add_argument(
        "paths",
        type=expanded,
        nargs="+",
        metavar="PATH",
        help="files, folders with all below them, patterns such as '**/*.jpg', or - for a list on standard input",
    )


def open_model(args: Namespace) -> "ViT":
    """The model that the arguments of `add_model_arguments` and `add_speed_arguments` name, ready for inference."""
    import torch

    check_device(args.device)
    dtype_name = getattr(args, "dtype", None)
    dtype = getattr(torch, dtype_name) if dtype_name else None
    calibrate = _calibration_pictures(args)
    if not getattr(args, "fast", False):
        return create_or_load(args, device=args.device, dtype=dtype)

    from vitlite.fast.optimize import optimize

    return optimize(create_or_load(args, device=args.device), dtype=dtype, calibrate=calibrate)


def _calibration_pictures(args: Namespace) -> list[str] | None:
    """Some pictures of the folder of --calibrate, evenly spaced, where the other options ask for it."""
    folder = getattr(args, "calibrate", None)
    in_bytes = getattr(args, "dtype", None) == "int8"
    if in_bytes and not args.fast:
        raise ConfigError("--dtype int8 needs --fast: bytes are what an optimized model computes in.")
    if in_bytes and not folder:
        raise ConfigError(
            f"--dtype int8 needs --calibrate FOLDER, with some {CALIBRATION} pictures like those to come."
        )
    if not folder:
        return None
    if not in_bytes:
        raise ConfigError("--calibrate belongs to --fast --dtype int8.")

    from vitlite.inference.embed import gather

    paths = gather([folder])
    count = min(len(paths), CALIBRATION)
    return [paths[place * len(paths) // count] for place in range(count)]


def refuse_inputs(out: Path, args: Namespace, pictures: Iterable[str] = ()) -> None:
    """Makes sure that a file to be written is none of those to be read, by whatever name.

    `pictures` are those that the paths of the command mean, and others that it reads.

    Raises:
        InputError: It is.
    """
    if not out.exists():
        return
    read = [Path(path) for path in (*args.paths, *pictures)]
    for word in (args.model, args.weights):
        read += weights_of(Path(word)) if word else []
    for file in read:
        if file.exists() and out.samefile(file):
            raise InputError(f"--out {shown(str(out))} is to be read, too. Name another file.")


def weights_of(place: Path) -> list[Path]:
    """A place, and the files with its weights, where it is one on this disk: an index or a folder names several."""
    from vitlite.checkpoints.reader import files_of

    with suppress(CheckpointError, OSError):
        return [place, *files_of(place)[1]]
    return [place]


def refuse_inside(out: Path, data: Path, *, hidden: bool = False) -> None:
    """Makes sure that what is written is no data the next time.

    Args:
        out: The folder or the file to write.
        data: The folder with the data, which goes on where links in it lead.
        hidden: Whether folders whose names begin with a dot are data, too.

    Raises:
        InputError: It is the data, or in it, by whatever name.
    """
    folder = _first_around(out, folders_below(str(data), hidden=hidden))
    if folder is not None:
        raise InputError(f"--out {shown(str(out))} is in the data, {shown(folder)}. Name another folder.")


def refuse_among(out: Path, words: Iterable[str]) -> None:
    """The same of a picture, and the folders among the words that name pictures, which are searched for them.

    Raises:
        InputError: It would be found there.
    """
    for word in words:
        if os.path.isdir(word):
            refuse_inside(out, Path(word), hidden=True)


def _first_around(out: Path, folders: Iterable[str]) -> str | None:
    """The first of the folders that something to be written would be in, or in a folder of it."""
    place = out.resolve()
    around = {_number_of(folder) for folder in (place, *place.parents) if os.path.isdir(folder)}
    with suppress(OSError):  # one that cannot be looked into: whoever reads the data says so
        return next((folder for folder in folders if _number_of(folder) in around), None)
    return None


def _number_of(folder: Path | str) -> tuple[int, int]:
    """What a folder has in common under all its names."""
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def create_or_load(args: Namespace, **options: Any) -> "ViT":
    """What --model, --weights and --size name, as it is stored but for these options of `create` and `load`."""
    from vitlite.factory import create, load

    options["image_size"] = args.size
    if args.weights is not None:  # an empty one is a mistake, not a wish for the model's own
        model = create(args.model, weights=args.weights, **options)
    elif is_place(args.model):
        model = load(args.model, **options)
    else:
        model = create(args.model, **options)
    if getattr(args, "quick_decode", False):
        from vitlite.images.transform import preprocess_of

        model.preprocess = preprocess_of(model).with_quick_decode()
    return model


def check_device(device: str | None) -> None:
    """Makes sure that torch has this device here.

    Raises:
        ConfigError: It has not, and these it has.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's answer, depending on how it was built
        names = ["cpu"]
        if torch.cuda.is_available():
            names.append("cuda")
        if torch.backends.mps.is_available():
            names.append("mps")
        raise ConfigError(f"--device {device} cannot be used here. This machine has: {', '.join(names)}.") from error


def is_place(model: str) -> bool:
    """Whether this is a path or a repository, for `load`, and no name of the zoo."""
    return model not in registry.NAMES and (Path(model).exists() or "/" in model)


def expanded(text: str) -> str:
    """The value of an option that names a file or a folder, or may do so: with ~ spelt out.

    A shell does that for words of their own alone, and not in `--out=~/run`.
    """
    return os.path.expanduser(text)


def expanded_path(text: str) -> Path:
    """The same, for what can be no name; an empty one is no path: Python would take the current folder."""
    if not text.strip():
        raise ArgumentTypeError(f"{text!r} is no path (was a variable not set?). The current folder is '.'")
    return Path(expanded(text))


def image_size(text: str) -> int | tuple[int, int]:
    """The value of --size: one side of a square, or HEIGHTxWIDTH.

    >>> image_size("384"), image_size("384x512")
    (384, (384, 512))
    """
    try:
        sides = [int(side) for side in text.split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ArgumentTypeError(f"a size is a number of pixels or HEIGHTxWIDTH, such as 384 or 384x512, not {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def positive(text: str) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or not any(map(int, text)):
        raise ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return _of_few_digits(text, 9)


def seed(text: str) -> int:
    """The value of --seed."""
    if not text.removeprefix("-").isdecimal():
        raise ArgumentTypeError(f"a whole number, not {text!r}")
    return _of_few_digits(text, 12)


def _of_few_digits(text: str, most: int) -> int:
    """Such a number; with ever more digits, it is none that torch could take."""
    digits = len(text.removeprefix("-"))
    if digits > most:
        raise ArgumentTypeError(f"a whole number of at most {most} digits, not one of {digits}")
    return int(text)


def positives(text: str) -> list[int]:
    """The value of an option that lists such numbers: "1,8"."""
    return [positive(part) for part in text.split(",")]

"""How commands open a model, and `vitlite download`, `verify` and `convert`."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite import hub, zoo
from vitlite.errors import CheckpointError, ConfigError, DownloadError, UnknownNameError, VitliteError

if TYPE_CHECKING:
    from vitlite.model import ViT

OFFLINE_MODEL = "vit_nano_4.cifar10"


def add_model_arguments(parser: ArgumentParser, *, named: bool = False) -> None:
    """Which model a command uses, and how; with `named` it is the command's first word instead of an option."""
    what = "a name of `vitlite list`, a folder, a file, or a repository of the Hub (owner/name)"
    if named:
        parser.add_argument("model", metavar="MODEL", help=what)
    else:
        parser.add_argument("--model", default="vit_base_16", help=f"{what}; default: %(default)s")
    parser.add_argument("--weights", metavar="PATH", help="a file to fill the named model with, in place of its own")
    parser.add_argument(
        "--size", type=image_size, metavar="PIXELS", help="image size other than the model's: 384, 384x512"
    )
    parser.add_argument("--device", help="such as cpu, cuda, mps; default: cpu")


def add_speed_arguments(parser: ArgumentParser) -> None:
    """How fast, and with which precision, a command runs its model."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32")
    parser.add_argument(
        "--batch", type=positive, default=32, metavar="N", help="pictures at once; default: %(default)s"
    )
    parser.add_argument(
        "--fast", action="store_true", help="optimize the model first: quicker from some 100 pictures on"
    )


def open_model(args: Namespace) -> "ViT":
    """The model that the arguments of `add_model_arguments` and `add_speed_arguments` name, ready for inference."""
    import torch

    from vitlite.factory import create, load

    _check_device(args.device)
    dtype = getattr(torch, args.dtype) if getattr(args, "dtype", None) else None
    fast = getattr(args, "fast", False)
    options = {"image_size": args.size, "device": args.device, "dtype": None if fast else dtype}
    try:
        if args.weights is not None:  # an empty one is a mistake, not a wish for the model's own
            model = create(args.model, weights=args.weights, **options)
        elif is_place(args.model):
            model = load(args.model, **options)
        else:
            model = create(args.model, **options)
    except DownloadError as error:
        raise DownloadError(
            f"{error} Without a network: --model {OFFLINE_MODEL} (the ten classes of CIFAR-10) comes with vitlite."
        ) from error
    if fast:
        from vitlite.fast import optimize

        return optimize(model, dtype=dtype)
    return model


def _check_device(device: str | None) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's answer, depending on how it was built
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        names = ", ".join(["cpu", *(name for name, is_there in there.items() if is_there)])
        raise ConfigError(f"--device {device} cannot be used here. This machine has: {names}.") from error


def is_place(model: str) -> bool:
    """Whether this is a path or a repository, for `load`, and no name of the zoo."""
    return model not in zoo.NAMES and (Path(model).exists() or "/" in model)


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
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def add_download_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite download`."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="names that `vitlite list` shows, or presets")
    parser.add_argument("--update", action="store_true", help="ask the Hub for its newest file and pin that instead")


def run_download(args: Namespace) -> int:
    """Fetches checkpoints, so that later calls need no network."""
    records = [zoo.find(name) for name in args.names]  # a wrong name is said before anything is fetched
    for record in dict.fromkeys(records):
        if not record.repo:
            print(f"{record.name}: comes with vitlite, nothing to download")
            continue
        before = hub.pins().get(record.name)
        fetched = hub.fetch(
            record.repo,
            record.filename,
            revision=record.commit,
            sha256=record.sha256,
            pin=record.name,
            update=args.update,
        )
        print(f"{record.name}: {fetched.path}\n  sha256 {fetched.sha256}, verified by {fetched.verified}")
        if args.update and before is not None:
            moved = before.sha256 != fetched.sha256
            print(f"  the pin moved from commit {before.commit} to {fetched.commit}" if moved else "  nothing newer")
    return 0


def add_verify_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite verify`."""
    parser.add_argument("targets", nargs="*", metavar="NAME|PATH", help="default: every name downloaded so far")


def run_verify(args: Namespace) -> int:
    """Hashes files again and compares, each on its own line; 1 where any is not what it should be."""
    targets = args.targets or sorted(hub.pins())
    if not targets:
        raise UnknownNameError("Nothing to verify: no name was downloaded so far. Give a name or the path of a file.")
    failed = 0
    for target in targets:
        try:
            record = zoo.find(target) if target in zoo.NAMES else None
            if record and record.file:
                fetched = hub.verify(zoo.DATA / record.file, record.sha256)
            else:
                fetched = hub.verify(record.name if record else target)
        except VitliteError as error:
            failed = 1
            print(f"{target}: FAILED: {error}")
        else:
            print(f"{target}: good, sha256 {fetched.sha256} ({fetched.verified}), {fetched.path}")
    return failed


def add_convert_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite convert`."""
    parser.add_argument("source", metavar="IN", help="a file, also .pth or .bin, a folder, or an .npz")
    parser.add_argument("target", metavar="OUT", help="the folder or .safetensors file to write")
    parser.add_argument(
        "--to", required=True, choices=("timm", "transformers", "torchvision", "vitlite"), help="whose layout"
    )
    parser.add_argument("--like", metavar="NAME", help="a model of the zoo, for what the file alone does not tell")


def run_convert(args: Namespace) -> int:
    """Rewrites weights in another library's layout."""
    from vitlite.save import convert

    if not Path(args.source).expanduser().exists():
        if args.source in zoo.NAMES:
            raise ConfigError(
                f"convert rewrites a file or a folder, and {args.source} is a name. For a folder of it, in Python: "
                f"vitlite.create({args.source!r}).save('FOLDER')."
            )
        raise CheckpointError(f"There is no file or folder {args.source}.")
    convert(args.source, args.target, args.to, config=zoo.find(args.like).config if args.like else None)
    print(f"wrote {args.target}")
    return 0

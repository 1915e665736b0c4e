"""`vitlite convert`: rewrite weights for another library."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitlite.errors import CheckpointError, ConfigError
from vitlite.weights import zoo


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite convert`."""
    parser.add_argument("source", metavar="IN", help="a file, also .pth or .bin, a folder, or an .npz")
    parser.add_argument(
        "target",
        metavar="OUT",
        help="the .safetensors file to write, replaced if it is there; or a folder, new or empty",
    )
    parser.add_argument(
        "--to", required=True, choices=("timm", "transformers", "torchvision", "vitlite"), help="whose layout"
    )
    parser.add_argument("--like", metavar="NAME", help="a model of the zoo, for what the file alone does not tell")


def run(args: Namespace) -> int:
    """Rewrites weights in another library's layout."""
    from vitlite.convert import convert

    _check_source(args.source)
    _check_target(args.source, Path(args.target).expanduser())
    config = zoo.find(args.like).config if args.like else None
    convert(args.source, args.target, args.to, config=config)
    print(f"wrote {args.target}")
    return 0


def _check_source(source: str) -> None:
    """Tells a name of the zoo from a file that is not there."""
    if Path(source).expanduser().exists():
        return
    if source in zoo.NAMES:
        raise ConfigError(
            f"convert rewrites a file or a folder, and {source} is a name. For a folder of it, in Python: "
            f"vitlite.create({source!r}).save('FOLDER')."
        )
    raise CheckpointError(f"There is no file or folder {source}.")


def _check_target(source: str, target: Path) -> None:
    """Makes sure that nothing which is there is overwritten but a file that was named, and that is not the source."""
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"The folder {target} is not empty, and what is in it stays. Name one that is new.")
    if target.exists() and target.samefile(Path(source).expanduser()):
        raise CheckpointError(f"{target} is to be read and to be written. Name another file.")

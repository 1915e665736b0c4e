"""`vitlite convert`: rewrite weights for another library."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import expanded, image_size, positive
from vitlite.config import Gelu, Pool, Positions
from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.images.transform import Margin
from vitlite.zoo import registry

SAID = (
    "num_classes",
    "heads",
    "image_size",
    "patch_size",
    "pool",
    "norm_eps",
    "gelu",
    "positions",
)  # fields of the config


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite convert`."""
    parser.add_argument(
        "source", type=expanded, metavar="IN", help="a file, also .pth, .pth.tar or .bin, a folder, or an .npz"
    )
    parser.add_argument(
        "target",
        type=expanded,
        metavar="OUT",
        help="the .safetensors file to write, replaced if it is there; or a folder, new or empty",
    )
    parser.add_argument(
        "--to", required=True, choices=("timm", "transformers", "torchvision", "vitlite"), help="whose layout"
    )
    parser.add_argument(
        "--like",
        metavar="NAME",
        help="a checkpoint of `vitlite list`, for all that the file alone does not tell, preprocessing and labels too",
    )
    parser.add_argument(
        "--num-classes", type=positive, metavar="N", help="of a fine-tune with other classes than NAME: how many it has"
    )
    parser.add_argument(
        "--margin", choices=get_args(Margin), help="accept that pictures are cut a pixel further on, where OUT needs it"
    )
    parser.add_argument("--heads", type=positive, metavar="N", help="or one by one: heads of attention")
    parser.add_argument(
        "--size", dest="image_size", type=image_size, metavar="PIXELS", help="of its images: 224, 384x512"
    )
    parser.add_argument("--patch-size", type=positive, metavar="PIXELS", help="side of a patch")
    parser.add_argument("--pool", choices=get_args(Pool), help="what the head sees")
    parser.add_argument("--norm-eps", type=float, metavar="X", help="epsilon of its norms, such as 1e-6")
    parser.add_argument("--gelu", choices=get_args(Gelu), help="which GELU")
    parser.add_argument("--positions", choices=get_args(Positions), help="which positions")


def run(args: Namespace) -> int:
    """Rewrites weights in another library's layout."""
    from vitlite.checkpoints.convert import convert
    from vitlite.checkpoints.reader import path_of

    _check_source(args.source)
    _check_target(path_of(args.source, "convert"), path_of(args.target, "convert"))
    said = {field: getattr(args, field) for field in SAID if getattr(args, field) is not None}
    convert(args.source, args.target, args.to, config=said or None, like=args.like, margin=args.margin)
    alone = ""
    if Path(args.target).suffix == ".safetensors":
        alone = ": tensors alone, without the config.json that a folder has"
    elif args.margin:
        alone = f": half of an odd margin is rounded {args.margin}, which moves the crop of some pictures by a pixel"
    print(f"wrote {shown(args.target, 1000)}{alone}")
    return 0


def _check_source(source: str) -> None:
    """Tells a name of the zoo from a file that is not there."""
    if Path(source).exists():
        return
    if source in registry.NAMES:
        raise ConfigError(
            f"convert rewrites a file or a folder, and {source} is a name. For a folder of it, in Python: "
            f"vitlite.create({source!r}).save('FOLDER')."
        )
    raise CheckpointError(f"There is no file or folder {source}.")


def _check_target(source: Path, target: Path) -> None:
    """Makes sure that nothing which is there is overwritten but a file that was named, and that is not the source."""
    from vitlite.checkpoints.convert import refuse_to_write_over, refuse_unwritable

    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"The folder {target} is not empty, and what is in it stays. Name one that is new.")
    refuse_to_write_over(source, target)
    refuse_unwritable(target)

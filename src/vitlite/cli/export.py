"""`vitlite export`: export a model to an ONNX or torch.export file."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import add_model_arguments, expanded, open_model
from vitlite.errors import ExportError
from vitlite.export import MIN_PATCHES, SUFFIX, Format, check_onnx_installed, check_target, export


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite export`."""
    add_model_arguments(parser, named=True)
    parser.add_argument("--to", choices=get_args(Format), required=True, help="format to export to")
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="FILE",
        help="file to write, replaced if it exists; default: a new file in this folder",
    )
    parser.add_argument(
        "--fixed-size",
        action="store_true",
        help="accept only images of --size, for quantizers and compilers",
    )


def run(args: Namespace) -> int:
    """Export a model to an ONNX or torch.export file."""
    out = _target(args)
    if args.to == "onnx":
        check_onnx_installed()  # before the model is downloaded
    model = open_model(args)
    compared = export(model, out, to=args.to, fixed_size=args.fixed_size)
    if args.fixed_size:
        height, width = model.config.size
        print(f"{out}: accepts any batch size, and images of {height} x {width} pixels")
    else:
        patch = model.config.patch_size
        least = MIN_PATCHES[args.to] * patch
        print(f"{out}: accepts any batch size, and heights and widths that are multiples of {patch}, at least {least}")
    if not compared:
        print(
            "The file was not compared with the model, because onnxruntime is not installed. Install it: pip install "
            "'vitlite[onnx]'"
        )
    for engine, difference in compared.items():
        print(f"Compared with the model in {engine} on 3 batches: logits differ by at most {difference:.1g} (relative)")
    return 0


def _target(args: Namespace) -> Path:
    """Return the file to write. Without --out, an existing file is an error."""
    suffix = SUFFIX[args.to]
    out = Path(args.out or Path(args.model).name + suffix)
    if out.suffix != suffix:
        raise ExportError(f"--out {out} must end in {suffix} with --to {args.to}. Choose another name.")
    if args.out is None and out.exists():
        raise ExportError(f"{out} already exists. To replace the file, pass --out {out}")
    return check_target(out)

"""`vitlite export`: write a model for ONNX or torch.export."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import add_model_arguments, expanded, open_model
from vitlite.errors import ExportError
from vitlite.export import MIN_PATCHES, SUFFIX, Format, check_onnx_installed, check_target, export


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite export`."""
    add_model_arguments(parser, named=True)
    parser.add_argument("--to", choices=get_args(Format), required=True, help="the kind of file")
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="FILE",
        help="replaced if it exists; default: a new file in this folder, such as best.onnx for runs/pets/best",
    )


def run(args: Namespace) -> int:
    """Write a model for ONNX runtimes or torch.export."""
    out = _target(args)
    if args.to == "onnx":
        check_onnx_installed()  # before the model is downloaded
    model = open_model(args)
    compared = export(model, out, to=args.to)
    patch = model.config.patch_size
    least = MIN_PATCHES[args.to] * patch
    print(f"{out}: any batch, any height and width from {least} on that {patch} divides")
    if not compared:
        print("Not compared with the model: that needs onnxruntime (pip install 'vitlite[onnx]').")
    for engine, difference in compared.items():
        print(f"Compared with the model in {engine} at three sizes: logits within {difference:.1g} of the largest")
    return 0


def _target(args: Namespace) -> Path:
    """Return the file to write. Only a file that was named may exist already."""
    suffix = SUFFIX[args.to]
    out = Path(args.out or Path(args.model).name + suffix)
    if out.suffix != suffix:
        raise ExportError(f"--out {out}: with --to {args.to} the name must end in {suffix}.")
    if args.out is None and out.exists():
        raise ExportError(f"{out} already exists. To replace it: --out {out}")
    return check_target(out)

"""`vitlite export`: write a model for ONNX or torch.export."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import add_model_arguments, open_model
from vitlite.errors import ExportError
from vitlite.export import SUFFIX, Format, export, need_onnx


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite export`."""
    add_model_arguments(parser, named=True)
    parser.add_argument("--to", choices=get_args(Format), required=True, help="the kind of file")
    parser.add_argument("--out", metavar="FILE", help="where to; default: the model's name, here")


def run(args: Namespace) -> int:
    """Writes a model for ONNX runtimes or torch.export."""
    suffix = SUFFIX[args.to]
    out = Path(args.out or Path(args.model).name + suffix)
    if out.suffix != suffix:
        raise ExportError(f"--out {out}: with --to {args.to} the name must end in {suffix}.")
    if args.to == "onnx":
        need_onnx()  # before the model is fetched
    model = open_model(args)
    farthest = export(model, out, to=args.to)
    print(f"{out}: any batch, any height and width that {model.config.patch_size} divides")
    if farthest is None:
        print("Not compared with the model: that needs onnxruntime (pip install onnxruntime).")
    else:
        print(f"Compared with the model at three sizes: logits within {farthest:.1g} of the largest")
    return 0

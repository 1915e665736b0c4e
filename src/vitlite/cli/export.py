"""`vitlite export`: write a model for ONNX or torch.export."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from vitlite.cli.options import add_model_arguments, expanded, open_model
from vitlite.errors import ExportError, shown
from vitlite.export import LEAST, SUFFIX, Format, check_target, export, need_onnx


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite export`."""
    add_model_arguments(parser, named=True)
    parser.add_argument("--to", choices=get_args(Format), required=True, help="the kind of file")
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="FILE",
        help="replaced if it is there; default: a new one here that is called as MODEL ends, such as best.onnx of "
        "runs/pets/best",
    )


def run(args: Namespace) -> int:
    """Writes a model for ONNX runtimes or torch.export."""
    out = _target(args)
    if args.to == "onnx":
        need_onnx()  # before the model is fetched
    model = open_model(args)
    compared = export(model, out, to=args.to)
    patch = model.config.patch_size
    least = LEAST[args.to] * patch
    print(f"{shown(str(out), 1000)}: any batch, any height and width from {least} on that {patch} divides")
    if not compared:
        print("Not compared with the model: that needs onnxruntime (pip install 'vitlite[onnx]').")
    for engine, far in compared.items():
        print(f"Compared with the model in {engine} at three sizes: logits within {far:.1g} of the largest")
    return 0


def _target(args: Namespace) -> Path:
    """The file to write; only one that was named may be there already."""
    suffix = SUFFIX[args.to]
    out = Path(args.out or Path(args.model).name + suffix)
    if out.suffix != suffix:
        raise ExportError(f"--out {out}: with --to {args.to} the name must end in {suffix}.")
    if args.out is None and out.exists():
        raise ExportError(f"{out} is there already. To replace it: --out {out}")
    return check_target(out)

"""The command `vitlite`, with its subcommands, exit codes and error messages.

The module of a subcommand is imported only when the subcommand runs. As a result, `vitlite --help`, `list` and `info`
do not import torch.
"""

import argparse
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from vitlite import __version__
from vitlite.errors import VitliteError, closest, printable

COMMANDS = {  # modules of this package: `add_arguments` fills the parser, `run` returns the exit code
    "list": "list the models of the zoo",
    "info": "show the facts and the layers of a model",
    "classify": "classify images",
    "embed": "write a vector for each image",
    "search": "find similar images",
    "duplicates": "find images that are nearly the same",
    "probe": "measure how well a model's vectors separate classes",
    "pca": "draw the patch features of images as colours",
    "attention": "draw where a model looks in an image",
    "distances": "draw the mean attention distance of each head",
    "positions": "draw a model's position embeddings",
    "filters": "draw the filters of a model's patch embedding",
    "download": "download weights before they are needed",
    "verify": "check downloaded weights for damage",
    "convert": "convert weights to another library's format",
    "export": "export a model to an ONNX or torch.export file",
    "bench": "measure speed on this machine",
    "train": "train or fine-tune on labelled images",
    "eval": "measure accuracy on labelled images",
}
EXAMPLES = {
    "list": "list free classification --sort top1",
    "info": "info vit_base_16",
    "classify": "classify photos --model vit_base_16 --top 3",
    "embed": "embed photos --model vit_base_16.dino --out photos.safetensors",
    "search": "search photos.safetensors cat.jpg --top 5 --out matches.jpg",
    "duplicates": "duplicates photos.safetensors --threshold 0.97",
    "probe": "probe photos --model vit_small_16.dino --save classifier",
    "pca": "pca cat.jpg --model vit_small_16.dino --out pca.png",
    "attention": "attention cat.jpg --model vit_small_16.dino --out attention.png",
    "distances": "distances photos --model vit_base_16 --out distances.png",
    "positions": "positions vit_base_16 --out positions.png",
    "filters": "filters vit_base_16 --out filters.png",
    "download": "download vit_base_16 vit_small_16.dino",
    "verify": "verify vit_base_16",
    "convert": "convert deit.pth out --to transformers --like vit_tiny_16.deit_fb_in1k",
    "export": "export vit_base_16 --to onnx --out model.onnx",
    "bench": "bench --models vit_tiny_16,vit_base_16 --batch 1,8",
    "train": "train photos --model vit_tiny_16 --out run",
    "eval": "eval photos --model run/best --out report",
}
RESUMABLE = ("embed", "train")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that marks required options and does not wrap descriptions and examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        required = action.required and action.option_strings
        return f"{action.help} (required)" if required else action.help


class Parser(argparse.ArgumentParser):
    """An argument parser that prints one-line errors and does not accept abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"vitlite: error: {printable(message)} (see: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: The arguments after `vitlite`; None means the arguments of the process.

    Returns:
        The exit code: 0 for success, 1 for failure, 2 for wrong usage, 130 after Ctrl-C, 141 after a broken pipe.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), "")
    # torch prints this warning if numpy is not installed, which vitlite does not require.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    _accept_any_file_name()
    try:
        args = _parse(words, name)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: 0 after --help, 2 after an error
        return int(stop.code or 0)
    except BrokenPipeError:  # the program that reads the output has ended, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python prints an error at exit
        return 141
    except (Exception, KeyboardInterrupt) as error:
        if _is_interrupt(error):
            hint = ". Run the same command again to continue." if name in RESUMABLE else ""
            print(f"vitlite: interrupted{hint}", file=sys.stderr)
            return 130
        if "--debug" in words:
            traceback.print_exc()
        print(f"vitlite: error: {_describe(error)}", file=sys.stderr)
        return 1


def _parse(words: list[str], name: str) -> argparse.Namespace:
    """Parse a command line with the parser of the command `name`."""
    debug = Parser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser = Parser(
        prog="vitlite",
        description="Vision Transformers on the command line.",
        epilog="example: vitlite classify sample --model vit_nano_4.cifar10",
        parents=[debug],
    )
    parser.add_argument("--version", action="version", version=f"vitlite {__version__}")
    if name and name not in COMMANDS:
        parser.error(f"No command {name!r}.{closest(name, COMMANDS)} Commands: {', '.join(COMMANDS)}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    subparsers = {}
    for command, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        subparsers[command] = commands.add_parser(
            command,
            help=summary,
            description=description,
            epilog=f"example: vitlite {EXAMPLES[command]}",
            parents=[debug],
        )
    if not name:
        return parser.parse_args(words)  # --help, --version, or the error about a missing command
    module = import_module(f"vitlite.cli.{name}")
    module.add_arguments(subparsers[name])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        options = [option for action in subparsers[name]._actions for option in action.option_strings]
        hint = closest(unknown[0].partition("=")[0], options, count=1) if unknown[0].startswith("-") else ""
        subparsers[name].error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    args.run = module.run
    return args


def _accept_any_file_name() -> None:
    """Allow file names that are not valid Unicode on standard input, and print them with replacement characters."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an error. The cause can be indirect, as when Ctrl-C interrupts an import."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _is_interrupt(error.__cause__) or _is_interrupt(error.__context__)


def _describe(error: BaseException) -> str:
    """Return the text of an error. For an unexpected error, return its type and the first line of its text."""
    if isinstance(error, VitliteError):
        return str(error)
    if isinstance(error, OSError):
        return printable(str(error))
    first_line = printable(str(error).partition("\n")[0])
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", first_line, re.IGNORECASE):
        return f"There is not enough memory. Use a smaller --size or --batch, or a smaller model. {first_line}"
    return f"{type(error).__name__}: {first_line} (--debug shows the traceback)"

"""The command `vitlite`: which subcommands there are, and how any of them ends.

A subcommand's module is imported only when it is used, so that `--help`, `list` and `info` start at once.
"""

import argparse
import codecs
import errno
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from vitlite import __version__
from vitlite.errors import VitliteError, closest, fit_to_print

COMMANDS = {  # each is a module of this folder: `add_arguments` fills its parser, `run` returns the exit code
    "list": "the models of the zoo",
    "info": "all about one model, with its layers",
    "classify": "say what is in pictures",
    "embed": "write a vector for each picture",
    "search": "find the pictures that look like another",
    "probe": "measure how well a model's vectors tell classes apart",
    "attention": "draw where the model looked",
    "distances": "draw how far each head looks",
    "positions": "draw a model's position embeddings",
    "filters": "draw what a model's patch embedding looks for",
    "download": "fetch weights ahead of use",
    "verify": "hash weights again",
    "convert": "rewrite weights for another library",
    "export": "write a model for ONNX or torch.export",
    "bench": "measure speed on this machine",
    "train": "train or fine-tune on a folder of pictures",
    "eval": "measure accuracy on labelled pictures",
}
RESUMABLE = ("embed", "train")
MODEL_FIRST = ("info", "positions", "filters", "export")  # whose model is their first word, without --model

OPTION_OF = {  # what an error's field is called on the command line
    "image_size": "--size",
    "layers": "--layer",
    "target": "--out",
    "epochs": "--epochs",
    "patience": "--patience",
    "val_share": "--val-share",
    "batch": "--batch",
    "lr": "--lr",
    "layer_decay": "--layer-decay",
    "weight_decay": "--weight-decay",
    "drop_path": "--drop-path",
    "smoothing": "--smoothing",
    "clip": "--clip",
    "ema": "--ema",
    "accumulate": "--accumulate",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, and whose options are never guessed from their beginning."""

    def __init__(self, **options: Any) -> None:
        def wide(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=30)

        super().__init__(formatter_class=wide, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"vitlite: error: {fit_to_print(message)} (see: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: The words after `vitlite`; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader of a pipe went away.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, where it is not installed: not needed
    _prepare_streams()
    try:
        args = _parse(words)
        code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except SystemExit as stop:  # argparse: --help is 0, a mistake 2
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if _reader_is_gone(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it exits
            return 141
        return _failed(error, words)


def command(name: str) -> ModuleType:
    """The module of a subcommand."""
    return import_module(f"vitlite.cli.{name}")


def _parse(words: list[str]) -> argparse.Namespace:
    """Parses a command line; only the command that it names is imported."""
    parser, parser_of = _parsers()
    wanted = next((word for word in words if not word.startswith("-")), None)
    if wanted is None:
        return parser.parse_args(words)  # --help and --version, or the error that a command is missing
    if wanted not in COMMANDS:
        parser.error(f"No command {wanted!r}.{closest(wanted, COMMANDS)} Commands: {', '.join(COMMANDS)}")
    module = command(wanted)
    module.add_arguments(parser_of[wanted])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser_of[wanted].error(f"unrecognized arguments: {' '.join(unknown)}.{_nearest(unknown, parser_of[wanted])}")
    args.run = module.run
    return args


def _nearest(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The hint for an option that is misspelt: one of the command's own that comes near."""
    options = [name for action in parser._actions for name in action.option_strings]
    misspelt = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    return closest(misspelt[0], options, count=1) if misspelt else ""


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole line, and that of each command, which has no arguments of its own yet."""
    debug = Parser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from")
    parser = Parser(prog="vitlite", description="Vision Transformers on the command line.", parents=[debug])
    parser.add_argument("--version", action="version", version=f"vitlite {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parser_of = {}
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        parser_of[name] = commands.add_parser(name, help=summary, description=description, parents=[debug])
    return parser, parser_of


def _prepare_streams() -> None:
    """Lets any text be read and printed: names of files that are no Unicode, and letters that an encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # to the end of the process
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        unicode = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "replace")


def _failed(error: BaseException, words: list[str]) -> int:
    """Says in one line on stderr why a command ended, and returns its exit code."""
    if "--debug" in words:
        traceback.print_exc()
    name = next((word for word in words if not word.startswith("-")), "")
    if _by_ctrl_c(error):
        goes_on = "; the same command goes on" if name in RESUMABLE else ""
        print(f"vitlite: interrupted{goes_on}", file=sys.stderr)
        return 130
    text = _explained(error)
    if name in MODEL_FIRST:
        text = re.sub(r"--model (?=[A-Z])", "", text)  # NAME --weights PATH
    print(f"vitlite: error: {fit_to_print(text)}", file=sys.stderr)
    return 1


def _reader_is_gone(error: BaseException) -> bool:
    """Whether what reads our output ended, which Windows calls an invalid argument, as it does much else."""
    if isinstance(error, BrokenPipeError):
        return True
    if not isinstance(error, OSError) or error.errno != errno.EINVAL or error.filename is not None:
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error; torch catches it now and then, and raises something else."""
    if error is None:
        return False
    return isinstance(error, KeyboardInterrupt) or _by_ctrl_c(error.__cause__) or _by_ctrl_c(error.__context__)


def _explained(error: BaseException) -> str:
    """An error in the words of the command line; one that is a mistake of vitlite's own as such."""
    if isinstance(error, VitliteError):
        return _with_its_option(error)
    if isinstance(error, OSError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", first_line, re.IGNORECASE):
        return f"There is not enough memory. A smaller --size or --batch, or another model takes less. {first_line}"
    return f"{type(error).__name__}: {first_line} (--debug shows where)"


def _with_its_option(error: VitliteError) -> str:
    """The error's text; where it begins with a field that an option sets, with the option in its place."""
    text, field = error.for_command_line(), error.field
    if field is None or field not in OPTION_OF:
        return text
    without_class = text.removeprefix("ViTConfig: ")
    if not without_class.startswith(field):
        return text
    return OPTION_OF[field] + without_class.removeprefix(field)

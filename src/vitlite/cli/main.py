"""The command `vitlite`: which subcommands there are, and how any of them ends.

A subcommand's module is imported only when it is used, so that `--help`, `list` and `info` start at once.
"""

import argparse
import codecs
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
from vitlite.errors import VitliteError, closest


COMMANDS = {  # each is a module of this folder: `add_arguments` fills its parser, `run` returns the exit code
    "list": "the models of the zoo",
    "info": "all about one model, with its layers",
    "classify": "say what is in pictures",
    "embed": "write a vector for each picture",
    "attention": "draw where the model looked",
    "positions": "draw a model's position embeddings",
    "download": "fetch weights ahead of use",
    "verify": "hash weights again",
    "convert": "rewrite weights for another library",
    "export": "write a model for ONNX or torch.export",
    "bench": "measure speed on this machine",
    "train": "train or fine-tune on a folder of pictures",
    "eval": "measure accuracy on labelled pictures",
}

# How errors of the library, which say what to write in Python, say it on the command line.
WORDS = {
    r"vitlite\.list_models\(\)": "`vitlite list`",
    r"vitlite\.load\(PATH\)": "--model PATH",
    r"vitlite\.load\(source\)": "--model PATH, --model OWNER/NAME",
    r"create\('(\S+)', weights=None\)": r"vitlite train --model \1 --weights none",
    r"create\(\.\.\., weights=PATH\) or load\(PATH\)": "--weights PATH or --model PATH",
    r"weights=PATH": "--weights PATH",
    r"image_size=": "--size",
    r"^ViTConfig: image_size": "--size",
    r"^ViTConfig: drop_path": "--drop-path",
    r"^layers has": "--layer is",
    r"model\.embed\(.*\)": "vitlite embed",
    r"Set it: model\.preprocess = .*": "Name a checkpoint like it: --model NAME --weights PATH.",
    r": model\.labels = .*": " in its config.json, or name a checkpoint like it: --model NAME --weights PATH.",
    r"Say so: .*, or vitlite\.create\(.*\) with": "Say --model NAME --weights PATH, or convert's --like NAME, with",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, and whose options are never guessed from their beginning."""

    def __init__(self, **options: Any) -> None:
        def wide(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=30)

        super().__init__(formatter_class=wide, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"vitlite: error: {message} (see: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: The words after `vitlite`; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader of a pipe went away.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, where it is not installed: not needed
    _prepare_streams()
    try:
        args = _parse(words)
        code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except SystemExit as stop:  # argparse: --help is 0, a mistake 2
        return int(stop.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it exits
        return 141
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        if _by_ctrl_c(error):
            resumes = words[:1] in (["train"], ["embed"])
            print(f"vitlite: interrupted{'; the same command goes on' if resumes else ''}", file=sys.stderr)
            return 130
        known, first = isinstance(error, (VitliteError, OSError)), str(error).partition("\n")[0]
        text = _in_words(str(error)) if known else f"{type(error).__name__}: {first} (--debug shows where)"
        print(f"vitlite: error: {text}", file=sys.stderr)
        return 1


def _parse(words: list[str]) -> argparse.Namespace:
    """Parses a command line; only the command that it names is imported."""
    debug = Parser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error came from")
    parser = Parser(prog="vitlite", description="Vision Transformers on the command line.", parents=[debug])
    parser.add_argument("--version", action="version", version=f"vitlite {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), None)
    if wanted is not None and wanted not in COMMANDS:
        parser.error(f"No command {wanted!r}.{closest(wanted, COMMANDS)} Commands: {', '.join(COMMANDS)}")
    asked = parser
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        sub = commands.add_parser(name, help=summary, description=description, parents=[debug])
        if name == wanted:
            asked = sub
            command = import_module(f"vitlite.cli.{name}")
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _prepare_streams() -> None:
    """Lets any text be read and printed: names of files that are no Unicode, and letters that an encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # to the end of the process
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        unicode = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "replace")


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error; torch catches it now and then, and raises something else."""
    if error is None:
        return False
    return isinstance(error, KeyboardInterrupt) or _by_ctrl_c(error.__cause__) or _by_ctrl_c(error.__context__)


def _in_words(text: str) -> str:
    """An error of the library for somebody who does not write Python."""
    for python, word in WORDS.items():
        text = re.sub(python, word, text)
    return text


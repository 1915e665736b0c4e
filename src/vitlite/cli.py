"""The command `vitlite`: which module answers each subcommand, and how any of them ends.

A module is imported only when its subcommand is used, so that `--help`, `list` and `info` start at once.
Each offers a function that adds its arguments to a parser, and one that runs with them and returns the exit code.
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
from typing import Any, NamedTuple, NoReturn

from vitlite import __version__
from vitlite.errors import VitliteError, closest


class Command(NamedTuple):
    """One subcommand: its line in `--help`, and where its two functions are ("module:function")."""

    help: str
    add_arguments: str
    run: str


COMMANDS = {
    "list": Command("the models of the zoo", "report:add_list_arguments", "report:run_list"),
    "info": Command("all about one model, with its layers", "report:add_info_arguments", "report:run_info"),
    "classify": Command("say what is in pictures", "bulk:add_classify_arguments", "bulk:run_classify"),
    "embed": Command("write a vector for each picture", "bulk:add_embed_arguments", "bulk:run_embed"),
    "attention": Command("draw where the model looked", "maps:add_attention_arguments", "maps:run_attention"),
    "positions": Command("draw a model's position embeddings", "maps:add_positions_arguments", "maps:run_positions"),
    "download": Command("fetch weights ahead of use", "weights:add_download_arguments", "weights:run_download"),
    "verify": Command("hash weights again", "weights:add_verify_arguments", "weights:run_verify"),
    "convert": Command("rewrite weights for another library", "weights:add_convert_arguments", "weights:run_convert"),
    "export": Command("write a model for ONNX or torch.export", "export:add_arguments", "export:run"),
    "bench": Command("measure speed on this machine", "bench:add_arguments", "bench:run"),
    "train": Command("train or fine-tune on a folder of pictures", "train:add_train_arguments", "train:run_train"),
    "eval": Command("measure accuracy on labelled pictures", "evaluate:add_eval_arguments", "evaluate:run_eval"),
}  # fmt: skip

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
    for name, command in COMMANDS.items():
        about = f"{command.help[0].upper()}{command.help[1:]}."
        sub = commands.add_parser(name, help=command.help, description=about, parents=[debug])
        if name == wanted:
            asked = sub
            find(command.add_arguments)(sub)
            sub.set_defaults(run=find(command.run))
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


def find(place: str) -> Any:
    """The function at "module:function", its module imported now."""
    module, function = place.split(":")
    return getattr(import_module(f"vitlite.{module}"), function)

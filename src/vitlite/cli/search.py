"""`vitlite search`: the pictures that look most like another."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite.cli.options import (
    add_model_arguments,
    add_paths,
    expanded,
    open_model,
    positive,
    refuse_among,
    refuse_inputs,
)
from vitlite.cli.progress import say_skipped
from vitlite.cli.tables import bold
from vitlite.errors import InputError, VitliteError, shown
from vitlite.inference.embed import gather

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT
    from vitlite.retrieval.store import Vectors


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite search`."""
    parser.add_argument(
        "vectors", type=expanded, metavar="VECTORS", help="the .safetensors file that `vitlite embed` wrote"
    )
    add_paths(parser)
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="how many; default: %(default)s")
    parser.add_argument("--out", type=expanded, metavar="JPG", help="a contact sheet to draw, replaced if it is there")
    parser.add_argument("--format", choices=("table", "jsonl"), default="table", help="default: %(default)s")
    add_model_arguments(parser, default="that which made the vectors")


def run(args: Namespace) -> int:
    """Prints the nearest pictures of each, with their scores."""
    from vitlite.plots import check_target, save_picture
    from vitlite.retrieval.search import search
    from vitlite.retrieval.sheet import check_size, contact_sheet
    from vitlite.retrieval.store import open_vectors

    vectors = open_vectors(args.vectors)
    if args.out:
        check_target(args.out)
    asked = gather(args.paths, sys.stdin, say_skipped)
    if args.out:
        refuse_inputs(Path(args.out), args, chain(asked, vectors.pictures))
        refuse_among(Path(args.out), args.paths)
        check_size(len(asked), min(args.top, len(vectors)))
    args.quick_decode = vectors.quick_decode  # no option: whoever made the vectors has chosen
    model = open_model(args) if args.model is not None else _their_model(args, vectors)
    found = search(vectors, model, asked, args.top)
    for picture, matches in zip(asked, found, strict=True):
        if args.format == "jsonl":
            print(json.dumps({"path": picture, "matches": [match._asdict() for match in matches]}))
            continue
        print(bold(shown(picture, 1000)))
        for match in matches:
            print(f"  {match.score:.4f}  {shown(match.picture, 1000)}")
    if args.out:
        _say_absent([match.picture for matches in found for match in matches])
        save_picture(contact_sheet(asked, found), args.out)
        print(f"wrote {shown(args.out, 1000)}", file=sys.stderr)
    return 0


def _say_absent(pictures: Sequence[str]) -> None:
    """Of pictures that cannot be drawn, since they are not where their names say."""
    absent = [picture for picture in pictures if not os.path.exists(picture)]
    if absent:
        print(
            f"vitlite: {len(absent)} of the {len(pictures)} pictures found are not there, such as "
            f"{shown(absent[0], 1000)}, and stay grey on the sheet. Their names are those that embed was given: run "
            "this in the folder where it ran.",
            file=sys.stderr,
        )


def _their_model(args: Namespace, vectors: "Vectors") -> "ViT":
    """The model that made the vectors, by the name that it had then."""
    args.model, args.size = vectors.model, args.size or vectors.image_size
    try:
        return open_model(args)
    except VitliteError as error:
        raise InputError(
            f"{shown(args.vectors, 1000)}: The model that made these vectors, {shown(vectors.model)}, cannot be "
            f"opened: {error.for_command_line()}",
            command="The vectors fit this model alone. If it lies elsewhere now, say where: --model MODEL. If they "
            "were made with --weights, say that again: --weights PATH.",
        ) from error

"""`vitlite search`: find similar images, by images or by words."""

import glob
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite.cli.options import add_model_arguments, check_not_an_input, expanded, image_path, open_model, positive
from vitlite.cli.progress import say_skipped
from vitlite.cli.tables import bold
from vitlite.errors import InputError, VitliteError, printable
from vitlite.inference.find import find_images

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT
    from vitlite.retrieval.store import Vectors


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite search`."""
    parser.add_argument(
        "vectors", type=expanded, metavar="VECTORS", help=".safetensors file written by `vitlite embed`"
    )
    parser.add_argument(
        "queries",
        type=image_path,
        nargs="+",
        metavar="QUERY",
        help="image, folder, pattern, - (list on stdin), or words (CLIP, SigLIP)",
    )
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="matches per query; default: %(default)s")
    parser.add_argument("--out", type=expanded, metavar="JPG", help="file for a contact sheet, replaced if it exists")
    parser.add_argument(
        "--format", choices=("table", "jsonl"), default="table", help="format of the output; default: %(default)s"
    )
    add_model_arguments(parser, default="the model of VECTORS")


def run(args: Namespace) -> int:
    """Print the most similar images for each query, with their scores."""
    from vitlite.plots import check_target, save_image
    from vitlite.retrieval.search import search, search_text
    from vitlite.retrieval.sheet import check_size, contact_sheet
    from vitlite.retrieval.store import open_vectors

    vectors = open_vectors(args.vectors)
    if args.out:
        check_target(args.out)
    sentences = [query for query in args.queries if _is_text(query)]
    args.paths = [query for query in args.queries if query not in sentences]
    if sentences and args.out:
        raise InputError("--out draws only the matches of images, not of words. Omit --out, or the words.")
    images = find_images(args.paths, sys.stdin, say_skipped) if args.paths else []
    if args.out:
        check_not_an_input(Path(args.out), args, chain(images, vectors.paths))
        check_size(len(images), min(args.top, len(vectors)))
    args.last_block = vectors.layer
    args.quick_decode = vectors.quick_decode  # decode the queries in the same way as the images of the vectors
    args.background = args.background or vectors.background
    args.max_patches = args.max_patches or vectors.max_patches
    model = _model_of(vectors, args) if args.model is None else open_model(args)
    found = search(vectors, model, images, args.top) if images else []
    found += search_text(vectors, model, sentences, args.top) if sentences else []
    queries = [*(("path", path) for path in images), *(("text", sentence) for sentence in sentences)]
    for (kind, query), matches in zip(queries, found, strict=True):
        if args.format == "jsonl":
            print(json.dumps({kind: query, "matches": [match._asdict() for match in matches]}))
        else:
            print(bold(printable(query if kind == "path" else f'"{query}"')))
            for match in matches:
                print(f"  {match.score:.4f}  {printable(match.path)}")
    if args.out:
        missing = [match.path for matches in found for match in matches if not os.path.exists(match.path)]
        if missing:
            print(
                f"vitlite: {len(missing)} of the images found do not exist, such as {printable(missing[0])}, and are "
                "shown in grey. If the paths are relative, run this command in the folder in which embed was run.",
                file=sys.stderr,
            )
        save_image(contact_sheet(images, found), args.out)
        print(f"wrote {printable(args.out)}", file=sys.stderr)
    return 0


def _is_text(query: str) -> bool:
    """Return True if a query is words instead of a file name or a pattern."""
    from vitlite.images.decode import SUFFIXES  # here, because it imports torch, which `--help` does not need

    if query == "-" or os.path.exists(query) or os.path.splitext(query)[1].lower() in SUFFIXES:
        return False
    return " " in query or not (glob.has_magic(query) or os.sep in query)


def _model_of(vectors: "Vectors", args: Namespace) -> "ViT":
    """Open the model that made the vectors, by the name in the metadata of the vectors."""
    args.model, args.size = vectors.model, args.size or vectors.image_size
    try:
        return open_model(args)
    except VitliteError as error:
        raise InputError(
            f"Cannot open the model of {args.vectors}, {vectors.model}: {error} If the model has moved, pass --model "
            "MODEL. If embed was run with --weights, pass --weights PATH."
        ) from error

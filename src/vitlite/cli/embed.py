"""`vitlite embed`: write a vector for each image."""

import json
import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite.cli.engine import add_work_arguments, check_local_options, run_on_ray
from vitlite.cli.options import add_layer, add_paths, check_not_an_input, expanded, is_place, open_model
from vitlite.cli.progress import ImageProgress, say_resumed, say_skipped
from vitlite.errors import InputError
from vitlite.inference.embed import embed_into, identity_of
from vitlite.inference.find import find_images
from vitlite.inference.journal import WRITERS, ImageFile, check_names, check_target, open_journal
from vitlite.storage import atomic_write

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

PATCH_FORMATS = (".safetensors", ".npz", ".npy")  # formats that can store arrays of any shape


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite embed`."""
    add_paths(parser, at_least=0)
    parser.add_argument(
        "--text",
        type=expanded,
        metavar="FILE",
        help="embed the lines of a text file instead, with CLIP or SigLIP",
    )
    parser.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help=f"{', '.join(WRITERS)} file to write",
    )
    add_layer(parser)
    parser.add_argument(
        "--patches",
        action="store_true",
        help=f"write a vector for each patch, to {', '.join(PATCH_FORMATS)}",
    )
    parser.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        help="embed only part I of N, such as 3/16; each part needs its own --out",
    )
    add_work_arguments(parser)


def shard(text: str) -> tuple[int, int]:
    """Parse the value of --shard.

    >>> shard("3/16")
    (3, 16)
    """
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ArgumentTypeError(f"must be I/N with I from 1 to N, such as 3/16, got {text!r}")
    return int(part), int(parts)


def _shape_of_vectors(model: "ViT", *, patches: bool) -> tuple[int, ...]:
    """Return the shape of the vector of an image, or of the vectors of all its patches."""
    if not patches:
        return (model.config.embed_dim,)
    if hasattr(getattr(model.preprocess, "transform", None), "max_patches"):
        raise InputError(
            "--patches needs images of one size, but a NaFlex model keeps the aspect ratio of each image. Omit "
            "--patches, or use a model with a fixed image size."
        )
    return (*model.config.grid, model.config.dim)


def run(args: Namespace) -> int:
    """Write a vector for each image, or resume an interrupted run."""
    if args.text is not None or not args.paths:
        return _embed_text(args)
    if args.patches and (args.engine == "ray" or Path(args.out).suffix not in PATCH_FORMATS):
        raise InputError(
            f"--patches needs --engine local and an --out that ends in {', '.join(PATCH_FORMATS)}, got {args.out}. "
            "Choose another file, or omit --patches."
        )
    if args.engine == "ray":
        from vitlite.cluster.jobs import embed_images

        if args.shard:
            raise InputError(
                "--shard cannot be used with --engine ray, which distributes the images itself. Omit --shard."
            )
        return run_on_ray(args, embed_images)
    check_local_options(args)
    target = Path(args.out)
    check_target(target)
    check_not_an_input(target, args)
    paths = find_images(args.paths, sys.stdin, say_skipped)
    if args.shard:
        part, parts = args.shard
        if len(paths) < parts:
            raise InputError(f"There are fewer images ({len(paths)}) than parts ({parts}). Use a smaller --shard I/N.")
        paths = paths[part - 1 :: parts]
    check_names(target, paths)

    from vitlite.fast.optimize import kernels_of  # here, because it imports torch, which `--help` does not need

    model = open_model(args)
    identity = asdict(identity_of(model, dtype=args.dtype, fast=args.fast))
    inputs = [source if source == "-" else os.path.abspath(source) for source in args.paths]
    run_identity = identity | {
        "kernels": kernels_of(model),
        "inputs": inputs,
        "patches": args.patches,
        "shard": args.shard,
    }
    shape = _shape_of_vectors(model, patches=args.patches)
    with open_journal(target, run_identity, math.prod(shape)) as journal:
        images = [ImageFile.at(path) for path in paths]
        done = sum(image in journal.rows for image in images)
        if done:
            say_resumed(str(journal.folder), done)
        progress = ImageProgress(len(images) - done, bar=True, strict=args.strict)
        outcomes = embed_into(journal, model, images, args.batch, progress.timings, patches=args.patches)
        for _ in progress.outcomes(outcomes):
            pass
        metadata = {
            "model": _marked_as_path(args.model),
            "sha256": model.source.sha256 if model.source else "",
            "identity": json.dumps(identity),  # `search` compares this identity with its model
        }
        if args.last_block is not None:
            metadata["layer"] = str(args.last_block)
        count = journal.finish(images, metadata, shape)
    print(f"wrote {target}: {' x '.join(map(str, (count, *shape[:-1])))} vectors of {shape[-1]}")
    return progress.exit_code()


def _embed_text(args: Namespace) -> int:
    """Write a vector of length 1 for each line of a text file."""
    if args.text is None:
        raise InputError("There is nothing to embed. Pass images (PATH), or sentences with --text FILE.")
    if args.paths or args.engine == "ray" or args.fast or args.patches or args.shard or args.last_block is not None:
        raise InputError(
            "--text cannot be combined with PATH, --engine ray, --fast, --layer, --patches or --shard. Omit them, or "
            "embed the images in another run."
        )
    target, source = Path(args.out), Path(args.text)
    check_target(target)
    try:
        sentences = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read {source}: {error}. Pass a text file in UTF-8.") from None
    if not sentences:
        raise InputError(f"{source} contains no sentences. Write one per line.")

    from vitlite.text.half import open_text_half  # here, because it imports torch, which `--help` does not need

    model = open_model(args)
    vectors = open_text_half(model).vectors(sentences).numpy()
    metadata = {"model": _marked_as_path(args.model), "sha256": model.source.sha256 if model.source else ""}
    with atomic_write(target) as temporary:
        WRITERS[target.suffix](temporary, sentences, vectors, metadata)
    print(f"wrote {target}: {len(sentences)} vectors of {vectors.shape[1]}")
    return 0


def _marked_as_path(model: str) -> str:
    """Return a relative path with a leading ./, because owner/name would mean a Hub repository."""
    is_relative = is_place(model) and os.path.exists(model) and not os.path.isabs(model)
    return os.path.join(".", model) if is_relative else model

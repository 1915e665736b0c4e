"""The pictures whose vectors point most nearly where another's does: exact, and in constant memory."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import ImageError, InputError, check_count
from vitlite.images.transform import image_list
from vitlite.inference.predict import embed
from vitlite.retrieval.store import Vectors

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

TOGETHER = 256  # vectors that are compared with others at once


class Match(NamedTuple):
    """A picture, and the cosine between its vector and the one asked for: 1 where both point the same way."""

    picture: str
    score: float


def search(vectors: Vectors, model: "ViT", images: Any, top: int = 10) -> list[list[Match]]:
    """The pictures that look most like each of some others, most alike first.

    Args:
        vectors: `open_vectors(path)`.
        model: That which made them. If its weights were changed since they were read, as by training, or its layers or
            settings, it is refused; but for hooks, and single numbers of a large weight, not all of which are compared.
        images: What `model.preprocess` takes: one picture, or a list.
        top: How many; all of them where there are fewer.

    Raises:
        InputError: Another model made the vectors, or `top` is not a positive whole number.
        ImageError: A picture cannot be read.
    """
    vectors.refuse_other_model(model)
    several = image_list(images)
    return nearest(vectors, _vectors_of(model, [images] if several is None else several), top)


def _vectors_of(model: "ViT", images: Iterable[Any]) -> Tensor:
    found = []
    for _, vector in embed(model, images):
        if isinstance(vector, ImageError):
            raise vector
        found.append(vector)
    return torch.stack(found) if found else torch.zeros(0, model.config.embed_dim, device="cpu")


def nearest(vectors: Vectors, queries: Tensor, top: int = 10) -> list[list[Match]]:
    """The pictures whose vectors have the largest cosine with each of some vectors (q, d), the largest first.

    Raises:
        InputError: The vectors are of another width, complex or not finite; or `top` is not a positive whole number.
    """
    check_count(top, "top")
    if queries.ndim != 2 or queries.shape[1] != vectors.dim:
        raise InputError(f"The vectors are (n, {vectors.dim}), got {tuple(queries.shape)} to compare with them.")
    refuse_complex(queries)
    if not queries.isfinite().all():
        raise InputError("Some of the vectors to compare with are not finite numbers: nothing is near to them.")
    queries = of_length_one(queries.detach().cpu())
    directions = [queries[i : i + TOGETHER] for i in range(0, len(queries), TOGETHER)]
    best = [_Best(some.new_zeros(len(some), 0), some.new_zeros(len(some), 0, dtype=torch.int64)) for some in directions]
    first = 0
    for part in vectors.parts():
        known = of_length_one(part)
        for i, some in enumerate(directions):
            best[i] = _better(best[i], cosines(some, known), first, top)
        first += len(part)
    matches = []
    for scores, rows in best:
        for row_of_scores, row_of_rows in zip(scores.tolist(), rows.tolist(), strict=True):
            found = zip(row_of_rows, row_of_scores, strict=True)
            matches.append([Match(vectors.pictures[row], score) for row, score in found])
    return matches


class _Best(NamedTuple):
    """The largest cosines of some queries so far, and the vectors that have them."""

    scores: Tensor  # (q, top), the largest first
    rows: Tensor  # (q, top)


def _better(best: _Best, found: Tensor, first: int, top: int) -> _Best:
    """The same once the cosines (q, n) with further vectors are found, of which the first is number `first`."""
    numbers = torch.arange(first, first + found.shape[1], device="cpu").expand(len(found), -1)
    both = torch.cat([best.scores, found], dim=1)
    scores, places = both.topk(min(top, both.shape[1]))
    return _Best(scores, torch.cat([best.rows, numbers], dim=1).gather(1, places))


def cosines(some: Tensor, known: Tensor) -> Tensor:
    """Between each of some directions (q, d) and each of others (n, d): (q, n), not rounded by an autocast around."""
    with torch.autocast(some.device.type, enabled=False):
        return some @ known.mT


def refuse_complex(vectors: Tensor) -> None:
    """Makes sure that vectors are of real numbers: of others, torch would drop a half."""
    if vectors.is_complex():
        raise InputError(f"Vectors are real numbers, got {vectors.dtype}.", python="No model gives others.")


def of_length_one(vectors: Tensor) -> Tensor:
    """The directions of vectors (n, d), in float32; zeros stay.

    The largest number of each becomes 1 first, in float64 where they are: its square then is a number in float32, too.
    """
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    largest = vectors.abs().amax(1, keepdim=True)
    return F.normalize((vectors / largest.where(largest > 0, 1)).float(), dim=1)

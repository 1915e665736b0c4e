"""The pictures whose vectors point most nearly where another's does: exact, and in constant memory."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import ImageError, InputError
from vitlite.images import pictures
from vitlite.predict import embed
from vitlite.vectors.store import Vectors

if TYPE_CHECKING:
    from vitlite.model import ViT


class Match(NamedTuple):
    """A picture, and the cosine between its vector and the one asked for: 1 where both point the same way."""

    picture: str
    score: float


def search(vectors: Vectors, model: "ViT", images: Any, top: int = 10) -> list[list[Match]]:
    """The pictures that look most like each of some others, most alike first.

    Args:
        vectors: `open_vectors(path)`.
        model: That which made them.
        images: What `model.preprocess` takes: one picture, or a list.
        top: How many; all of them where there are fewer.

    Raises:
        InputError: Another model made the vectors.
        ImageError: A picture cannot be read.
    """
    vectors.refuse_other_model(model)
    several = pictures(images)
    return nearest(vectors, _vectors_of(model, [images] if several is None else several), top)


def _vectors_of(model: "ViT", images: Iterable[Any]) -> Tensor:
    found = []
    for _, vector in embed(model, images):
        if isinstance(vector, ImageError):
            raise vector
        found.append(vector)
    return torch.stack(found)


def nearest(vectors: Vectors, queries: Tensor, top: int = 10) -> list[list[Match]]:
    """The pictures whose vectors have the largest cosine with each of some vectors (q, d), the largest first.

    Raises:
        InputError: The vectors are of another width, or not finite.
    """
    if queries.ndim != 2 or queries.shape[1] != vectors.dim:
        raise InputError(f"The vectors are (n, {vectors.dim}), got {tuple(queries.shape)} to compare with them.")
    if not queries.isfinite().all():
        raise InputError("Some of the vectors to compare with are not finite numbers: nothing is near to them.")
    directions = of_length_one(queries.detach().float().cpu())
    scores, rows = directions.new_zeros(len(queries), 0), torch.zeros(len(queries), 0, dtype=torch.int64)
    first = 0
    for part in vectors.parts():
        found = directions @ of_length_one(part).mT  # (q, rows)
        numbers = torch.arange(first, first + len(part)).expand(len(queries), -1)
        scores, places = torch.cat([scores, found], dim=1).topk(min(top, scores.shape[1] + len(part)))
        rows = torch.cat([rows, numbers], dim=1).gather(1, places)
        first += len(part)
    matches = []
    for row_of_scores, row_of_rows in zip(scores.tolist(), rows.tolist(), strict=True):
        best = zip(row_of_rows, row_of_scores, strict=True)
        matches.append([Match(vectors.pictures[row], score) for row, score in best])
    return matches


def of_length_one(vectors: Tensor) -> Tensor:
    """The directions of vectors (n, d); zeros stay. They are brought near to 1 first, where all squares are numbers."""
    _, exponents = torch.frexp(vectors.abs().amax(1, keepdim=True))
    return F.normalize(torch.ldexp(vectors, -exponents.clamp(-126, 126)), dim=1)

"""Find the images whose vectors have the largest cosine similarity to a query, by exact search in constant memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.errors import ImageError, InputError, check_count
from vitlite.images.transform import image_list
from vitlite.inference.predict import embed
from vitlite.retrieval.store import PART, Vectors

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

QUERIES = 256  # queries compared at a time


class Match(NamedTuple):
    """An image that was found for a query, and the cosine similarity of their vectors (`score`)."""

    path: str
    score: float


def search(vectors: Vectors, model: "ViT", images: Any, top: int = 10) -> list[list[Match]]:
    """Find the images that are most similar to each query image, in order of decreasing similarity.

    Args:
        vectors: The vectors of the images to search, as `open_vectors` returns them.
        model: The model that computed the vectors.
        images: A query image or a list of query images, in any form that `model.preprocess` accepts.
        top: The number of matches per query. If there are fewer vectors, all of them are returned.

    Raises:
        InputError: The vectors were computed by another model, or `top` is not a positive integer.
        ImageError: A query image cannot be read.
    """
    vectors.check_model(model)
    several = image_list(images)
    return nearest(vectors, _embed_all(model, [images] if several is None else several), top)


def search_text(vectors: Vectors, model: "ViT", sentences: Sequence[str], top: int = 10) -> list[list[Match]]:
    """Find the images that fit each sentence best, in order of decreasing similarity.

    Args:
        vectors: The vectors of the images to search, as `open_vectors` returns them.
        model: The CLIP or SigLIP model that computed the vectors.
        sentences: The sentences, such as ["a red car at night"].
        top: The number of matches per sentence. If there are fewer vectors, all of them are returned.

    Raises:
        InputError: The vectors were computed by a different model or taken from a block other than the last, the
            checkpoint has no text half, the head or pooling of the model was changed, a sentence is too long, or `top`
            is not a positive integer.
        CheckpointError: The text half is damaged, or vitlite does not support it.
        DownloadError: The text half cannot be downloaded.
        MissingExtraError: The packages for text are not installed: pip install 'vitlite[text]'.
    """
    from vitlite.text.half import open_text_half
    from vitlite.text.labels import projection_of

    vectors.check_model(model)
    if vectors.layer is not None:
        raise InputError(
            f"{vectors.path} contains vectors of block {vectors.layer}, but only those of the last block can be "
            "compared with text. Embed the images again without --layer."
        )
    half = open_text_half(model)
    queries, projection = half.vectors(sentences), projection_of(model, half.weights)
    if projection is not None:
        vectors = _Projected(**(vars(vectors) | {"dim": projection.out_features}), projection=projection)
    return nearest(vectors, queries, top)


@dataclass(frozen=True)
class _Projected(Vectors):
    """Vectors of images that are multiplied by CLIP's image projection, so that they can be compared with text."""

    projection: nn.Linear = field(kw_only=True)

    @torch.no_grad()
    def parts(self, rows: int = PART, first: int = 0) -> Iterator[Tensor]:
        weight, bias = (tensor.detach().cpu().float() for tensor in (self.projection.weight, self.projection.bias))
        for part in super().parts(rows, first):
            yield F.linear(part.float(), weight, bias)


def _embed_all(model: "ViT", images: Iterable[Any]) -> Tensor:
    found = []
    for _, vector in embed(model, images):
        if isinstance(vector, ImageError):
            raise vector
        found.append(vector)
    return torch.stack(found) if found else torch.zeros(0, model.config.embed_dim, device="cpu")


def nearest(vectors: Vectors, queries: Tensor, top: int = 10) -> list[list[Match]]:
    """Find the images whose vectors are most similar to each query vector, in order of decreasing cosine similarity.

    Args:
        vectors: The vectors of the images to search, as `open_vectors` returns them.
        queries: The query vectors (q, d), computed by the same model.
        top: The number of matches per query. If there are fewer vectors, all of them are returned.

    Raises:
        InputError: The queries have the wrong shape, are complex or not finite, or `top` is not a positive integer.
    """
    check_count(top, "top")
    if queries.ndim != 2 or queries.shape[1] != vectors.dim:
        raise InputError(
            f"queries must have the shape (n, {vectors.dim}), got {tuple(queries.shape)}. Compute the queries with the "
            "model that made the vectors."
        )
    check_real(queries)
    queries = normalized(queries.detach().cpu())
    groups = torch.split(queries, QUERIES)
    best = [
        _Best(group.new_zeros(len(group), 0), group.new_zeros(len(group), 0, dtype=torch.int64)) for group in groups
    ]
    first = 0
    for part in vectors.parts():
        known = normalized(part)
        best = [_update(found, cosines(group, known), first, top) for found, group in zip(best, groups, strict=True)]
        first += len(part)
    matches = []
    for scores, rows in best:
        for query_scores, query_rows in zip(scores.tolist(), rows.tolist(), strict=True):
            found = zip(query_rows, query_scores, strict=True)
            matches.append([Match(vectors.paths[row], score) for row, score in found])
    return matches


class _Best(NamedTuple):
    """The largest cosines found so far for some queries (q, top), and the rows of the matching vectors (q, top)."""

    scores: Tensor
    rows: Tensor


def _update(best: _Best, scores: Tensor, first: int, top: int) -> _Best:
    """Return the best matches of some queries after comparing them with more vectors.

    Args:
        best: The best matches so far.
        scores: The cosines of the q queries and n further vectors (q, n).
        first: The row of the first of these vectors in the file.
        top: The number of matches to keep per query.
    """
    rows = torch.arange(first, first + scores.shape[1], device="cpu").expand(len(scores), -1)
    all_scores, all_rows = torch.cat([best.scores, scores], dim=1), torch.cat([best.rows, rows], dim=1)
    largest, places = all_scores.topk(min(top, all_scores.shape[1]))
    return _Best(largest, all_rows.gather(1, places))


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosines of all pairs of normalised vectors, (q, d) and (n, d), in full precision: (q, n)."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.mT


def check_real(vectors: Tensor) -> None:
    """Check that vectors are real and finite.

    Raises:
        InputError: The vectors are complex or not finite.
    """
    if vectors.is_complex():
        raise InputError(
            f"Vectors must be real, got {vectors.dtype}. Convert them to a floating-point dtype such as torch.float32."
        )
    if not vectors.isfinite().all():
        raise InputError("Vectors must be finite, got NaN or infinity. Remove the vectors that contain these values.")


def normalized(vectors: Tensor) -> Tensor:
    """Return vectors (n, d) in float32, scaled to length 1. Vectors of zeros are not changed.

    Each vector is first divided by its largest absolute value, so that squares do not overflow.
    """
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    largest = vectors.abs().amax(1, keepdim=True)
    return F.normalize((vectors / largest.where(largest > 0, 1)).float(), dim=1)

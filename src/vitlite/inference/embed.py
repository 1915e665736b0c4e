"""Compute the vectors of many images in a run that can be resumed, and identify the model and its settings."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vitlite.errors import ImageError
from vitlite.inference.journal import ImageFile, Journal

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.inference.predict import Outcomes, Timings
    from vitlite.nn.vit import ViT


@dataclass(frozen=True)
class VectorIdentity:
    """The weights and settings that determine a model's vectors. Only compare vectors with the same identity.

    Attributes:
        weights: The sha256 of the weights.
        config: The config of the model, as `ViTConfig.to_dict` returns it.
        preprocessing: The preprocessing, as `TransformConfig.to_dict` returns it, or None if the model has none.
        quick_decode: True if large JPEG files are decoded at a reduced size.
        dtype: The dtype of the computation, such as "float32".
        fast: True if the vectors are computed by an optimized model.
    """

    weights: str
    config: dict[str, Any]
    preprocessing: dict[str, Any] | None
    quick_decode: bool
    dtype: str
    fast: bool


def identity_of(model: "ViT", *, dtype: str | None = None, fast: bool = False) -> VectorIdentity:
    """Return the identity of the vectors that a model computes.

    Args:
        model: The model.
        dtype: The dtype of the computation, such as "bfloat16". Default: the dtype of the model.
        fast: If True, the vectors are computed by an optimized copy of the model; otherwise, by the model itself.

    Raises:
        InputError: The model was modified, so its config and weights no longer determine the vectors.
    """
    from vitlite.checkpoints.fingerprint import hash_of_weights
    from vitlite.images.transform import transform_to_save

    transform = transform_to_save(model)
    return VectorIdentity(
        weights=hash_of_weights(model),
        config=model.config.to_dict(),
        preprocessing=transform.to_dict() if transform else None,
        quick_decode=getattr(model.preprocess, "quick_decode", False),
        dtype=dtype or str(model.dtype).removeprefix("torch."),
        fast=fast,
    )


def keep_blocks(model: "ViT", layer: int) -> None:
    """Remove all blocks after one block, so that `model.embed` returns the vector of this block.

    The final norm and the pooling of the model are applied to the output of the block. The config is updated, so the
    smaller model can be optimized and saved.

    Args:
        model: The model to change.
        layer: The index of the last block to keep. Negative indices count from the last block.

    Raises:
        InputError: The model has no such block.
    """
    (last,) = model._layers(layer)
    if last + 1 < model.config.depth:
        model.blocks = model.blocks[: last + 1]
        model.config = model.config.replace(depth=last + 1)


def embed_into(
    journal: Journal,
    model: "ViT",
    images: Sequence[ImageFile],
    batch: int,
    timings: "Timings | None" = None,
    *,
    patches: bool = False,
) -> "Outcomes[Tensor]":
    """Compute the vectors of image files, and add them to a journal batch by batch.

    Args:
        journal: The journal for the vectors and for the paths of images that cannot be read.
        model: The model that computes the vectors.
        images: The image files. Files that are already in the journal are skipped.
        batch: The number of images per batch.
        timings: A `Timings` object, to which the seconds of this run are added.
        patches: If True, compute one vector for each patch (h, w, d); otherwise, one for each image (d,).

    Returns:
        A generator of pairs: a path, and the vector or the error of the image. Images are processed lazily.
    """
    from vitlite.inference.predict import embed

    pending = [image for image in images if image not in journal.rows]
    pending.sort(
        key=lambda image: image.path in journal.failed
    )  # failed images last, so that the batches are the same as without an interruption
    by_path = {image.path: image for image in pending}
    with closing(embed(model, list(by_path), batch, timings, patches=patches)) as outcomes:
        while found := list(islice(outcomes, batch)):
            vectors = {path: vector for path, vector in found if not isinstance(vector, ImageError)}
            failed = [path for path, _ in found if path not in vectors]
            journal.add([by_path[path] for path in vectors], list(vectors.values()), failed)
            yield from found

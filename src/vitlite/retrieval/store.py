"""Open a file of vectors that was written by `vitlite embed`, and read the vectors in parts."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlite.errors import InputError, check_count
from vitlite.inference.embed import identity_of

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

PART = 2**16  # vectors in memory at a time
DTYPES = ("F64", "F32", "F16", "BF16")
COMPARED = ("weights", "config", "preprocessing", "quick_decode")  # fields of `VectorIdentity` that must be equal
# fields of the config that do not affect the vectors
UNUSED = ("num_classes", "cosine_head", "dropout", "drop_path", "checkpointing")


@dataclass(frozen=True)
class Vectors:
    """A file of image vectors. The vectors stay on disk until `parts` reads them.

    Attributes:
        path: The path of the file.
        paths: The path of the image that each vector belongs to.
        dim: The width of a vector.
        model: The name of the model that computed the vectors.
        identity: The fields of the `VectorIdentity` of the vectors.
        layer: The index of the block whose output was pooled, or None if it was the last block.
    """

    path: Path
    paths: list[str] = field(repr=False)
    dim: int
    model: str
    identity: Mapping[str, Any] = field(repr=False)
    layer: int | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """The image size of the model that computed the vectors."""
        size = self.identity["config"].get("image_size")
        return tuple(size) if isinstance(size, list) else size

    @property
    def quick_decode(self) -> bool:
        """True if the vectors were computed from large JPEG files decoded at a reduced size."""
        return bool(self.identity.get("quick_decode"))

    @property
    def background(self) -> str | None:
        """The colour that was put behind transparent pixels, or None if alpha was dropped."""
        return (self.identity.get("preprocessing") or {}).get("background")

    @property
    def max_patches(self) -> int | None:
        """The most patches of an image, for a NaFlex model."""
        return (self.identity.get("preprocessing") or {}).get("max_patches")

    def parts(self, rows: int = PART, first: int = 0) -> Iterator[Tensor]:
        """Yield the vectors in parts (n, d), in float32 or float64.

        Args:
            rows: The maximum number of vectors per part.
            first: The row of the first vector.

        Raises:
            InputError: A value is not finite, or `rows` is not a positive integer.
        """
        check_count(rows, "rows")
        with _open(self.path) as file:
            stored = file.get_slice("vectors")
            for start in range(first, len(self), rows):
                with torch.device("cpu"):  # otherwise safetensors would use torch's default device
                    part: Tensor = stored[start : start + rows]
                part = part.to(torch.promote_types(part.dtype, torch.float32))
                if not part.isfinite().all():
                    raise InputError(f"{self.path} contains vectors with NaN or infinity. Embed the images again.")
                yield part

    def check_model(self, model: "ViT") -> None:
        """Check that vectors computed by a model can be compared with the vectors in this file.

        Raises:
            InputError: The model has different weights, another config or other preprocessing, or it was modified.
        """
        ours = _comparable(json.loads(json.dumps(asdict(identity_of(model)))))
        theirs = _comparable(self.identity)
        differing = [name for name in COMPARED if ours[name] != theirs[name]]
        if differing:
            raise InputError(
                f"The vectors in {self.path} were made by {self.model}, but this model differs in "
                f"{', '.join(differing)}. Use the model that made the vectors: omit --model and --size, and pass "
                "the same --weights as to `vitlite embed`, if any. To use this model, embed the images again."
            )


def open_vectors(path: str | PathLike[str]) -> Vectors:
    """Open a file of vectors that was written by `vitlite embed --out NAME.safetensors`.

    Raises:
        InputError: The file cannot be read, or does not contain vectors, image paths and the identity of the model.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path} is not a .safetensors file, which is the only format that identifies the model. Embed the images "
            "again with --out NAME.safetensors."
        )
    if not path.is_file():
        raise InputError(f"There is no file {path}. Create it with: vitlite embed PATH --out {path}")
    with _open(path) as file:
        metadata, names = file.metadata() or {}, file.keys()
        stored = file.get_slice("vectors") if "vectors" in names else None
        shape = stored.get_shape() if stored and stored.get_dtype() in DTYPES else []
    if len(shape) == 4:
        raise InputError(
            f"{path} has one vector per patch, but one vector per image is needed. Embed the images again without "
            "--patches."
        )
    try:
        paths, identity, model = json.loads(metadata["paths"]), json.loads(metadata["identity"]), metadata["model"]
        layer = int(metadata["layer"]) if "layer" in metadata else None
        valid = all(isinstance(each, str) for each in paths) and isinstance(identity["config"], dict)
    except (KeyError, TypeError, ValueError, RecursionError):
        valid = False
    if not valid or len(shape) != 2 or shape[0] != len(paths) or shape[1] == 0:
        raise InputError(
            f"{path} is not a valid file of vectors. It must contain vectors, image paths and the identity of the "
            "model. Embed the images again."
        )
    return Vectors(path, list(paths), shape[1], model, identity, layer)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"Cannot read {path}: {error}. Check its permissions, and embed the images again if it is damaged."
        ) from error


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: identity.get(name) for name in COMPARED}
    if isinstance(fields["config"], dict):
        fields["config"] = {name: value for name, value in fields["config"].items() if name not in UNUSED}
    return fields

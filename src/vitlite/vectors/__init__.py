"""What vectors of pictures are made for: finding pictures that look alike, and telling how good the vectors are."""

from vitlite.vectors.probe import Probed, probe
from vitlite.vectors.search import Match, nearest, search
from vitlite.vectors.store import Vectors, open_vectors

__all__ = ["Match", "Probed", "Vectors", "nearest", "open_vectors", "probe", "search"]

"""What vectors of pictures are made for: finding pictures that look alike, and telling how good the vectors are."""

from vitlite.retrieval.probe import Probed, probe
from vitlite.retrieval.search import Match, nearest, search
from vitlite.retrieval.store import Vectors, open_vectors

__all__ = ["Match", "Probed", "Vectors", "nearest", "open_vectors", "probe", "search"]

"""Use image vectors: find similar images, or measure how well the vectors separate classes."""

from vitlite.retrieval.probe import ProbeResult, probe
from vitlite.retrieval.search import Match, nearest, search
from vitlite.retrieval.store import Vectors, open_vectors

__all__ = ["Match", "ProbeResult", "Vectors", "nearest", "open_vectors", "probe", "search"]

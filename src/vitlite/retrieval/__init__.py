"""Use image vectors: find similar images and near-duplicates, or measure how well the vectors separate classes."""

from vitlite.retrieval.duplicates import Pair, duplicate_groups, duplicate_pairs
from vitlite.retrieval.probe import ProbeResult, probe
from vitlite.retrieval.search import Match, nearest, search
from vitlite.retrieval.store import Vectors, open_vectors

__all__ = [
    "Match",
    "Pair",
    "ProbeResult",
    "Vectors",
    "duplicate_groups",
    "duplicate_pairs",
    "nearest",
    "open_vectors",
    "probe",
    "search",
]

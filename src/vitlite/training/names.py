"""Whether the names of folders are those of a model's labels: to the letter, nearly, or in part."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence


def rows_by_name(labels: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Which of the labels each name is, where they are the same ones in whatever order; None where they are not.

    >>> rows_by_name(["tabby cat", "dog"], ["Dog", "tabby_cat"])
    [1, 0]
    >>> rows_by_name(["cat", "dog"], ["cat", "ship"])
    """
    ways: tuple[Callable[[str], str], ...] = (str, letters_of)
    for written in ways:
        row_of = {written(label): row for row, label in enumerate(labels)}
        rows = [row_of.get(written(name), -1) for name in names]
        if sorted(rows) == list(range(len(labels))):
            return rows
    return None


def letters_of(name: str) -> str:
    """What is left of a name where marks and capitals differ: on macOS, an accent may be a mark of its own."""
    letters = filter(str.isalnum, unicodedata.normalize("NFKC", name))
    return "".join(letters).casefold() or name


def better_place(names: Sequence[str], labels: Sequence[str]) -> tuple[int, int] | None:
    """The first name with more words of another label than of that in its place, and the place of that other.

    >>> better_place(["cat", "dog"], ["dog, hound", "cat, puss"])
    (0, 1)
    >>> better_place(["01_cat", "02_dog"], ["cat, puss", "dog, hound"])
    """
    places_of: dict[str, list[int]] = defaultdict(list)
    for place, label in enumerate(labels):
        for word in _words_of(label):
            places_of[word].append(place)
    for place, name in enumerate(names):
        shared: Counter[int] = Counter()
        for word in _words_of(name):
            shared.update(places_of.get(word, ()))
        most = shared.most_common(1)
        if most and most[0][1] > shared[place]:
            return place, most[0][0]
    return None


def _words_of(name: str) -> set[str]:
    """The words and numbers of a name; where they are written as one, as in dog1, the word alone, too."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    words = [*re.findall(r"[^\W_]+", plain), *re.findall(r"[^\W\d_]{3,}", plain)]
    return {_stem(word) for word in words}


def _stem(word: str) -> str:
    """What the singular and the plural have in common: horse and horses, puppy and puppies; of 007, 7."""
    if word.isdecimal():
        return word.lstrip("0") or "0"
    stem = word.rstrip("es")
    if stem.endswith("y"):
        stem = f"{stem[:-1]}i"
    return stem or word

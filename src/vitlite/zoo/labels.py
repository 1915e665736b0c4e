"""What the classes of a head are called: the label sets in data/labels/, one of which a row of the zoo may name."""

from vitlite.zoo.registry import DATA, Record


def labels_of(record: Record) -> tuple[str, ...] | None:
    """The names of a checkpoint's classes in the order of its head; None where they have none.

    >>> from vitlite.zoo.registry import info
    >>> labels_of(info("vit_base_16"))[285]
    'Egyptian cat'
    """
    if record.labels_name is None:
        return None
    return read_label_set(record.labels_name)


def read_label_set(name: str) -> tuple[str, ...]:
    """A label set of the data folder, such as "imagenet-1k"."""
    lines = (DATA / "labels" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(lines)

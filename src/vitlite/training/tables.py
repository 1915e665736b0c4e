"""Read a table of labels, a CSV or Parquet file with one row per image.

The label column contains one label, or several labels with a separator. Alternatively, each label has its own column,
which contains 0 or 1.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

from vitlite.errors import TrainError, missing_extra
from vitlite.training.data import PARTS, ImageData, PreparedImages, Read, composed, label_tensor, listed

SUFFIXES = (".csv", ".tsv", ".parquet")
PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path")
LABELS = ("label", "labels", "class", "category", "tags")
SPLITS = ("split", "subset", "set")
SEPARATORS = "|;"  # no comma, because labels such as ImageNet's "tench, Tinca tinca" contain commas
BITS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


class Columns(NamedTuple):
    """The names of the columns to read from a table. By default, columns with common names are used.

    Attributes:
        path: The column of the paths, which are relative to the folder of the table.
        labels: The column of the labels, or the columns of individual labels, which contain 0 or 1.
        split: The column that contains train, val or test.
        separator: The character between the labels of an image. With an empty string, each image has one label. With
            None, the separator is "|" or ";" if the label column contains one of them.
    """

    path: str | None = None
    labels: tuple[str, ...] = ()
    split: str | None = None
    separator: str | None = None


USUAL = Columns()


@dataclass(frozen=True)
class Table:
    """The rows of a table of labels, sorted by path.

    Attributes:
        file: The file of the table.
        paths: The paths of the images.
        labels: The labels of each image.
        split: The part of each image ("train", "val" or "test"), or an empty list if the table has no split.
        multi_label: True if an image may have several labels, or none.
        columns: The labels that have their own column.
    """

    file: Path
    paths: Sequence[Path]
    labels: Sequence[tuple[str, ...]]
    split: Sequence[str]
    multi_label: bool
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.file)

    @property
    def classes(self) -> tuple[str, ...]:
        """The sorted labels."""
        return tuple(sorted(self.columns or {label for labels in self.labels for label in labels}))

    @property
    def parts(self) -> "dict[str, Table]":
        """The rows of each part, or an empty dict if the table has no split."""
        return {part: self._part(part) for part in sorted(set(self.split))}

    def _part(self, part: str) -> "Table":
        rows = [row for row, other in enumerate(self.split) if other == part]
        return replace(self, paths=[self.paths[i] for i in rows], labels=[self.labels[i] for i in rows], split=[])

    def read(self, read: Read, classes: Sequence[str], *, strict: bool = False) -> ImageData:
        """Return the images of all rows. See `read_folder` for the arguments.

        Raises:
            TrainError: A label is not one of the classes, or none of the images exists.
        """
        classes = tuple(map(composed, classes))
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise TrainError(
                f"{self} has the labels {listed(unknown)}, but the classes are {listed(classes)}. Correct or remove "
                "the rows with these labels."
            )
        if not any(path.exists() for path in self.paths):
            raise TrainError(
                f"None of the {len(self.paths)} images of {self} exist, for example {self.paths[0]}. Write absolute "
                "paths, or paths relative to the folder of the table."
            )
        index = {name: number for number, name in enumerate(classes)}
        indices: list[Any] = [[index[name] for name in names] for names in self.labels]
        if not self.multi_label:
            indices = [only for (only,) in indices]
        labels = label_tensor(indices, classes, multi_label=self.multi_label)
        return ImageData(PreparedImages(self.paths, read, self.file.parent, strict=strict), labels, classes)


def open_data(data: Path, columns: Columns = USUAL) -> Path | Table:
    """Read `data` if it is a table of labels. Return a folder unchanged.

    Raises:
        TrainError: `data` is another kind of file, or the table cannot be read.
    """
    if data.suffix.lower() in SUFFIXES and not data.is_dir():
        return read_table(data, columns)
    if data.is_file():
        raise TrainError(f"{data} is not a folder of images. Pass a folder, or a table ({', '.join(SUFFIXES)}).")
    if columns != USUAL:
        raise TrainError(
            f"{data} is not a table ({', '.join(SUFFIXES)}). Omit columns= (--path-column, --label-column, "
            "--split-column, --separator)."
        )
    return data


def read_table(file: Path, columns: Columns = USUAL) -> Table:
    """Read a table of labels.

    Raises:
        TrainError: The file cannot be read, a column is missing, or a cell has an invalid value.
        MissingExtraError: The file is a Parquet file, and pyarrow is not installed.
    """
    read = _read_parquet if file.suffix.lower() == ".parquet" else _read_csv
    names = read(file, None)
    if not names:
        raise TrainError(f"{file} is empty. Write the names of the columns, and one row per image.")
    path = _column(file, names, columns.path, PATHS, "path", "--path-column")
    if path is None:
        raise _no_paths(file, names, columns)
    split = _column(file, names, columns.split, SPLITS, "split", "--split-column")
    wanted = _label_columns(file, names, columns.labels, [path, split])
    cells = _filled(file, read(file, [path, *wanted, *([split] if split else [])]))
    if not cells:
        raise TrainError(f"{file} has no rows. Add one row per image.")
    cells.sort(key=lambda row: Path(row[0]).parts)  # in the same order as the files of a folder
    paths = [_existing(file.parent, row[0]) for row in cells]
    _check_unique(file, paths)
    parts = [_part_of(file, row[0], row[-1]) for row in cells] if split else []
    if len(wanted) > 1:
        labels = [
            tuple(composed(name) for name, cell in zip(wanted, row[1:], strict=False) if _bit(file, row[0], name, cell))
            for row in cells
        ]
        return Table(file, paths, labels, parts, multi_label=True, columns=tuple(map(composed, wanted)))
    separator = _separator(file, [row[1] for row in cells], columns.separator)
    labels = [_labels(row[1], separator) for row in cells]
    for row, names_of_row in zip(cells, labels, strict=True):
        if not separator and len(names_of_row) != 1:
            raise TrainError(
                f"{file} has no label for {row[0]}. Add one. If images may have several labels or none, pass "
                "separator= (--separator '|')."
            )
    return Table(file, paths, labels, parts, multi_label=bool(separator))


def _column(
    file: Path, names: Sequence[str], given: str | None, usual: Sequence[str], what: str, option: str
) -> str | None:
    """Return the column that the caller chose, or the first column with a common name, or None."""
    if given is not None:
        if given not in names:
            raise _missing(file, names, f"no column {given}", what, option)
        return given
    return next((name for name in names if name.strip().lower() in usual), None)


def _label_columns(
    file: Path, names: Sequence[str], given: Sequence[str], others: Sequence[str | None]
) -> tuple[str, ...]:
    """Return the column of labels, or the columns of individual labels.

    Without `given` and without a column of labels, these are all columns except `others`.
    """
    for name in given:
        _column(file, names, name, (), "labels", "--label-column")
    rest = tuple(name for name in names if name and name not in others)  # pandas writes its index without a name
    usual = _column(file, rest, None, LABELS, "labels", "--label-column")
    if given or usual:
        return tuple(given) or (str(usual),)
    if len(rest) < 2:
        raise _missing(file, names, f"no column of labels ({', '.join(LABELS)})", "labels", "--label-column")
    return rest


def _missing(file: Path, names: Sequence[str], problem: str, what: str, option: str) -> TrainError:
    return TrainError(f"{file} has {problem}. Its columns are {listed(names)}. Pass {what}= ({option}).")


def _no_paths(file: Path, names: Sequence[str], columns: Columns) -> TrainError:
    """Return the error for a table without a column of paths, which may also lack a column of labels."""
    problem, what, option = f"no column of paths ({', '.join(PATHS)})", "path", "--path-column"
    if not columns.labels and _column(file, names, None, LABELS, "labels", "--label-column") is None:
        problem += f" and no column of labels ({', '.join(LABELS)})"
        option += ") and labels= (--label-column"
    return _missing(file, names, problem, what, option)


def _filled(file: Path, rows: Sequence[Any]) -> list[Any]:
    """Return the rows that are not empty. The first cell of each is a path."""
    first = 1 if file.suffix.lower() == ".parquet" else 2  # row 1 of a CSV file has the names of the columns
    filled = [(number, row) for number, row in enumerate(rows, first) if any(cell not in (None, "") for cell in row)]
    for number, (path, *_) in filled:
        if not isinstance(path, str) or not path:
            raise TrainError(f"{file} has {path!r} instead of a path in row {number}. Correct or remove the row.")
    return [row for _, row in filled]


def _existing(folder: Path, name: str) -> Path:
    """Return the path of a file. If it does not exist, try the other form of letters with accents."""
    if name.isascii():
        return folder / name
    forms = [name, normalize("NFC", name), normalize("NFD", name)]
    return next((path for form in forms if (path := folder / form).exists()), folder / name)


def _check_unique(file: Path, paths: Sequence[Path]) -> None:
    path, count = Counter(paths).most_common(1)[0]
    if count > 1:
        raise TrainError(f"{file} lists {path} {count} times. Write one row per image, with all labels of the image.")


def _part_of(file: Path, path: str, cell: Any) -> str:
    part = PARTS.get(str(cell).strip().lower())
    if part is None:
        raise TrainError(f"{file} has the split {cell!r} for {path}. Use train, val or test.")
    return part


def _bit(file: Path, path: str, column: str, cell: Any) -> bool:
    value = BITS.get(str(cell).strip().lower())
    if value is None:
        raise TrainError(
            f"{file} has {cell!r} in the column {column} for {path}, but the column of a label must contain 0 or 1. "
            "Correct the cell, or name the columns of labels with labels= (--label-column)."
        )
    return value


def _separator(file: Path, cells: Sequence[Any], given: str | None) -> str:
    """Return the separator of the labels, or "" if each image has one label."""
    if given is not None:
        return given
    if any(isinstance(cell, list) for cell in cells):
        return SEPARATORS[0]
    found = [mark for mark in SEPARATORS if any(mark in cell for cell in cells if isinstance(cell, str))]
    if len(found) > 1:
        raise TrainError(
            f"{file} has labels that contain {' and '.join(found)}. Pass the character between labels as separator= "
            "(--separator)."
        )
    return found[0] if found else ""


def _labels(cell: Any, separator: str) -> tuple[str, ...]:
    """Return the labels of a cell, which is text or, in Parquet, may be a list."""
    if isinstance(cell, list):
        parts = [str(label) for label in cell]
    else:
        text = "" if cell is None else str(cell)
        parts = text.split(separator) if separator else [text]
    return tuple(label for part in parts if (label := composed(part.strip())))


def _read_csv(file: Path, wanted: Sequence[str] | None) -> list[Any]:
    """Read a CSV file. Return the column names if `wanted` is None, otherwise the cells of these columns by row."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:  # Excel writes a byte order mark
            header = stream.readline()
            delimiter = max(",;\t", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter, skipinitialspace=True), [])
            if wanted is None:
                return names
            places = [names.index(name) for name in wanted]
            rows = []
            for row in csv.reader(stream, delimiter=delimiter, skipinitialspace=True, strict=True):
                if any(row) and len(row) != len(names):
                    raise TrainError(
                        f"{file} has {len(row)} cells in a row that begins with {row[0]!r}, but {len(names)} columns. "
                        "Quote cells that contain the delimiter."
                    )
                rows.append([row[place] for place in places] if any(row) else [""] * len(places))
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TrainError(f"Cannot read {file}: {error}. Pass a CSV file in UTF-8 with column names.") from error


def _read_parquet(file: Path, wanted: Sequence[str] | None) -> list[Any]:
    """Read a Parquet file. Return the same as `_read_csv`."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("Reading Parquet", "parquet") from error
    try:
        if wanted is None:
            return list(parquet.read_schema(file).names)
        table = parquet.read_table(file, columns=list(wanted))
        return list(map(list, zip(*(table[name].to_pylist() for name in wanted), strict=True)))
    except (OSError, ValueError) as error:  # pyarrow raises a ValueError for a damaged file
        raise TrainError(f"Cannot read {file}: {error}. Pass a Parquet file.") from error

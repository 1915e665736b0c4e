"""From a name to a label there is little to read."""

from pathlib import Path

from reading_path import reading_path, write_weights


def test_reading_path_is_short(tmp_path: Path) -> None:
    path = reading_path("vitlite", write_weights(tmp_path))
    assert len(path.functions) <= 110, "\n".join(path.functions)
    assert len(path.modules) <= 15, path.modules
    assert path.lines <= 700
    assert path.imported <= 22

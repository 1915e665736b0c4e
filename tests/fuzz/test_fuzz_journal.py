"""Any journal that an interrupted run may have left is continued correctly, or is one error that names it."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from attempts import json_values
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitlite.errors import InputError
from vitlite.inference.journal import ImageFile, Journal

CASES = int(os.environ.get("VITLITE_FUZZ", "50"))
RUN = {"weights": "ab", "dtype": None}
IMAGES = [ImageFile(f"{i}.png", i, i) for i in range(4)]

images = st.lists(st.tuples(st.text() | json_values, st.integers() | json_values, st.integers()))
lines = st.fixed_dictionaries(
    {}, optional={"images": images | json_values, "failed": st.lists(st.text()) | json_values}
)


def check(lines: bytes, rows: bytes) -> None:
    """Continue from a journal with these files."""
    with TemporaryDirectory() as name:
        target = Path(name, "out.npz")
        folder = Path(name, "out.npz.partial")
        folder.mkdir()
        (folder / "images.jsonl").write_bytes(lines)
        (folder / "vectors.f32").write_bytes(rows)
        try:
            with Journal(target, RUN, 2) as journal:
                for image in IMAGES:
                    if image not in journal.rows:
                        journal.add([image], [torch.full((2,), float(image.size))])
                assert journal.finish(IMAGES, {}) == 4
        except InputError as error:
            message = str(error)
        if not target.exists():
            assert str(folder) in message
            assert len(message) < 5000
            assert (folder / "images.jsonl").read_bytes() == lines
            return
        with np.load(target) as arrays:
            assert arrays["paths"].tolist() == [image.path for image in IMAGES]
            assert arrays["vectors"].shape == (4, 2)


fuzzed = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))


@fuzzed
@given(st.binary(max_size=300), st.binary(max_size=40))
@example(b"\0" * 100, b"")
@example(b"[" * 100_000 + b"\n", b"")
@example(b"1" * 5000 + b"\n", b"")
def test_any_bytes(lines: bytes, rows: bytes) -> None:
    check(lines, rows)


@fuzzed
@given(st.lists(lines | json_values, max_size=3), st.booleans(), st.binary(max_size=40))
def test_any_lines_after_the_first(records: list[Any], torn: bool, rows: bytes) -> None:
    content = "".join(json.dumps(record) + "\n" for record in [RUN, *records]).encode()
    check(content[:-1] if torn else content, rows)

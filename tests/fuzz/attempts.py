"""What the targets for weights share: how many cases, how JSON is spoilt, and what loading a file may end in."""

import copy
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from files_made import completed
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from vitlite import ViT, load
from vitlite.errors import VitliteError

CASES = settings(
    max_examples=int(os.environ.get("VITLITE_FUZZ", "15")),
    deadline=None,  # by the clock, which a busy machine uses up for others: `bounded` counts this process's own time
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes, and a case is readable as it is
)
FINDS = Path(gettempdir(), "vitlite-finds")
GIGABYTE = 2**20  # KiB
SECONDS = 10  # of a processor
LONGEST_ERROR = 12_000  # letters: forty lines of names and shapes

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("\x1b[31m")
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


class Content(bytes):
    """Bytes of a file, which are no help in a report."""

    def __repr__(self) -> str:
        return f"{len(self)} bytes"


@contextmanager
def kept(content: bytes, suffix: str) -> Iterator[None]:
    """Keeps a file that is a find, so that it can be looked at, and then go into the corpus."""
    try:
        yield
    except BaseException:
        FINDS.mkdir(exist_ok=True)
        (FINDS / f"{hashlib.sha256(content).hexdigest()[:8]}{suffix}").write_bytes(content)
        raise


@contextmanager
def bounded() -> Iterator[None]:
    """Makes sure that what is done within takes less than ten seconds, and a gigabyte of memory more than there was."""
    begun = time.process_time()
    if sys.platform != "linux":
        yield
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _memory("VmRSS")
        yield
        assert _memory("VmHWM") - before < GIGABYTE
    assert time.process_time() - begun < SECONDS


def _memory(what: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1])


def attempt(source: Path, fields: dict[str, Any] | None = None, **options: Any) -> ViT | None:
    """A model of finite numbers; None where there was one readable error, which names the file or its folder."""
    with bounded():
        try:
            if fields is not None:  # beside what the file itself tells
                options["config"] = completed(source, **fields)
            model = load(source, **options)
        except VitliteError as error:
            said = str(error)
            model = None
    if model is None:
        folder = source if source.is_dir() else source.parent
        assert str(folder) in said
        assert len(said) < LONGEST_ERROR
        assert said.replace("\n", "").isprintable()
        return None
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    return model


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each table and list in a JSON value, with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@st.composite
def spoilt(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any], most: int = 3) -> Any:
    """A JSON value in which up to `most` parts are replaced, left out, renamed, nested, or new."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(document))
        if not places:
            break
        inside, key = places[draw(st.integers(0, len(places) - 1))]
        what = draw(st.sampled_from(["put", "put", "put", "remove", "rename", "nest", "add"]))
        if what == "put":
            inside[key] = copy.deepcopy(draw(values))  # which may be spoilt next
        elif what == "remove":
            del inside[key]
        elif what == "rename" and isinstance(inside, dict):
            inside[
                draw(st.text(max_size=8) | st.sampled_from([each for _, each in places if isinstance(each, str)]))
            ] = inside.pop(key)
        elif what == "nest":
            for _ in range(draw(st.sampled_from([1, 2, 40, 500]))):
                inside[key] = [inside[key]]
        elif isinstance(inside, dict):
            inside[draw(st.text(max_size=8))] = copy.deepcopy(draw(values))
        else:
            inside.append(copy.deepcopy(draw(values)))
    return document


def spoilt_bytes(draw: st.DrawFn, content: bytes, among: int = 10**9) -> Content:
    """Some bytes changed, left out or put in, mostly among the first so many; and perhaps cut short."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(min(len(changed), among) - 1, 0)))
        what = draw(st.sampled_from(["set", "large", "insert", "delete"]))
        if what == "set":
            changed[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif what == "large":  # sizes and offsets
            changed[place : place + 4] = draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"]))
        elif what == "insert":
            changed[place:place] = draw(st.binary(max_size=8))
        else:
            del changed[place : place + draw(st.integers(1, 8))]
    return Content(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)

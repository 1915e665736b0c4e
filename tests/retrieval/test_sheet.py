"""The captions and the limits of a contact sheet."""

from pathlib import Path
from typing import Any

import pytest

from vitlite.errors import InputError
from vitlite.retrieval import sheet
from vitlite.retrieval.search import Match
from vitlite.retrieval.sheet import LETTERS, SIDE, check_size, contact_sheet, shortened


def test_captions_have_the_folder_and_both_ends_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (str(tmp_path / "cat" / f"IMG_20240131_0777_{i}.jpeg") for i in (17, 18))
    odd = str(tmp_path / "a folder of a long name" / "\x1b.png")
    captions: list[str] = []
    drawn = sheet.arrange

    def arrange(panels: dict[str, Any], columns: int, letters: int) -> Any:
        captions.extend(panels)
        return drawn(panels, columns, letters)

    monkeypatch.setattr(sheet, "arrange", arrange)
    contact_sheet([first], [[Match(path, 0.5) for path in (first, second, odd, "0.png")]])
    assert captions == [
        "? cat\nIMG_202401...7_17.jpeg",
        "1. 0.500 cat\nIMG_202401...7_17.jpeg",
        "2. 0.500 cat\nIMG_202401...7_18.jpeg",
        "3. 0.500 a fol... name\n\\x1b.png",
        "4. 0.500 \n0.png",
    ]
    assert max(len(line) for caption in captions for line in caption.split("\n")) == LETTERS


def test_both_lines_of_a_caption_are_on_the_sheet() -> None:
    drawn = contact_sheet(["0.png"], [[Match("cat/1.png", 0.5)]]).convert("L")
    dark = [drawn.crop((0, y, drawn.width, y + 1)).getextrema()[0] < 128 for y in range(SIDE + 8, drawn.height)]
    lines = sum(now and not before for before, now in zip([False, *dark], dark, strict=False))
    assert lines >= 2
    assert not dark[-1]  # the last line is there to its end


def test_a_short_name_stays() -> None:
    assert shortened("a.png", LETTERS) == "a.png"
    assert [len(shortened(22 * "x" + ".jpeg", most)) for most in (12, 13, 22)] == [12, 13, 22]


@pytest.mark.parametrize(("asked", "found", "fits"), [
    (250, 15, True), (16, 249, True), (251, 3, False), (1, 250, False), (250, 16, False),
])  # fmt: skip
def test_a_sheet_that_is_too_large_is_an_error(asked: int, found: int, fits: bool) -> None:
    if fits:
        check_size(asked, found)
        return
    with pytest.raises(InputError, match=f"A contact sheet with {asked} rows of {found + 1} images is too large"):
        check_size(asked, found)

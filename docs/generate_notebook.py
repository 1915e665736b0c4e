"""Writes docs/how_a_vit_works.ipynb from the page of that name; with --check only says whether it is up to date.

Its code cells are the page's blocks, and what they printed stands below them. The page's pictures are in it, and the
photo that it looks at, so that it needs no other file: `pip install 'vitlite[images,plot]'` is enough.
"""

import json
import re
import sys
from base64 import b64encode
from pathlib import Path
from textwrap import dedent
from typing import Any

DOCS = Path(__file__).parent
PAGE, NOTEBOOK = DOCS / "how_a_vit_works.md", DOCS / "how_a_vit_works.ipynb"
BLOCK = re.compile(r"(?:^ *<!-- (\w+).*? -->\n)?^( *)```(\w+)\n(.*?)^\2```\n", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[([^]]*)\]\(images/([^)]*)\)")
OTHER_PAGE = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|attachment:)[^)]*\)")
TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
DOWNLOAD = "[This page as a notebook](how_a_vit_works.ipynb), to download and run. What the page needs:"
INSTALL = """\
This is a page of vitlite's documentation as a notebook. It brings one of the photos with it, and needs no network, once
this is done in the environment that it runs in:"""
FOLD = re.compile(r"^</?(?:details|summary).*\n", re.MULTILINE)  # cannot go through several cells
PHOTO = DOCS / "images" / "chelsea.jpg"
WRITE_PHOTO = """\
# The photo of this page, if it is not there. With another one in its place, all of the page is about that one.
# And the commands of the environment that this notebook runs in are found, also where it was not activated.
import os
import sysconfig
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from PIL import Image

os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
photo = Path("examples/photos/chelsea.png")
if not photo.exists():
    photo.parent.mkdir(parents=True, exist_ok=True)
    Image.open(BytesIO(b64decode("{photo}"))).save(photo)
"""
FOLDED = {"jupyter": {"source_hidden": True}}
ABOUT = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cells() -> list[dict[str, Any]]:
    """The page, cut where code is that runs."""
    page = PAGE.read_text(encoding="utf-8").replace(DOWNLOAD, INSTALL)
    page = FOLD.sub("", page)
    found: list[dict[str, Any]] = []  # prose and code in turn
    prose, end = "", 0
    for block in BLOCK.finditer(page):
        note, _, language, text = block.groups()
        prose, end = prose + page[end : block.start()], block.end()
        if note == "output":
            found[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines_of(dedent(text))}]
        elif note or language not in ("python", "bash"):
            prose += as_markdown(language, text)
        else:
            found += [markdown_cell(prose), code_cell(dedent(text) if language == "python" else as_shell(text))]
            prose = ""
    photo = b64encode(PHOTO.read_bytes()).decode()
    found.insert(1, code_cell(WRITE_PHOTO.format(photo=photo)) | {"metadata": FOLDED})
    return [*found, markdown_cell(prose + page[end:])]


def as_markdown(language: str, text: str) -> str:
    """A block that does not run, as notebooks write it."""
    return f"$$\n{text}$$\n" if language == "math" else f"```{language}\n{text}```\n"


def as_shell(text: str) -> str:
    """Lines for a terminal, as a notebook runs them."""
    return "".join(f"!{line}\n" for line in text.splitlines())


def markdown_cell(text: str) -> dict[str, Any]:
    """Prose with the pictures that it shows. What leads to other pages does not leave the site."""
    attached = {}
    for _, name in IMAGE.findall(text):
        picture = DOCS / "images" / name
        attached[name] = {TYPES[picture.suffix]: b64encode(picture.read_bytes()).decode()}
    text = OTHER_PAGE.sub(r"\1", IMAGE.sub(r"![\1](attachment:\2)", text))
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": lines_of(text)}
    return cell | {"attachments": attached} if attached else cell


def code_cell(text: str) -> dict[str, Any]:
    """Code that has not run yet."""
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": lines_of(text)}


def lines_of(text: str) -> list[str]:
    """As notebooks keep text: the last line without its end."""
    return text.strip("\n").splitlines(keepends=True)


def main() -> int:
    """The command: 1 where the notebook is stale and was not written."""
    numbered = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells())]
    notebook = {"cells": numbered, "metadata": ABOUT, "nbformat": 4, "nbformat_minor": 5}
    new = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    fresh = NOTEBOOK.exists() and NOTEBOOK.read_text(encoding="utf-8") == new
    if not fresh and "--check" in sys.argv:
        print(f"{NOTEBOOK.name} is stale. Write it: python docs/{Path(__file__).name}", file=sys.stderr)
        return 1
    NOTEBOOK.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

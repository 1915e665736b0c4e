"""Write docs/how_a_vit_works.ipynb from the page of that name; with --check, only report whether it is up to date.

The code cells are the page's blocks, with their outputs below them. The page's figures are attached, so that the
notebook needs no other file.
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
NOTEBOOK_LINK = "You can run this page as [a notebook](how_a_vit_works.ipynb). Install what it needs:"
INSTALL = "This notebook is a page of vitlite's documentation. Install what it needs:"
FOLD = re.compile(r"^</?(?:details|summary).*\n", re.MULTILINE)  # cannot go through several cells
SETUP = """\
# Find the vitlite command of this environment, even if the environment is not activated.
import os
import sysconfig

os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
"""
FOLDED = {"jupyter": {"source_hidden": True}}
ABOUT = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cells() -> list[dict[str, Any]]:
    """Return the cells: the page, cut at each block that runs."""
    page = PAGE.read_text(encoding="utf-8").replace(NOTEBOOK_LINK, INSTALL)
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
    found.insert(1, code_cell(SETUP) | {"metadata": FOLDED})
    return [*found, markdown_cell(prose + page[end:])]


def as_markdown(language: str, text: str) -> str:
    """Return a block that does not run, as Markdown for notebooks."""
    return f"$$\n{text}$$\n" if language == "math" else f"```{language}\n{text}```\n"


def as_shell(text: str) -> str:
    """Return shell lines as a notebook runs them: each command starts with `!`, and may go on in the next line."""
    return re.sub(r"(?<!\\\n)^(?=.)", "!", text, flags=re.MULTILINE)


def markdown_cell(text: str) -> dict[str, Any]:
    """Return a cell of prose with its figures attached and without links to other pages."""
    attached = {}
    for _, name in IMAGE.findall(text):
        picture = DOCS / "images" / name
        attached[name] = {TYPES[picture.suffix]: b64encode(picture.read_bytes()).decode()}
    text = OTHER_PAGE.sub(r"\1", IMAGE.sub(r"![\1](attachment:\2)", text))
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": lines_of(text)}
    return cell | {"attachments": attached} if attached else cell


def code_cell(text: str) -> dict[str, Any]:
    """Return a cell of code that has not run yet."""
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": lines_of(text)}


def lines_of(text: str) -> list[str]:
    """Split text into lines as notebooks store it: the last one without a line break."""
    return text.strip("\n").splitlines(keepends=True)


def main() -> int:
    """Write the notebook, or return 1 if it is stale and --check was given."""
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

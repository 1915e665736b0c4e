"""What mkdocs does beside building the pages: the site carries the repository's files that they name, and more.

A path in code type, such as `src/vitlite/model.py`, and a link that leads out of docs/ become links to a copy of the
file. Every picture leads to itself, so that it can be enlarged on a phone.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
COPIES = "files"  # the folder of the site for what lies outside docs/
CODE = re.compile(r"(?<!</span>)<code>[^<]*</code>")  # of a sentence: blocks have spans in them
PATH = re.compile(r"\b(?:src|examples|benchmarks|docs|tests)/[\w./-]*\.(?:py|txt|md|json|png|jpg)\b")
LINK_OUT = re.compile(r"\[([^]]*)\]\(\.\./([^)#]+)\)")
PICTURE = re.compile(r'<img [^>]*src="([^"]*)"[^>]*>')
FIRST_FOUND = {"how_a_vit_works.md": 3, "models.md": 3}  # pages that a search shows before those that name a thing

named: set[str] = set()  # files of the repository that the pages lead to


def link_to(path: str, text: str, page: Any) -> str:
    """A link to the copy of a file of the repository."""
    if not (ROOT / path).is_file():
        raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which is not in the repository.")
    named.add(path)
    return f'<a href="{get_relative_url(f"{COPIES}/{path}", page.url)}">{text}</a>'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/, as they work where the repository is read, become links to copies."""
    boost = FIRST_FOUND.get(page.file.src_uri)
    if boost:
        page.meta["search"] = {"boost": boost}
    if page.file.src_uri.startswith("lab_notes/"):  # too many tokens with digits, which lunr confuses with each other
        page.meta["search"] = {"exclude": True}
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def linked(link: re.Match[str]) -> str:
        target = (folder / ".." / link[2]).resolve()
        return (
            link[0] if target.is_relative_to(ROOT / "docs") else link_to(str(target.relative_to(ROOT)), link[1], page)
        )

    return LINK_OUT.sub(linked, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Paths in code type become links to copies, pictures links to themselves."""

    def linked(path: re.Match[str]) -> str:
        return link_to(path[0], path[0], page) if (ROOT / path[0]).is_file() else path[0]

    html = CODE.sub(lambda code: PATH.sub(linked, code[0]), html)
    return PICTURE.sub(r'<a href="\1">\g<0></a>', html)


def on_post_build(config: Any, **_: Any) -> None:
    """The copies."""
    for path in named:
        copy = Path(config["site_dir"], COPIES, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy)

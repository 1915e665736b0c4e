"""Fetches KaTeX, which typesets the equations, into docs/katex/, so that the site asks nobody else for it.

It is 1 MB that git need not keep: the version and the hash of its npm package stand here.
"""

import base64
import hashlib
import io
import shutil
import tarfile
import urllib.request
from pathlib import Path

VERSION = "0.19.1"
SHA512 = "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA=="
URL = f"https://registry.npmjs.org/katex/-/katex-{VERSION}.tgz"
HERE = Path(__file__).with_name("katex")
INSIDE = "package/dist/"
NEEDED = ("katex.min.js", "katex.min.css")
FONT = ".woff2"  # the format that every browser of today takes


def fetch() -> None:
    """Writes the script, the style and the fonts, if this version is not there."""
    stamp = HERE / "VERSION"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == VERSION:
        return
    with urllib.request.urlopen(URL, timeout=60) as answer:
        package = answer.read()
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
        raise SystemExit(f"{URL} has another hash than docs/fetch_katex.py names. Fetch again, or do not use it.")
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "fonts").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for member in archive:
            name = member.name.removeprefix(INSIDE)
            content = archive.extractfile(member)
            if content and (name in NEEDED or (name.startswith("fonts/") and name.endswith(FONT))):
                (HERE / name).write_bytes(content.read())
    stamp.write_text(VERSION, encoding="utf-8")


if __name__ == "__main__":
    fetch()

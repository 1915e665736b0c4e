"""Opens every page of the built site in headless Chromium, on a desk and on a phone, and fails on what cannot be read.

    make docs && pip install playwright && python docs/check_site.py site --pictures /tmp/pages

Playwright drives the Chromium that is installed (`apt install chromium`). A page fails if it scrolls sideways, if code
or output is cut off at the desk's width, if an equation is not typeset, or if it asks another server for anything.
"""

import argparse
import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

WIDTHS = {"desk": 1280, "phone": 390}
MEASURE = """() => {
  const cut = [...document.querySelectorAll("pre > code")].filter((code) => code.scrollWidth > code.clientWidth + 1);
  return {
    beyond: document.documentElement.scrollWidth - window.innerWidth,
    cut: cut.map((code) => code.textContent.trim().split("\\n")[0]),
    raw: [...document.querySelectorAll("div.math")].filter((block) => !block.querySelector(".katex")).length,
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing."""

    def log_message(self, *words: Any) -> None:
        """No line for each request."""


def check(browser: Any, address: str, page: str, width: str, pictures: Path | None) -> list[str]:
    """What is wrong with one page at one width."""
    window = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    asked: list[str] = []
    window.on("request", lambda request: asked.append(request.url))
    window.goto(f"{address}/{page}", wait_until="load")
    found = window.evaluate(MEASURE)
    if pictures:
        name = page.strip("/").replace("/", "_") or "home"
        window.screenshot(path=pictures / f"{name}.{width}.png", full_page=True)
    window.close()
    wrong = []
    if found["beyond"] > 0:
        wrong.append(f"scrolls sideways by {found['beyond']} pixels")
    if width == "desk":
        wrong += [f"cuts off the block that begins {line!r}" for line in found["cut"]]
    if found["raw"]:
        wrong.append(f"shows {found['raw']} equations as they were written")
    wrong += [f"asks for {url}" for url in asked if not url.startswith((address, "data:", "blob:"))]
    return wrong


def main() -> int:
    """The exit code: 1 where a page has something wrong."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description="Checks the built site in headless Chromium.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for a screenshot of each page")
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    pages = sorted(str(file.parent.relative_to(args.site)) for file in args.site.glob("**/index.html"))
    handler = functools.partial(Quiet, directory=str(args.site))
    failures = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for page in pages:
            for width in WIDTHS:
                path = "" if page == "." else f"{page}/"
                for wrong in check(browser, address, path, width, args.pictures):
                    print(f"{path or 'home'} at {WIDTHS[width]} pixels {wrong}")
                    failures += 1
        browser.close()
        server.shutdown()
    print(f"{len(pages)} pages at {len(WIDTHS)} widths: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

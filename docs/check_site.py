"""Opens every page of the built site in headless Chromium, on a desk and on a phone, and fails on what cannot be read.

    make docs && pip install playwright && python docs/check_site.py site --pictures pages

Playwright drives the Chromium that is installed (`apt install chromium`). A page fails if it scrolls sideways, if code
or output is cut off at the desk's width, or on a phone is broken or cut off without a shade that says so, if on a phone
a cell of a table is taller than eight lines or what should be folded is open, if a picture leads nowhere, if it links
to a file that is not there, if an equation is not typeset, or if it asks another server for anything. The site fails if
its search does not lead from a word of SEARCHES to its page, among the first three, or if its home cannot be walked on
from.
"""

import argparse
import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

WIDTHS = {"desk": 1280, "phone": 390}
SEARCHES = {  # what people look for, and where it is
    "license": "models/",
    "licence": "models/",
    "LoRA": "tools/",
    "checkpointing": "fine_tuning/",
    "features_only": "coming_from/",
    "dinov2": "models/",
    "attention": "how_a_vit_works/",
}
MEASURE = """() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const wider = (block) => block.scrollWidth > block.clientWidth + 1;
  const begins = (block) => block.textContent.trim().split("\\n")[0];
  const cut = all("pre > code").filter(wider);
  const scrolled = all("pre > code, div.math, .md-typeset__scrollwrap");
  const shaded = (block) => getComputedStyle(block).backgroundImage.includes("gradient");
  const tall = all("td").filter((cell) => cell.offsetHeight > 180 && !cell.closest("[data-stacked]"));
  const pictures = all("article img").filter((picture) => !picture.closest("a[href]"));
  const inside = all("article a[href]").map((link) => link.href.split("#")[0]);
  return {
    broken: all("pre > code").filter((code) => getComputedStyle(code).whiteSpace !== "pre").map(begins),
    unsaid: scrolled.filter((block) => wider(block) && !shaded(block)).map(begins),
    tall: tall.map(begins),
    open: all("article details[open] > summary").map(begins),
    small: pictures.map((picture) => picture.getAttribute("src")),
    links: [...new Set(inside)].filter((link) => link.startsWith(location.origin)),
    beyond: document.documentElement.scrollWidth - window.innerWidth,
    cut: cut.map(begins),
    raw: [...document.querySelectorAll("div.math")].filter((block) => !block.querySelector(".katex")).length,
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing."""

    def log_message(self, *words: Any) -> None:
        """No line for each request."""


def there(link: str, address: str, site: Path) -> bool:
    """Whether the site has what a link of its own leads to."""
    file = site / unquote(link.removeprefix(f"{address}/"))
    return file.is_file() or (file / "index.html").is_file()


def check(browser: Any, address: str, page: str, width: str, site: Path, pictures: Path | None) -> list[str]:
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
        wrong += [f"shows {picture} and cannot enlarge it" for picture in found["small"]]
        wrong += [f"links to {link}, which is not there" for link in found["links"] if not there(link, address, site)]
    else:
        wrong += [f"breaks the lines of the code that begins {line!r}" for line in found["broken"]]
        wrong += [f"cuts off, without a word, what begins {line!r}" for line in found["unsaid"]]
        wrong += [f"has a tall cell that begins {line!r}" for line in found["tall"]]
        wrong += [f"has not folded {line!r}" for line in found["open"]]
    if found["raw"]:
        wrong.append(f"shows {found['raw']} equations as they were written")
    wrong += [f"asks for {url}" for url in asked if not url.startswith((address, "data:", "blob:"))]
    return wrong


def search(browser: Any, address: str) -> list[str]:
    """Which words do not lead where they should."""
    wrong = []
    for word, page in SEARCHES.items():
        window = browser.new_page(viewport={"width": WIDTHS["desk"], "height": 900})
        window.goto(f"{address}/", wait_until="networkidle")
        window.fill("input[name=query]", word)
        window.press("input[name=query]", "End")  # it is read when a key is let go
        window.wait_for_selector(".md-search-result__meta:text-matches('matching document', 'i')", state="attached")
        first = ".md-search-result__item > .md-search-result__link:first-child"  # of each page; its sections follow
        links = window.eval_on_selector_all(first, "links => links.map((link) => link.href)")
        if not any(link.startswith(f"{address}/{page}") for link in links[:3]):
            wrong.append(f"the search for {word!r} does not lead to {page}: {links}")
        window.close()
    return wrong


def walk_on(browser: Any, address: str) -> list[str]:
    """What is missing at the foot of the home page, and of the one after it."""
    window = browser.new_page(viewport={"width": WIDTHS["desk"], "height": 900})
    window.goto(f"{address}/", wait_until="load")
    wrong = []
    if "pip install" not in window.inner_text("article"):
        wrong.append("the home page does not say how to install")
    window.click("a.md-footer__link--next")
    if not window.query_selector("a.md-footer__link--prev"):
        wrong.append("the page after the home page has no way back")
    window.close()
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
                for wrong in check(browser, address, path, width, args.site, args.pictures):
                    print(f"{path or 'home'} at {WIDTHS[width]} pixels {wrong}")
                    failures += 1
        for wrong in (*search(browser, address), *walk_on(browser, address)):
            print(wrong)
            failures += 1
        browser.close()
        server.shutdown()
    print(f"{len(pages)} pages at {len(WIDTHS)} widths: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

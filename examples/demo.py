"""What `make demo` runs: two commands of vitlite, with the model that comes with it and no network."""

import sys
from pathlib import Path

from vitlite import cli

PHOTOS = Path(__file__).with_name("photos")
MODEL = "vit_nano_4.cifar10"
TARGET = Path("demo")


def run(*words: str) -> None:
    """Shows a command as one would type it, and runs it."""
    print(f"\n$ vitlite {' '.join(words)}", flush=True)
    if code := cli.main(words):
        sys.exit(code)


TARGET.mkdir(exist_ok=True)
run("classify", str(PHOTOS), "--model", MODEL, "--top", "3")
run("attention", str(PHOTOS / "chelsea.png"), "--model", MODEL, "--size", "96", "--out", str(TARGET / "attention.png"))

"""Run two commands of vitlite, with the model that comes with it and without network access: make demo"""

import os
import sys
from pathlib import Path

from vitlite import info
from vitlite.cli import main as cli

PHOTO = os.path.relpath(Path(__file__).with_name("photos") / "chelsea.png")
MODEL = "vit_nano_4.cifar10"
TARGET = Path("demo")


def run(*words: str) -> None:
    """Print a command and run it."""
    print(f"\n$ vitlite {' '.join(words)}", flush=True)
    if code := cli.main(words):
        sys.exit(code)


TARGET.mkdir(exist_ok=True)
print(f"{MODEL} comes with vitlite and knows ten classes: {', '.join(info(MODEL).labels or ())}.")
print("With network access, leave out --model: vit_base_16 knows a thousand.")
run("classify", PHOTO, "--model", MODEL)
run("attention", PHOTO, "--model", MODEL, "--size", "96", "--out", str(TARGET / "attention.png"))

"""What a process saves by taking the kernels that were chosen before, in place of timing them: `python first_call.py`.

Processor time of the first answer of ViT-Tiny, each in a fresh process, in turns: as created, and with `optimize`.
"""

import os
import subprocess
import sys
from statistics import median

ROUNDS = 5
SCRIPT = """
import sys, time, torch, vitlite, vitlite.fast.optimize
from vitlite.fast.kernels import unpacked_pays
model, images = vitlite.create("vit_tiny_16", weights=None).eval(), torch.randn(1, 3, 224, 224)
begun = time.process_time()
with torch.inference_mode():
    if sys.argv[1] == "optimized":
        model = vitlite.optimize(model)
    elif sys.argv[1] == "look alone":
        unpacked_pays()
    if sys.argv[1] != "look alone":
        model(images)
print(time.process_time() - begun)
"""


def seconds(way: str, wish: str) -> float:
    """Of one process, with VITLITE_KERNELS as wished."""
    environment = os.environ | {"VITLITE_KERNELS": wish}
    line = [sys.executable, "-c", SCRIPT, way]
    return float(subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Prints medians."""
    for way in ("as created", "optimized", "look alone"):
        seconds(way, "")  # which decides, if nothing is kept yet
        turns = [(seconds(way, "measure"), seconds(way, "")) for _ in range(ROUNDS)]
        timed, kept = (median(column) * 1e3 for column in zip(*turns, strict=True))
        print(
            f"{way}: {timed:.1f} ms where kernels are timed, {kept:.1f} where they are kept: {timed - kept:.1f} saved"
        )


if __name__ == "__main__":
    main()

"""Measure how much `--quick-decode` changes results: the share of equal top-1, and the cosine of vectors.

    python benchmarks/quick_decode.py PHOTO... --model NAME --weights PATH [--parts 20]

Several parts of each photo are enlarged to 12 megapixels and written as JPEG of quality 90. Each is decoded at full
size and with `quick_decode`.
"""

import argparse
import io
from pathlib import Path

import torch
from PIL import Image

import vitlite

LARGE = (4000, 3000)


def enlarged(path: Path, part: int, parts: int) -> bytes:
    """Return a part of a photo as a JPEG of 12 megapixels. Later parts are smaller and in other corners."""
    with Image.open(path) as photo:
        share = 1 - 0.5 * part / parts
        width, height = photo.width * share, photo.height * share
        left, top = (photo.width - width) * (part % 3) / 2, (photo.height - height) * (part % 2)
        large = photo.convert("RGB").resize(LARGE, box=(left, top, left + width, top + height))
    file = io.BytesIO()
    large.save(file, "JPEG", quality=90)
    return file.getvalue()


def main() -> None:
    """Compare both ways on every part and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", nargs="+", type=Path)
    parser.add_argument("--model", required=True, help="a name that vitlite.create takes")
    parser.add_argument("--weights", type=Path, help="a file with its weights")
    parser.add_argument("--parts", type=int, default=20, help="of each photo; default: %(default)s")
    args = parser.parse_args()
    model = vitlite.create(args.model, weights=args.weights or "default").eval()
    whole, quick = model.preprocess, model.preprocess.with_quick_decode()
    equal, cosines = 0, []
    for path in args.photos:
        for part in range(args.parts):
            content = enlarged(path, part, args.parts)
            images = torch.cat([whole(content), quick(content)])
            with torch.inference_mode():
                first, second = model(images).argmax(-1).tolist()
                vectors = model.embed(images).float()
            equal += first == second
            cosines.append(torch.cosine_similarity(vectors[0], vectors[1], dim=0).item())
    mean, least = sum(cosines) / len(cosines), min(cosines)
    print(
        f"{len(cosines)} images: same top-1 {equal / len(cosines):.2%}; cosine of vectors {mean:.4f}, least {least:.4f}"
    )


if __name__ == "__main__":
    main()

"""Writes docs/parity.md: how far the network is from each library it must equal, measured now, as the tests measure it.

With --check it compares all but the figures, which differ from processor to processor, and holds them to the bounds;
and all but the versions, so that others are held to the page: it is made with those that are pinned.
The table of arguments is left to tests/parity/test_arguments.py, which makes each of its rows anew.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

import arguments  # noqa: E402
import test_equal as proof  # noqa: E402
from references import REFERENCES, Reference, distance  # noqa: E402
from torch import Tensor  # noqa: E402

ARGUMENTS = "## Arguments"
PAGE = Path(__file__).with_name("parity.md")
FIGURE = re.compile(r"(?<=\| )(0|\de[+-]\d\d)(?= \|)")
LIBRARIES = "timm", "transformers", "torchvision", "vit-pytorch", "torch"
VERSION = re.compile(rf"\b({'|'.join(LIBRARIES)}) (\d+\.\d+\.\d+)")


def page() -> Iterator[str]:
    """The lines of the page."""
    *libraries, torch_version = (f"{name} {version(name).split('+')[0]}" for name in LIBRARIES)
    yield f"""\
# Parity

*Explanation · for people who ask how equal the results are.*

The network against the libraries whose weights it reads: {", ".join(libraries)}.
All on {torch_version}, float32, one CPU.

Models are tiny, and every tensor holds values such as training leaves, because zeros and ones would hide swapped
tensors. A figure is the largest difference divided by the largest value of the reference; for layers, sizes and
gradients the worst of all. The tests in `tests/parity/` hold logits and layers to {bound(proof.LOGITS)}, gradients to
{bound(proof.GRADIENTS)}, and resampled position tables to {bound(proof.TABLES)}.
`python docs/generate_parity.py` makes this page.

| library | with | logits | layers | other sizes | gradients |
|---|---|--:|--:|--:|--:|"""
    yield from map(row, REFERENCES)
    yield """
An empty cell: the library has no way to another size. timm mostly gives the same bits, as both call the same kernels
in the same order. transformers has no EVA-02, Perception Encoder or RoPE-ViT of its own: its `TimmWrapperModel` and
`TimmWrapperForImageClassification` run timm's.

## Position tables at other sizes

| `resample` | computed by | difference |
|---|---|--:|"""
    by = {
        "timm": "`timm.layers.resample_abs_pos_embed`",
        "transformers": "`ViTEmbeddings.interpolate_pos_encoding`",
        "torchvision": "`torchvision.models.vision_transformer.interpolate_embeddings`",
        "jax": "`scipy.ndimage.zoom(order=1)`, as google-research/vision_transformer and big_vision",
        "tensorflow": '`timm.layers.resample_abs_pos_embed(interpolation="bilinear", antialias=False)`, for FlexiViT',
    }
    for method, function in by.items():
        worst = max(table(method, new) for name, new in proof.TABLES_OF if name == method)
        yield f'| `"{method}"` | {function} | {figure(worst, proof.TABLES)} |'
    yield """
## What the comparison would notice

Mistakes that loose comparisons let through, each made on purpose with square images of every library. They must
come out above the bound; the tests fail where one does not.

| mistake | logits, at the least | with |
|---|--:|---|"""
    for mistake in proof.MISTAKES:
        seen = {str(reference): proof.mistaken(reference, name) for reference, name in proof.CAUGHT if name == mistake}
        least = min(seen, key=seen.__getitem__)
        yield f"| {mistake} | {far(seen[least])} | {least} |"
    yield """
Mistakes that only one family of models can have, against timm:

| mistake | logits | with |
|---|--:|---|"""
    for option, mistake in proof.FAMILY_CAUGHT:
        yield f"| {mistake} | {far(proof.mistaken_in_a_family(option, mistake))} | timm: {option} |"


def of_arguments() -> Iterator[str]:
    """What becomes of each argument of other libraries, with a value other than the default."""
    yield f"""
{ARGUMENTS}

For every argument of these classes a small model with another value than the default, saved by its library, and loaded:
its folder by `load`; its weights alone, where what is asked for is answered as somebody does who knows the model; and
its folder by `create` with the name of a checkpoint. It is equal, or refused, or asked about where vitlite has no word
for the truth, or where published weights of another network have such names; "assumed" is what names cannot tell where
nobody publishes such weights, and what `model.source.report` says was assumed. The arguments are read from the
libraries' own signatures: with a new one, the tests fail until it has a row.

| class | argument | value | folder | weights alone | as a checkpoint |
|---|---|---|---|---|---|"""
    for case in arguments.CASES:
        with TemporaryDirectory() as folder:
            yield arguments.row(*case, arguments.outcome(*case, Path(folder)))


def row(reference: Reference) -> str:
    """One option of one library."""
    ours, theirs = proof.pair(reference)
    images = proof.pictures(reference)
    with torch.no_grad():
        logits, layers = reference.layers(theirs, images)
        outputs = ours.features(images, range(reference.config.depth)).layers
        native = distance(ours(images), logits)
        deep = max(distance(mine, other) for mine, other in zip(outputs, layers, strict=True))
        sizes = [at(reference, ours, theirs, size) for size in reference.image_sizes]
    gradients = max(distance(mine, other) for mine, other in proof.gradients(reference, ours, theirs, images).values())
    cells = (
        figure(native, proof.LOGITS),
        figure(deep, proof.LAYERS),
        figure(max(sizes), proof.LOGITS) if sizes else "",
        figure(gradients, proof.GRADIENTS),
    )
    return f"| {reference.library} | {reference.option} | {' | '.join(cells)} |"


def at(reference: Reference, ours: torch.nn.Module, theirs: torch.nn.Module, size: tuple[int, int]) -> float:
    """How far the logits are at another size."""
    images = proof.pictures(reference, size)
    return distance(ours(images), reference.logits(theirs, images))


def table(method: str, new: tuple[int, int]) -> float:
    """How far a resampled table is from the library's own."""
    positions: Tensor = torch.randn(1, 49, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = proof.TABLE_OF[method](positions, (7, 7), new)
    return distance(proof.resample_positions(positions, (7, 7), new, method), wanted)


def figure(value: float, limit: float) -> str:
    """A difference to one digit, which must be below its bound."""
    if not value < limit:
        sys.exit(f"A difference of {value:.1g} where {limit:.0e} is allowed: run pytest tests/parity.")
    return far(value)


def far(value: float) -> str:
    """A difference to one digit."""
    return f"{value:.0e}" if value else "0"


def bound(value: float) -> str:
    """A bound, as the page writes it."""
    return f"{value:.0e}".replace("e-0", "e-")


def compared(text: str) -> str:
    """What must be the same wherever the page is made."""
    return FIGURE.sub("x", VERSION.sub(r"\1", text))


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = "\n".join(page()) + "\n"
    if sys.argv[1:] == ["--check"]:
        before, *_ = (PAGE.read_text(encoding="utf-8") if PAGE.exists() else "").split(f"\n{ARGUMENTS}")
        if compared(before) != compared(text):
            sys.exit(f"{PAGE.name} is not what the tests compare. Run: python docs/{Path(__file__).name}")
    else:
        PAGE.write_text("\n".join([text.rstrip("\n"), *of_arguments()]) + "\n", encoding="utf-8")

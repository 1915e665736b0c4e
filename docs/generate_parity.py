"""Write docs/parity.md: the differences between the network and each library, measured as in the tests.

With --check, compare everything but the figures, which depend on the processor, and hold the figures to the bounds.
Versions are not compared either: the page is made with those that are pinned. The table of arguments is left to
tests/parity/test_arguments.py, which makes each of its rows again.
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

This page compares vitlite's network with the libraries whose weights it reads: {", ".join(libraries)}. All
of them run on {torch_version}, in float32, on one CPU.

The models are tiny. Every tensor holds values like those of a trained model, because zeros and ones would hide swapped
tensors. Each figure is the largest difference divided by the largest value of the reference. For layers, sizes and
gradients it is the worst of all. The tests in `tests/parity/` fail if logits or layers differ by more than
{bound(proof.LOGITS)}, gradients by more than {bound(proof.GRADIENTS)}, or resampled position tables by more than
{bound(proof.TABLES)}. `python docs/generate_parity.py` writes this page.

| library | with | logits | layers | other sizes | gradients |
|---|---|--:|--:|--:|--:|"""
    yield from map(row, REFERENCES)
    yield """
A cell is empty if the library does not support another size. timm mostly gives the same bits, because both call the
same kernels in the same order. transformers has no EVA-02, Perception Encoder or RoPE-ViT of its own. Its
`TimmWrapperModel` and `TimmWrapperForImageClassification` run timm's.

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

A loose comparison would miss the following mistakes. The tests make each of them on purpose, with every library, and
fail if the difference stays below the bound.

| mistake | smallest difference of logits | with |
|---|--:|---|"""
    for mistake in proof.MISTAKES:
        seen = {str(reference): proof.mistaken(reference, name) for reference, name in proof.CAUGHT if name == mistake}
        least = min(seen, key=seen.__getitem__)
        yield f"| {mistake} | {far(seen[least])} | {least} |"
    yield """
Mistakes that only one family of models can have, compared with timm:

| mistake | difference of logits | with |
|---|--:|---|"""
    for option, mistake in proof.FAMILY_CAUGHT:
        yield f"| {mistake} | {far(proof.mistaken_in_a_family(option, mistake))} | timm: {option} |"


def of_arguments() -> Iterator[str]:
    """Yield the table of the arguments of other libraries, each with a value other than the default."""
    yield f"""
{ARGUMENTS}

The table shows what happens to each argument of other libraries. For each row, a small model with a value other than
the default is saved by its library and loaded in three ways: its folder by `load`, its weights alone with an answer to
each question that vitlite asks, and its folder by `create` with the name of a checkpoint.

The result is equal, refused, or asked about. vitlite asks if published weights of another network have the same tensor
names. "Assumed" marks what names cannot tell and no published weights use. `model.source.report` lists it. The
arguments are read from the signatures of the libraries. If a library adds one, the tests fail until it has a row.

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

"""Attention maps, positions and filters as numbers and drawn, and the plots of a training run."""

import io
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageChops, ImageFont
from torch import Tensor

from vitlite import plots
from vitlite.config import ViTConfig
from vitlite.errors import ImageError, InputError, VitliteError
from vitlite.images import Preprocess, TransformConfig
from vitlite.images.decode import read_image
from vitlite.nn.positions import sincos_positions
from vitlite.nn.vit import ViT

BELOW = plots.CAPTION + 8  # a caption of one line, and the room around it


def build(**options: Any) -> ViT:
    """Return a small model with preprocessing whose tokens differ."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 3, "heads": 4, "mlp_dim": 96}
    model = ViT(ViTConfig(**(sizes | options))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    recipe = TransformConfig(
        size=model.config.size,
        resize=model.config.size,
        mode="center",
        interpolation="bicubic",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    model.preprocess = Preprocess(recipe, model)
    return model


def photo(path: Path, size: tuple[int, int] = (90, 60)) -> Path:
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.numpy()).save(path)
    return path


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, slice(0, 1)),
        ({"registers": 2, "cls_position": False}, slice(0, 1)),
        ({"pool": "cls_and_mean"}, slice(0, 1)),
        ({"pool": "mean"}, slice(1, None)),
        ({"pool": "mean", "class_token": False}, slice(0, None)),
        ({"pool": "mean_with_cls"}, slice(0, None)),
        ({"pool": "map"}, slice(1, None)),
        ({"pool": "cls_and_distillation", "registers": 1, "cls_position": False}, slice(0, 2)),
    ],
)
def test_attention_is_what_the_output_reads(options: dict[str, Any], rows: slice) -> None:
    model, images = build(**options), torch.randn(2, 3, 16, 40)
    whole = model.attention_maps(images, layers=(1,))[0]
    grid = plots.attention(model, images, layer=1)
    assert grid.shape == (2, 4, 2, 5)
    expected = whole[:, :, rows, model.config.prefix_tokens :].mean(2).unflatten(-1, (2, 5))
    torch.testing.assert_close(grid, expected)
    assert not grid.requires_grad


def test_a_model_in_training_mode_is_drawn_in_eval_mode(tmp_path: Path) -> None:
    model, path = build(drop_path=0.9, dropout=0.9), photo(tmp_path / "a.png")
    images = torch.randn(1, 3, 32, 32)

    def drawn() -> list[Tensor]:
        whole = torch.from_numpy(np.array(plots.draw_attention(model, path)))
        return [whole, *(draw(model, images) for draw in (plots.attention, plots.rollout, plots.attention_distances))]

    expected = drawn()
    model.train()
    assert all(map(torch.equal, drawn(), expected))
    assert model.blocks[1].training


def test_a_rollout_takes_no_layer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"A rollout combines all blocks and heads, .* Got layer=1 and head=None\."):
        plots.draw_attention(build(), photo(tmp_path / "a.png"), layer=1, rolled_out=True)


def test_rollout_of_one_block_is_half_its_attention() -> None:
    model, images = build(depth=1), torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(plots.rollout(model, images), plots.attention(model, images).mean(1) / 2)


def test_rollout_multiplies_the_last_block_from_the_left() -> None:
    model, images = build(depth=2), torch.randn(1, 3, 32, 32)
    first, last = model.attention_maps(images, layers=(0, 1)).detach().mean(2)[:, 0]
    eye = torch.eye(17)
    rolled = (last + eye) / 2 @ ((first + eye) / 2)
    torch.testing.assert_close(plots.rollout(model, images)[0], rolled[0, 1:].unflatten(0, (4, 4)))


def test_rollout_by_hand() -> None:
    """Add up every path from the class token to a patch, step by step."""
    model, images = build(image_size=16, depth=3), torch.randn(1, 3, 16, 16)
    maps = model.attention_maps(images, layers=range(3)).detach().mean(2)[:, 0].tolist()
    n = 5

    def step(block: int, here: int, below: int) -> float:
        stays = 1.0 if here == below else 0.0
        return float(maps[block][here][below] + stays) / 2

    expected = []
    for patch in range(1, n):
        flow = 0.0
        for above in range(n):
            for below in range(n):
                flow += step(2, 0, above) * step(1, above, below) * step(0, below, patch)
        expected.append(flow)
    torch.testing.assert_close(plots.rollout(model, images)[0].flatten(), torch.tensor(expected))


@pytest.mark.parametrize(
    "options", [{}, {"registers": 2, "cls_position": False}, {"pool": "mean", "class_token": False}]
)
def test_attention_distances_by_brute_force(options: dict[str, Any]) -> None:
    model, images = build(**options), torch.randn(2, 3, 16, 40)  # 2 x 5 patches of 8 pixels
    first = model.config.prefix_tokens
    maps = model.attention_maps(images, layers=range(3)).detach()
    places = [(row, column) for row in range(2) for column in range(5)]
    found = plots.attention_distances(model, images)
    assert found.shape == (2, 3, 4)
    for image in range(2):
        for block in range(3):
            for head in range(4):
                far = paid = 0.0
                for i, (row, column) in enumerate(places):
                    for j, (other_row, other_column) in enumerate(places):
                        weight = maps[block, image, head, first + i, first + j].item()
                        far += weight * 8 * ((row - other_row) ** 2 + (column - other_column) ** 2) ** 0.5
                        paid += weight
                assert found[image, block, head].item() == pytest.approx(far / paid, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"channels": 1}, {"input_norm": "patches"}, {"dim": 24}])
def test_filters_are_the_principal_components(options: dict[str, Any]) -> None:
    """They are eigenvectors of the filters' covariance, and their shares its eigenvalues."""
    model = build(**options)
    rows = model.patch_embed.proj.weight.detach().flatten(1).double()
    covariance = torch.cov(rows.T, correction=0)
    found = plots.patch_filters(model, count=5)
    assert found.components.shape == (5, model.config.channels, 8, 8)
    for component, share in zip(found.components.flatten(1).double(), found.shares, strict=True):
        assert component.norm().item() == pytest.approx(1, abs=1e-5)
        variance = share.item() * covariance.trace()
        torch.testing.assert_close(covariance @ component, variance * component, atol=1e-5, rtol=1e-4)
    assert found.shares.tolist() == sorted(found.shares.tolist(), reverse=True)
    assert plots.patch_filters(model, count=10_000).shares.sum().item() == pytest.approx(1, abs=1e-5)


def test_draw_filters() -> None:
    side = plots.FILTER + plots.GAP
    size = (7 * side + plots.GAP, 4 * (side + BELOW) + plots.GAP)
    for channels in (1, 3):
        image = plots.draw_filters(build(channels=channels))
        assert image.size == size
        tile = image.crop((plots.GAP, plots.GAP, plots.GAP + plots.FILTER, plots.GAP + plots.FILTER))
        extremes = tile.getextrema()  # of red, green and blue
        assert min(low for low, _ in extremes) == 0
        assert max(high for _, high in extremes) == 255
    with pytest.raises(InputError, match="with 1 or 3 channels, but this model has 4"):
        plots.draw_filters(build(channels=4))
    with pytest.raises(InputError, match="apply to ResNet features"):
        plots.draw_filters(build(stem=()))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures that a test draws."""
    figures: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            figures.append(self)

    monkeypatch.setattr(plots, "need_matplotlib", lambda: Kept)
    return figures


def test_draw_distances(drawn: list[Figure]) -> None:
    distances = torch.tensor([[10.0, 30.0], [20.0, 40.0], [25.0, 45.0]])
    image = plots.draw_distances(distances)
    assert (image.mode, image.size) == ("RGB", (840, 560))
    heads = [line.get_xydata().tolist() for line in drawn[0].axes[0].lines]
    left, right = [[-0.1, 10], [0.9, 20], [1.9, 25]], [[0.1, 30], [1.1, 40], [2.1, 45]]
    assert heads == [[pytest.approx(dot) for dot in head] for head in (left, right)]


def test_draw_few_shots(drawn: list[Figure]) -> None:
    curves = [("one", {1: [0.2, 0.4], 5: [0.5, 0.5]}), ("other", {1: [0.1], 25: [0.9]})]
    assert plots.draw_few_shots(curves).size == (840, 560)
    axes = drawn[0].axes[0]
    assert [container.get_label() for container in axes.containers] == ["one", "other"]
    first, second = (container.lines[0].get_xydata().tolist() for container in axes.containers)
    assert first == [[1, pytest.approx(30)], [5, pytest.approx(50)]]
    assert second == [[1, pytest.approx(10)], [25, pytest.approx(90)]]
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]  # the bar of the first point
    assert (low, high) == (pytest.approx(20), pytest.approx(40))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "5", "25"]
    with pytest.raises(InputError, match="no curve to draw"):
        plots.draw_few_shots([("one", {})])


def test_position_similarity() -> None:
    model = build(image_size=(16, 32))
    assert model.pos_embed is not None
    similarity = plots.position_similarity(model)
    assert similarity.shape == (2, 4, 2, 4)
    one, other = model.pos_embed[0, 1 + 3], model.pos_embed[0, 1 + 5]  # places (0, 3) and (1, 1)
    torch.testing.assert_close(similarity[0, 3, 1, 1], torch.cosine_similarity(one, other, dim=0))
    fixed = plots.position_similarity(build(positions="sincos2d"))
    rows = torch.nn.functional.normalize(sincos_positions((4, 4), 48)[0], dim=-1)
    torch.testing.assert_close(fixed.flatten(2).flatten(0, 1), rows @ rows.T)
    for without in ("none",):
        with pytest.raises(InputError, match=rf"no position embeddings to draw \(positions='{without}'\)"):
            plots.position_similarity(build(positions=without))


def test_the_overlay_is_bright_where_the_attention_is() -> None:
    grid = torch.zeros(4, 4)
    grid[1, 2] = 1.0
    drawn = plots.overlay(torch.full((64, 64, 3), 128.0), grid)
    row, column = divmod(int(drawn.sum(-1).argmax()), 64)
    assert (row // 16, column // 16) == (1, 2)
    assert drawn[row, column].sum() > 2 * drawn[60, 4].sum()


def test_draw_attention(tmp_path: Path) -> None:
    model = build()
    image = plots.draw_attention(model, photo(tmp_path / "a.png"))
    width, height = 3 * (plots.PANEL + plots.GAP) + plots.GAP, 2 * (plots.PANEL + BELOW + plots.GAP) + plots.GAP
    assert image.size == (width, height)
    rolled = plots.draw_attention(model, photo(tmp_path / "a.png"), rolled_out=True)
    assert rolled.size == (2 * (plots.PANEL + plots.GAP) + plots.GAP, plots.PANEL + BELOW + 2 * plots.GAP)


def test_attention_is_drawn_on_grey_and_colour_images() -> None:
    with pytest.raises(InputError, match="with 1 or 3 channels, but the model needs 4"):
        plots.draw_attention(build(channels=4), torch.rand(4, 32, 32))


def test_captions_are_readable_on_a_phone_and_fit_their_panels() -> None:
    phone = 350  # pixels across its page
    assert plots.CAPTION * phone / (3 * (plots.PANEL + plots.GAP) + plots.GAP) >= 9
    font = ImageFont.load_default(plots.CAPTION)
    for caption, side in (("rollout through all blocks", plots.PANEL), ("28: 10.0%", plots.FILTER)):
        assert font.getlength(caption) <= side


def test_a_list_of_one_image_is_drawn(tmp_path: Path) -> None:
    path = photo(tmp_path / "a.png")
    right = plots.draw_attention(build(), path)
    for one in ([path], (path,), read_image(path)[None]):
        assert plots.draw_attention(build(), one).tobytes() == right.tobytes()


def test_the_image_is_cropped_as_the_model_sees_it(tmp_path: Path) -> None:
    stripes = Image.new("RGB", (96, 32), "red")
    stripes.paste("blue", (32, 0, 64, 32))  # the centre crop is all blue
    stripes.save(tmp_path / "stripes.png")
    image = plots.draw_attention(build(), tmp_path / "stripes.png")
    middle = plots.GAP + plots.PANEL // 2
    assert image.getpixel((middle, middle)) == (0, 0, 255)


def test_attention_of_an_open_file(tmp_path: Path) -> None:
    file = photo(tmp_path / "a.png")
    expected = plots.draw_attention(build(), file).tobytes()
    with open(file, "rb") as opened:
        assert plots.draw_attention(build(), opened).tobytes() == expected


def test_draw_positions() -> None:
    image = plots.draw_positions(build())
    cell = 800 // 16
    left = cell + cell // 2  # gap, then the first patch's own place in its own tile
    assert image.getpixel((left, left)) == (0xFD, 0xE7, 0x25)  # viridis at 1
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_draw_positions_of_one_row() -> None:
    image = plots.draw_positions(build(image_size=(8, 320)))
    assert image.height == 2 * plots.GAP + 3 * plots.CAPTION


def test_mistakes(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(InputError, match="drawn for one image, got 2"):
        plots.draw_attention(model, [photo(tmp_path / "a.png"), photo(tmp_path / "b.png")])
    with pytest.raises(InputError, match="from -3 to 2, got 3"):
        plots.draw_attention(model, photo(tmp_path / "a.png"), layer=3)
    model.preprocess = lambda image: torch.zeros(1, 3, 32, 32)
    with pytest.raises(ImageError, match=r"must be a vitlite\.images\.Preprocess"):
        plots.draw_attention(model, photo(tmp_path / "a.png"))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(VitliteError, match=r"pip install 'vitlite\[images\]'"):
        plots.draw_positions(build())


def test_real_positions_show_rows_and_columns(shared: Path) -> None:
    """In a trained model, a position is most similar to those of its row and column, as in the paper."""
    from safetensors.torch import load_file

    from vitlite.zoo import registry

    model = ViT(registry.find("vit_tiny_16.deit_fb_in1k").config)
    model.load_state_dict(load_file(shared / "weights" / "deit_tiny_16.timm.safetensors"))
    similarity = plots.position_similarity(model)
    here = similarity[6, 6]
    assert here[6, 6] == pytest.approx(1, abs=1e-5)
    assert here[6].mean() > here[[0, 1, 12, 13]].mean() + 0.2
    assert here[:, 6].mean() > here[:, [0, 1, 12, 13]].mean() + 0.2


@pytest.mark.parametrize("epochs", [1, 2, 3, 50])
def test_ticks_are_whole_epochs(epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "_save_figure", lambda figure, path: drawn.append(figure))
    history: list[dict[str, Any]] = [
        {"epoch": i, "loss": 1 / i, "accuracy": 0.5, "val_loss": 1.0, "val_top1": 0.5} for i in range(1, epochs + 1)
    ]
    plots.draw_curves(history, tmp_path / "curves.png")
    for axes in drawn[0].axes:
        assert len(axes.lines) == 2
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)


def test_curves_without_validation(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    plots.draw_curves([{"epoch": 1, "loss": 1.0, "accuracy": 0.5}], path)
    with Image.open(path) as image:
        assert image.format == "PNG"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("classes", "named", "counts"), [(3, 3, 4), (21, 21, 0), (41, 0, 0)])
def test_confusion(classes: int, named: int, counts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "_save_figure", lambda figure, path: drawn.append(figure))
    confusion = torch.eye(classes, dtype=torch.int64) * 3
    confusion[2, 0] = 1
    names = [f"class {i}" for i in range(classes)]
    plots.draw_confusion(confusion, names, tmp_path / "confusion.png")
    axes = drawn[0].axes[0]
    labels = {tick.get_text() for tick in axes.get_xticklabels()}
    assert len(labels & set(names)) == named
    assert len(axes.texts) == counts
    if counts:
        shown = {(text.get_position(), text.get_text(), text.get_color()) for text in axes.texts}
        assert ((0, 2), "1", "black") in shown
        assert ((2, 2), "3", "white") in shown


def test_names_with_dollars_are_not_formulas(tmp_path: Path) -> None:
    names = ["$a_b$", "x$\\frac$y", "caf\udce9", "US$"]
    plots.draw_confusion(torch.eye(4, dtype=torch.int64), names, tmp_path / "confusion.png")
    plots.draw_few_shots([(name, {1: [0.5]}) for name in names])


def test_an_image_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    image = Image.new("RGBA", (4, 4))
    path = tmp_path / "image.jpg"
    path.write_text("old")
    with pytest.raises(
        InputError, match=r"Cannot write the image .*: cannot write mode RGBA as JPEG\. Pass the path of a \.png"
    ):
        plots.save_image(image, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    for name in ("image", "image.txt", "image.gif", "no/image.png"):
        with pytest.raises(InputError, match=r"Pass the path of a \.png file in an existing folder"):
            plots.save_image(image, tmp_path / name)
    plots.save_image(image, tmp_path / "image.PNG")
    with Image.open(tmp_path / "image.PNG") as written:
        assert written.format == "PNG"


def test_every_format_keeps_a_drawing(tmp_path: Path) -> None:
    drawing = Image.effect_noise((300, 170), 80).convert("RGB")
    for suffix in plots.FORMATS:
        plots.save_image(drawing, tmp_path / f"image{suffix}")
    pdf = (tmp_path / "image.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    with Image.open(io.BytesIO(pdf[pdf.index(b"\xff\xd8") :])) as embedded:
        assert max(high for _, high in ImageChops.difference(embedded.convert("RGB"), drawing).getextrema()) < 4
    svg = ElementTree.parse(tmp_path / "image.svg").getroot()
    assert (svg.get("viewBox"), svg.get("width")) == ("0 0 300 170", "3.125in")
    inside = svg[0].get("href").removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(b64decode(inside))) as written:
        assert written.tobytes() == drawing.tobytes()
    for suffix in set(plots.FORMATS) - {".pdf", ".svg"}:
        with Image.open(tmp_path / f"image{suffix}") as written:
            assert (written.size, written.mode) == (drawing.size, "RGB")


def test_a_plot_is_vector_graphics_in_pdf_and_svg(tmp_path: Path) -> None:
    figure = plots.plot_distances(torch.tensor([[10.0, 30.0], [20.0, 40.0]]))
    for suffix in plots.FORMATS:
        plots.save_image(figure, tmp_path / f"plot{suffix}", dpi=200)
    svg = (tmp_path / "plot.svg").read_text()
    assert svg.count("<use ") >= 4  # the dots
    assert "<image" not in svg
    assert b"/Font" in (tmp_path / "plot.pdf").read_bytes()
    with Image.open(tmp_path / "plot.png") as written:
        assert written.size == (1050, 700)  # inches times 200
        assert written.info["dpi"] == pytest.approx((200, 200), abs=0.1)


def test_one_head_without_labels(tmp_path: Path) -> None:
    model, path = build(), photo(tmp_path / "a.png")
    panel, gap = 2 * plots.PANEL, plots.GAP
    drawn = plots.draw_attention(model, path, head=2, labels=False, dpi=2 * plots.DPI)
    assert drawn.size == (2 * panel + 3 * gap, panel + 2 * gap)
    whole = plots.draw_attention(model, path, labels=False, dpi=2 * plots.DPI)
    assert whole.width == 4 * (panel + gap) + gap or whole.width == 3 * (panel + gap) + gap
    one = np.array(drawn)[gap : gap + panel, panel + 2 * gap :][:, :panel]
    panels = [
        np.array(whole)[top : top + panel, left : left + panel]
        for top in range(gap, whole.height, panel + gap)
        for left in range(gap, whole.width, panel + gap)
    ]
    assert [np.array_equal(one, each) for each in panels[:6]] == [False, False, False, False, True, False]
    plots.save_image(drawn, tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as written:
        assert written.info["dpi"] == pytest.approx((2 * plots.DPI,) * 2, abs=0.1)
    for head in (-1, 4):
        with pytest.raises(InputError, match=rf"head= \(--head\) must be an integer from 0 to 3, got {head}"):
            plots.draw_attention(model, path, head=head)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(VitliteError, match=r"pip install 'vitlite\[plot\]'"):
        plots.draw_curves([], tmp_path / "curves.png")


def test_principal_components_are_those_of_the_svd() -> None:
    """scikit-learn's PCA is this SVD, and equal up to the sign (2.5e-15 with version 1.9)."""
    vectors = torch.randn(300, 20, dtype=torch.float64) * torch.logspace(1, -1, 20, dtype=torch.float64) + 5
    left, singular, _ = np.linalg.svd((vectors - vectors.mean(0)).numpy(), full_matrices=False)
    found = plots.principal_components(vectors, 4).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(left * singular)[:, :4], atol=1e-9)
    again = plots.principal_components(vectors.flip(0), 4).flip(0).numpy()
    np.testing.assert_allclose(again, found, atol=1e-9)  # with the same signs
    assert plots.principal_components(torch.ones(5, 8)).abs().max() == 0


def test_pca_colours_patches_of_all_images_together(tmp_path: Path) -> None:
    """The same image has the same colours twice, whatever is beside it; other patches have others."""
    model, first = build(), photo(tmp_path / "a.png")
    other = photo(tmp_path / "b.png", (60, 90))
    drawn = np.array(plots.draw_pca(model, [first, other, first]))
    side, step = plots.PANEL, plots.PANEL + plots.GAP
    rows = plots.PANEL + BELOW + plots.GAP
    panels = [drawn[plots.GAP + r * rows :, plots.GAP + c * step :][:side, :side] for r in range(3) for c in range(2)]
    assert np.array_equal(panels[0], panels[4])
    assert np.array_equal(panels[1], panels[5])
    assert not np.array_equal(panels[1], panels[3])
    tokens = torch.cat([model.features(model.preprocess(path)).patches[0] for path in (first, other, first)])
    expected = plots.principal_components(tokens)[:16, 0].unflatten(0, (4, 4)).numpy()
    red = panels[1][32::64, 32::64, 0].astype(float)
    inside = (red > 0) & (red < 255)
    assert inside.sum() > 10
    assert np.corrcoef(red[inside], expected[inside])[0, 1] > 0.999


def test_similarity_to_a_patch(tmp_path: Path) -> None:
    model, path = build(image_size=(32, 48)), photo(tmp_path / "a.png")
    features = model.features(model.preprocess(path))
    cosines = torch.cosine_similarity(features.patches[0], features.patches[0, 1 * 6 + 4], dim=1).unflatten(0, (4, 6))
    for place in ((0.7, 0.3), (0.82, 0.49)):
        found = plots.patch_similarity(model, model.preprocess(path), place)
        torch.testing.assert_close(found[0], cosines.detach())
    assert plots.patch_similarity(model, model.preprocess(path), (1, 1))[0, 3, 5] == pytest.approx(1)
    for place in ((1.1, 0.5), (0.5, -0.1), (float("nan"), 0.5), (12, 3)):
        with pytest.raises(InputError, match="must be two fractions from 0 to 1, got"):
            plots.patch_similarity(model, model.preprocess(path), place)
    drawn = np.array(plots.draw_similarity(model, path, (0.7, 0.3)))
    red = (drawn == [255, 0, 0]).all(2).nonzero()  # the frame
    patch = plots.PANEL / 6
    assert red[0].min() == pytest.approx(plots.GAP + patch - 3, abs=1)
    assert red[1].min() == pytest.approx(plots.GAP + 4 * patch - 3, abs=1)

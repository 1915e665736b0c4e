"""What `measure` counts, and which images it refuses."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_run import CONFIG, TRANSFORM, new_model, settings, small_cifar10, stripes, stripes_in_folders
from torch import Tensor, nn

from vitlite import ViT
from vitlite.errors import InputError, TrainError
from vitlite.images import Preprocess
from vitlite.images.transform import naflex_like
from vitlite.training import ImageData, evaluate, measure, read_cifar10, read_folder, train
from vitlite.training.evaluate import Measured
from vitlite.training.split import read_evaluation_data, read_training_data


class Oracle(nn.Module):
    """Predicts a fixed class for each image, read from its first pixel."""

    def __init__(self, model: ViT, predictions: list[int], k: int) -> None:
        super().__init__()
        self.config, self.preprocess = model.config.replace(num_classes=k), model.preprocess
        self.predictions, self.k, self.labels, self.source = torch.tensor(predictions), k, None, None
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, images: Tensor) -> Tensor:
        which = ((images[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        return -(torch.arange(self.k) - self.predictions[which][:, None]).abs().float()


def six_images() -> ImageData:
    images = torch.zeros(6, 3, 16, 16, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(6)
    return ImageData(images, torch.tensor([0, 0, 1, 2, 2, 9]), tuple("abcdefghij"))


def test_measure_counts_right_and_wrong_predictions() -> None:
    measured = measure(Oracle(new_model(), [0, 1, 1, 2, 9, 0], 10), six_images(), batch=4)
    assert measured.top1 == 3 / 6
    assert measured.top5 == 4 / 6
    assert measured.confusion.nonzero().tolist() == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 9], [9, 0]]
    assert measured.recall[:3].tolist() == [0.5, 1.0, 0.5]
    assert measured.precision[:3].tolist() == [0.5, 0.5, 1.0]
    assert measured.predictions.tolist() == [0, 1, 1, 2, 9, 0]


def test_very_many_classes_have_no_confusion_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(new_model(), [0, 1, 1, 2, 9, 0], 10)
    full = measure(oracle, six_images(), batch=4)
    assert torch.equal(full.confusion.sum(1), full.images)
    assert torch.equal(full.confusion.sum(0), full.predicted)
    assert torch.equal(full.confusion.diagonal(), full.correct)
    monkeypatch.setattr(evaluate, "MOST_CONFUSED", 9)
    found = measure(oracle, six_images(), batch=4)
    assert found.confusion is None
    assert (found.top1, found.top5, found.loss) == (full.top1, full.top5, full.loss)
    torch.testing.assert_close(found.recall, full.recall, equal_nan=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts memory so")
def test_memory_with_the_classes_of_imagenet_21k() -> None:
    code = """
import resource, torch
from vitlite import ViT, ViTConfig
from vitlite.images import Preprocess, TransformConfig
from vitlite.training import ImageData, measure
sides, half = (16, 16), (0.5,) * 3
k = 21843
model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=k))
transform = TransformConfig(size=sides, resize=sides, mode="squash", interpolation="bicubic", mean=half, std=half)
model.preprocess = Preprocess(transform, model)
data = ImageData(torch.zeros(8, 3, 16, 16, dtype=torch.uint8), torch.arange(8), tuple(map(str, range(k))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
measured = measure(model, data)
assert measured.images.sum() == 8 and measured.confusion is None
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 300  # MB


def test_images_are_measured_as_predict_prepares_them() -> None:
    model, seen = new_model(), []
    pixels = torch.arange(3 * 256).view(1, 3, 16, 16).to(torch.uint8)
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for changes in ({"mean": (0.4, 0.5, 0.6)}, {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)}):
        model.preprocess = Preprocess(replace(TRANSFORM, **changes), model)
        measure(model, ImageData(pixels, torch.tensor([0]), ("lying", "standing")))
        assert torch.equal(seen.pop(), model.preprocess.batch(list(pixels)))


def prepared_by(model: ViT, **changes: object) -> Preprocess:
    return Preprocess(replace(TRANSFORM, **changes), model)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda model: prepared_by(model, resize=(20, 20)), "resize"),
        (lambda model: prepared_by(model, interpolation="bilinear", mode="squash"), "mode, interpolation"),
        (lambda model: model.preprocess.with_quick_decode(), "quick_decode"),
    ],
)
def test_images_prepared_for_another_model_are_an_error(
    folders: Path, other: Callable[[ViT], Preprocess], text: str
) -> None:
    model = new_model()
    data = read_folder(folders / "val", other(model).pixels, ("lying", "standing"))
    with pytest.raises(TrainError, match=f"of the images and of the model differs in {text}"):
        measure(model, data)
    with pytest.raises(TrainError, match="of the images and of the model differs in"):
        train(model, data, folders / "out", settings())
    model.preprocess = other(model)
    measure(model, data)


def test_images_may_be_shared_by_models_with_another_normalisation(folders: Path) -> None:
    model = new_model()
    pixels = prepared_by(model, mean=(0.1,) * 3, std=(0.2,) * 3).pixels
    data = read_folder(folders / "val", pixels, ("lying", "standing"))
    wanted = measure(model, read_folder(folders / "val", model.preprocess.pixels, ("lying", "standing")))
    assert measure(model, data).loss == wanted.loss


def test_thresholds_do_not_mean_several_labels_per_image(folders: Path) -> None:
    model = new_model()
    model.labels, model.thresholds = ("lying", "standing"), (0.9, 0.9)
    assert read_evaluation_data(folders, model).labels.ndim == 1


def test_images_of_different_shapes_for_a_naflex_model(folders: Path) -> None:
    model, rows = new_model(), torch.arange(0, 8)
    nn.init.normal_(model.head.weight)
    model.preprocess = naflex_like(TRANSFORM, (16, 16), 8)
    model.labels = ("lying", "standing")
    for i, path in enumerate(sorted((folders / "val").rglob("*.png"))):
        Image.open(path).resize((16, 16 + 24 * (i % 2))).save(path)
    data = read_folder(folders / "val", model.preprocess.pixels, model.labels)
    assert {image.shape[1:] for image in data.readable(rows)[0]} == {(16, 16), (24, 8)}
    found, answers = measure(model, data, batch=5), model.predict(data.files())
    scores_of = [{each.index: each.score for each in answer} for answer in answers]
    scores = torch.tensor([scores_of[i][label] for i, label in enumerate(data.labels.tolist())])
    assert found.predictions.tolist() == [answer[0].index for answer in answers]
    assert found.loss == pytest.approx(-scores.log().mean().item(), rel=1e-5)
    with pytest.raises(TrainError, match="Training needs images of equal size"):
        train(model, data, folders / "out", settings())
    model.preprocess = model.preprocess.with_max_patches(3)
    with pytest.raises(TrainError, match="differs in max_patches"):
        measure(model, data)


def test_images_that_do_not_fit_the_model_are_an_error(tmp_path: Path) -> None:
    model, data = new_model(), stripes(8)
    model.labels = data.classes
    large = replace(data, images=data.images.repeat(1, 1, 2, 2))
    turned, three = replace(data, classes=data.classes[::-1]), replace(data, classes=(*data.classes, "sitting"))
    size = "have 3 channels and 32 x 32 pixels, but the model expects 3 channels and 16 x 16 pixels"
    for other, text in (
        (large, size),
        (turned, "of the images and of the model differ: standing for lying"),
        (three, "have 3 classes"),
    ):
        with pytest.raises(TrainError, match=text):
            measure(model, other)
        with pytest.raises(TrainError, match=text):
            train(model, data, tmp_path / "out", settings(), validation=other)
    with pytest.raises(TrainError, match=size):
        train(model, large, tmp_path / "out", settings())
    model.labels = None
    measure(model, turned)


@pytest.mark.parametrize("size", [32, 48])
def test_cifar10_is_grey_for_a_model_of_one_channel(size: int, tmp_path: Path) -> None:
    folder, names = small_cifar10(tmp_path / "data"), ("plane", "car")
    model = ViT(CONFIG.replace(channels=1, image_size=size))
    model.preprocess = replace(TRANSFORM, size=(size, size), resize=(size, size), mean=(0.5,), std=(0.25,))
    data, coloured = read_evaluation_data(folder, model), read_cifar10(folder, "test")
    for number in range(20):
        file = tmp_path / f"{number}.png"
        Image.fromarray(coloured.images[number].permute(1, 2, 0).numpy()).save(file)
        assert torch.equal(data.readable(torch.tensor([number]))[0][0], model.preprocess.pixels(file))
    measure(model, data)
    train(model, read_training_data(folder, model.preprocess, names).train, tmp_path / "out", settings(epochs=1))


def test_output_that_is_not_finite_is_an_error() -> None:
    """float16 overflows where the activations between two layers are too large for it."""
    model = new_model().half()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.bias.fill_(6e4)
        model.blocks[1].mlp.fc2.bias.fill_(6e4)
    with pytest.raises(InputError, match=r"not finite in torch\.float16\. Use float32 or bfloat16"):
        measure(model, stripes(8))


def test_images_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    folder = stripes_in_folders(tmp_path / "data") / "val"
    model = new_model()

    def measured() -> tuple[ImageData, Measured]:
        images = read_folder(folder, model.preprocess.pixels, ("lying", "standing"))
        return images, measure(model, images, batch=3)

    whole, before = measured()
    broken = ["lying/0.png", "lying/2.png", "standing/7.png"]
    kept = torch.tensor([name not in broken for name in whole.names()])
    for name in broken:
        (folder / name).write_bytes(b"broken")
    rest, after = measured()
    assert rest.broken() == broken
    assert after.images.tolist() == [2, 3]
    assert after.predictions[kept].equal(before.predictions[kept])
    assert after.predictions[~kept].tolist() == [-1] * 3
    expected = measure(model, whole.subset(kept))
    assert (after.loss, after.top1) == (pytest.approx(expected.loss), expected.top1)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(TrainError, match=r"Cannot read any of 8 images"):
        measured()

"""What is measured, of which pictures, and in which order of the classes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_run import CONFIG, TRANSFORM, new_model, settings, small_cifar10, stripes
from torch import nn

from vitlite import ViT, ViTConfig
from vitlite.errors import InputError, TrainError
from vitlite.images import Preprocess
from vitlite.training import Pictures, evaluate, measure, read_cifar10, read_folder, train
from vitlite.training.evaluate import check_data, classes_in_order, read_to_measure
from vitlite.training.split import read_to_train
from vitlite.zoo import registry
from vitlite.zoo.labels import labels_of


class Oracle(nn.Module):
    """Answers with a fixed class for each picture, read from its first pixel."""

    def __init__(self, model: ViT, answers: list[int], k: int) -> None:
        super().__init__()
        self.config, self.preprocess = model.config.replace(num_classes=k), model.preprocess
        self.answers, self.k, self.labels = torch.tensor(answers), k, None
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, images):
        which = ((images[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        return -(torch.arange(self.k) - self.answers[which][:, None]).abs().float()


def test_measure_counts_right_and_wrong():
    images = torch.zeros(6, 3, 16, 16, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(6)
    pictures = Pictures(images, torch.tensor([0, 0, 1, 2, 2, 9]), tuple("abcdefghij"))
    measured = measure(Oracle(new_model(), [0, 1, 1, 2, 9, 0], 10), pictures, batch=4)
    assert measured.top1 == 3 / 6
    assert measured.top5 == 4 / 6
    assert measured.confusion.nonzero().tolist() == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 9], [9, 0]]
    assert measured.recall[:3].tolist() == [0.5, 1.0, 0.5]
    assert measured.precision[:3].tolist() == [0.5, 0.5, 1.0]


def test_of_very_many_classes_no_table_of_all_pairs_is_kept(monkeypatch):
    images = torch.zeros(6, 3, 16, 16, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(6)
    pictures = Pictures(images, torch.tensor([0, 0, 1, 2, 2, 9]), tuple("abcdefghij"))
    oracle = Oracle(new_model(), [0, 1, 1, 2, 9, 0], 10)
    table = measure(oracle, pictures, batch=4)
    assert torch.equal(table.confusion.sum(1), table.pictures)
    assert torch.equal(table.confusion.sum(0), table.taken)
    assert torch.equal(table.confusion.diagonal(), table.right)
    monkeypatch.setattr(evaluate, "MOST_CONFUSED", 9)
    found = measure(oracle, pictures, batch=4)
    assert found.confusion is None
    assert (found.top1, found.top5, found.loss) == (table.top1, table.top5, table.loss)
    torch.testing.assert_close(found.recall, table.recall, equal_nan=True)
    torch.testing.assert_close(found.precision, table.precision, equal_nan=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts memory so")
def test_memory_with_the_classes_of_imagenet_21k():
    """Two tables of 21,843 by 21,843 took 7.6 GB."""
    code = """
import resource, torch
from vitlite import ViT, ViTConfig
from vitlite.images import Preprocess, TransformConfig
from vitlite.training import Pictures, evaluate, measure, read_cifar10, read_folder, train
sides, half = (16, 16), (0.5,) * 3
k = 21843
model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=k))
recipe = TransformConfig(size=sides, resize=sides, mode="squash", interpolation="bicubic", mean=half, std=half)
model.preprocess = Preprocess(recipe, model)
data = Pictures(torch.zeros(8, 3, 16, 16, dtype=torch.uint8), torch.arange(8), tuple(map(str, range(k))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
measured = measure(model, data)
assert measured.pictures.sum() == 8 and measured.confusion is None
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 300  # MB


def test_pictures_are_measured_as_predict_prepares_them():
    model, seen = new_model(), []
    pixels = torch.arange(3 * 256).view(1, 3, 16, 16).to(torch.uint8)
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for changes in ({"mean": (0.4, 0.5, 0.6)}, {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)}):
        model.preprocess = Preprocess(replace(TRANSFORM, **changes), model)
        measure(model, Pictures(pixels, torch.tensor([0]), ("lying", "standing")))
        assert torch.equal(seen.pop(), model.preprocess.batch(list(pixels)))


@pytest.mark.parametrize(
    ("folders", "strange"),
    [(("dogs", "cat"), "dogs"), (("Dog", "Cat"), "Dog, Cat"), (("n1", "n2", "n3"), "n1, n2, n3")],
)
def test_folders_that_are_nearly_the_labels(folders: tuple[str, ...], strange: str) -> None:
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=2))
    model.labels = ("dog", "cat")
    assert classes_in_order(model, ["cat"]) == ("dog", "cat")
    assert classes_in_order(model, ["n1", "n2"]) == ("n1", "n2")  # none is a label: in the model's order
    with pytest.raises(TrainError, match=rf"model's 2 classes \(dog, cat\), none is named {strange}\. Name"):
        classes_in_order(model, folders)


@pytest.mark.parametrize(
    ("labels", "folders"),
    [
        (("caz\u00e9", "ca\u00e9e"), ("cae\u0301e", "caze\u0301")),  # as macOS names files, sorted as they are then
        (("tabby cat", "Egyptian cat"), ("Egyptian_cat", "tabby_cat")),
    ],
)
def test_folders_that_are_the_labels_but_for_marks(labels: tuple[str, str], folders: tuple[str, str]) -> None:
    """In the model's order, each would be taken for the other class."""
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=2))
    model.labels = labels
    with pytest.raises(TrainError, match="Name the folders after its labels"):
        classes_in_order(model, sorted(folders))


@pytest.mark.parametrize(
    ("labels", "folders", "said"),
    [
        (("dog, hound", "cat, puss"), ("cat", "dog"), "cat would be dog, hound, while its name is more like cat, puss"),
        (("dog", "cat"), ("cats", "dogs"), "cats would be dog, while its name is more like cat"),
        (("pony", "cherry"), ("cherries", "ponies"), "cherries would be pony, while"),
        (("tench, Tinca tinca", "goldfish"), ("goldfish (one)", "tench (two)"), "would be tench, Tinca tinca, while"),
        (("Egyptian cat", "tabby cat"), ("a tabby cat", "b Egyptian cat"), "a tabby cat would be Egyptian cat, while"),
        (("dog", "cat"), ("cat2", "dog1"), "cat2 would be dog, while its name is more like cat"),
        (("LABEL_1", "LABEL_0"), ("class_0", "class_1"), "class_0 would be LABEL_1, while its name is more like"),
    ],
)
def test_folders_whose_names_say_another_class_than_their_order(
    labels: tuple[str, ...], folders: tuple[str, ...], said: str
) -> None:
    """Each was measured as the other."""
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=2))
    model.labels = labels
    with pytest.raises(TrainError, match=re.escape(said)):
        classes_in_order(model, folders)
    model.labels = labels[::-1]
    assert classes_in_order(model, folders) == folders  # the names say the same as the order


def test_synsets_are_in_the_order_of_the_labels() -> None:
    """Those of ImageNet's folders say nothing of their own."""
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=1000))
    model.labels = labels_of(registry.find("vit_base_16"))
    folders = [f"n{number:08}" for number in range(1_440_764, 1_441_764)]
    assert classes_in_order(model, folders) == tuple(folders)


@pytest.mark.parametrize("folders", [("1", "2", "10"), ("Zebra", "ape", "bee"), ("c8", "c9", "c10")])
def test_folders_of_two_orders(folders: tuple[str, ...]) -> None:
    """torchvision sorts them by letters, timm by numbers: which class each is meant for, nobody knows."""
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=3))
    with pytest.raises(TrainError, match=r"and there are two: .* such as 007 for 7"):
        classes_in_order(model, sorted(folders))
    assert classes_in_order(model, ["001", "002", "010"]) == ("001", "002", "010")
    model.labels = folders
    assert classes_in_order(model, sorted(folders)) == folders  # by their names


class Negative(Preprocess):
    def pixels(self, image):
        return 255 - super().pixels(image)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda way: way.replace(transform=replace(TRANSFORM, resize=(20, 20))), "resize"),
        (
            lambda way: way.replace(transform=replace(TRANSFORM, interpolation="bilinear", mode="squash")),
            "mode, interpolation",
        ),
        (lambda way: way.with_quick_decode(), "quick_decode"),
        (lambda way: Negative(TRANSFORM, way.model), "pixels"),
    ],
)
def test_pictures_that_are_prepared_in_another_way_are_refused(folders: Path, other, text: str) -> None:
    """They would be of the right size, and the accuracy another than that of `predict`."""
    model, names = new_model(), ("lying", "standing")
    pictures = read_folder(folders / "val", other(model.preprocess).pixels, names)
    for wrong in (pictures, pictures.part(pictures.labels == 0)):
        with pytest.raises(TrainError, match=f"prepared in another way than the model's: it differs in {text}"):
            measure(model, wrong)
    with pytest.raises(TrainError, match="prepared in another way"):
        train(model, pictures, folders / "out", settings())
    model.preprocess = other(model.preprocess)
    measure(model, pictures)


def test_pictures_may_be_shared_by_models_that_normalise_in_another_way(folders: Path) -> None:
    model = new_model()
    way = model.preprocess.replace(transform=replace(TRANSFORM, mean=(0.1,) * 3, std=(0.2,) * 3))
    pictures = read_folder(folders / "val", way.pixels, ("lying", "standing"))
    wanted = measure(model, read_folder(folders / "val", model.preprocess.pixels, ("lying", "standing")))
    assert measure(model, pictures).loss == wanted.loss


def test_a_run_on_pictures_that_are_decoded_quickly(folders: Path) -> None:
    """Its best epoch is measured again in the same way, which no file says."""
    model, names = new_model(), ("lying", "standing")
    model.preprocess = model.preprocess.with_quick_decode()
    data, validation = (read_folder(folders / part, model.preprocess.pixels, names) for part in ("train", "val"))
    assert len(train(model, data, folders / "out", settings(), validation=validation)) == 2


def test_pictures_of_other_channels_are_refused() -> None:
    model = ViT(CONFIG.replace(channels=1))
    model.preprocess = replace(TRANSFORM, mean=(0.5,), std=(0.25,))
    with pytest.raises(TrainError, match="The pictures are of 3 channels, and the model takes 1"):
        measure(model, stripes(8))


@pytest.mark.parametrize("size", [32, 48])
def test_cifar10_is_grey_for_a_model_of_one_channel(size: int, tmp_path: Path) -> None:
    """As the same pictures are from files."""
    folder, names = small_cifar10(tmp_path / "data"), ("plane", "car")
    model = ViT(CONFIG.replace(channels=1, image_size=size))
    model.preprocess = replace(TRANSFORM, size=(size, size), resize=(size, size), mean=(0.5,), std=(0.25,))
    pictures = read_to_measure(folder, model, "grey")
    coloured = read_cifar10(folder, "test")
    for name in names:
        (tmp_path / "files" / name).mkdir(parents=True)
    for number in range(20):
        file = tmp_path / "files" / names[int(coloured.labels[number])] / f"{number}.png"
        Image.fromarray(coloured.images[number].permute(1, 2, 0).numpy()).save(file)
        assert torch.equal(pictures.images[torch.tensor([number])][0], model.preprocess.pixels(file))
    measure(model, pictures)
    train(model, read_to_train(folder, model.preprocess, names).train, tmp_path / "out", settings(epochs=1))


class WithGrey(Preprocess):
    """Makes a fourth channel of CIFAR-10's three."""

    def pixels(self, image):
        return torch.cat([image, image.float().mean(0, keepdim=True).to(torch.uint8)])


def test_cifar10_for_a_model_of_four_channels(tmp_path: Path) -> None:
    folder, model = small_cifar10(tmp_path / "data"), ViT(CONFIG.replace(channels=4, image_size=32))
    model.preprocess = recipe = replace(TRANSFORM, size=(32, 32), resize=(32, 32), mean=(0.5,), std=(0.25,))
    with pytest.raises(TrainError, match="The pictures are of 3 channels, and the model takes 4"):
        measure(model, read_to_measure(folder, model, "four"))
    model.preprocess = WithGrey(recipe, model)
    measure(model, read_to_measure(folder, model, "four"))


def test_cifar10_in_the_order_of_the_labels(tmp_path: Path) -> None:
    data, model = small_cifar10(tmp_path / "data"), new_model()
    plain = read_to_measure(data, model, "it")
    model.labels = ("car", "plane")
    turned = read_to_measure(data, model, "it")
    assert (plain.classes, turned.classes) == (("plane", "car"), ("car", "plane"))
    assert torch.equal(plain.labels, 1 - turned.labels)
    with pytest.raises(TrainError, match=r"The data have 2 classes, and mine 5. .*vitlite.training.train"):
        read_to_measure(data, new_model(CONFIG.replace(num_classes=5)), "mine")


def test_answers_that_are_not_finite_are_no_answers() -> None:
    """As float16 gives them where the numbers between two layers are too large for it."""
    model = new_model().half()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.bias.fill_(6e4)
        model.blocks[1].mlp.fc2.bias.fill_(6e4)
    assert not model(torch.zeros(1, 3, 16, 16).half()).isfinite().all()
    with pytest.raises(InputError, match=r"outputs are not finite in torch\.float16\. Use float32 or bfloat16"):
        measure(model, stripes(8))


def test_folders_to_measure_on(folders: Path, tmp_path: Path) -> None:
    model = new_model()
    inside, itself = (read_to_measure(data, model, "it") for data in (folders, folders / "val"))
    assert inside.images.pictures == itself.images.pictures
    assert len(inside) == 8
    check_data(folders)
    with pytest.raises(TrainError, match="There is no folder"):
        check_data(tmp_path / "nowhere")
    with pytest.raises(TrainError, match="it has no preprocessing"):
        read_to_measure(folders, ViT(CONFIG), "it")


def test_what_is_confused_most() -> None:
    model = new_model()
    data = stripes(8)
    measured = replace(
        measure(model, data),
        right=torch.tensor([5, 2, 0]),
        confusion=torch.tensor([[5, 1, 0], [0, 2, 3], [1, 0, 0]]),
    )
    assert measured.confused() == [(1, 2, 3), (0, 1, 1), (2, 0, 1)]
    assert measured.confused(most=1) == [(1, 2, 3)]
    assert replace(measured, confusion=torch.eye(3, dtype=torch.int64)).confused() == []
    assert replace(measured, confusion=None).confused() == []


def test_of_a_model_without_labels_it_is_said_which_class_each_folder_is(folders, caplog):
    model = new_model()
    assert read_to_measure(folders, model, "mine").classes == ("lying", "standing")
    (said,) = caplog.messages
    assert said.endswith("no labels, so the folders are taken in order: lying for class 0, standing for class 1")
    caplog.clear()
    model.labels = ("lying", "standing")
    read_to_measure(folders, model, "mine")
    assert not caplog.messages

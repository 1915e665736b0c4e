"""The model that a run begins with."""

from collections.abc import Sequence

import pytest
import torch
from tiny_run import CONFIG, new_model
from torch import nn

from vitlite import ViT
from vitlite.errors import TrainError
from vitlite.images import Preprocess
from vitlite.training.start import random_model, take_classes, usual_transform


def test_random_weights_with_the_preprocessing_that_is_usual() -> None:
    model = random_model("vit_nano_4", num_classes=3, image_size=16, device="cpu")
    assert (model.config.num_classes, model.config.size) == (3, (16, 16))
    assert model.preprocess.model is model
    assert model.preprocess.transform.std == (0.2470, 0.2435, 0.2616)  # the zoo's for this name
    assert model.source is None


def test_a_name_without_a_record_gets_the_middle_of_the_picture() -> None:
    config = new_model().config.replace(channels=1)
    recipe = usual_transform("vit_small_14", config)
    assert (recipe.size, recipe.resize) == (config.size, config.size)
    assert recipe.mean == recipe.std == (0.5,)
    wide = torch.zeros(3, 16, 48, dtype=torch.uint8)
    wide[:, :, :16] = 255  # is cut off, as is the other end
    pixels = Preprocess(usual_transform("vit_small_14", new_model().config), new_model()).pixels(wide)
    assert pixels.shape == (3, 16, 16)
    assert pixels.max() == 0


def model_of(labels: Sequence[str] | None) -> ViT:
    """The row of each class has its number in it."""
    model = new_model(CONFIG.replace(num_classes=3))
    model.head.weight.data.copy_(torch.arange(1.0, 4)[:, None].expand(3, 32))
    model.head.bias.data.copy_(torch.arange(1.0, 4))
    model.labels = labels
    return model


@pytest.mark.parametrize(
    ("labels", "classes", "rows"),
    [
        (("a", "b", "c"), ("a", "b", "c"), [1, 2, 3]),
        (("c", "a", "b"), ("a", "b", "c"), [2, 3, 1]),
        (("caz\u00e9", "Tabby cat", "dog"), ("caze\u0301", "dog", "tabby_cat"), [1, 3, 2]),  # but for marks
        (None, ("a", "b", "c"), [1, 2, 3]),  # of the caller's making
    ],
)
def test_rows_of_the_head_go_with_their_names(
    labels: Sequence[str] | None, classes: Sequence[str], rows: list[int]
) -> None:
    model = model_of(labels)
    assert take_classes(model, classes) == ""
    assert model.labels == classes
    assert model.head.bias.tolist() == model.head.weight[:, 7].tolist() == rows


def test_other_classes_get_a_new_head_and_it_is_said() -> None:
    model = model_of(("a", "b", "c"))
    said = take_classes(model, ("a", "b", "d"))
    assert said.startswith("the head is a new one, as the model's own knew a, b, c, and the classes are a, b, d;")
    assert not any(weight.any() for weight in model.head.parameters())


@pytest.mark.parametrize("classes", [("n01", "n02", "n03"), ("001", "002", "010")])
def test_a_head_goes_on_with_the_numbers_of_its_classes(classes: Sequence[str]) -> None:
    model = model_of(("a", "b", "c"))
    said = take_classes(model, classes)
    assert said.startswith(f"no folder is named after a label, so the head goes on in order: {classes[0]} for a, ")
    assert model.head.bias.tolist() == [1, 2, 3]
    model = model_of(("a1", "b2", "c3"))
    assert "new one" in take_classes(model, ("x2", "y", "z3"))  # one says nothing of a number
    model = model_of(("a", "b", "c"))
    assert "new one" in take_classes(model, ("1", "2", "10"))  # of two orders


def test_a_head_of_a_kind_of_its_own_is_not_changed() -> None:
    model = model_of(("a", "b", "c"))
    model.head = nn.Sequential(nn.Linear(32, 3))
    with pytest.raises(TrainError, match=r"which weights of a Sequential are whose is not known.*data\.classes"):
        take_classes(model, ("b", "a", "c"))
    model.labels = ("a", "b", "c")
    assert take_classes(model, ("a", "b", "c")) == ""

"""The model that a run begins with."""

import pytest
import torch
from tiny_run import new_model

from vitlite.images import Preprocess
from vitlite.training.start import head_for, random_model, usual_recipe


def test_random_weights_with_the_preprocessing_that_is_usual() -> None:
    model = random_model("vit_nano_4", num_classes=3, image_size=16, device="cpu")
    assert (model.config.num_classes, model.config.size) == (3, (16, 16))
    assert model.preprocess.model is model
    assert model.preprocess.recipe.std == (0.2470, 0.2435, 0.2616)  # the zoo's for this name
    assert model.source is None


def test_a_name_without_a_record_gets_the_middle_of_the_picture() -> None:
    config = new_model().config.replace(channels=1)
    recipe = usual_recipe("vit_small_14", config)
    assert (recipe.size, recipe.resize) == (config.size, config.size)
    assert recipe.mean == recipe.std == (0.5,)
    wide = torch.zeros(3, 16, 48, dtype=torch.uint8)
    wide[:, :, :16] = 255  # is cut off, as is the other end
    pixels = Preprocess(usual_recipe("vit_small_14", new_model().config), new_model()).pixels(wide)
    assert pixels.shape == (3, 16, 16)
    assert pixels.max() == 0


def test_a_head_keeps_what_it_knows_of_these_classes_and_is_new_for_others(caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    torch.nn.init.normal_(model.head.weight)
    model.labels, head = ("standing", "lying"), model.head
    assert head_for(model, ("lying", "standing")) == ("standing", "lying")
    assert not caplog.messages
    assert head_for(model, ("n01", "n02")) == ("n01", "n02")
    assert caplog.messages[0].endswith("so the head goes on in order: n01 for standing, n02 for lying")
    assert model.head is head
    for others in (("ant", "lying"), ("Lying", "Standing")):  # some of its own, and nearly its own
        model.labels, model.head = ("standing", "lying"), head
        assert head_for(model, others) == others
        assert (model.labels, int(model.head.weight.count_nonzero())) == (None, 0)
    head = model.head
    assert head_for(model, ("ant", "bee")) == ("ant", "bee")
    assert model.head is head  # it knows none

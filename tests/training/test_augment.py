"""Random numbers, and what becomes of images and labels."""

from dataclasses import replace

import pytest
import torch

from vitlite.training.augment import SampleRandom, _affine, augment, mix, shuffled
from vitlite.training.settings import STRENGTHS, Augmentation


def test_random_numbers_depend_on_the_sample_only():
    images = torch.rand(6, 3, 16, 16)
    rows, how = torch.tensor([5, 9, 2, 7, 0, 4]), STRENGTHS["strong"]
    together = augment(images, SampleRandom(1, 3, rows), how)
    alone = torch.cat([augment(images[i : i + 1], SampleRandom(1, 3, rows[i : i + 1]), how) for i in range(6)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, augment(images, SampleRandom(1, 4, rows), how))
    assert not torch.equal(together, augment(images, SampleRandom(2, 3, rows), how))


def test_random_numbers_are_uniform_and_independent():
    random = SampleRandom(0, 0, torch.arange(50_000))
    others = [
        SampleRandom(0, 1, torch.arange(50_000))("a"),
        SampleRandom(1, 0, torch.arange(50_000))("a"),
        random("b"),
        random("a").roll(1),
    ]
    values = random("a")
    assert 0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=0.006)
    assert values.histc(10, 0, 1).min() > 4700
    for other in others:
        assert abs(torch.corrcoef(torch.stack([values, other]))[0, 1]) < 0.02
    assert random.chance("a", 0.25).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_an_epoch_visits_every_sample_once_in_its_own_order():
    orders = [shuffled(0, 0, 1000), shuffled(0, 1, 1000), shuffled(1, 0, 1000)]
    assert all(torch.equal(order.sort().values, torch.arange(1000)) for order in orders)
    assert all((a == b).float().mean() < 0.02 for a, b in ((orders[0], orders[1]), (orders[0], orders[2])))


def test_no_augmentation_leaves_the_pixels():
    images, random = torch.rand(4, 3, 16, 16), SampleRandom(0, 0, torch.arange(4))
    torch.testing.assert_close(augment(images, random, STRENGTHS["none"]), images, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("h", "w"), [(16, 16), (16, 48)])
def test_a_warp_is_a_rotation_times_a_shear(h, w):
    random = SampleRandom(0, 0, torch.arange(64))
    found = _affine(h, w, random, replace(STRENGTHS["none"], warp=1.0))[:, :, :2].double()
    to_pixels = torch.diag(torch.tensor([w, h]).double())
    in_pixels = to_pixels @ found @ to_pixels.inverse()
    shear = torch.eye(2, dtype=torch.float64).repeat(64, 1, 1)
    shear[:, 0, 1] = random("shear", -0.2, 0.2)
    zoom = torch.exp(random("zoom", -0.2, 0.2)).double().view(-1, 1, 1)
    turn = in_pixels @ shear.inverse() / zoom
    torch.testing.assert_close(turn @ turn.mT, torch.eye(2, dtype=torch.float64).expand(64, 2, 2), atol=1e-6, rtol=0)
    torch.testing.assert_close(turn[:, 1, 0].asin().rad2deg().float(), random("angle", -15, 15), atol=1e-3, rtol=0)


@pytest.mark.parametrize("change", ["flip", "shift", "warp", "colour", "erase"])
def test_each_change_changes_some_images(change):
    images, random = torch.rand(64, 3, 16, 16), SampleRandom(0, 0, torch.arange(64))
    changed = augment(images, random, replace(STRENGTHS["none"], **{change: 0.5}))
    share = ((changed - images).abs().amax((1, 2, 3)) > 1e-3).float().mean()
    assert 0.3 < share <= (1 if change == "shift" else 0.7)
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_labels_are_mixed_as_pixels_are():
    ones, zeros, random = torch.ones(200, 3, 16, 16), torch.zeros(200, 3, 16, 16), SampleRandom(0, 0, torch.arange(200))
    labels = torch.tensor([[1.0, 0.0]]).expand(200, 2)
    images, mixed = mix(ones, labels, zeros, labels.flip(1), random, Augmentation(mixup=0.4, cutmix=0.4))
    torch.testing.assert_close(images.mean((1, 2, 3)), mixed[:, 0])
    torch.testing.assert_close(mixed.sum(1), torch.ones(200))
    values = images[:, 0].flatten(1)
    cut = (values.min(1).values == 0) & (values.max(1).values == 1)
    untouched = values.min(1).values == 1
    assert 60 < cut.sum() < 100
    assert 20 < untouched.sum() < 60

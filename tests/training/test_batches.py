"""Every picture is seen in every epoch, and counts as it should."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from tiny_run import new_model, settings, stripes

from vitlite.images.transform import normalise
from vitlite.training import STRENGTHS, Pictures, loop, measure, train
from vitlite.training.batches import batch_of, importance_of_classes, steps_of_an_epoch
from vitlite.training.run import Run

PLAIN = {"augmentation": STRENGTHS["none"], "smoothing": 0.0}


@pytest.mark.parametrize(("pictures", "batch"), [(90, 32), (65, 32), (96, 32), (6, 64), (1, 8), (49_000, 128)])
def test_batches_are_even_and_hold_all(pictures: int, batch: int) -> None:
    order, steps = torch.randperm(pictures), steps_of_an_epoch(pictures, batch)
    batches = [batch_of(order, step, steps) for step in range(steps)]
    assert torch.equal(torch.cat(batches), order)
    sizes = {len(rows) for rows in batches}
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1


def test_an_epoch_sees_90_pictures_of_90(tmp_path, monkeypatch):
    step, seen = loop._step, []
    monkeypatch.setattr(loop, "_step", lambda run, rows: (seen.append(rows.tolist()), step(run, rows))[1])
    train(new_model(), stripes(90), tmp_path, settings(batch=32))
    assert [len(rows) for rows in seen] == [30] * 6
    first, second = (sorted(chain(*epoch)) for epoch in (seen[:3], seen[3:]))
    assert first == second == list(range(90))
    assert seen[:3] != seen[3:]


def gradients_of_an_epoch(run: Run) -> tuple[list[torch.Tensor], float]:
    """The sum over the steps, with the weights as they are; and the mean loss."""
    total = 0.0
    for step in range(run.steps):
        rows = batch_of(torch.arange(len(run.data)), step, run.steps)
        total += loop._add_gradients(run, *loop._batch(run, rows))[0]
    return [weight.grad for weight in run.weights.values()], total / run.steps


@pytest.mark.parametrize("changes", [{}, {"accumulate": 3}])
def test_each_picture_of_an_epoch_counts_alike(changes):
    """Of 23 pictures in batches of at most 8, one batch has 7."""
    run = Run(new_model(), stripes(23), settings(**PLAIN, **changes))
    found, loss = gradients_of_an_epoch(run)
    assert run.steps == 3
    model, data = new_model(), stripes(23)
    images = normalise(data.images, model.preprocess.transform, 3)
    wanted = F.cross_entropy(model(images), data.labels)
    (3 * wanted).backward()  # the mean over all pictures, in each of three steps
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()], rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def uneven():
    """Of 24 pictures, 3 stand."""
    data = stripes(48)
    kept = torch.cat([(data.labels == 0).nonzero()[:21], (data.labels == 1).nonzero()[:3]])[:, 0]
    return replace(data, images=data.images[kept], labels=data.labels[kept])


def test_balanced_classes_count_all_alike():
    data = replace(uneven(), classes=("lying", "standing", "nobody"))
    assert importance_of_classes(data, balance=False).tolist() == [1, 1, 1]
    assert importance_of_classes(data, balance=True).tolist() == pytest.approx([24 / 42, 4, 0])
    run = Run(new_model(), uneven(), settings(**PLAIN, balance=True))
    found, _ = gradients_of_an_epoch(run)
    model, data = new_model(), uneven()
    images = normalise(data.images, model.preprocess.transform, 3)
    losses = F.cross_entropy(model(images), data.labels, reduction="none")
    (3 * (losses[data.labels == 0].mean() + losses[data.labels == 1].mean()) / 2).backward()
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()], rtol=1e-4, atol=1e-6)


def test_what_a_mixed_picture_counts_does_not_depend_on_smoothing():
    """Smoothing gives a bit of every class, which is no picture of it."""
    mixed = replace(STRENGTHS["none"], mixup=1.0)
    rows = torch.arange(24)
    counts = []
    for smoothing in (0.0, 0.1):
        recipe = settings(balance=True, augmentation=mixed, smoothing=smoothing)
        _, labels = loop._batch(Run(new_model(), uneven(), recipe), rows)
        counts.append(labels.sum(1))
    torch.testing.assert_close(*counts)
    assert counts[0].mean() == pytest.approx(1, abs=0.2)
    assert len(counts[0].unique()) > 2  # some are of both classes


def shades(each: tuple[int, int], seed: int) -> Pictures:
    """Dark pictures and bright ones, whose shades overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((count,), k) for k, count in enumerate(each)])
    shade = 100 + 40 * labels + 25 * torch.randn(len(labels), generator=generator)
    images = shade.clamp(0, 255).to(torch.uint8)[:, None, None, None].expand(-1, 3, 16, 16).contiguous()
    return Pictures(images, labels, ("dark", "bright"))


def test_balance_finds_the_few(tmp_path):
    """Without it, whoever says "dark" of all that overlaps is right most of the time."""
    data, held = shades((112, 14), seed=0), shades((50, 50), seed=1)
    right = {}
    for balance in (False, True):
        recipe = settings(epochs=4, batch=16, balance=balance, **PLAIN)
        train(model := new_model(), data, tmp_path / str(balance), recipe)
        right[balance] = measure(model, held).right.tolist()
    assert right[False][1] < 10 < 20 < right[True][1], right
    assert sum(right[True]) > sum(right[False]) + 5

"""Images that may have several labels: loss, mean average precision, thresholds, and the saved model."""

import csv
import doctest
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_run import CONFIG, Killed, new_model, settings, several_labels, stop, stripes

import vitlite
from vitlite.cli.main import main
from vitlite.errors import CheckpointError, TrainError
from vitlite.training import Settings, evaluate, train
from vitlite.training.data import ImageData
from vitlite.training.evaluate import MeasuredLabels, average_precision, best_threshold, measure, measure_labels
from vitlite.training.split import hold_out, read_training_data
from vitlite.training.tables import read_table

CLASSES = ("lying", "standing")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return several_labels(tmp_path_factory.mktemp("several") / "data")


@pytest.fixture(scope="module")
def trained(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("trained") / "run"
    command = f"train {table} --model vit_nano_4 --weights none --size 16 --batch 8 --epochs 8 --out {out}"
    assert main(command.split()) == 0
    return out


def in_memory(count: int = 32) -> ImageData:
    """Images of stripes, of which those of the second class also have a third label."""
    one = stripes(count)
    labels = torch.stack([one.labels == 0, one.labels == 1, one.labels == 1], 1)
    return ImageData(one.images, labels, (*one.classes, "again"))


def test_examples() -> None:
    assert doctest.testmod(evaluate).failed == 0
    assert doctest.testmod(evaluate).attempted == 2


def brute_force(scores: list[float], labels: list[bool]) -> float:
    """Add the precision at each threshold, times the recall that it gains."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        found = [label for score, label in zip(scores, labels, strict=True) if score >= threshold]
        gained = sum(found) / sum(labels) - recall
        total, recall = total + gained * sum(found) / len(found), recall + gained
    return total


def f1(scores: torch.Tensor, labels: torch.Tensor, threshold: float) -> float:
    found = scores >= threshold
    return 2 * (found & labels).sum().item() / (found.sum() + labels.sum()).item()


def test_average_precision_and_thresholds_equal_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (2, 7, 60):
        scores = torch.rand(count, generator=generator).mul(10).round().div(10)  # with ties
        labels = torch.rand(count, generator=generator) < 0.3
        labels[0] = True
        expected = brute_force(scores.tolist(), labels.tolist())
        assert average_precision(scores, labels).item() == pytest.approx(expected, abs=1e-12)
        best = max(f1(scores, labels, threshold) for threshold in scores.tolist())
        assert f1(scores, labels, best_threshold(scores, labels)) == best
    assert math.isnan(average_precision(scores, labels & False))
    assert best_threshold(scores, labels & False) == 0.5


def test_a_label_without_images_does_not_count() -> None:
    scores, labels = torch.tensor([[0.9, 0.1], [0.2, 0.3]]), torch.tensor([[True, False], [False, False]])
    measured = MeasuredLabels(0.0, torch.arange(2), scores, labels)
    assert measured.mean_average_precision == 1.0
    assert measured.best_thresholds == (pytest.approx(0.55), 0.5)
    recall, precision = measured.recall_and_precision((0.1, 0.2))
    assert (recall[0].item(), precision.tolist()) == (1, [0.5, 0])


def test_a_run_learns_chooses_by_map_and_saves_thresholds(table: Path, trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert all(0 < record["val_map"] <= 1 and "val_top1" not in record for record in log)
    best = max(log, key=lambda record: (record["val_map"], -record["val_loss"]))
    model = vitlite.load(trained / "best")
    assert (model.scores, list(model.thresholds)) == ("sigmoid", best["thresholds"])
    assert model.labels == CLASSES
    split = read_training_data(read_table(table), model.preprocess, CLASSES)
    measured = measure_labels(model, split.validation)
    assert measured.mean_average_precision == pytest.approx(best["val_map"], abs=0.02)  # that was in bfloat16
    assert measured.mean_average_precision > 0.8
    images = torch.stack([model.preprocess.one(path) for path in split.validation.files()])
    with torch.inference_mode():
        assert torch.allclose(model(images).sigmoid(), measured.scores, atol=1e-6)
    predicted = model.predict(str(split.validation.files()[0]))
    assert {each.label: each.score for each in predicted} == pytest.approx(
        dict(zip(CLASSES, measured.scores[0].tolist(), strict=True)), abs=1e-6
    )


def test_eval_and_classify(table: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, split = trained / "best", trained / "split.json"
    command = f"eval {table} --split {split} --model {best} --out {tmp_path / 'eval'}"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"label +images +average precision +recall +precision +threshold\nlying +\d", out)
    assert re.search(r"\nmAP \d+\.\d\d%   loss \d\.\d{4}   \d+ images\n", out)
    figures = json.loads((tmp_path / "eval" / "eval.json").read_text())
    model = vitlite.load(best)
    data = read_training_data(read_table(table), model.preprocess, CLASSES).validation
    measured = measure_labels(model, data)
    assert figures["map"] == measured.mean_average_precision
    assert main(["classify", *map(str, data.files()), "--model", str(best), "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    found = {path: {row["label"] for row in rows if row["path"] == str(path)} - {""} for path in data.files()}
    wrong = {str(table.parent / each["image"]): each for each in figures["wrong"]}
    for path, labels in zip(data.files(), data.labels, strict=True):
        right = {name for name, label in zip(CLASSES, labels, strict=True) if label}
        each = wrong.get(str(path), {"missed": [], "predicted": []})
        assert found[path] == right - set(each["missed"]) | set(each["predicted"])
    assert any(not labels for labels in found.values())  # some images have no label
    one_each = tmp_path / "one.csv"  # by chance, each image has one label
    rows = [(table.parent / "1.png", "lying"), (table.parent / "2.png", "standing")]
    one_each.write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
    assert main(["eval", str(one_each), "--model", str(best)]) == 0
    assert "mAP" in capsys.readouterr().out


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    data, validation = in_memory(), in_memory(12)
    config = CONFIG.replace(num_classes=3)
    for name, kill in (("whole", None), ("killed", stop)):
        model = new_model(config)
        if kill:
            with pytest.raises(Killed):
                train(model, data, tmp_path / name, settings(), validation=validation, after_epoch=kill)
            model = new_model(config)
        train(model, data, tmp_path / name, settings(), validation=validation)
    whole, killed = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    configs = [json.loads((tmp_path / name / "best" / "config.json").read_text()) for name in ("whole", "killed")]
    assert configs[0]["vitlite"] == configs[1]["vitlite"]
    assert len(configs[0]["vitlite"]["thresholds"]) == 3


def test_the_loss_is_binary_cross_entropy(tmp_path: Path) -> None:
    """The first loss of a new head, whose logits are 0, is ln 2; and the gradient is that of torch's loss."""
    data = in_memory(8)
    model = new_model(CONFIG.replace(num_classes=3))
    plain = settings(epochs=1, lr=1e-9, smoothing=0, augmentation=vitlite.training.STRENGTHS["none"])
    history = train(model, data, tmp_path / "run", plain, validation=data)
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert "accuracy" not in history[0]
    torch.nn.init.normal_(model.head.weight)
    images = torch.stack([model.preprocess(image[None])[0] for image in data.images])
    with torch.no_grad():
        expected = F.binary_cross_entropy_with_logits(model(images), data.labels.float()).item()
    model.scores = "sigmoid"
    assert measure_labels(model, data).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("augmentation", ["none", "weak", "strong"])
def test_mixed_and_smoothed_targets_keep_the_share_of_a_rare_label(tmp_path: Path, augmentation: str) -> None:
    """Otherwise, the scores of rare labels would be too high."""
    from vitlite.training.state import Run
    from vitlite.training.trainer import _batch

    data = in_memory(64)
    rare = data.labels & (torch.arange(64)[:, None] < torch.tensor([64, 64, 8]))
    data = replace(data, labels=rare)
    model = new_model(CONFIG.replace(num_classes=3))
    options = Settings(epochs=1, smoothing=0.1, augmentation=vitlite.training.STRENGTHS[augmentation])
    runs = [Run(model, data, replace(options, seed=seed)) for seed in range(5)]
    targets = [_batch(run, torch.arange(64))[1] for run in runs]
    shares = rare.float().mean(0)
    assert shares[2] == 4 / 64
    assert torch.cat(targets).mean(0) == pytest.approx(shares, abs=0.02)
    assert torch.cat(targets).min() == pytest.approx(0.1 * shares.min().item())
    if augmentation == "none":
        assert torch.allclose(targets[0], 0.9 * rare + 0.1 * shares)


def test_held_out_images_have_all_labels() -> None:
    labels = torch.zeros(200, 4, dtype=torch.bool)
    labels[:, 0] = True  # all
    labels[::2, 1] = True
    labels[:10, 2] = True  # rare
    labels[3, 3] = True  # alone
    labels[190:] = False
    data = ImageData(torch.zeros(200, 3, 2, 2, dtype=torch.uint8), labels, ("all", "half", "rare", "alone"))
    train_data, held_out = hold_out(data)
    assert len(held_out) == 40
    assert held_out.labels.sum(0).tolist()[2:] == [2, 0] or held_out.labels.sum(0)[2] in (1, 2, 3)
    assert train_data.labels[:, 3].sum() + held_out.labels[:, 3].sum() == 1
    assert 15 <= held_out.labels[:, 1].sum() <= 25


def test_a_broken_image_is_replaced_with_its_labels(tmp_path: Path) -> None:
    table = several_labels(tmp_path / "data", 8)
    (table.parent / "3.png").write_bytes(b"")
    model = new_model()
    data = read_table(table).read(model.preprocess.pixels, CLASSES)
    images, labels = data.fetch(torch.arange(8))
    assert torch.equal(images[3], images[4])
    assert torch.equal(labels[3], data.labels[4])
    assert not torch.equal(data.labels[3], data.labels[4])


def test_errors(tmp_path: Path) -> None:
    data, one = in_memory(), stripes(8)
    model = new_model(CONFIG.replace(num_classes=3))
    with pytest.raises(TrainError, match=r"cannot be balanced .* Omit balance="):
        train(model, data, tmp_path / "run", settings(balance=True))
    with pytest.raises(TrainError, match=r"Only one of the training data and the validation data has several labels"):
        train(new_model(), one.with_multi_label(), tmp_path / "run", settings(), validation=one)
    with pytest.raises(TrainError, match=r"the model predicts only one\. .* set model\.scores = 'sigmoid'"):
        measure_labels(model, data)
    with pytest.raises(TrainError, match="Call measure_labels"):
        measure(model, data)
    with pytest.raises(TrainError, match=r"or a bool tensor \(n, k\) for several labels"):
        replace(data, labels=data.labels.float())
    model.thresholds = (0.5,)
    with pytest.raises(CheckpointError, match=r"thresholds must be a list of 3 numbers, got \[0\.5\]"):
        model.save(tmp_path / "model")


def test_classes_in_another_order() -> None:
    data = in_memory(4)
    other = data.with_classes(("again", "new", "standing", "lying"))
    assert torch.equal(other.labels[:, [3, 2, 0]], data.labels)
    assert not other.labels[:, 1].any()

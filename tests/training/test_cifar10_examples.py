"""The experiments on CIFAR-10, without its images."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from tiny_run import CONFIG, TRANSFORM, stripes

from vitlite import ViT, create
from vitlite.training import Augmentation, ImageData, read_cifar10

FOLDER = Path(__file__).parents[2] / "examples" / "cifar10"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports one of the scripts for the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module


def test_prepare_builds_the_binary_version_from_pngs(example, tmp_path, monkeypatch, capsys):
    source, generator = tmp_path / "package", torch.Generator().manual_seed(0)
    source.mkdir()
    pixels = torch.randint(0, 256, (6, 2, 1024, 3), generator=generator, dtype=torch.uint8)
    for i, rows in enumerate(pixels, 1):
        Image.fromarray(rows.numpy()).save(source / (f"data_batch_{i}.png" if i < 6 else "test_batch.png"))
    (source / "train_lables.json").write_text(json.dumps(list(range(10))))
    (source / "test_lables.json").write_text("[7, 8]")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(source), str(tmp_path / "bin")])
    example("prepare").main()
    test = read_cifar10(tmp_path / "bin", "test")
    assert test.labels.tolist() == [7, 8]
    assert torch.equal(test.images[1, 2].flatten(), pixels[5, 1, :, 2])
    assert (tmp_path / "bin" / "data_batch_5.bin").read_bytes()[3073] == 9
    assert "data_batch_1.bin  2 images" in capsys.readouterr().out


def test_prepare_opens_only_the_published_pickles(example, tmp_path, monkeypatch):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path), str(tmp_path / "bin")])
    with pytest.raises(SystemExit, match=r"data_batch_1 has md5 .* It was not opened"):
        example("prepare").main()
    assert not (tmp_path / "bin").exists()


def test_every_row_of_the_experiments_is_a_model(example):
    ablation = example("ablation")
    images = torch.rand(2, 3, 32, 32)
    for row in ablation.ROWS.values():
        if row.config is None:
            continue
        model = row.kind(row.config)
        assert isinstance(model, ViT)
        assert model(images).shape == (2, 10)
        changed = [weight for weight in model.parameters() if weight.requires_grad]
        model(images).square().sum().backward()
        assert all(weight.grad is not None for weight in changed)


def test_a_row_is_trained_and_measured(example, tmp_path, monkeypatch):
    ablation = example("ablation")
    small = ImageData(
        torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8), torch.arange(300) % 10, tuple("abcdefghij")
    )
    monkeypatch.setattr(ablation, "read_cifar10", lambda folder, split: small)
    for name in ("cls", "relative", "cnn"):
        found = ablation.run(ablation.ROWS[name], 1e-3, 0, tmp_path)
        assert found["val"] == found["test"]  # of the same images
        assert found["weights"] > 100_000


def test_the_best_learning_rate_is_shown(example):
    ablation = example("ablation")
    scores = {"cls 0.001 0": (0.4, 0.9), "cls 0.003 0": (0.5, 0.6), "cls 0.003 1": (0.5, 0.7), "cls 0.01 0": (0.2, 1)}
    results = {key: {"val": val, "test": test, "weights": 360_000} for key, (val, test) in scores.items()}
    assert ablation.table(results).splitlines()[2:] == [
        "| position embedding: 1-D learned | 0.003 | 0.36 M | **65.0** (60.0, 70.0) |"
    ]


def test_the_embedded_model_begins_with_mimetic_attention(example):
    model = ViT(CONFIG.replace(dim=64))
    example("embedded").mimetic(model)
    queries, keys, _ = model.blocks[0].attn.qkv.weight.chunk(3)
    alike = queries[:32].T @ keys[:32]  # of the first head
    assert alike.diagonal().mean() > 10 * alike.mean().abs()


def test_few_images_per_class(example):
    fewshot = example("fewshot")
    dark_to_bright = torch.arange(60)[:, None, None, None] % 3 * 100 + torch.randint(0, 20, (60, 3, 32, 32))
    images = ImageData(dark_to_bright.to(torch.uint8), torch.arange(60) % 3, ("dark", "grey", "bright"))
    found = fewshot.few_shots(create("vit_nano_4.cifar10"), images, images)
    assert list(found) == [1, 5, 10]  # there are only 20 of each
    assert all(len(draws) == 10 for draws in found.values())
    assert min(found[10]) > 0.9


def test_the_cnn_learns(example):
    cnn = example("cnn")
    none = Augmentation(flip=0, shift=0, warp=0, colour=0, erase=0, mixup=0, cutmix=0)
    small = stripes(64)
    data = ImageData(small.images.repeat(1, 1, 2, 2), small.labels, small.classes)
    model = cnn.train_cnn(data, TRANSFORM, none, epochs=8, seed=0, batch=16)
    assert cnn.accuracy(model, data, TRANSFORM) > 0.8

"""Models on a GPU: a fake one, torch's meta device, and a real one if there is one."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import fake_gpu, on_fake_gpu, skip_where_a_driver_is_needed
from models import FAMILIES
from tiny_run import TRANSFORM, new_model, settings, stripes

from vitlite import ViT, ViTConfig, optimize
from vitlite.cli import bench as command
from vitlite.cli import main as cli
from vitlite.fast import bench
from vitlite.images import Preprocess
from vitlite.nn.positions import RESAMPLE
from vitlite.nn.vit import model_on_meta
from vitlite.training import train
from vitlite.training.optim import optimizers, restore_optimizer
from vitlite.training.settings import Settings
from vitlite.training.state import Run

TINY = dict(image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=80, num_classes=5)
EVERY: dict[str, dict[str, Any]] = {"plain": {}, **FAMILIES}
families = pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch's own deepcopy does
real = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def gpu() -> Iterator[None]:
    skip_where_a_driver_is_needed()
    with fake_gpu():
        yield


# ---- on a fake GPU


@families
@pytest.mark.usefixtures("gpu")
def test_every_answer_stays_on_the_gpu(options: dict[str, Any]) -> None:
    if not torch.version.cuda:
        options = options | {"resample": "timm"}  # the others need such a torch
    model = on_fake_gpu(ViTConfig(**TINY | options), torch.bfloat16).eval()
    images = torch.empty(2, 3, 48, 24, dtype=torch.bfloat16, device="cuda")
    for _ in ("as it is", "optimized"):
        features = model.features(images, [0])
        for tensor in (model(images), model.attention_maps(images), features.patches, *features.layers):
            assert tensor.device.type == "cuda"
            assert tensor.dtype is torch.bfloat16
        assert optimize(model) is model


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("resample", RESAMPLE if torch.version.cuda else ["timm"])  # the others need such a torch
def test_positions_are_resampled_on_the_gpu(resample: Any) -> None:
    model = on_fake_gpu(ViTConfig(**TINY | {"resample": resample}))
    assert model(torch.empty(1, 3, 16, 40, device="cuda")).device.type == "cuda"


@pytest.mark.usefixtures("gpu")
def test_images_are_normalised_on_the_gpu() -> None:
    model = on_fake_gpu(ViTConfig(**TINY), torch.bfloat16)
    model.preprocess = Preprocess(TRANSFORM, model)
    images = model.preprocess.batch([torch.empty(3, 16, 16, dtype=torch.uint8)] * 2)
    assert (images.device.type, images.dtype) == ("cuda", torch.bfloat16)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_is_restored_on_the_gpu(optimizer: Any) -> None:
    model = on_fake_gpu(ViTConfig(**TINY))
    weights = dict(model.named_parameters())
    for weight in weights.values():
        weight.grad = torch.empty_like(weight)
    names = {weight: name for name, weight in weights.items()}
    saved: dict[str, torch.Tensor] = {}
    for found in optimizers(model, weights, Settings(epochs=1, optimizer=optimizer)):
        found.step()
        for weight, state in found.state.items():
            for kind, value in state.items():
                assert value.device.type == "cuda", kind
                saved[f"{kind}.{names[weight]}"] = torch.empty(value.shape, dtype=value.dtype)  # as a file gives it
    for found in optimizers(model, weights, Settings(epochs=1, optimizer=optimizer)):
        restore_optimizer(found, names, saved)
        for state in found.state.values():
            assert {value.device.type for value in state.values()} == {"cuda"}
        found.step()  # fused AdamW needs its step count on the same device


@pytest.mark.usefixtures("gpu")
def test_bench_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 43_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 9000")
    monkeypatch.setattr(bench, "TOLERANCE", {torch.float32: 0})  # fake tensors keep their dtype
    monkeypatch.setattr(bench, "difference", lambda answer, right: 0.0)  # without values
    monkeypatch.setattr(command, "random_model", lambda config: on_fake_gpu(ViTConfig(**TINY)).eval())
    monkeypatch.setattr(command, "check_device", lambda device: None)
    assert cli.main(["--debug", "bench", "--device", "cuda", "--quick", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("GPU 9000, CUDA ")
    assert re.search(r"^model +px +batch +dtype +eager +optimized +MB +images/s +gain$", out, re.MULTILINE)
    for batch in (1, 64):
        row = rf"^vit_base_16 +\d+ +{batch} +float32 +[\d.]+ +[\d.]+ +42 +[\d.]+ +[\d.]+$"
        assert re.search(row, out, re.MULTILINE)
    assert len(waited) >= 2 * 2 * 4, "two batches, two ways: to warm up, for the time, for the answer, for the memory"
    assert "Kernels on this CPU" not in out


# ---- on the meta device


@families
def test_a_training_step_does_not_synchronise(options: dict[str, Any]) -> None:
    model = model_on_meta(ViTConfig(**TINY | options | {"dropout": 0.1, "drop_path": 0.1})).train()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.empty(4, 3, 48, 24, device="meta"))
    F.cross_entropy(logits.float(), torch.empty(4, 5, device="meta")).backward()
    assert {weight.grad.device.type for weight in model.parameters() if weight.grad is not None} == {"meta"}
    for optimizer in optimizers(model, dict(model.named_parameters()), Settings(epochs=1)):
        optimizer.step()


# ---- on a real GPU


@real
@families
def test_a_gpu_gives_the_answers_of_a_cpu(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**TINY | options)).eval()
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            wanted = model.cpu().embed(images)
            found = model.cuda().embed(images.cuda())
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(optimize(model).embed(images.cuda()).cpu(), wanted, rtol=1e-3, atol=1e-3)


@real
def test_bench_on_a_real_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cuda", "--quick", "--rounds", "1"]) == 0
    print(out := capsys.readouterr().out)
    assert out.startswith(torch.cuda.get_device_name())
    assert len(re.findall(r"^vit_base_16 ", out, re.MULTILINE)) == 4


@real
def test_changed_positions_are_used() -> None:
    model = ViT(ViTConfig(**TINY)).eval().cuda()
    images = torch.randn(1, 3, 48, 24, device="cuda")
    with torch.no_grad():
        before = model.embed(images)
        model.pos_embed.data.add_(torch.randn_like(model.pos_embed))
        assert not torch.equal(model.embed(images), before)


@real
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_run_on_a_gpu_is_resumed(bfloat16: bool, tmp_path: Path) -> None:
    for epochs in (1, 2):
        model = new_model().cuda()
        history = train(model, stripes(24), tmp_path, settings(epochs=epochs, decay=0.0, bfloat16=bfloat16))
        assert len(history) == epochs
    run = Run(new_model().cuda(), stripes(24), settings(epochs=2, decay=0.0, bfloat16=bfloat16))
    run.resume(tmp_path / "state.safetensors")
    assert {value.device.type for value in run.tensors().values()} == {"cuda"}

"""The same network in other libraries and engines: the same logits."""

import peer_models
import pytest
import torch

from vitlite import ViTConfig
from vitlite.fast.measure import difference, random_model

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)


@pytest.mark.parametrize("name", ["timm", "torchvision", "transformers", "ONNX Runtime", "OpenVINO"])
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_peer_computes_the_same(name: str) -> None:
    if name == "OpenVINO":
        pytest.importorskip("openvino")
    model, images = random_model(TINY), torch.randn(2, 3, 32, 32)
    assert difference(peer_models.PEERS[name](model, images)(), model(images)) < 1e-5


def test_a_peer_with_weights_of_its_own() -> None:
    assert peer_models.vit_pytorch(random_model(TINY), torch.randn(2, 3, 32, 32))().shape == (2, 7)


def test_torch_compile_gets_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, options: model)  # compiling takes a minute
    model, images = random_model(TINY), torch.randn(2, 3, 32, 32)
    assert torch.equal(peer_models.torch_compile(model, images)(), model(images))

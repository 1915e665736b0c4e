"""What differs between versions is in one table, and each difference is got over with what is there."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

import vitlite
from vitlite.checkpoints.reader import metadata_of, open_weights
from vitlite.checkpoints.save import write_tensors
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError
from vitlite.nn.vit import ViT
from vitlite.versions import DIFFERENCES, Difference

SOURCE = Path(vitlite.__file__).parent
VERSIONED = {"torch", "huggingface_hub", "safetensors", "numpy", "PIL", "einops"}


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.what)
def test_the_table_says_where_a_difference_is_found_out(difference: Difference) -> None:
    file = SOURCE.joinpath(*difference.module.split(".")).with_suffix(".py")
    assert difference.asks in file.read_text("utf-8")


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_whatever_asks_what_a_package_has_is_in_the_table(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("getattr", "hasattr"):
            continue
        asked = ast.unparse(node)
        if isinstance(node.args[1], ast.Constant) and ast.unparse(node.args[0]).split(".")[0] in VERSIONED:
            known = [difference.asks.replace('"', "'") for difference in DIFFERENCES]
            assert any(text in asked for text in known), f"{asked} is not in vitlite.versions"
        assert "__version__" not in asked


def test_no_version_is_compared() -> None:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                assert "__version__" not in ast.unparse(node), file


# ---- safetensors before 0.8


def test_a_library_that_cannot_but_map_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = safetensors.safe_open
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors", {"said": "so"})

    def old(filename: Any, framework: str, device: str = "cpu") -> Any:
        return new(filename, framework=framework, device=device)

    monkeypatch.setattr(safetensors, "safe_open", old)
    assert metadata_of(tmp_path / "a.safetensors") == {"said": "so"}
    with open_weights(tmp_path / "a.safetensors") as weights:
        assert weights.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "a.safetensors" not in maps.read_text()
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with (
        pytest.raises(CheckpointError, match=r"cut\.safetensors cannot be read"),
        open_weights(tmp_path / "cut.safetensors"),
    ):
        pass


def test_files_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {
        "blocks.10.b": torch.randn(3, 2).T, "blocks.9.a": torch.randn(1), "double": torch.randn(2, dtype=torch.float64),
        "half": torch.randn(3).half(), "narrow": torch.randn(5).bfloat16(), "whole": torch.arange(3),
        "yes": torch.tensor([True, False, True]), "empty": torch.zeros(0, 4), "one": torch.tensor(7.0),
        "ä": torch.ones(1),
    }  # fmt: skip
    write_tensors(tmp_path / "ours", tensors, {"said": 'so, "and" ü'})
    ours = load_file(tmp_path / "ours")
    assert ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor)
        assert ours[name].dtype == tensor.dtype
    assert metadata_of(tmp_path / "ours") == {"format": "pt", "said": 'so, "and" ü'}
    names = ("blocks.10.b", "blocks.9.a", "double", "half", "yes", "empty")
    same = {name: tensors[name].contiguous() for name in names}
    write_tensors(tmp_path / "ours", same)
    save_file(same, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_types_that_a_file_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wave is of torch\.complex64, which is not written"):
        write_tensors(tmp_path / "out", {"wave": torch.zeros(2, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


# ---- torch without what is private to it

TAKEN_AWAY = """
import sys, types, torch
sys.path.insert(0, sys.argv[1])
taken = sys.argv[2]
if taken == "operators":
    torch.ops.__dict__["mkldnn"] = types.SimpleNamespace()
elif taken == "matmul":
    torch.backends.mkldnn = types.SimpleNamespace(is_available=torch.backends.mkldnn.is_available)
elif taken == "amx":
    vars(torch.cpu).pop("_is_amx_tile_supported", None)
else:
    vars(torch._C._functorch).pop("is_functorch_wrapped_tensor", None)
from models import tiny_model
import vitlite
from vitlite.fast import kernels

for dtype in (torch.float32, torch.bfloat16):
    model = tiny_model(dim=64, mlp_dim=96)
    images = torch.randn(2, 3, *model.config.size)
    with torch.no_grad():
        wanted = model(images)
        found = vitlite.optimize(model, dtype=dtype)(images)
    far = (found - wanted).abs().max() / wanted.abs().max()
    assert far < (1e-5 if dtype is torch.float32 else 5e-2), (dtype, far)
    assert taken != "operators" or not (kernels.packing_pays(dtype) or kernels.unpacked_pays())
    assert taken != "matmul" or not kernels.float32_products_pay(17, 16)
"""


@pytest.mark.parametrize("taken", ["operators", "matmul", "amx", "functorch"])
def test_without_what_is_private_to_torch_answers_are_the_same(taken: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKEN_AWAY, str(Path(__file__).parent), taken]
    nothing_kept = os.environ | {"VITLITE_CACHE": str(tmp_path)}  # no verdict of this torch when it had it all
    done = subprocess.run(command, env=nothing_kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_leaves_what_only_training_needs() -> None:
    """torch.utils.checkpoint takes half a second in torch 2.6."""
    code = "import sys, torch; before = 'torch.utils.checkpoint' in sys.modules; import vitlite; vitlite.ViT; " \
           "print(before or 'torch.utils.checkpoint' not in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
    config = ViTConfig(image_size=32, patch_size=16, dim=16, depth=1, heads=2, mlp_dim=16, checkpointing=True)
    ViT(config)(torch.zeros(1, 3, 32, 32)).sum().backward()

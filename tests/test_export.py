"""Exported files give the logits of the model at any batch and size, and hold its labels and preprocessing."""

import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import onnx
import onnxruntime
import pytest
import torch
from changed_models import CHANGED
from models import tiny_model
from torch import Tensor

import vitlite
from vitlite import export as module
from vitlite.cli import export as command
from vitlite.cli import main as cli
from vitlite.config import Resample, ViTConfig
from vitlite.errors import ExportError, MissingExtraError, OptimizedError
from vitlite.export import export
from vitlite.fast.optimize import optimize
from vitlite.images import Preprocess, TransformConfig
from vitlite.nn.vit import ViT

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, module.NEEDS_TORCH.split(".")))
MAY_BE_REFUSED = pytest.mark.xfail(OLD, raises=ExportError, strict=False, reason="this torch exports something else")
NEEDS_NEWER = pytest.mark.skipif(OLD, reason=f"only torch {module.NEEDS_TORCH} and newer export it")

TINY = dict(image_size=(32, 48), patch_size=8, dim=32, depth=1, heads=2, mlp_dim=48, num_classes=3)


def tiny(**options: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**TINY | options)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.2 * torch.randn_like(tensor))
    model.labels = ("cat", "dog", "bird")
    half = (0.5, 0.5, 0.5)
    transform = TransformConfig(
        size=(32, 48), resize=(32, 48), mode="squash", interpolation="bicubic", mean=half, std=half
    )
    model.preprocess = Preprocess(transform, model)
    return model


def run(path: Path, to: str, images: Tensor) -> Tensor:
    if to == "torch":
        return torch.export.load(path).module()(images)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    return torch.from_numpy(logits)


def description(path: Path, to: str) -> Any:
    if to == "torch":
        files = {"vitlite": ""}
        torch.export.load(path, extra_files=files)
        return json.loads(files["vitlite"])
    return json.loads({prop.key: prop.value for prop in onnx.load(path).metadata_props}["vitlite"])


OPTIONS = [
    ("onnx", {"depth": 2}),
    ("onnx", {"positions": "sincos2d", "pool": "mean", "mlp": "gelu_tanh"}),
    ("onnx", {"input_norm": "tokens", "mlp": "quick_gelu", "resample": "torchvision"}),
    ("onnx", {"norm": "rms", "input_norm": "projected", "mlp": "swiglu", "qkv_bias": False}),
    ("torch", {"registers": 2, "cls_position": False, "layer_scale": 1.0}),
    ("torch", {"input_norm": "patches", "head_dim": 12, "resample": "jax"}),
]


@MAY_BE_REFUSED
@pytest.mark.parametrize(("to", "options"), OPTIONS, ids=str)
def test_exported_file_gives_the_logits_of_the_model(tmp_path: Path, to: Any, options: dict[str, Any]) -> None:
    model, path = tiny(**options), tmp_path / "model"
    compared = export(model, path, to=to)
    installed = {"torch"} if to == "torch" else {"onnxruntime", *(["openvino"] if find_spec("openvino") else [])}
    assert set(compared) == installed
    assert max(compared.values()) < 1e-5
    with torch.no_grad():
        for shape in ((2, 3, 32, 48), (1, 3, 64, 24), (5, 3, 16, 80)):
            images = torch.randn(shape)
            torch.testing.assert_close(run(path, to, images), model(images), rtol=1e-4, atol=1e-5)
    described = description(path, to)
    assert described["labels"] == ["cat", "dog", "bird"]
    assert ViTConfig(**described["config"]) == model.config
    assert described["preprocess"]["size"] == [32, 48]
    assert [file.name for file in tmp_path.iterdir()] == ["model"], "nothing else is left behind"
    if to == "onnx" and not OLD:  # engines compute an antialiased resize differently; all know a matrix product
        assert "Resize" not in {node.op_type for node in onnx.load(path).graph.node}


def test_autocast_does_not_change_the_file(tmp_path: Path) -> None:
    model, path, images = tiny(), tmp_path / "model", torch.randn(2, 3, 32, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert max(export(model, path, to="onnx").values()) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(run(path, "onnx", images), model(images), rtol=1e-4, atol=1e-5)


def test_missing_torchvision_is_not_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, messages = logging.getLogger("torch.onnx._internal.exporter._registration"), []
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", messages.append)
    log.addHandler(handler)
    export(tiny(), tmp_path / "model.onnx", to="onnx", fixed_size=True)
    assert not messages
    assert not log.disabled
    log.removeHandler(handler)


def test_large_weights_get_their_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_FILE", 1000)
    model, path = tiny(), tmp_path / "model.onnx"
    export(model, path, to="onnx", fixed_size=True)
    (before,) = {file.name for file in tmp_path.iterdir()} - {"model.onnx"}
    assert re.fullmatch(r"model\.onnx\.[0-9a-f]{16}\.data", before)
    (tmp_path / "model.onnx.data").write_text("not written by vitlite")
    export(model, path, to="onnx", fixed_size=True)
    names = {file.name for file in tmp_path.iterdir()}
    assert before not in names
    assert {"model.onnx", "model.onnx.data"} < names
    assert len(names) == 3
    images = torch.randn(1, 3, 32, 48)
    torch.testing.assert_close(run(path, "onnx", images), model(images), rtol=1e-4, atol=1e-5)


@MAY_BE_REFUSED
def test_half_precision(tmp_path: Path) -> None:
    model, path = tiny().bfloat16(), tmp_path / "model.pt2"
    assert export(model, path, to="torch")["torch"] < 0.05
    assert run(path, "torch", torch.randn(1, 3, 32, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_model_without_preprocessing_or_labels(tmp_path: Path) -> None:
    model = ViT(ViTConfig(**TINY)).eval()  # its head is zero, and so are all logits
    assert export(model, tmp_path / "model.pt2", to="torch", fixed_size=True) == {"torch": 0}
    described = description(tmp_path / "model.pt2", "torch")
    assert described["labels"] is described["preprocess"] is None


def test_file_with_other_logits_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("what was here before")
    model = tiny()
    answers_otherwise = {"torch": lambda _: lambda images: model(images) * (1 + 0.001 * (len(images) == 3))}
    monkeypatch.setitem(module.ENGINES, "torch", answers_otherwise)
    with pytest.raises(
        ExportError, match=r"in torch, .* is 0\.001 for images of shape \(3, 3, 16, 64\)\. Nothing was written"
    ):
        export(model, path, to="torch")
    assert path.read_text() == "what was here before"
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_does_not_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.ENGINES, "torch", {"torch": lambda _: lambda images: images[len(images)]})
    with pytest.raises(ExportError, match=r"torch cannot run the exported model on images of shape \(.*out of bounds"):
        export(tiny(), tmp_path / "model.pt2", to="torch")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_that_an_engine_does_not_support(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"in {dtype}: .* Export the model in float32"):
        export(tiny().to(dtype), tmp_path / "model.onnx", to="onnx", fixed_size=True)
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"Cannot export to 'pt2': to= \(--to\) must be onnx or torch\."):
        export(tiny(), tmp_path / "model.pt2", to="pt2")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"so dropout would be exported\. Call model\.eval\(\) first\."):
        export(tiny().train(), tmp_path / "model.onnx", to="onnx")
    with pytest.raises(OptimizedError, match=r"optimized model cannot be exported\. Create the model again"):
        export(optimize(tiny(dim=64, mlp_dim=64)), tmp_path / "model.onnx", to="onnx")
    with pytest.raises(
        ExportError, match=r"Cannot write .*there is no folder .*no\. Pass the path of a file in an existing"
    ):
        export(tiny(), tmp_path / "no" / "model.onnx", to="onnx")
    with pytest.raises(ExportError, match=r"Cannot write .*: it is a folder\. Pass the path of a file"):
        export(tiny(), tmp_path, to="torch")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", CHANGED)
def test_modified_model_is_not_exported(tmp_path: Path, kind: str) -> None:
    change, said = CHANGED[kind]
    model = tiny_model()
    change(model)
    with pytest.raises(ExportError, match=said):
        export(model, tmp_path / "model.pt2", to="torch")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not find_spec("openvino"), reason="openvino is not installed")
@pytest.mark.parametrize("resample", get_args(Resample))
def test_engines_agree_at_any_size(tmp_path: Path, resample: Any) -> None:
    import openvino

    model = tiny(resample=resample)
    export(model, tmp_path / "model.onnx", to="onnx")
    compiled = openvino.Core().compile_model(tmp_path / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for shape in ((2, 3, 32, 48), (1, 3, 64, 24), (5, 3, 16, 80), (1, 3, 8, 8), (1, 3, 160, 152)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(compiled(images.numpy())[0]), model(images), rtol=1e-4, atol=1e-5
            )


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr(command, "open_model", lambda _: tiny())
    monkeypatch.setattr(module, "_write_onnx", lambda _, file, fixed_size: file.touch())
    assert cli.main(["export", "vit_nano_4", "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 0
    assert (
        "The file was not compared with the model, because onnxruntime is not installed. Install it: pip install "
        "'vitlite[onnx]'" in capsys.readouterr().out
    )
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vitlite\[onnx\]'"):
        export(tiny(), tmp_path / "model.onnx", to="onnx")
    monkeypatch.setattr(command, "open_model", lambda _: pytest.fail("the model was fetched"))
    assert cli.main(["export", "vit_nano_4", "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 1
    assert "pip install 'vitlite[onnx]'" in capsys.readouterr().err


@NEEDS_NEWER
def test_a_file_for_one_image_size_suits_a_quantizer(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, images = tiny(), torch.randn(3, 3, 32, 48)
    assert export(model, tmp_path / "model.onnx", to="onnx", fixed_size=True)["onnxruntime"] < 1e-5
    with pytest.raises(Exception, match="Got invalid dimensions for input: images"):
        run(tmp_path / "model.onnx", "onnx", torch.randn(3, 3, 32, 40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quant_pre_process(tmp_path / "model.onnx", tmp_path / "prepared.onnx")  # asserts with free sizes
        quantize_dynamic(tmp_path / "prepared.onnx", tmp_path / "int8.onnx")
    logits = run(tmp_path / "int8.onnx", "onnx", images)
    expected = model(images).detach()
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_default_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("runs/pets/best", "owner/best", "best"):
        assert command._target(Namespace(model=model, out=None, to="onnx")) == Path("best.onnx")


@NEEDS_NEWER
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[SimpleNamespace] = []

    def open_model(args: Any) -> ViT:
        opened.append(args)
        return tiny()

    monkeypatch.setattr(command, "open_model", open_model)
    assert cli.main(["export", "owner/name", "--to", "torch", "--size", "64x32"]) == 0
    assert capsys.readouterr().out == (
        "name.pt2: accepts any batch size, and heights and widths that are multiples of 8, at least 16\n"
        "Compared with the model in torch on 3 batches: logits differ by at most 0 (relative)\n"
    )
    assert Path("name.pt2").stat().st_size > 1000
    assert (opened[0].model, opened[0].size) == ("owner/name", (64, 32))
    run(Path("name.pt2"), "torch", torch.randn(1, 3, 16, 16))
    assert cli.main(["export", "owner/name", "--to", "torch", "--fixed-size", "--out", "one.pt2"]) == 0
    assert capsys.readouterr().out.startswith("one.pt2: accepts any batch size, and images of 32 x 48 pixels\n")
    assert cli.main(["export", "owner/name", "--to", "torch"]) == 1  # a file that nobody named stays
    assert (
        capsys.readouterr().err == "vitlite: error: name.pt2 already exists. To replace the file, pass --out name.pt2\n"
    )
    assert cli.main(["export", "owner/name", "--to", "torch", "--out", "name.pt2"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "vit_nano_4", "--to", "tensorrt"]) == 2
    assert "invalid choice: 'tensorrt'" in capsys.readouterr().err
    assert cli.main(["export", "vit_nano_4", "--to", "torch", "--out", "name.onnx"]) == 1
    assert (
        capsys.readouterr().err
        == "vitlite: error: --out name.onnx must end in .pt2 with --to torch. Choose another name.\n"
    )


KILLED = """
import sys, torch, vitlite
from vitlite.export import export
model = vitlite.create("vit_nano_4.cifar10")
with torch.no_grad():
    model.head.bias.add_(1.0)
print("ready", flush=True)
export(model, sys.argv[1], to=sys.argv[2])
"""


@NEEDS_NEWER
def test_killed_export_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    """The next export removes the folders that the killed ones left."""
    path, model = tmp_path / "model.pt2", vitlite.create("vit_nano_4.cifar10")
    export(model, path, to="torch")
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images)
    for seconds in (0.05, 2.0):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(path), "torch"], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(seconds)
        child.kill()
        child.communicate()
        found = run(path, "torch", images)
        assert any(torch.allclose(found, wanted + shift, atol=1e-4) for shift in (0, 1))
    export(model, path, to="torch")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.usefixtures("uncovered")
def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("old")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    line = [sys.executable, "-c", ignore + limit + KILLED, str(path), "torch"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ExportError: Cannot write" in ended.stderr.splitlines()[-1]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model.pt2"]


def test_failed_export_names_the_torch_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such shape\nand a long story")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(
        ExportError,
        match=r"cannot export this model \(no such shape\)\. Try another version of torch\. Exports need 2\.8 or "
        rf"later, and {re.escape(torch.__version__)} is installed",
    ):
        export(tiny(), tmp_path / "model.pt2", to="torch")
    assert not list(tmp_path.iterdir())

"""The same network in other libraries and engines, with the same weights.

Each function takes a `ViT` and images, and gives a call without arguments that returns the logits, in two threads or
however many torch has. Whatever a library needs is imported inside, so that one that is not installed says so.
"""

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.nn.vit import ViT

Call = Callable[[], Any]


def load(name: str) -> Any:
    """Imports a library that may import torchvision, whose wheel for CUDA lacks operators beside a torch without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import_module("torchvision")
        except ModuleNotFoundError:
            pass  # the others do without
        except RuntimeError:  # operator torchvision::nms does not exist
            for module in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
                del sys.modules[module]
            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float limit) -> Tensor")
        return import_module(name)


def timm(model: ViT, images: Tensor) -> Call:
    """timm, eager."""
    c = model.config
    build = load("timm").models.VisionTransformer
    theirs = build(c.size, c.patch_size, c.channels, c.num_classes, "token", c.dim, c.depth, c.heads, c.mlp_dim / c.dim)
    theirs.load_state_dict(model.state_dict())
    return _eager(theirs, images)


def torchvision(model: ViT, images: Tensor) -> Call:
    """torchvision, eager."""
    c = model.config
    build = load("torchvision").models.VisionTransformer
    theirs = build(c.size[0], c.patch_size, c.depth, c.heads, c.dim, c.mlp_dim, num_classes=c.num_classes)
    theirs.load_state_dict(dict(rename_tensors(FORMATS["torchvision"], "", model.state_dict())))
    return _eager(theirs, images)


def transformers(model: ViT, images: Tensor) -> Call:
    """transformers, eager, with its own choice of attention."""
    library, c = load("transformers"), model.config
    config = library.ViTConfig(
        hidden_size=c.dim, num_hidden_layers=c.depth, num_attention_heads=c.heads, intermediate_size=c.mlp_dim,
        layer_norm_eps=c.norm_eps, image_size=c.size[0], patch_size=c.patch_size, num_labels=c.num_classes,
    )  # fmt: skip
    state = dict(rename_tensors(FORMATS["transformers"], "vit.", model.state_dict()))
    theirs = library.ViTForImageClassification.from_pretrained(None, config=config, state_dict=state)
    run = _eager(theirs, images)
    return lambda: run().logits


def vit_pytorch(model: ViT, images: Tensor) -> Call:
    """vit-pytorch, eager: norms around its patches and no bias for q, k and v, so it has weights of its own."""
    c = model.config
    theirs = load("vit_pytorch").ViT(
        image_size=c.size[0], patch_size=c.patch_size, num_classes=c.num_classes, dim=c.dim, depth=c.depth,
        heads=c.heads, mlp_dim=c.mlp_dim, dim_head=c.dim // c.heads,
    )  # fmt: skip
    return _eager(theirs, images)


def torch_compile(model: ViT, images: Tensor) -> Call:
    """torch.compile of vitlite's own model, with frozen weights and measured kernels."""
    options: dict[str, Any] = {"freezing": True, "max_autotune": True}
    run = torch.compile(model, options=options)
    return lambda: run(images)


def onnxruntime(model: ViT, images: Tensor) -> Call:
    """ONNX Runtime, with all of its graph optimizations, on the graph that torch exports."""
    library = load("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "model.onnx"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (images,), file, dynamo=True, verbose=False)
        session = library.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: images.numpy()}
    return lambda: session.run(None, inputs)[0]


def traced(model: torch.nn.Module, images: Tensor) -> Any:
    """A network as a graph of OpenVINO, for these images' shape."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain = copy.deepcopy(model).float().requires_grad_(False)
        return load("openvino").convert_model(plain, example_input=images.float(), input=list(images.shape))


def compiled_by_openvino(model: torch.nn.Module, images: Tensor, narrow: bool) -> Call:
    """OpenVINO, converted from torch for these images' shape; bfloat16 as its own precision hint."""
    run = openvino_network(model, images, narrow)
    return lambda: run(images)


def openvino_network(model: torch.nn.Module, images: Tensor, narrow: bool) -> Callable[[Tensor], Any]:
    """The same, to be given other images of that shape."""
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32",
    }
    compiled = load("openvino").Core().compile_model(traced(model, images), "CPU", settings)
    return lambda given: compiled(given.float().numpy())[0]


def openvino(model: ViT, images: Tensor) -> Call:
    """OpenVINO, in the model's dtype."""
    return compiled_by_openvino(model, images, narrow=model.dtype is torch.bfloat16)


PEERS: dict[str, Callable[[ViT, Tensor], Call]] = {
    "timm": timm,
    "torchvision": torchvision,
    "transformers": transformers,
    "vit-pytorch": vit_pytorch,
    "torch.compile": torch_compile,
    "ONNX Runtime": onnxruntime,
    "OpenVINO": openvino,
}
NARROW = ("timm", "OpenVINO")  # those that are measured in bfloat16 too


def _eager(theirs: torch.nn.Module, images: Tensor) -> Call:
    theirs.eval().to(images.dtype)

    def run() -> Any:
        with torch.inference_mode():
            return theirs(images)

    return run

"""The reference libraries. torchvision's wheel expects a CUDA torch; beside a CPU build two operators are missing."""

import sys
import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchvision
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

    import open_clip
    import timm
    import transformers
    import vit_pytorch

__all__ = ["open_clip", "timm", "torchvision", "transformers", "vit_pytorch"]

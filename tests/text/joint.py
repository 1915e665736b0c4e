"""Tiny joint checkpoints, as open_clip and transformers build and write them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import open_clip, transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from vocabularies import clip_tokenizer, write_siglip_tokenizer

from vitlite.zoo import text as zoo
from vitlite.zoo.text import TextRecord

VOCABULARY = 600
END = VOCABULARY - 1
TEXT = {"context_length": 12, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 3}
CLIP = replace(zoo.CLIP, head_dim=16, start=END - 1, end=END, context=12)
SIGLIP = replace(zoo.SIGLIP, head_dim=16, context=12)
SIGLIP_TEXT = {
    **TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
    "act_kwargs": {"approximate": "tanh"},
}  # fmt: skip
SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT_SIZES = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 12}
IMAGE_SIZES = {**SIZES, "image_size": 32, "patch_size": 8}


class Joint(NamedTuple):
    build: Callable[[], nn.Module]
    record: TextRecord
    vectors: Callable[[nn.Module, Tensor], Tensor]


def _open_clip(text: dict[str, Any], quick: bool = False, bias: float | None = None) -> nn.Module:
    vision = {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8}
    if "proj_bias" not in text:
        return open_clip.CLIP(24, vision, text, quick_gelu=quick, init_logit_bias=bias)
    timm_vision = {
        "image_size": 32, "timm_model_name": "vit_base_patch16_siglip_224", "timm_pool": "map", "timm_proj": "none",
        "timm_model_pretrained": False,
    }  # fmt: skip
    return open_clip.CustomTextCLIP(32, timm_vision, text, init_logit_bias=bias)


def _clip(act: str = "quick_gelu") -> nn.Module:
    text = {**TEXT_SIZES, "hidden_act": act, "eos_token_id": END, "bos_token_id": END - 1, "pad_token_id": 0}
    image = {**IMAGE_SIZES, "hidden_act": act}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=24))


def _siglip() -> nn.Module:
    text = {**TEXT_SIZES, "projection_size": 32}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=IMAGE_SIZES))


def _features(model: nn.Module, ids: Tensor) -> Tensor:
    found = model.get_text_features(input_ids=ids)  # type: ignore[operator]
    return found if isinstance(found, Tensor) else found.pooler_output


JOINT = {
    "open_clip, CLIP": Joint(lambda: _open_clip(TEXT), CLIP, lambda m, ids: m.encode_text(ids)),  # type: ignore[operator]
    "open_clip, quick GELU": Joint(
        lambda: _open_clip(TEXT, quick=True),
        replace(CLIP, mlp="quick_gelu"),
        lambda m, ids: m.encode_text(ids),  # type: ignore[operator]
    ),
    "open_clip, SigLIP": Joint(
        lambda: _open_clip(SIGLIP_TEXT, bias=-10.0),
        SIGLIP,
        lambda m, ids: m.encode_text(ids),  # type: ignore[operator]
    ),
    "transformers, CLIP": Joint(_clip, replace(CLIP, mlp="quick_gelu", pool="eos"), _features),
    "transformers, SigLIP": Joint(_siglip, SIGLIP, _features),
}


def spread(model: nn.Module) -> nn.Module:
    """Give every weight a value that matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name == "logit_scale":
                tensor.fill_(2.5)
            elif name != "logit_bias":
                centre = 1.0 if "norm" in name.split(".")[-2:][0] or ".ln_" in name else 0.0
                tensor.copy_(centre + 0.2 * torch.randn(tensor.shape, generator=generator))
            else:
                tensor.fill_(-3.0)
    return model.eval()


def write(model: nn.Module, path: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)


def sentences() -> Tensor:
    """Ids of sentences: the end of text at different places, then padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, END - 1, (6, 12), generator=generator)
    for row, length in enumerate((1, 3, 5, 8, 11, 12)):
        ids[row, length - 1] = END
        ids[row, length:] = 0
    return ids


PROCESSOR = {
    "do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, "resample": 3,
    "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True,
}  # fmt: skip
SIGLIP_PROCESSOR = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "rescale_factor": 1 / 255,
    "size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "SiglipImageProcessor",
}  # fmt: skip


def write_repository(folder: Path, kind: str) -> Any:
    """Write a tiny joint checkpoint of transformers with its tokenizer, and return the model of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "clip":
        clip_tokenizer().save_pretrained(folder)
        text = {**TEXT_SIZES, "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
        text |= {"bos_token_id": 49406, "pad_token_id": 0}
        config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE_SIZES, projection_dim=24)
        model = transformers.CLIPModel(config)
    else:
        words = write_siglip_tokenizer(folder, "</s>")
        text = {**TEXT_SIZES, "vocab_size": words, "max_position_embeddings": 64, "projection_size": 32}
        text |= {"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 1}
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=IMAGE_SIZES))
    spread(model).save_pretrained(folder)
    processor = PROCESSOR if kind == "clip" else SIGLIP_PROCESSOR
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model

"""Writes timm.txt: the architectures of timm that vitlite computes, each proved by a small model with random weights.

    python examples/maintain/timm_architectures.py

For every name that timm gives to a Vision Transformer, a small one is built by it, filled, saved, and loaded by vitlite
with what the name stands for. Only where both answer the same is the name written down. Run it after a new version of
timm, or when vitlite has learned to compute more; tests/parity/test_architectures.py says when that is due.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

import torch  # noqa: E402
from peers import timm  # noqa: E402
from references import distance, final_norm_of, mlp_of, norm_of, rotation_of, spread  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from torch import nn  # noqa: E402

from vitlite import VitliteError, load  # noqa: E402
from vitlite.checkpoints.formats.timm import POOLS, Architecture  # noqa: E402
from vitlite.checkpoints.key_mapping import infer_geometry, map_keys  # noqa: E402
from vitlite.config import FIELDS, Resample, Rotation  # noqa: E402
from vitlite.nn.positions import RESAMPLE, resample_positions  # noqa: E402

TABLE = ROOT / "src" / "vitlite" / "checkpoints" / "data" / "timm.txt"
HEAD = """\
# timm's architectures that vitlite computes, and what their names stand for beside what tensors tell. Written by
# examples/maintain/timm_architectures.py, which compares a small model of each with timm's.
#
# image_size            pixels; height and width
# heads                 of attention
# norm_eps              of every norm
# pool, ..., resample    as in ViTConfig; so is final_norm; a rotation is the list of its fields that are not as usual
# cls_position          whether the class token has a row in the position table
# kernel_size           of the patches, in pixels, or in cells of a ResNet before them
# stem_stride           pixels to a side of such a cell; 1 where there is no ResNet
# dynamic               whether it takes images of any size
# map_of_patches        whether global_pool="map" leaves out the tokens before the patches
# dim, ..., layer_scale as in ViTConfig: what tensors tell too, and have to confirm unless a config.json says otherwise
"""
NAFLEX = ("naflexvit_base_patch16_siglip", "naflexvit_so400m_patch16_siglip")
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit", "qwen3_vit")
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
EQUAL = 5e-5  # where the stem is a ResNet of 50 layers, rounding adds up


def stands_for(model: nn.Module) -> Architecture:
    """What the name of a model of timm's stands for."""
    encoder = getattr(model, "encoder", model)  # Qwen3's classifier is around one
    norm = encoder.blocks[0].norm1
    pool, eva = POOLS[model.global_pool], isinstance(model, timm.models.Eva)
    if isinstance(model, VisionTransformerDistilled):
        pool = "cls_and_distillation"
    if pool == "map" and eva:
        pool = "map_all"
    naflex = hasattr(model, "embeds")
    embed = model.embeds if naflex else encoder.patch_embed
    kernel = embed.patch_size[0] if naflex else embed.proj.kernel_size[0]
    return Architecture(
        image_size=model.embeds.pos_embed.shape[1] * kernel if naflex else model.pretrained_cfg["input_size"][1],
        heads=encoder.blocks[0].attn.num_heads,
        norm_eps=norm.eps,
        pool=pool,
        norm=norm_of(norm),
        cls_position=model.num_prefix_tokens == 0 or not model.no_embed_class,
        positions="none" if getattr(model, "embeds", encoder).pos_embed is None else "learned",
        rope=rotation_of(model),
        resample="timm",  # or as `resampling_of` finds
        final_norm=final_norm_of(model),
        kernel_size=kernel,
        stem_stride=1 if naflex else embed.img_size[0] // embed.grid_size[0] // kernel,
        dynamic=getattr(model, "dynamic_img_size", True),
        map_of_patches=not eva,
        mlp=mlp_of(encoder.blocks[0].mlp),
        **{name: value for name, value in built(model).items() if name != "mlp"},
    )


def geometry_of(model: nn.Module) -> dict[str, Any]:
    """Return the fields of the config that the tensors of a model tell."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    geometry = infer_geometry(
        map_keys(shapes, model.embeds.patch_size[0] if hasattr(model, "embeds") else None), shapes
    )
    return {name: value for name, value in geometry.items() if name in FIELDS}


def built(model: nn.Module) -> dict[str, Any]:
    """Return the columns of the table that the tensors of a model tell."""
    geometry = geometry_of(model)
    columns = Architecture._fields[Architecture._fields.index("dim") :]
    return {name: geometry.get(name) for name in columns}


def is_computed(small: nn.Module, architecture: Architecture) -> bool:
    """Return whether vitlite computes what a small model does, with what the name stands for."""
    encoder = getattr(small, "encoder", small)
    size = (256, 256) if hasattr(small, "embeds") else encoder.patch_embed.img_size
    fields = {name: value for name, value in architecture._asdict().items() if name in FIELDS} | geometry_of(small)
    fields |= {"image_size": tuple(size), "heads": encoder.blocks[0].attn.num_heads}
    fields["layer_scale"] = 1e-5 if fields["layer_scale"] else None
    if fields["registers"]:
        fields["cls_position"] = False
    fields |= {name: getattr(architecture, name) for name in ("positions", "rope", "pool", "final_norm", "mlp")}
    if fields["rope"] is not None:
        fields["rope"] = asdict(fields["rope"])
    with TemporaryDirectory() as folder, torch.no_grad():
        save_file(small.state_dict(), Path(folder) / "model.safetensors")
        config = {"vitlite": {"config": fields}}  # which names the network
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            ours = load(folder)
        except VitliteError:
            return False
        images = torch.randn(2, ours.config.channels, *size, generator=torch.Generator().manual_seed(0))
        theirs = small(images)
        return theirs.shape == (2, ours.config.num_classes) and distance(ours(images), theirs) < EQUAL


def cell(value: Any) -> str:
    """The text of a cell of the table."""
    if isinstance(value, Rotation):
        usual = asdict(Rotation())
        changed = [f"{name}={part:g}" if isinstance(part, float) else f"{name}={part}"
                   for name, part in asdict(value).items() if part != usual[name]]  # fmt: skip
        return ",".join(changed) or "default"
    return "-" if value is None else str(value)


def resampling_of(small: nn.Module) -> Resample:
    """By whose arithmetic timm stretches the position table of a model that it loads at twice its size."""
    if hasattr(small, "encoder"):
        return "jax"  # Qwen3's, on every call: tests/parity compares it
    if hasattr(small, "embeds"):
        return "naflex"  # on every call, too
    with TemporaryDirectory() as folder:
        timm.models.save_for_hf(small, folder, model_args=SMALL, safe_serialization=True)
        twice = [2 * side for side in small.patch_embed.img_size]
        large = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=twice)
    for method in RESAMPLE:
        table = resample_positions(small.pos_embed, small.patch_embed.grid_size, large.patch_embed.grid_size, method)
        if table.shape == large.pos_embed.shape and (table - large.pos_embed).abs().max() < EQUAL:
            return method
    raise ValueError(f"timm stretches the table of {small.pretrained_cfg['architecture']} in none of these ways")


def small_model(name: str) -> nn.Module:
    """A model of timm's by this name, with few and narrow blocks, and weights as training leaves them."""
    if name in NAFLEX:
        return spread(timm.create_model(name, **SMALL))
    whole = timm.create_model(name, device="meta", depth=1)
    patches = getattr(whole, "encoder", whole).patch_embed
    size = 64 if hasattr(patches, "backbone") else 2 * patches.patch_size[0]
    grid = {"pos_embed_grid_size": 2} if hasattr(whole, "encoder") else {}
    return spread(timm.create_model(name, img_size=size, **grid, **SMALL))


def architecture_of(name: str) -> Architecture | None:
    """What a name of timm's stands for; None where vitlite does not compute that."""
    try:
        whole = timm.create_model(name, device="meta")
        candidate = stands_for(whole)
        small = small_model(name)
    except (TypeError, AttributeError, KeyError, StopIteration, AssertionError, VitliteError):
        return None  # another network altogether
    if not is_computed(small, candidate):
        return None
    return candidate._replace(resample=resampling_of(small)) if candidate.positions == "learned" else candidate


def table() -> list[str]:
    """The lines of the table."""
    rows = [("name", *Architecture._fields)]
    for name in [*(name for module in MODULES for name in timm.list_models(module=module)), *NAFLEX]:
        found = architecture_of(name)
        if found is not None:
            rows.append((name, *map(cell, found)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return [*HEAD.splitlines(), "", "# " + lines[0], *lines[1:]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE.write_text("\n".join(table()) + "\n", encoding="utf-8")

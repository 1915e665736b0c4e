"""The text towers of open_clip and transformers, read from their files, compute the same vectors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from joint import CLIP, JOINT, SIGLIP, sentences, spread, write
from models import near
from safetensors.torch import load_file, save_file

from vitlite.errors import CheckpointError, InputError
from vitlite.text.weights import JointWeights, read_text_tower
from vitlite.zoo.text import TextRecord


def _saved(name: str, path: Path) -> tuple[torch.nn.Module, Path]:
    model = spread(JOINT[name].build())
    write(model, path / "joint.safetensors")
    return model, path / "joint.safetensors"


@pytest.mark.parametrize("name", JOINT)
def test_vectors_equal(name: str, tmp_path: Path) -> None:
    model, path = _saved(name, tmp_path)
    ids = sentences()
    weights = read_text_tower(path, JOINT[name].record)
    with torch.no_grad():
        assert near(weights.tower(ids), JOINT[name].vectors(model, ids))
    assert weights.scale == pytest.approx(2.718281828**2.5)
    assert weights.bias == (-3.0 if "SigLIP" in name else None)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("open_clip, CLIP", replace(CLIP, pool="last")),
        ("open_clip, CLIP", replace(CLIP, causal=False)),
        ("open_clip, CLIP", replace(CLIP, mlp="quick_gelu")),
        ("open_clip, SigLIP", replace(SIGLIP, pool="argmax")),
        ("transformers, SigLIP", replace(SIGLIP, causal=True)),
    ],
)
def test_a_mistake_is_seen(name: str, mistake: TextRecord, tmp_path: Path) -> None:
    model, path = _saved(name, tmp_path)
    ids = sentences()
    with torch.no_grad():
        assert not near(read_text_tower(path, mistake).tower(ids), JOINT[name].vectors(model, ids))


def test_padding_to_the_batch_is_an_error(tmp_path: Path) -> None:
    _, path = _saved("transformers, SigLIP", tmp_path)
    with pytest.raises(InputError, match=r"shape \(sentences, 12\), got \(6, 8\). Pad each sentence"):
        read_text_tower(path, SIGLIP).tower(sentences()[:, :8])


def _changed(path: Path, without: str = "", **tensors: torch.Tensor) -> JointWeights:
    state = {name: tensor for name, tensor in load_file(path).items() if not without or not name.endswith(without)}
    save_file(state | tensors, path)
    return read_text_tower(path, CLIP)


def test_other_files_are_errors(tmp_path: Path) -> None:
    _, path = _saved("open_clip, CLIP", tmp_path)
    with pytest.raises(CheckpointError, match="vitlite does not support a text tower with cls_emb"):
        _changed(path, cls_emb=torch.zeros(32))
    _, path = _saved("open_clip, CLIP", tmp_path)
    with pytest.raises(CheckpointError, match=r"no blocks\.1\.mlp\.fc1\.bias"):
        _changed(path, without="transformer.resblocks.1.mlp.c_fc.bias")
    _, path = _saved("open_clip, CLIP", tmp_path)
    with pytest.raises(CheckpointError, match=r"token_embedding\.weight has values that are not finite"):
        _changed(path, **{"token_embedding.weight": torch.full((600, 32), torch.nan)})
    _, path = _saved("open_clip, CLIP", tmp_path)
    with pytest.raises(CheckpointError, match="without logit_scale"):
        _changed(path, without="logit_scale")
    save_file({"visual.conv1.weight": torch.zeros(4, 3, 8, 8)}, path)
    with pytest.raises(CheckpointError, match="contains no CLIP or SigLIP text tower"):
        read_text_tower(path, CLIP)

"""What is saved is read back whole by vitlite, and by timm; and it goes to the Hub as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import CHANGED, LoRA, Quantised
from models import IMAGES, TRANSFORM, near, tiny_model
from peers import timm, transformers
from safetensors.torch import load_file, save_file
from server import Hub
from torch import nn

from vitlite import load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.formats.timm import transform_from_timm
from vitlite.checkpoints.reader import checked_metadata
from vitlite.checkpoints.save import _warn_once, card, push_to_hub, write_tensors
from vitlite.errors import CheckpointError, DownloadError
from vitlite.images import Preprocess
from vitlite.training.data import digest


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("changes", [
    {}, {"registers": 2, "cls_position": False, "layer_scale": 0.1}, {"pool": "mean_with_cls"}, {"pre_logits": 8},
    {"pool": "cls_and_mean", "norm_eps": 1e-5}, {"class_token": False, "pool": "mean", "final_norm": "pooled"},
    {"input_norm": "patches", "head_dim": 4, "qkv_bias": False}, {"positions": "sincos2d", "mlp": "gelu_tanh"},
    {"image_size": (32, 16), "input_norm": "tokens", "mlp": "quick_gelu", "num_classes": 0},
    {"channels": 1, "inner_norm": "both"},
])  # fmt: skip
def test_save_and_load(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    images = torch.randn(1, model.config.channels, *model.config.size)
    assert torch.equal(again(images), model(images))
    assert again.config.to_dict() == model.config.to_dict()
    assert again.labels == model.labels
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


def test_preprocessing_is_saved_and_follows_the_size(tmp_path: Path) -> None:
    tiny_model().save(tmp_path)
    assert load(tmp_path).preprocess.transform == TRANSFORM
    larger = load(tmp_path, image_size=64).preprocess.transform
    assert (larger.size, larger.resize) == ((64, 64), (72, 72))


@pytest.mark.parametrize("changes", [
    {}, {"pool": "mean", "mlp": "quick_gelu", "input_norm": "tokens"}, {"qkv_bias": False, "image_size": (32, 48)},
    {"registers": 1, "cls_position": False, "layer_scale": 0.1},
    {"class_token": False, "pool": "mean", "final_norm": "pooled", "num_classes": 0},
    {"pool": "map"}, {"pool": "map", "class_token": False, "mlp": "gelu_tanh"},
])  # fmt: skip
def test_timm_loads_the_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    model.save(tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, *model.config.size)
    assert near(theirs(images), model(images))
    data = timm.data.resolve_model_data_config(theirs)
    assert (data["mean"], data["interpolation"], int(32 / data["crop_pct"])) == ([0.5] * 3, "bicubic", 36)


@pytest.mark.parametrize(("classes", "labels"), [
    (3, ("x", "y", "z")), (3, None), (1000, tuple(f"own {number}" for number in range(1000))), (1000, None), (0, None),
])  # fmt: skip
def test_transformers_names_classes_as_vitlite(classes: int, labels: tuple[str, ...] | None, tmp_path: Path) -> None:
    """Of a folder for timm it takes 1,000 classes without names for those of ImageNet."""
    model = tiny_model(num_classes=classes)
    model.labels = labels
    model.save(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted", "timm")
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        theirs = transformers.AutoConfig.from_pretrained(folder)
        named = labels or tuple(f"LABEL_{number}" for number in range(classes))
        assert classes == 0 or tuple(theirs.id2label.values()) == named
        opened = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert tuple(opened.pretrained_cfg.get("label_names") or ()) == named
        assert load(folder).labels == labels


@pytest.mark.parametrize(("changes", "reason"), [
    ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
    ({"pool": "mean_with_cls", "norm_eps": 1e-12}, "norm_eps=1e-12, pool='mean_with_cls'"),
    ({"pool": "cls_and_distillation", "registers": 1, "cls_position": False}, "`vitlite convert --to timm` writes"),
])  # fmt: skip
def test_folder_that_timm_cannot_open_is_announced_once(
    changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    model = tiny_model(**changes)
    for _ in range(2):  # as a run does
        model.save(tmp_path)
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert record.getMessage().startswith("timm and transformers cannot load the saved model: ")
    about = json.loads((tmp_path / "config.json").read_text())
    assert reason in about["vitlite"]["for_vitlite_alone"]
    assert load(tmp_path).config == model.config
    with pytest.raises(KeyError, match="architecture"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    with pytest.raises(ValueError, match="Unrecognized model"):
        transformers.AutoConfig.from_pretrained(tmp_path)
    caplog.clear()
    tiny_model().save(tmp_path)
    assert not caplog.records
    assert "for_vitlite_alone" not in json.loads((tmp_path / "config.json").read_text())["vitlite"]


def test_mean_and_std_are_scaled_for_timm(tmp_path: Path) -> None:
    model = tiny_model()
    model.preprocess = Preprocess(replace(TRANSFORM, scale=1 / 127.5, mean=(1.0,) * 3, std=(1.0,) * 3), model)
    model.save(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert data["mean"] == data["std"] == [0.5] * 3


def test_resize_with_two_ratios_is_not_written_for_timm(tmp_path: Path) -> None:
    model = tiny_model(image_size=(32, 24))
    for resize, known in (((36, 27), True), ((35, 26), True), ((36, 36), False)):  # timm has one share for both sides
        model.preprocess = Preprocess(replace(TRANSFORM, size=(32, 24), resize=resize), model)
        model.save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert ("pretrained_cfg" in config) == known
        assert not known or transform_from_timm(config).resize == resize
        assert load(tmp_path).preprocess.transform == model.preprocess.transform


def test_timm_loads_the_file_strictly(tmp_path: Path) -> None:
    model = tiny_model()
    model.save(tmp_path)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5,
        num_classes=3,
    ).eval()  # fmt: skip
    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert near(theirs(IMAGES), model(IMAGES))


def test_file_keeps_the_dtype_and_load_uses_the_default(tmp_path: Path) -> None:
    tiny_model().bfloat16().save(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["head.bias"].dtype == torch.bfloat16
    assert load(tmp_path).dtype == torch.float32
    assert load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_tied_and_strided_tensors_are_written_whole(tmp_path: Path) -> None:
    model = tiny_model()
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight
    model.head.weight = torch.nn.Parameter(torch.randn(16, 3).T)
    model.save(tmp_path)
    again = load(tmp_path)
    assert near(again(IMAGES), model(IMAGES))
    assert again.blocks[1].norm1.weight is not again.blocks[0].norm1.weight


def test_weights_and_config_json_carry_the_same_id(tmp_path: Path) -> None:
    for name, model in (("one", tiny_model()), ("two", tiny_model(num_classes=4))):
        model.labels = None
        model.save(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert checked_metadata(tmp_path / name / "model.safetensors")["vitlite_id"] == config["vitlite_id"]
    (tmp_path / "two" / "config.json").replace(tmp_path / "one" / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: .* written for other weights: .* Save the model again"):
        load(tmp_path / "one")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(json.dumps({"vitlite": config["vitlite"]}))
    with pytest.raises(CheckpointError, match=r"config\.json: .* not saved together: only one .* vitlite_id"):
        load(tmp_path / "one")


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    model = tiny_model()
    model.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    broken = tiny_model().to("meta")
    with pytest.raises(CheckpointError, match=r"cls_token is on the meta device"):
        broken.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


# ---- the Hub


def test_push_uploads_a_folder_with_a_card(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server of the tests takes no uploads: what huggingface_hub would be given is looked at instead."""
    import huggingface_hub

    calls: list[Any] = []

    def upload(self: Any, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        calls.append((repo_id, files))
        return type("Commit", (), {"commit_url": "https://hub/commit/1"})

    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, repo, **options: calls.append((repo, options))
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert push_to_hub(tiny_model(), "me/vit", private=True) == "https://hub/commit/1"
    assert calls[0] == ("me/vit", {"private": True, "exist_ok": True})
    repo, files = calls[1]
    assert repo == "me/vit"
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert torch.equal(load(tmp_path)(IMAGES), tiny_model()(IMAGES))
    assert json.loads(files["config.json"])["vitlite"]["labels"] == ["ant", "bee", "cow"]
    server.publish("me/vit", README_md=b"By hand.")
    push_to_hub(tiny_model(), "me/vit")
    assert set(calls[-1][1]) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("repo", "token", "address", "words"),
    [
        ("a b", None, "", "Cannot upload to .*/a b: .*Repo id must use alphanumeric chars"),
        ("me/vit", None, "nonsense", "Cannot upload to nonsense/me/vit: .*protocol|Invalid URL"),
        ("me/vit", None, "http://127.0.0.1:9", "Cannot upload to http://127.0.0.1:9/me/vit: "),
    ],
)
def test_push_errors(
    server: Hub, monkeypatch: pytest.MonkeyPatch, repo: Any, token: str | None, address: str, words: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address or server.url)
    with pytest.raises(DownloadError, match=words):
        push_to_hub(tiny_model(), repo, token=token)


def test_push_offline_is_an_error(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the client was imported, which reads the variable then."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"^Cannot upload to .*/me/vit: offline mode is on\. Unset"):
        push_to_hub(tiny_model(), "me/vit")
    assert not server.log


def test_card(tmp_path: Path) -> None:
    text = card(tiny_model(), "me/vit")
    assert text.startswith("---\nlibrary_name: vitlite\npipeline_tag: image-classification\n")
    assert 'vitlite.load("me/vit")' in text
    assert "It was trained from random weights." in text
    tiny_model(num_classes=0).save(tmp_path)
    again = load(tmp_path)
    assert f"sha256 `{again.source.sha256}`" in card(again, "me/vit")
    assert "image-feature-extraction" in card(again, "me/vit")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "preprocessor_config.json",
                                  "model.safetensors.index.json"])  # fmt: skip
def test_foreign_model_is_not_overwritten(name: str, tmp_path: Path) -> None:
    kind = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(kind).save_pretrained(tmp_path / "theirs")
    save_file({"a": torch.ones(1)}, tmp_path / "alone.safetensors")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / name).write_bytes((tmp_path / "alone.safetensors").read_bytes())
    for folder in ("theirs", "part"):
        there = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        model = load(tmp_path / "theirs")
        words = r"which vitlite did not write\. Pass a new folder\.|would overwrite its input"
        for write in (model.save, lambda target: convert(tmp_path / "theirs", target, "transformers")):
            with pytest.raises(CheckpointError, match=words):
                write(tmp_path / folder)
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} == there
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("mine")
    for _ in range(2):
        model.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("kind", CHANGED)
def test_modified_model_is_not_saved(kind: str, tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "before")
    there = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    change, said = CHANGED[kind]
    model = tiny_model()
    change(model)
    for folder in ("before", "new"):
        with pytest.raises(CheckpointError, match=said):
            model.save(tmp_path / folder)
    assert {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()} == there
    assert not (tmp_path / "new").exists()


def test_shared_layers_are_saved_separately(tmp_path: Path) -> None:
    model = tiny_model()
    model.blocks[1].mlp = model.blocks[0].mlp
    model.save(tmp_path)
    assert torch.equal(load(tmp_path)(IMAGES), model(IMAGES))


def test_lazily_negated_tensor_is_written(tmp_path: Path) -> None:
    values = torch.randn(3)
    turned = torch.complex(torch.zeros(3), values).conj().imag  # torch negates it where it is read
    assert turned.is_neg()
    write_tensors(tmp_path / "x.safetensors", {"x": turned})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], -values)
    assert digest([turned]) == digest([-values])


def test_reset_head_and_merged_lora_can_be_saved(tmp_path: Path) -> None:
    model = tiny_model()
    head = nn.Linear(16, 5)
    model.reset_head(5)
    model.head.load_state_dict(head.state_dict())
    model.labels = tuple("abcde")
    qkv = model.blocks[1].attn.qkv
    lora = LoRA(qkv)
    merged = nn.Linear(16, 48)  # as peft gives it back
    merged.weight.data = qkv.weight + lora.up.weight @ lora.down.weight
    merged.bias.data = qkv.bias + lora.up.weight @ lora.down.bias + lora.up.bias
    model.blocks[1].attn.qkv = merged
    model.save(tmp_path)
    again = load(tmp_path)
    assert near(again(IMAGES), model(IMAGES))
    assert again.labels == tuple("abcde")


def test_tensor_subclass_is_not_written(tmp_path: Path) -> None:
    weight = torch.ones(2, 3).as_subclass(Quantised)
    with pytest.raises(CheckpointError, match="Cannot write a: Quantised with"):
        write_tensors(tmp_path / "a.safetensors", {"a": weight})
    assert not list(tmp_path.iterdir())


def test_model_in_training_mode_is_saved(tmp_path: Path) -> None:
    model = tiny_model(dropout=0.1, drop_path=0.2).train()
    model(IMAGES).sum().backward()
    model.save(tmp_path)
    assert load(tmp_path).config == model.config

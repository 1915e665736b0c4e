import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from server import Hub

SCRIPT = Path(__file__).parents[2] / "examples" / "maintain" / "pin.py"
HEADER = "# name, commit and sha256\n"
TINY, SMALL = "timm/deit_tiny_patch16_224.fb_in1k", "timm/deit_small_patch16_224.fb_in1k"


def run(hub: Hub, pins: Path, pattern: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(pins.parent)}
    command = [sys.executable, str(SCRIPT), pattern, "--pins", str(pins)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_commit_and_hash_are_written_without_a_download(tmp_path: Path):
    pins = tmp_path / "pins.txt"
    pins.write_text(HEADER)
    with Hub() as hub:
        commit = hub.publish(TINY, model_safetensors=b"weights")
        done = run(hub, pins, "vit_tiny_16.deit_fb_in1k")
        assert done.returncode == 0, done.stderr
        sha256 = hashlib.sha256(b"weights").hexdigest()
        assert pins.read_text() == f"{HEADER}vit_tiny_16.deit_fb_in1k  {commit}  {sha256}\n"
        assert re.search(r"^1 of \d+ checkpoints are pinned; 0 could not be\.", done.stdout, re.MULTILINE)
        assert (hub.count("GET", "resolve"), hub.sent) == (0, 0)


def test_pins_never_change_and_survive_a_failure(tmp_path: Path):
    pins = tmp_path / "pins.txt"
    old = f"vit_tiny_16.deit_fb_in1k  {'a' * 40}  {'b' * 64}\n"
    pins.write_text(HEADER + old)
    with Hub() as hub:
        hub.publish(TINY, model_safetensors=b"other weights")
        commit = hub.publish(SMALL, model_safetensors=b"weights")
        done = run(hub, pins, "vit_*_16.deit_fb_in1k")  # tiny is pinned, small is there, base is not
    assert done.returncode == 1
    assert done.stderr.startswith("vit_base_16.deit_fb_in1k: 401 ")
    small = f"vit_small_16.deit_fb_in1k  {commit}  {hashlib.sha256(b'weights').hexdigest()}\n"
    assert pins.read_text() == HEADER + old + small
    assert re.search(r"^2 of \d+ checkpoints are pinned; 1 could not be\.", done.stdout, re.MULTILINE)


def test_file_without_a_hash_is_not_pinned(tmp_path: Path):
    pins = tmp_path / "pins.txt"
    pins.write_text(HEADER)
    with Hub() as hub:
        hub.publish(TINY, model_safetensors=b"weights")
        hub.fail.append((200, {"ETag": '"abc"', "X-Repo-Commit": "c" * 40}))
        done = run(hub, pins, "vit_tiny_16.deit_fb_in1k")
    assert done.returncode == 1
    assert "expected a sha256, got 'abc'" in done.stderr
    assert pins.read_text() == HEADER

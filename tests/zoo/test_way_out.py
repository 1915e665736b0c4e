"""What an error without a network says to do, done word by word."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from fetching import FETCH, finish, start
from PIL import Image
from server import Hub

import vitlite
from vitlite.checkpoints.convert import convert
from vitlite.errors import DownloadError
from vitlite.zoo import registry

NAME = "vit_tiny_16.deit_fb_in1k"
PICTURE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


def published(server: Hub, repo: str, folder: Path) -> None:
    files = {"_".join(file.name.rsplit(".", 1)): file.read_bytes() for file in folder.iterdir()}
    server.publish(repo, **files)


@pytest.fixture
def away(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, without a network."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "work"


@pytest.fixture
def tiny(server: Hub, tmp_path: Path) -> vitlite.ViT:
    """A checkpoint of the zoo in timm's layout, which tells neither heads nor preprocessing."""
    torch.manual_seed(0)
    record = registry.find(NAME)
    assert record.layout == "timm"
    model = vitlite.ViT(record.config).eval()
    model.save(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "timm", "timm")
    server.publish(record.repo, model_safetensors=(tmp_path / "timm/model.safetensors").read_bytes())
    return model


def test_a_name_in_python(tiny: vitlite.ViT, away: Path) -> None:
    with pytest.raises(DownloadError) as error:
        vitlite.create("vit_tiny_16.deit_fb_in1k", image_size=32)
    said = re.search(r"download (\S+) and use that file here: (vitlite\.create\(.*?\))\. ", str(error.value))
    assert said is not None
    url, line = said.groups()
    assert line == f"vitlite.create('{NAME}', weights='model.safetensors')"
    urllib.request.urlretrieve(url, "model.safetensors")
    model = eval(line)
    assert torch.equal(model(torch.zeros(1, 3, 224, 224)), tiny(torch.zeros(1, 3, 224, 224)))


def test_a_name_at_the_command_line(tiny: vitlite.ViT, away: Path) -> None:
    Image.new("RGB", (32, 32)).save("a.png")
    command = [sys.executable, "-m", "vitlite", "classify", "a.png", "--model", NAME]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    said = re.search(r"download (\S+) and use that file here: (--model \S+ --weights \S+) ", done.stderr)
    assert said is not None, done.stderr
    url, words = said.groups()
    assert words == f"--model {NAME} --weights model.safetensors"
    urllib.request.urlretrieve(url, "model.safetensors")
    again = subprocess.run([*command[:-2], *shlex.split(words)], capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith("a.png")


def test_a_command_that_takes_the_name_first(tiny: vitlite.ViT, away: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "vitlite", "positions", NAME, "--out", "a.png"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert "(export and positions take the name without --model)" in done.stderr
    shutil.copy(tmp_path / "timm/model.safetensors", ".")
    again = subprocess.run([*line, "--weights", "model.safetensors"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr


@pytest.fixture
def nano(server: Hub, tmp_path: Path) -> vitlite.ViT:
    model = vitlite.create("vit_nano_4")
    model.save(tmp_path / "saved")
    published(server, "someone/vit", tmp_path / "saved")
    return model


def fetched_by_hand(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command that an error names, where there is a network."""
    said = re.search(r"Where there is a network: `hf (download [^`]+)`\. Copy that folder here", text)
    assert said is not None, text
    with monkeypatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE")
        program = Path(sys.executable).with_name("hf")
        if not program.exists():
            pytest.skip("needs a newer huggingface_hub")
        subprocess.run([program, *shlex.split(said[1])], check=True, capture_output=True)


def test_a_repository_in_python(nano: vitlite.ViT, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError) as error:
        vitlite.load("someone/vit")
    fetched_by_hand(str(error.value), monkeypatch)
    said = re.search(r"instead of someone/vit: (vitlite\.load\(.*?\))\. ", str(error.value))
    assert said is not None
    model = eval(said[1])
    assert torch.equal(model(PICTURE), nano(PICTURE))
    assert model.labels == nano.labels


def test_a_repository_at_the_command_line(nano: vitlite.ViT, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (32, 32)).save("a.png")
    command = [sys.executable, "-m", "vitlite", "classify", "a.png", "--model"]
    done = subprocess.run([*command, "someone/vit"], capture_output=True, text=True)
    fetched_by_hand(done.stderr, monkeypatch)
    said = re.search(r"instead of someone/vit: --model (\S+) ", done.stderr)
    assert said is not None
    again = subprocess.run([*command, said[1]], capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")


SCRIPTS = {
    "offline": (f"import vitlite; vitlite.create({NAME!r})", {"HF_HUB_OFFLINE": "1"}),
    "nobody there": (f"import vitlite; vitlite.create({NAME!r})", {"HF_ENDPOINT": "http://127.0.0.1:9"}),
    "no such host": (FETCH, {"HF_ENDPOINT": "http://hub.invalid"}),
    "a repository": ("import vitlite; vitlite.load('a/b')", {"HF_ENDPOINT": "http://127.0.0.1:9"}),
    "refused": (FETCH.replace("timm/vit", "a/b"), {}),
    "no such file": (FETCH.replace("model.safetensors", "none"), {}),
    "no such revision": (FETCH.replace("pin=", "revision='none', pin="), {}),
    "no file to verify": ("from vitlite.zoo import hub; hub.verify('none')", {}),
    "nowhere to write": (FETCH, {"VITLITE_CACHE": "/dev/null"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_one_short_traceback(server: Hub, name: str) -> None:
    code, variables = SCRIPTS[name]
    text = finish(start(code, **variables), code=1)
    lines = text.splitlines()
    assert re.match(r"vitlite\.\w+(\.\w+)*Error: ", lines[-1]), text
    assert text.count("Traceback") == 1
    assert len(lines) < 25, text
    assert not re.search(r"httpx|httpcore|requests/|urllib3|huggingface_hub/", text), text


def test_what_was_behind_an_error_is_in_the_log(server: Hub) -> None:
    code = "import logging; logging.basicConfig(level='DEBUG')\nfrom vitlite.zoo import hub; hub.fetch('a/b', 'c')"
    text = finish(start(code, HF_ENDPOINT="http://127.0.0.1:9"), code=1)
    assert "DEBUG:vitlite:Cannot fetch c of a/b@main" in text
    assert "Connection refused" in text
    assert os.environ["HF_ENDPOINT"] not in text

"""`vitlite train`: what it begins with, what it writes, and that a killed run is resumed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from tiny_run import CONFIG, TRANSFORM, new_model, small_cifar10, stop, stripes_in_folders

from vitlite import ViT, load
from vitlite.cli import eval as eval_command
from vitlite.cli import progress
from vitlite.cli import train as train_command
from vitlite.cli.main import main
from vitlite.cli.run_report import Report
from vitlite.images import Preprocess
from vitlite.training import read_cifar10
from vitlite.training.state import STATE
from vitlite.zoo import registry

SCRATCH = "--model vit_nano_4 --weights none --size 16 --batch 8"


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """train/ and val/, with a folder per class in each."""
    return stripes_in_folders(tmp_path / "data")


def test_train_then_eval(folders, tmp_path, capsys):
    command = f"train {folders} {SCRATCH} --epochs 1 --format jsonl --out {tmp_path / 'run'}"
    assert main(command.split()) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["epoch"] == 1
    assert "vitlite: 2 classes (lying, standing), 24 training images, 8 validation images, 1 epochs" in printed.err
    assert re.search(
        r"\nBest epoch: 1 of 1, with the highest validation accuracy \(\d+\.\d\d%\)\. The weights are in ", printed.err
    )
    best = str(tmp_path / "run" / "best")
    assert main(["eval", str(folders), "--model", best, "--out", str(tmp_path / "eval")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"lying +4 +\d+.\d%", out)
    assert re.search(r"top-1 \d+.\d\d%   loss \d\.\d{4}   8 images", out)  # no top-5 for two classes
    figures = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert figures["classes"] == ["lying", "standing"]
    assert "top5" not in figures
    assert sum(map(sum, figures["confusion"])) == 8
    with Image.open(tmp_path / "eval" / "confusion.png") as image:
        assert image.width > 200


def test_a_home_folder_after_an_equals_sign(folders, tmp_path, capsys, monkeypatch):
    """Shells expand ~ only at the start of a word, so the command does it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(f"train ~/data {SCRATCH} --epochs 1 --out=~/run".split()) == 0
    out = capsys.readouterr().out
    for name in ("classify", "eval"):
        (line,) = (line for line in out.splitlines() if line.startswith(f"  vitlite {name}"))
        assert main(shlex.split(line)[1:]) == 0, line
    assert main(["eval", "~/data", "--model=~/run/best", "--out=~/figures"]) == 0
    assert (tmp_path / "figures/eval.json").is_file()
    assert os.listdir(tmp_path / "here") == []


def test_cifar10(tmp_path, capsys):
    data, out = small_cifar10(tmp_path / "data"), tmp_path / "run"
    assert main(f"train {data} --model vit_nano_4 --weights none --size 8 --epochs 1 --out {out}".split()) == 0
    assert main(f"eval {data} --model {out / 'last'} --out {tmp_path / 'one'}".split()) == 0
    assert "300 images" in capsys.readouterr().out
    model = load(out / "last")
    model.labels = ("car", "plane")
    model.save(tmp_path / "turned")
    assert main(f"eval {data} --model {tmp_path / 'turned'} --out {tmp_path / 'other'}".split()) == 0
    one, other = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("one", "other"))
    assert (one["classes"], other["classes"]) == (["plane", "car"], ["car", "plane"])
    assert other["confusion"] == one["confusion"][::-1]


@pytest.mark.parametrize(
    ("labels", "classes", "bias"),
    [
        (("lying", "standing"), None, [1, 2]),
        (("standing", "lying"), None, [1, 2]),  # the data take the order of the labels
        (("hot", "cold"), None, [0, 0]),
        (("hot", "cold"), "lying\nstanding\n", [1, 2]),
        (None, None, [1, 2]),
    ],
)
def test_a_head_is_kept_if_the_folders_stand_for_its_classes(folders, tmp_path, caplog, labels, classes, bias):
    model = new_model()
    model.head.bias.data.copy_(torch.tensor([1.0, 2.0]))
    model.labels = labels
    model.save(tmp_path / "model")
    command = f"train {folders} --model {tmp_path / 'model'} --epochs 1 --batch 16 --lr 1e-9 --out {tmp_path / 'run'}"
    if classes:
        (tmp_path / "classes.txt").write_text(classes)
        command += f" --classes {tmp_path / 'classes.txt'}"
    assert main(command.split()) == 0
    trained = load(tmp_path / "run" / "last")
    is_new = bias == [0, 0]
    assert trained.labels == (("lying", "standing") if is_new or labels is None else labels)
    assert trained.head.bias.tolist() == pytest.approx(bias, abs=1e-6)
    assert ["replacing the head" in message for message in caplog.messages] == [True] * is_new


def test_killed_with_sigkill_and_started_again(folders, tmp_path):
    def command(out: str) -> list[str]:
        words = f"{SCRATCH} --epochs 3 --save-every 0 --out {tmp_path / out}"
        return [sys.executable, "-m", "vitlite", "train", str(folders), *words.split()]

    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command("whole"), check=True, env=environment, capture_output=True)
    state, deadline = tmp_path / "killed" / STATE, time.monotonic() + 120
    with subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL) as process:
        while not state.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert state.exists()
    done = subprocess.run(command("killed"), check=True, env=environment, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[:4]] == ["epoch", "1/3", "2/3", "3/3"]
    for name in ("last/model.safetensors", "best/model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert (tmp_path / "killed" / "curves.png").exists()


def test_a_resumed_run_says_where_and_counts_all_seconds(folders, tmp_path, capsys, monkeypatch):
    command = f"train {folders} {SCRATCH} --epochs 2 --save-every 0 --format jsonl --out {tmp_path / 'run'}".split()

    def interrupt(report, run):
        if run.progress.step == 2:
            raise KeyboardInterrupt
        run.progress.seconds += 50  # as on a slow machine

    with monkeypatch.context() as during:
        during.setattr(Report, "step", interrupt)
        assert main(command) == 130
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr()
    before = float(re.search(r"resuming in epoch 1 of 2, after step 2 of 3 \((5\d\.\d) seconds\)\n", printed.err)[1])
    first, second = (json.loads(line)["seconds"] for line in printed.out.splitlines())
    assert before <= first < before + 10
    assert second < 10


def test_a_log_shows_progress(folders, tmp_path, capsys, monkeypatch):
    command = f"train {folders} {SCRATCH} --epochs 1".split()
    assert main([*command, "--out", str(tmp_path / "quiet")]) == 0
    assert "step" not in capsys.readouterr().err  # it took less than half a minute
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    line = r"^vitlite: epoch 1/1: step (\d)/3, loss \d\.\d+, accuracy \d\.\d+, images/s \d+$"
    assert re.findall(line, capsys.readouterr().err, re.MULTILINE) == ["1", "2", "3"]
    assert main(["eval", str(folders), "--model", str(tmp_path / "run" / "best"), "--batch", "5"]) == 0
    assert capsys.readouterr().err == "vitlite: 5 of 8 images are done\nvitlite: 8 of 8 images are done\n"


def test_cifar10_is_prepared_as_by_predict(tmp_path, monkeypatch):
    seen = []

    def train(model, data, *_, validation, **__):
        seen.extend([data, validation])
        stop([])

    def measure(model, data, **_):
        seen.append(data)
        stop([])

    monkeypatch.setattr(train_command, "train", train)
    monkeypatch.setattr(eval_command, "measure", measure)
    folder, model, row = small_cifar10(tmp_path / "data"), new_model(CONFIG.replace(image_size=32)), torch.tensor([3])
    for resize, name in (((35, 35), "cropped"), ((32, 32), "whole")):
        model.preprocess = Preprocess(replace(TRANSFORM, size=(32, 32), resize=resize), model)
        model.save(tmp_path / name)
        assert main(f"train {folder} --model {tmp_path / name} --epochs 1 --out {tmp_path / 'run'}".split()) == 1
        assert main(f"eval {folder} --model {tmp_path / name}".split()) == 1
        for split in ("train", "val", "test"):
            raw = read_cifar10(folder, split).images[row]
            got, _ = seen.pop(0).readable(row)
            assert torch.equal(got[0], model.preprocess.pixels(raw[0])), (name, split)
            assert torch.equal(got[0], raw[0]) == (name == "whole")


def test_the_initial_model(tmp_path):
    def model(**options):
        defaults = {"model": "vit_nano_4", "weights": "none", "size": None, "device": None, "seed": 0}
        return train_command._model(Namespace(**defaults | {"drop_path": None, "checkpointing": False} | options), 2)

    fresh = model(size=16, drop_path=0.1)
    assert fresh.preprocess.transform.std == (0.2470, 0.2435, 0.2616)  # the zoo's for this name
    assert fresh.preprocess.model is fresh
    assert (fresh.config.drop_path, fresh.config.size) == (0.1, (16, 16))
    plain = model(model="vit_small_14", size=14).preprocess.transform  # a preset that the zoo has no weights for
    assert (plain.mean, plain.size, plain.resize) == ((0.5, 0.5, 0.5), (14, 14), (14, 14))
    trained = new_model()
    trained.head.bias.data.fill_(3)
    trained.labels = ("a", "b")
    trained.save(tmp_path / "model")
    again = model(model=str(tmp_path / "model"), weights=None)
    assert again.preprocess.transform == TRANSFORM
    assert again.head.bias.tolist() == [3, 3]
    deep = model(weights=None, drop_path=0.1, checkpointing=True)
    assert (deep.config.drop_path, deep.config.checkpointing) == (0.1, True)
    file = str(registry.DATA / "vit_nano_4.cifar10.safetensors")
    other = model(model="vit_nano_4.cifar10", weights=file)
    assert torch.equal(other.blocks[0].mlp.fc1.weight, deep.blocks[0].mlp.fc1.weight)
    assert other.preprocess.transform == deep.preprocess.transform


def test_weights_without_preprocessing_are_an_error(folders, tmp_path, capsys):
    ViT(CONFIG.replace(num_classes=0)).save(tmp_path / "bare")
    assert main(f"train {folders} --model {tmp_path / 'bare'} --out {tmp_path / 'run'}".split()) == 1
    assert "without preprocessing" in capsys.readouterr().err


def test_mistakes_in_data_are_errors(folders, tmp_path, capsys):
    new_model().save(tmp_path / "model")
    command = f"--model {tmp_path / 'model'} --out {tmp_path / 'run'}".split()
    assert main(["train", str(tmp_path / "none"), *command]) == 1
    assert "none does not exist. Pass a folder that contains one folder of images per class." in capsys.readouterr().err
    (tmp_path / "data" / "train" / "standing").rename(tmp_path / "standing")
    assert main(["train", str(folders), *command]) == 1
    assert "contains only one class, lying" in capsys.readouterr().err
    assert main(["train", str(folders), "--model", str(tmp_path / "model"), "--out", str(folders / "run")]) == 1
    assert f"--out {folders / 'run'} is inside the data" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["split.json", "curves.png", "best/config.json"])
def test_files_of_something_else_are_not_overwritten(folders, tmp_path, capsys, name):
    model, out = new_model(), tmp_path / "run"
    model.save(tmp_path / "model")
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    assert main(["train", str(folders), "--model", str(tmp_path / "model"), "--out", str(out)]) == 1
    assert f"contains {name.partition('/')[0]}, but no {STATE}" in capsys.readouterr().err
    assert (out / name).read_text() == "mine"
    assert [path for path in out.rglob("*") if path.is_file()] == [out / name]


def test_settings_out_of_range_are_errors(folders, tmp_path, capsys):
    command = f"train {folders} {SCRATCH} --epochs 1 --out {tmp_path / 'run'}"

    def error(words: str) -> str:
        assert main(f"{command} {words}".split()) == 1
        return capsys.readouterr().err

    assert "Start a new run with a lower lr= (--lr)." in error("--lr 1000 --clip inf")
    assert "layer_decay must be a number from 0.001 to 1, got 2.0." in error("--layer-decay 2")


def test_an_unavailable_device_is_an_error(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    words = ("--model", "vit_nano_4", "--weights", "none", "--epochs", "1", "--device", "cuda")
    assert main(["train", str(tmp_path / "nothing"), "--out", str(tmp_path / "out"), *words]) == 1
    assert "Cannot use the device 'cuda'" in capsys.readouterr().err


def draw_shapes(folder: Path, counts: dict[str, int]) -> Path:
    """Draw discs, crosses and rings on grounds of any colour, in a folder per class."""
    torch.manual_seed(0)
    for name in ("disc", "cross", "ring"):
        for part, count in counts.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (80, 60), tuple(torch.randint(0, 120, (3,)).tolist()))
                x, y, r = torch.randint(22, 58, ()).item(), torch.randint(22, 38, ()).item(), 18
                ink, pen = tuple(torch.randint(150, 256, (3,)).tolist()), ImageDraw.Draw(image)
                if name == "cross":
                    pen.rectangle((x - r, y - 5, x + r, y + 5), fill=ink)
                    pen.rectangle((x - 5, y - r, x + 5, y + r), fill=ink)
                else:
                    fill = ink if name == "disc" else None
                    pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=ink, width=5)
                image.save(folder / part / name / f"{i}.jpg")
    return folder


def test_from_120_photos_to_an_accurate_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(draw_shapes(tmp_path, {"photos": 40, "new": 10}))
    command = ["train", "photos", "--model", "vit_nano_4.cifar10", "--out", "run", "--epochs", "6"]
    assert main(command) == 0
    printed = capsys.readouterr()
    first = "vitlite: 3 classes (cross, disc, ring), 96 training images, 24 validation images (held out, listed in "
    assert printed.err.splitlines()[0] == f"{first}{Path('run/split.json')}), 6 epochs in batches of 16"
    rows, _, text = printed.out.partition("\n\n")
    assert rows.splitlines()[0].split() == ["epoch", "train", "loss", "val", "loss", "val", "accuracy", "seconds"]
    assert [row.split()[0] for row in rows.splitlines()[1:]] == [f"{i}/6" for i in range(1, 7)]
    assert rows.splitlines()[1].endswith("  best so far")
    assert re.match(r"Best epoch: \d of 6, with the highest .*\. The weights are in run/best\.\n", text)
    with Image.open("run/curves.png") as curves:
        assert curves.width > 500

    next_steps = re.findall(r"^  (vitlite .*)$", text, re.MULTILINE)
    assert [line.split()[1] for line in next_steps] == ["classify", "eval", "export"]
    for line in next_steps[:2]:
        assert main(shlex.split(line)[1:]) == 0, line
    printed = capsys.readouterr()
    assert "24 images" in printed.out
    assert "trained on" not in printed.err
    assert main(["eval", "new", "--model", "run/best"]) == 0
    printed = capsys.readouterr()
    assert float(re.search(r"top-1 (\S+)%   loss \S+   30 images", printed.out)[1]) >= 90, printed.out
    assert not printed.err

    before = Path("run/best/model.safetensors").read_bytes()
    assert main(command) == 0  # once more
    printed = capsys.readouterr()
    assert "this run already finished after 6 of 6 epochs; to train again, choose another --out" in printed.err
    assert printed.out.partition("\n\n")[2] == text
    assert main([*command, "--seed", "1"]) == 1
    assert "run contains another run: seed was 0 and is now 1" in capsys.readouterr().err
    assert Path("run/best/model.safetensors").read_bytes() == before


def test_without_matplotlib_and_stopped_early(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # not installed
    command = f"train {folders} {SCRATCH} --epochs 9 --patience 1 --lr 1e-9 --format jsonl --out {tmp_path / 'run'}"
    assert main(command.split()) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) < 9
    assert "curves.png was not drawn. Drawing a plot needs an optional package." in printed.err
    assert "pip install 'vitlite[plot]'" in printed.err
    assert "Stopped early: no improvement in 1 epochs (--patience).\nBest epoch: " in printed.err
    assert not (tmp_path / "run" / "curves.png").exists()


def test_broken_images_are_skipped_and_named_at_the_end(folders, tmp_path, capsys):
    for name in ("train/lying/0.png", "val/standing/1.png"):
        (folders / name).write_bytes((folders / name).read_bytes()[:50])
    (folders / "train" / "lying" / "._2.png").write_bytes(b"attributes of macOS")
    command = f"train {folders} {SCRATCH} --epochs 1 --out {tmp_path / 'run'}"
    assert main([*command.split(), "--strict"]) == 1
    assert re.search(r"vitlite: error: Cannot read \S+lying/0\.png as an image", capsys.readouterr().err)
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert "Best epoch: 1 of 1" in printed.out
    assert "24 training images" in printed.err
    assert printed.err.endswith("vitlite: 2 images could not be read: lying/0.png, standing/1.png\n")
    best, out = str(tmp_path / "run" / "best"), tmp_path / "eval"
    evaluate = ["eval", str(folders), "--model", best, "--out", str(out)]
    assert main(evaluate) == 1
    printed = capsys.readouterr()
    assert "7 images" in printed.out
    assert printed.err.endswith("vitlite: 1 image could not be read: standing/1.png\n")
    figures = json.loads((out / "eval.json").read_text())
    assert (figures["images"], figures["broken"]) == (7, ["standing/1.png"])
    assert sum(map(sum, figures["confusion"])) == 7
    assert main([*evaluate, "--strict"]) == 1
    assert "vitlite: error: Cannot read" in capsys.readouterr().err


def test_a_run_goes_on_without_an_image_that_is_gone(folders, tmp_path, capsys, monkeypatch):
    command = f"train {folders / 'train'} {SCRATCH} --epochs 2 --out {tmp_path / 'run'}"
    report = Report.epoch
    with monkeypatch.context() as patch:
        patch.setattr(Report, "epoch", lambda self, history: (report(self, history), stop(history)))
        assert main(command.split()) == 1
    capsys.readouterr()
    gone = json.loads((tmp_path / "run" / "split.json").read_text())["held out"][0]
    (folders / "train" / gone).unlink()
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert "2 classes (lying, standing), 20 training images, 4 validation images" in printed.err
    assert printed.err.endswith(f"vitlite: 1 image could not be read: {gone}\n")
    assert "Best epoch: " in printed.out

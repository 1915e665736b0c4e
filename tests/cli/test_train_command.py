"""`vitlite train`: what it begins with, what it leaves, and that it goes on when it was killed."""

import json
import os
import re
import shlex
import shutil
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
from vitlite.presets import PRESETS
from vitlite.training import read_cifar10
from vitlite.training.state import STATE
from vitlite.zoo import registry


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """train/ and val/, with a folder per class in each."""
    return stripes_in_folders(tmp_path / "data")


def test_the_commands(folders, tmp_path, capsys):
    words = f"--model vit_nano_4 --weights none --size 16 --epochs 1 --batch 8 --out {tmp_path / 'run'}".split()
    assert main(["train", str(folders), *words, "--format", "jsonl"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["epoch"] == 1
    assert "vitlite: 2 classes (lying, standing); 24 pictures to train on, 8 to compare epochs with; 1 epo" in said.err
    assert re.search(r"\nBest is epoch 1 of 1: the highest validation accuracy, \d+\.\d\d%\.\nIt is in ", said.err)
    best = str(tmp_path / "run" / "best")
    assert main(["eval", str(folders), "--model", best, "--out", str(tmp_path / "eval")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"lying +4 +\d+.\d%", out)
    assert re.search(
        r"top-1 \d+.\d\d%   loss \d\.\d{4}   8 pictures", out
    )  # of two classes, all are among the best five
    figures = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert figures["classes"] == ["lying", "standing"]
    assert "top5" not in figures
    assert sum(map(sum, figures["confusion"])) == 8
    with Image.open(tmp_path / "eval" / "confusion.png") as picture:
        assert picture.width > 200


def test_a_home_that_no_shell_spells_out(folders, tmp_path, capsys, monkeypatch):
    """The run is where the commands look that are printed."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        "--model",
        "vit_nano_4",
        "--weights",
        "none",
        "--size",
        "16",
        "--epochs",
        "1",
        "--batch",
        "8",
        "--out=~/run",
    ]
    assert main(["train", "~/data", *words]) == 0
    out = capsys.readouterr().out
    assert os.listdir(tmp_path / "here") == []
    for name in ("classify", "eval"):
        (line,) = (line for line in out.splitlines() if line.startswith(f"  vitlite {name}"))
        assert main(shlex.split(line)[1:]) == 0, line
    photo = next((tmp_path / "data").rglob("*.png")).relative_to(tmp_path)
    for line in (
        f"embed ~/{photo} --model=~/run/best --out=~/v.safetensors",
        "eval ~/data --model=~/run/best --out=~/figures",
        "export ~/run/best --to torch --out=~/best.pt2",
        f"attention ~/{photo} --model=~/run/best --out=~/map.png",
        f"search ~/v.safetensors ~/{photo} --model=~/run/best --out=~/sheet.jpg",
    ):
        assert main(line.split()) == 0, line
    for written in ("v.safetensors", "figures/eval.json", "best.pt2", "map.png", "sheet.jpg"):
        assert (tmp_path / written).is_file(), written
    assert os.listdir(tmp_path / "here") == []


def test_the_commands_on_cifar10(tmp_path, capsys):
    data, out = small_cifar10(tmp_path / "data"), tmp_path / "run"
    assert main(f"train {data} --model vit_nano_4 --weights none --size 8 --epochs 1 --out {out}".split()) == 0
    assert main(f"eval {data} --model {out / 'last'} --out {tmp_path / 'one'}".split()) == 0
    assert "300 pictures" in capsys.readouterr().out
    config = json.loads((out / "last" / "config.json").read_text())
    config["vitlite"]["labels"].reverse()
    (out / "last" / "config.json").write_text(json.dumps(config))
    assert main(f"eval {data} --model {out / 'last'} --out {tmp_path / 'other'}".split()) == 0
    one, other = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("one", "other"))
    assert (one["classes"], other["classes"]) == (["plane", "car"], ["car", "plane"])
    assert other["confusion"] == one["confusion"][::-1]
    new_model(CONFIG.replace(num_classes=5)).save(tmp_path / "five")
    assert main(f"eval {data} --model {tmp_path / 'five'}".split()) == 1
    assert "The data have 2 classes" in capsys.readouterr().err
    ViT(CONFIG).save(tmp_path / "bare")
    assert main(f"eval {data} --model {tmp_path / 'bare'}".split()) == 1
    assert "has no preprocessing" in capsys.readouterr().err


def test_a_head_goes_on_with_its_own_classes_whatever_their_order(folders, tmp_path):
    model = new_model()
    torch.nn.init.normal_(model.head.weight)
    words = "--epochs 1 --lr 1e-9 --augment none --dtype float32"
    for labels in (("lying", "standing"), ("standing", "lying"), ("ant", "lying")):
        out = tmp_path / f"run_{labels[0]}"
        model.labels = labels
        model.save(tmp_path / labels[0])
        assert main(f"train {folders} --model {tmp_path / labels[0]} {words} --out {out}".split()) == 0
        found = load(out / "last")
        if labels[0] == "ant":
            assert found.labels == ("lying", "standing")
            assert found.head.weight.abs().max() < 1e-6  # a new one
        else:
            assert found.labels == ("lying", "standing")
            rows = [labels.index(name) for name in found.labels]  # go with their names
            torch.testing.assert_close(found.head.weight, model.head.weight[rows])


def test_killed_with_sigkill_and_started_again(folders, tmp_path):
    def command(out: str) -> list[str]:
        words = "--model vit_nano_4 --weights none --size 16 --epochs 3 --batch 8 --save-every 0"
        return [sys.executable, "-m", "vitlite", "train", str(folders), *words.split(), "--out", str(tmp_path / out)]

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
    for name in ("last/model.safetensors", "best/model.safetensors", "last/config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list(tmp_path.glob("killed/**/*.partial"))
    assert (tmp_path / "killed" / "curves.png").exists()


def test_where_a_run_goes_on_and_what_its_seconds_count(folders, tmp_path, capsys, monkeypatch):
    words = f"train {folders} --model vit_nano_4 --weights none --size 16 --epochs 2 --batch 8 --save-every 0"
    command = [*words.split(), "--format", "jsonl", "--out", str(tmp_path / "run")]

    def interrupted(report, run):
        if run.progress.step == 2:
            raise KeyboardInterrupt
        run.progress.seconds += 50  # as on a slow machine

    with monkeypatch.context() as during:
        during.setattr(Report, "step", interrupted)
        assert main(command) == 130
        assert "step" not in capsys.readouterr().err
    assert main(command) == 0
    said = capsys.readouterr()
    where = r"goes on in epoch 1 of 2, after step 2 of 3, which took (5\d\.\d) seconds: they count in its row\n"
    before = float(re.search(where, said.err)[1])
    first, second = (json.loads(line)["seconds"] for line in said.out.splitlines())
    assert before <= first < before + 10
    assert second < 10


def test_a_run_shows_in_a_log_that_it_works(folders, tmp_path, capsys, monkeypatch):
    words = f"train {folders} --model vit_nano_4 --weights none --size 16 --epochs 1 --batch 8".split()
    assert main([*words, "--out", str(tmp_path / "quiet")]) == 0
    assert "step" not in capsys.readouterr().err  # it took less than half a minute
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    steps = re.findall(
        r"^vitlite: epoch 1/1: step (\d)/3, loss \d\.\d+, accuracy \d\.\d+, images/s \d+$",
        capsys.readouterr().err,
        re.MULTILINE,
    )
    assert steps == ["1", "2", "3"]
    assert main(["eval", str(folders), "--model", str(tmp_path / "run" / "best"), "--batch", "5"]) == 0
    said = capsys.readouterr()
    assert said.err == "vitlite: 5 of 8 images are done\nvitlite: 8 of 8 images are done\n"


def test_cifar10_is_prepared_as_predict_does_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        train_command, "train", lambda model, data, *_, validation, **__: (seen.extend([data, validation]), stop(None))
    )
    monkeypatch.setattr(eval_command, "measure", lambda model, data, **_: (seen.append(data), stop(None)))
    folder, model, row = small_cifar10(tmp_path / "data"), new_model(CONFIG.replace(image_size=32)), torch.tensor([3])
    for resize, name in (((35, 35), "cropped"), ((32, 32), "whole")):
        model.preprocess = Preprocess(replace(TRANSFORM, size=(32, 32), resize=resize), model)
        model.save(tmp_path / name)
        assert main(f"train {folder} --model {tmp_path / name} --epochs 1 --out {tmp_path / 'run'}".split()) == 1
        assert main(f"eval {folder} --model {tmp_path / name}".split()) == 1  # killed once the pictures are there
        for split in ("train", "val", "test"):
            raw = read_cifar10(folder, split).images[row]
            got = seen.pop(0).images[row]
            assert torch.equal(got[0], model.preprocess.pixels(raw[0])), (name, split)
            assert torch.equal(got, raw) == (name == "whole")


def test_what_training_begins_with(tmp_path):
    def model(**options):
        defaults = {
            "model": "vit_nano_4",
            "weights": "none",
            "size": None,
            "device": None,
            "seed": 0,
            "drop_path": None,
        }
        defaults["checkpointing"] = False
        return train_command._model(Namespace(**defaults | options), 2)

    fresh = model(size=16, drop_path=0.1)
    assert fresh.preprocess.transform.std == (0.2470, 0.2435, 0.2616)  # the zoo's for this name
    assert fresh.preprocess.model is fresh
    assert (fresh.config.drop_path, fresh.config.size) == (0.1, (16, 16))
    assert model(model="vit_small_14", size=14).preprocess.transform.mean == (0.5, 0.5, 0.5)  # no default in the zoo
    trained = new_model()
    trained.head.bias.data.fill_(3)
    trained.labels = ("a", "b")
    trained.save(tmp_path / "model")
    again = model(model=str(tmp_path / "model"), weights=None)
    assert again.preprocess.transform == TRANSFORM
    assert again.head.bias.tolist() == [3, 3]
    embedded = model(weights=None)
    assert embedded.source.verified == "record"
    deep = model(weights=None, drop_path=0.1, checkpointing=True)
    assert (deep.config.drop_path, deep.config.checkpointing) == (0.1, True)
    assert deep.source.sha256 == embedded.source.sha256
    assert all(map(torch.equal, deep.parameters(), embedded.parameters()))
    deep.labels = ("a", "b")
    deep.save(tmp_path / "deep")
    assert model(model=str(tmp_path / "deep"), weights=None).config.drop_path == 0.1  # a model keeps its own
    assert model(model=str(tmp_path / "deep"), weights=None, drop_path=0.0).config.drop_path == 0
    file = str(registry.DATA / "vit_nano_4.cifar10.safetensors")
    other = model(model="vit_nano_4.cifar10", weights=file)
    assert torch.equal(other.blocks[0].mlp.fc1.weight, embedded.blocks[0].mlp.fc1.weight)
    assert other.preprocess.transform == embedded.preprocess.transform


def test_weights_without_preprocessing_get_none_of_another(folders, tmp_path, capsys):
    ViT(CONFIG.replace(num_classes=0)).save(tmp_path / "bare")
    ViT(PRESETS["vit_nano_4"]).save(tmp_path / "nano")
    (tmp_path / "nano" / "config.json").unlink()
    nano = str(tmp_path / "nano" / "model.safetensors")
    bare = str(tmp_path / "bare")
    for words, said in (
        (
            ["--model", bare],
            f"{bare} has no preprocessing, so pictures cannot be prepared for it. Name a checkpoint like",
        ),
        (["--model", "vit_nano_4", "--weights", nano], f"{nano}: The tensors do not tell norm_eps, gelu, pool"),
    ):
        command = ["train", str(folders), *words, "--epochs", "1", "--drop-path", "0.1", "--out", str(tmp_path / "run")]
        assert main(command) == 1
        assert said in capsys.readouterr().err
    command = ["train", str(folders), "--model", "vit_nano_4.cifar10", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert main([*command, "--weights", ""]) == 1  # a mistake, not a wish for the model's own
    assert main([*command, "--weights", nano]) == 0


def test_the_commands_say_what_is_wrong(folders, tmp_path, capsys):
    train_words = f"--model vit_nano_4 --weights none --size 16 --epochs 1 --out {tmp_path / 'run'}".split()
    for path in (folders / "train" / "standing").iterdir():
        path.unlink()
    (folders / "train" / "standing").rmdir()
    assert main(["train", str(folders), *train_words]) == 1
    assert "has one class only, lying" in capsys.readouterr().err
    (folders / "val" / "standing").rename(folders / "val" / "sitting")
    new_model().save(tmp_path / "model")
    assert main(["eval", str(folders), "--model", str(tmp_path / "model")]) == 0  # as many folders as classes
    (folders / "val" / "third").mkdir()
    assert main(["eval", str(folders), "--model", str(tmp_path / "model")]) == 1
    assert "Of the model's 2 classes, none is named lying, sitting, third. Name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "bias", "said"),
    [
        (("standing", "lying"), [2, 1], ""),
        (("hot", "cold"), [0, 0], "vitlite: the head is a new one, as the model's own knew hot, cold, and the classes"),
        (
            None,
            [1, 2],
            "vitlite: the model has no labels, so its head is taken to know these classes in order: lying, s",
        ),
    ],
)
def test_what_becomes_of_the_head(folders, tmp_path, caplog, labels, bias, said):
    """Of the same classes in another order, of others, and where nobody said what they are."""
    model = new_model()
    model.head.bias.data.copy_(torch.tensor([1.0, 2.0]))
    model.labels = labels
    model.save(tmp_path / "model")
    words = f"--model {tmp_path / 'model'} --epochs 1 --batch 16 --lr 1e-9 --out {tmp_path / 'run'}".split()
    assert main(["train", str(folders), *words]) == 0
    trained = load(tmp_path / "run" / "last")
    assert trained.labels == ("lying", "standing")
    assert trained.head.bias.tolist() == pytest.approx(bias, abs=1e-6)
    assert "".join(caplog.messages).startswith(said)
    assert len(caplog.messages) == bool(said)


@pytest.mark.parametrize("name", ["split.json", "curves.png", "best/config.json"])
def test_files_of_others_are_in_the_way_before_an_epoch_is(folders, tmp_path, capsys, name):
    model, out = new_model(), tmp_path / "run"
    model.save(tmp_path / "model")
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    assert main(["train", str(folders), "--model", str(tmp_path / "model"), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert name.rpartition("/")[2] in said.err
    assert (out / name).read_text() == "mine"
    assert sorted(path for path in out.rglob("*") if path.is_file()) == [out / name]


def test_each_file_of_a_run_is_proved_to_be_its_own(tmp_path, capsys):
    """Beside a log that another program wrote, and beside the state of a run that was killed or is finished."""
    data, out = tmp_path / "data", tmp_path / "run"
    stripes_in_folders(data)
    new_model().save(tmp_path / "model")
    command = ["train", str(data / "train"), "--model", str(tmp_path / "model"), "--epochs", "1", "--out", str(out)]
    mine = {"split.json": '{"mine": 1}', "curves.png": "mine", "log.jsonl": '{"epoch": 1, "note": "mine"}\n'}
    out.mkdir()
    for name, text in mine.items():
        (out / name).write_text(text)
    assert main(command) == 1
    said = "has log.jsonl, split.json, curves.png, and no state.safetensors: "
    assert said in capsys.readouterr().err
    assert {path.name: path.read_text() for path in out.iterdir()} == mine
    shutil.rmtree(out)
    assert main(command) == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert main(command) == 0  # it is done
    for name, said in (
        ("split.json", "split.json was not written by vitlite, and stays. Move it away, or name another --out."),
        ("curves.png", "curves.png was not written by vitlite, and stays. Move it away, or name another --out."),
        ("log.jsonl", "log.jsonl is not the log of this run, and stays. Move it away, or name another --out."),
    ):
        (out / name).write_text(mine[name])
        capsys.readouterr()
        assert main(command) == 1
        assert said in capsys.readouterr().err
        assert (out / name).read_text() == mine[name]
        (out / name).write_bytes(whole[name])
    listed = json.loads(whole["split.json"])
    (out / "split.json").write_text(json.dumps(listed | {"note": "mine"}))
    assert main(command) == 1
    (out / "split.json").unlink()
    (out / "curves.png").unlink()
    assert main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == whole


def test_its_own_words_for_what_is_to_be_done(folders, tmp_path, capsys):
    begin = f"train {folders} --model vit_nano_4 --weights none --size 16 --epochs 1 --batch 8 --out {tmp_path / 'run'}"

    def error(words: str) -> str:
        assert main(f"{begin} {words}".split()) == 1
        return capsys.readouterr().err

    assert "Begin again with a lower --lr and another --out." in error("--lr 1000 --clip inf")
    assert "error: layer_decay must be a number from 0.001 to 1, got 2.0." in error("--layer-decay 2")
    assert main(begin.split()) == 0
    capsys.readouterr()
    assert f"perhaps with --model {tmp_path / 'run' / 'last'} and another --out" in error("--seed 1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_that_is_said_before_anything_is_read(tmp_path, capsys):
    words = ("--model", "vit_nano_4", "--weights", "none", "--epochs", "1", "--device", "cuda")
    assert main(["train", str(tmp_path / "nothing"), "--out", str(tmp_path / "out"), *words]) == 1
    assert "The device 'cuda' cannot be used here" in capsys.readouterr().err


def drawn(folder: Path, counts: dict[str, int]) -> Path:
    """Pictures of discs, crosses and rings on grounds of any colour, in a folder per class."""
    torch.manual_seed(0)
    for name in ("disc", "cross", "ring"):
        for part, count in counts.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                picture = Image.new("RGB", (80, 60), tuple(torch.randint(0, 120, (3,)).tolist()))
                x, y, r = torch.randint(22, 58, ()).item(), torch.randint(22, 38, ()).item(), 18
                ink, pen = tuple(torch.randint(150, 256, (3,)).tolist()), ImageDraw.Draw(picture)
                if name == "cross":
                    pen.rectangle((x - r, y - 5, x + r, y + 5), fill=ink)
                    pen.rectangle((x - 5, y - r, x + 5, y + r), fill=ink)
                else:
                    fill = ink if name == "disc" else None
                    pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=ink, width=5)
                picture.save(folder / part / name / f"{i}.jpg")
    return folder


def test_from_a_folder_of_120_photos_to_a_model_that_is_right(tmp_path, capsys, monkeypatch):
    """As somebody does it who has no val/ and asks for nothing but the model."""
    monkeypatch.chdir(drawn(tmp_path, {"photos": 40, "new": 10}))
    begin = "train photos --model vit_nano_4.cifar10 --out run"
    assert main([*begin.split(), "--epochs", "6"]) == 0
    said = capsys.readouterr()
    first = "vitlite: 3 classes (cross, disc, ring); 96 pictures to train on, 24 to compare epochs with (held out: "
    assert said.err == f"{first}{Path('run/split.json')} lists them); 6 epochs in batches of 16\n"
    rows, _, text = said.out.partition("\n\n")
    assert rows.splitlines()[0].split() == ["epoch", "train", "loss", "val", "loss", "val", "accuracy", "seconds"]
    assert [row.split()[0] for row in rows.splitlines()[1:]] == [f"{i}/6" for i in range(1, 7)]
    assert rows.splitlines()[1].endswith("  best so far")
    assert re.match(r"Best is epoch \d of 6: .*\.\nIt is in run/best; measured again from there, it is right on ", text)
    with Image.open("run/curves.png") as curves:
        assert curves.width > 500

    next_steps = re.findall(r"^  (vitlite .*)$", text, re.MULTILINE)
    assert [line.split()[1] for line in next_steps] == ["classify", "eval", "export"]
    for line in next_steps[:2]:
        assert main(shlex.split(line)[1:]) == 0, line
    said = capsys.readouterr()
    assert "24 pictures" in said.out
    assert "trained on" not in said.err
    assert main(["eval", "new", "--model", "run/best"]) == 0
    said = capsys.readouterr()
    assert float(re.search(r"top-1 (\S+)%   loss \S+   30 pictures", said.out)[1]) >= 90, said.out
    assert not said.err
    assert main(["eval", "photos", "--model", "run/best"]) == 0
    hint = (
        "vitlite: run/best was trained on most of these pictures. Those that it has not seen: --split run/split.json\n"
    )
    assert capsys.readouterr().err == hint
    Path("run/split.json").rename("run/kept.json")
    Path("run/split.json").write_text('{"train": ["a.jpg"]}')  # somebody's own
    assert main(["eval", "photos", "--model", "run/best"]) == 0
    assert not capsys.readouterr().err
    Path("run/kept.json").replace("run/split.json")

    before = Path("run/best/model.safetensors").read_bytes()
    assert main([*begin.split(), "--epochs", "6"]) == 0  # the same once more
    said = capsys.readouterr()
    assert "this run is finished, after 6 of 6 epochs; to train again, name another --out" in said.err
    assert said.out.partition("\n\n")[2] == text
    assert main([*begin.split(), "--epochs", "6", "--seed", "1"]) == 1
    assert "run holds another run: seed was 0 and is 1" in capsys.readouterr().err
    assert Path("run/best/model.safetensors").read_bytes() == before


def test_what_a_run_says_without_matplotlib_and_when_it_ends_early(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    words = f"train {folders} --model vit_nano_4 --weights none --size 16 --epochs 9 --patience 1 --lr 1e-9 --batch 8"
    assert main([*words.split(), "--format", "jsonl", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) < 9
    assert "no curves.png: Drawing a plot needs an optional package." in said.err
    assert "pip install 'vitlite[plot]'" in said.err
    assert "Ended early: none of the last 1 epochs was better (--patience).\nBest is epoch " in said.err
    right = int(re.search(r"it is right on (\d) of 8 pictures\.\n", said.err)[1])
    confused = re.findall(r"(lying|standing) taken for (lying|standing) \((\d)\)", said.err)
    assert ("Most confused: " in said.err) == bool(confused)
    assert all(name != taken for name, taken, _ in confused)
    assert right + sum(int(count) for *_, count in confused) == 8
    assert not (tmp_path / "run" / "curves.png").exists()

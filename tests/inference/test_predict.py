import gc
import io
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import FAMILIES, tiny_model
from PIL import Image, ImageSequence
from torch import Tensor

import vitlite
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ImageError, InputError
from vitlite.images import Preprocess, TransformConfig
from vitlite.inference.predict import Timings, classify, embed, predict, work_through
from vitlite.nn.vit import ViT
from vitlite.presets import preset

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
TRANSFORM = TransformConfig(
    size=(32, 32), resize=(32, 32), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,)
)


@pytest.fixture
def vit():
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=32, patch_size=16, dim=16, depth=1, heads=1, mlp_dim=16, num_classes=3)).eval()
    torch.nn.init.normal_(model.head.weight)
    model.preprocess = Preprocess(TRANSFORM, model)
    model.labels = ("cat", "dog", "owl")
    return model


def arrays(count):
    return list(np.random.default_rng(0).integers(0, 256, (count, 40, 40, 3), dtype=np.uint8))


def background_threads():
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitlite-images")]


# predict


def test_one_image(vit, monkeypatch):
    monkeypatch.setattr("vitlite.inference.predict.readers", None)  # no threads are needed
    image = arrays(1)[0]
    answer = vit.predict(image)
    with torch.no_grad():
        scores = vit(vit.preprocess(image)).softmax(-1)[0].tolist()
    assert [p.index for p in answer] == sorted(range(3), key=lambda i: -scores[i])
    assert [p.label for p in answer] == [vit.labels[p.index] for p in answer]
    assert [p.score for p in answer] == pytest.approx(sorted(scores, reverse=True))
    assert vit.predict(image, top=1) == answer[:1]
    assert vit.predict(image, top=2) == predict(vit, image, 2) == answer[:2]


def test_files_and_bytes(vit):
    path = PHOTOS / "chelsea.png"
    answer = vit.predict(path)
    assert vit.predict(path.read_bytes()) == answer
    assert vit.predict([path.read_bytes(), bytearray(path.read_bytes())]) == vit.predict([path, path])
    with path.open("rb") as file:
        assert vit.predict(file) == vit.predict(io.BytesIO(path.read_bytes())) == answer


def test_lists_and_iterators(vit):
    images = arrays(70)
    alone = [vit.predict(image) for image in images]
    together = vit.predict(images)
    assert [[p[:2] for p in answer] for answer in together] == [[p[:2] for p in answer] for answer in alone]
    for one, other in zip(together, alone, strict=True):
        assert [p.score for p in one] == pytest.approx([p.score for p in other], abs=1e-5)
    stream = vit.predict(iter(images))
    assert iter(stream) is stream
    assert list(stream) == together
    assert vit.predict(np.stack(images)) == vit.predict(tuple(images)) == together
    assert vit.predict([]) == []
    assert list(vit.predict(iter([]))) == []
    assert not background_threads()


def test_labels_are_ordered_by_logits_even_where_scores_are_equal(vit):
    wide = ViT(vit.config.replace(num_classes=40)).eval()
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(wide.head.weight, std=300, generator=generator)
    wide.preprocess, wide.labels = vit.preprocess, [str(number) for number in range(40)]
    for scale in (1.0, 1e-11):  # all but the first score are zero; all scores are equal
        with torch.no_grad():
            wide.head.weight.mul_(scale)
        for image in arrays(3):
            logits = wide(wide.preprocess(image))[0]
            answers = wide.predict(image, top=40)
            assert [answer.index for answer in answers] == logits.argsort(descending=True).tolist()
            assert [answer.score for answer in answers] == logits.softmax(0)[[a.index for a in answers]].tolist()


def test_half_precision_answers_in_float32(vit):
    vit.bfloat16()
    assert sum(p.score for p in vit.predict(arrays(1)[0])) == pytest.approx(1, abs=1e-6)
    assert next(embed(vit, arrays(1)))[1].dtype == torch.float32


def test_deit_tiny_knows_the_photos(shared):
    """The five best, with the probabilities of timm's own pipeline."""
    from safetensors.torch import load_file

    from vitlite.zoo import registry

    model = ViT(preset("vit_tiny_16")).eval()
    model.load_state_dict(load_file(shared / "weights" / "deit_tiny_16.timm.safetensors"))
    record = registry.find("deit_tiny_patch16_224.fb_in1k")
    model.preprocess = Preprocess(transform_from_record(record), model)
    model.labels = record.labels
    cat, coffee = model.predict([shared / "photos" / "chelsea.png", shared / "photos" / "coffee.png"])
    assert [(p.label, p.index) for p in cat[:3]] == [("Egyptian cat", 285), ("tabby", 281), ("tiger cat", 282)]
    assert [p.score for p in cat[:3]] == pytest.approx([0.4388, 0.2272, 0.1866], abs=5e-4)
    assert coffee[0][:2] == ("espresso", 967)
    assert coffee[0].score == pytest.approx(0.8182, abs=5e-4)


# iterators


def test_iterators_are_read_two_batches_ahead_in_the_caller_s_thread(vit):
    read = 0

    def endless():
        nonlocal read
        here = threading.current_thread()
        while True:
            assert threading.current_thread() is here
            read += 1
            yield np.zeros((32, 32, 3), np.uint8)

    stream = vit.predict(endless())
    assert read == 0
    for _ in range(100):
        next(stream)
    assert read == 160
    stream.close()
    assert not background_threads()


def one_array(images):
    frame = np.empty_like(images[0])
    for image in images:
        frame[:] = image
        yield frame


def one_tensor(images):
    frame = torch.empty_like(torch.from_numpy(images[0]))
    for image in images:
        yield frame.copy_(torch.from_numpy(image))


def one_file(images):
    file = io.BytesIO()
    for image in images:
        file.seek(0)
        Image.fromarray(image).save(file, "BMP")
        yield file


@pytest.mark.parametrize("stream", [one_array, one_tensor, one_file])
@pytest.mark.parametrize("size", [32, 40])
def test_an_iterator_may_reuse_its_image(vit, stream, size):
    images = [image[:size, :size] for image in arrays(70)]
    assert list(vit.predict(stream(images))) == vit.predict(images)


def test_frames_of_an_animation(vit, tmp_path):
    first, *others = map(Image.fromarray, arrays(20))
    first.save(tmp_path / "x.gif", save_all=True, append_images=others)
    with Image.open(tmp_path / "x.gif") as gif:  # one object for all frames
        copies = [frame.copy() for frame in ImageSequence.Iterator(gif)]
        assert list(vit.predict(ImageSequence.Iterator(gif))) == vit.predict(copies)


# background threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_files_are_prepared_while_the_model_works(vit, monkeypatch):
    first = threading.Event()
    pixels, model_works = Preprocess.pixels, threading.Event()
    vit.register_forward_pre_hook(lambda *_: model_works.set())

    def slow(self, image):
        if first.is_set():
            assert model_works.wait(20)  # the second image waits until the model has the first one
        first.set()
        return pixels(self, image)

    monkeypatch.setattr(Preprocess, "pixels", slow)
    assert len(list(classify(vit, [PHOTOS / "chelsea.png"] * 2, batch=1))) == 2


@pytest.mark.parametrize(("opened", "expected"), [(False, 2), (True, 1)])
def test_only_files_are_prepared_by_several_threads(vit, two_threads, monkeypatch, opened, expected):
    """The same open file or Pillow image may occur twice in a list."""
    pixels, lock, now, most = Preprocess.pixels, threading.Lock(), 0, 0

    def counted(self, image):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.03)
        with lock:
            now -= 1
        return pixels(self, image)

    monkeypatch.setattr(Preprocess, "pixels", counted)
    path = PHOTOS / "chelsea.png"
    images = [Image.open(path)] * 6 if opened else [path] * 6
    assert [image for image, _ in classify(vit, images)] == images
    assert most == expected


def test_timings(vit):
    timings = Timings()
    list(classify(vit, [PHOTOS / "coffee.png"] * 8, batch=4, timings=timings))
    assert timings.waited > 0
    assert timings.worked > 0


@pytest.mark.parametrize("training", [True, False])
def test_modes_gradients_and_threads_are_restored(vit, training):
    vit.train(training)
    vit.blocks[0].norm1.train(not training)
    modes = [module.training for module in vit.modules()]
    seen = []
    vit.blocks[0].attn.register_forward_hook(lambda *_: seen.append((vit.training, torch.is_grad_enabled())))

    def as_before():
        return (
            [module.training for module in vit.modules()] == modes
            and torch.is_grad_enabled()
            and all(p.requires_grad and p.grad is None for p in vit.parameters())
        )

    vit.predict(arrays(3))
    vit.predict(arrays(1)[0])
    assert as_before()
    stream = vit.predict(iter(arrays(40)))
    next(stream)
    assert as_before()  # also between two answers
    del stream
    assert as_before()
    with pytest.raises(ImageError) as raised:  # keeps every frame that the error passed
        vit.predict([None, *arrays(40)])
    assert as_before()
    assert not background_threads(), raised
    vit.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vit.predict(arrays(1))
    assert as_before()
    assert not background_threads()
    assert set(seen) == {(False, False)}


# errors


def test_an_unreadable_image_stops_predict(vit, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    images = [*arrays(33), tmp_path / "broken.jpg"]
    with pytest.raises(ImageError, match=r"Image 33: Cannot read .*broken.jpg"):
        vit.predict(images)
    stream = vit.predict(iter(images))
    assert len([next(stream) for _ in range(33)]) == 33
    with pytest.raises(ImageError, match=r"Image 33: Cannot read .*broken.jpg"):
        next(stream)


def test_an_unreadable_image_does_not_stop_classify_and_embed(vit, tmp_path):
    paths = [PHOTOS / "coffee.png", tmp_path / "missing.jpg", PHOTOS / "chelsea.png", PHOTOS / "README.md"]
    results = list(classify(vit, iter(paths), top=2, batch=2))
    assert [path for path, _ in results] == paths
    assert [type(result) for _, result in results] == [list, ImageError, list, ImageError]
    assert [p.index for p in results[0][1]] == [p.index for p in vit.predict(paths[0], top=2)]
    assert "missing.jpg as an image: no such file" in str(results[1][1])
    vectors = list(embed(vit, paths, batch=3))
    assert isinstance(vectors[3][1], ImageError)
    assert torch.allclose(vectors[2][1], vit.embed(vit.preprocess(paths[2]))[0].detach(), atol=1e-6)
    assert vectors[0][1].shape == (16,)
    assert isinstance(next(embed(vit, [None]))[1], ImageError)  # a batch without a single good image


def test_outputs_that_are_not_finite(vit):
    torch.nn.init.constant_(vit.norm.bias, 1e5)  # more than float16 holds
    assert next(embed(vit, arrays(1)))[1].isfinite().all()
    with pytest.raises(InputError, match=r"not finite in torch.float16\. Use float32 or bfloat16"):
        next(embed(vit.half(), arrays(1)))
    torch.nn.init.constant_(vit.float().head.bias, float("nan"))
    with pytest.raises(InputError, match=r"not finite in torch.float32"):
        vit.predict(arrays(1)[0])


@pytest.mark.parametrize("top", [0, -1, 2.0, True, "5"])
def test_top_is_a_positive_integer(vit, top):
    with pytest.raises(InputError, match=r"top must be a positive integer, got "):
        vit.predict(arrays(1)[0], top=top)


@pytest.mark.parametrize("images", [arrays(1)[0], arrays(2)], ids=["one", "list"])
def test_labels_must_be_as_many_as_classes(vit, images):
    vit.labels = ["cat"]
    with pytest.raises(InputError, match=r"The model has 3 classes but 1 labels\. Set model.labels to 3 names"):
        vit.predict(images)
    vit.labels = ["cat", "dog", "owl"]
    vit.head = torch.nn.Linear(16, 5)
    with pytest.raises(InputError, match=r"The model has 5 classes but 3 labels"):
        vit.predict(images)


@pytest.mark.parametrize("make", [list, iter])
def test_a_model_without_labels(vit, make):
    vit.labels = None
    with pytest.raises(InputError, match=r"The model has no labels\. Set model.labels to the names of its 3 classes"):
        vit.predict(make([]))
    for classes in (1, 0):
        vit.reset_head(classes)
        with pytest.raises(
            InputError, match=rf"at least two classes, but the model has {classes}\. Use model\(images\)"
        ):
            vit.predict(make([]))
    vit.preprocess = None
    with pytest.raises(ImageError, match=r"weights came without preprocessing"):
        work_through(vit, [], list)


@pytest.mark.parametrize(
    "image",
    [
        PHOTOS / "chelsea.png",
        str(PHOTOS / "chelsea.png"),
        (PHOTOS / "chelsea.png").read_bytes(),
        io.BytesIO((PHOTOS / "chelsea.png").read_bytes()),
        np.zeros((3, 40, 40), np.uint8),  # whose channels would pass for three grey images
        torch.zeros(40, 40, 3, dtype=torch.uint8),
        np.zeros((40, 40), np.uint8),
        Image.new("RGB", (40, 40)),
    ],
    ids=lambda image: type(image).__name__,
)
def test_one_image_is_not_a_list(vit, image):
    for function in (classify, embed):
        with pytest.raises(InputError, match=r"Expected a list or an iterator of images, got one .* Pass \[image\]\."):
            function(vit, image)
    assert len(list(classify(vit, [image]))) == 1


def test_vectors_of_images_in_batches_are_those_of_embed(vit):
    images = arrays(7)
    vit.train()
    found = vit.vectors(iter(images), batch=3)
    assert vit.training
    vit.eval()
    assert (type(found), found.dtype, found.shape) == (np.ndarray, np.float32, (7, 16))
    with torch.no_grad():
        expected = torch.cat([vit.embed(vit.preprocess(image)) for image in images]).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert vit.vectors([]).shape == (0, 16)
    with pytest.raises(ImageError, match=r"Image 1: Cannot read no\.jpg as an image: no such file"):
        vit.vectors([PHOTOS / "chelsea.png", "no.jpg"])
    with pytest.raises(InputError, match=r"Expected a list or an iterator of images, got one dict\. Pass \[image\]"):
        vit.vectors({"path": "no.jpg"})


class Column(Sequence):
    """Like a column of the library datasets, which is a sequence and no list."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]


def series(*columns):
    """Return pandas' Series, or nothing where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return []
    return [pandas.Series(values) for values in columns]


def test_columns_of_tables_are_lists_of_images(vit):
    paths = [str(PHOTOS / "chelsea.png"), str(PHOTOS / "coffee.png")]
    files = [{"bytes": Path(paths[0]).read_bytes(), "path": None}, {"bytes": None, "path": paths[1]}]
    expected, batch, vectors = vit.predict(paths), vit.preprocess(paths), vit.vectors(paths)
    for images in (files, Column(paths), Column(files), np.array(paths), *series(paths, files)):
        assert vit.predict(images) == expected
        assert torch.equal(vit.preprocess(images), batch)
        np.testing.assert_array_equal(vit.vectors(images), vectors)
    assert vit.predict(files[0]) == vit.predict(paths[0])
    assert torch.equal(vit.preprocess(files[1]), batch[1:])


def test_a_prediction_as_json(vit):
    (best,) = vit.predict(arrays(1)[0], top=1)
    assert json.loads(json.dumps(best.to_dict())) == {"label": best.label, "index": best.index, "score": best.score}


def test_an_upload_that_is_no_image_is_named(vit):
    with tempfile.SpooledTemporaryFile() as upload:  # its name is None
        upload.write(b"<!DOCTYPE html><html>")
        for image, text in (
            (upload, "Cannot read the open file as an image: "),
            (b"<!DOCTYPE html><html>", r"the 21 bytes as an image: .* The bytes start with b'<!DOCTYPE html>'\."),
            (b"", "Cannot read the 0 bytes as an image: "),
            (None, "An image must be a path, .*, got NoneType"),
            ({"bytes": b"", "path": None}, "Cannot read the 0 bytes as an image: "),
            ({"image": "cat.jpg"}, "An image must be a path, .*, got dict"),
        ):
            with pytest.raises(ImageError, match=text):
                vit.predict(image)


def test_sigmoid_scores_stand_by_themselves_and_are_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model.scores = "sigmoid"
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    logits = model(model.preprocess(image))[0]
    model.save(tmp_path / "model")
    loaded = vitlite.load(tmp_path / "model")
    answers = loaded.predict(image)
    assert [answer.score for answer in answers] == pytest.approx(logits.sigmoid().sort(descending=True).values.tolist())
    loaded.reset_head(2)
    assert loaded.scores == "softmax"
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["vitlite"]["scores"] = "tanh"
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="scores must be softmax or sigmoid, got 'tanh'"):
        vitlite.load(tmp_path / "model")


def test_one_class_with_sigmoid() -> None:
    model = tiny_model(num_classes=1)
    model.labels, model.scores = ["rust"], "sigmoid"
    (answer,) = model.predict(np.zeros((32, 32, 3), np.uint8))
    assert answer.label == "rust"
    assert 0 < answer.score < 1


def test_images_of_different_shapes_are_sorted_into_batches() -> None:
    """Each gets what it gets alone, in the order in which they came, and broken ones between them stay in place."""
    model = tiny_model(**FAMILIES["NaFlex"])
    generator = torch.Generator().manual_seed(0)
    sizes = [(30, 60), (60, 30), (40, 40), (31, 62), (60, 30), (80, 10), (45, 45), (40, 40)]
    images: list[Any] = [torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    batches: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, given: batches.append(tuple(given[0].shape)))
    alone = [model.predict(image) for image in images]
    batches.clear()
    for together, one in zip(model.predict(images), alone, strict=True):
        assert [each.label for each in together] == [each.label for each in one]
    assert len(batches) == len({shape[2:] for shape in batches}) < len(images) == sum(shape[0] for shape in batches)
    vectors = torch.stack([model.embed(model.preprocess(image))[0] for image in images]).detach()
    assert torch.allclose(torch.from_numpy(model.vectors(images, batch=3)), vectors, atol=1e-5)
    mixed = [images[0], b"broken", images[1], images[2], b"broken", images[3]]
    outcomes = [result for _, result in embed(model, mixed, batch=4)]
    assert [isinstance(result, ImageError) for result in outcomes] == [False, True, False, False, True, False]
    found = torch.stack([result for result in outcomes if isinstance(result, Tensor)])
    assert torch.allclose(found, vectors[:4], atol=1e-5)
    with pytest.raises(ImageError, match="different shapes"):
        model.preprocess(images)
    assert model.preprocess(images[:1] + images[3:4]).shape[0] == 2

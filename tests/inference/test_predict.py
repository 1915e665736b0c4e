import gc
import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from vitlite.checkpoints.metadata import transform_from_record
from vitlite.config import ViTConfig
from vitlite.errors import ImageError, InputError
from vitlite.images import Preprocess, TransformConfig
from vitlite.inference.predict import Pace, classify, embed, predict, work_through
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


def pictures(count):
    return list(np.random.default_rng(0).integers(0, 256, (count, 40, 40, 3), dtype=np.uint8))


def background_threads():
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitlite-images")]


def test_one_picture(vit):
    image = pictures(1)[0]
    answer = vit.predict(image)
    with torch.no_grad():
        scores = vit(vit.preprocess(image)).softmax(-1)[0].tolist()
    assert [p.index for p in answer] == sorted(range(3), key=lambda i: -scores[i])
    assert [p.label for p in answer] == [vit.labels[p.index] for p in answer]
    assert [p.score for p in answer] == pytest.approx(sorted(scores, reverse=True))
    assert vit.predict(image, top=1) == answer[:1]
    assert vit.predict(image, top=2) == predict(vit, image, 2) == answer[:2]


def test_an_open_file_is_one_picture(vit):
    path = PHOTOS / "chelsea.png"
    with path.open("rb") as file:
        assert vit.predict(file) == vit.predict(io.BytesIO(path.read_bytes())) == vit.predict(path)


def test_lists_and_iterators(vit):
    images = pictures(70)
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


def test_iterators_are_read_two_batches_ahead(vit):
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
def test_an_iterator_may_change_the_picture_that_it_gave(vit, stream):
    images = pictures(70)
    assert list(vit.predict(stream(images))) == vit.predict(images)


def test_an_iterator_may_write_one_file_again_and_again(vit, tmp_path):
    images = pictures(70)

    def frames():
        for image in images:
            Image.fromarray(image).save(tmp_path / "next.bmp")
            (tmp_path / "next.bmp").replace(tmp_path / "frame.bmp")
            yield tmp_path / "frame.bmp"

    assert list(vit.predict(frames())) == vit.predict(images)


def test_a_list_is_prepared_in_the_background(vit, monkeypatch):
    first = threading.Event()
    pixels, model_works = Preprocess.pixels, threading.Event()
    vit.register_forward_pre_hook(lambda *_: model_works.set())

    def slow(self, image):
        if first.is_set():
            assert model_works.wait(20)  # the second picture waits until the model has the first one
        first.set()
        return pixels(self, image)

    monkeypatch.setattr(Preprocess, "pixels", slow)
    assert len(list(classify(vit, pictures(2), batch=1))) == 2


def test_frames_of_an_animation(vit, tmp_path):
    first, *others = map(Image.fromarray, pictures(20))
    first.save(tmp_path / "x.gif", save_all=True, append_images=others)
    with Image.open(tmp_path / "x.gif") as gif:  # the one object that its iterator gives each time
        copies = [frame.copy() for frame in ImageSequence.Iterator(gif)]
        assert list(vit.predict(ImageSequence.Iterator(gif))) == vit.predict(copies)


@pytest.fixture
def several_readers(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_a_class_of_one_s_own_prepares_pictures_in_their_order(vit, several_readers):
    seen, inside = [], []

    class Own(Preprocess):
        def pixels(self, image):
            inside.append(image)
            assert len(inside) == 1
            time.sleep(0.001 * (int(image[0, 0, 0]) % 3))
            seen.append(int(image[0, 0, 0]))
            return super().pixels(inside.pop())

    vit.preprocess = Own(TRANSFORM, vit)
    images = [np.full((40, 40, 3), i, dtype=np.uint8) for i in range(70)]
    for _ in range(5):
        seen.clear()
        list(classify(vit, images))
        assert seen == list(range(70))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have names")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves the pipe open
def test_what_comes_out_of_one_pipe_keeps_its_order(vit, several_readers, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    files = []
    for image in pictures(8):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        files.append(file.getvalue())
    right = vit.predict(files)
    was_read, pixels = threading.Semaphore(0), Preprocess.pixels

    def noted(self, image):
        try:
            return pixels(self, image)
        finally:
            was_read.release()

    monkeypatch.setattr(Preprocess, "pixels", noted)

    def write():
        for file in files:
            pipe.write_bytes(file)
            was_read.acquire()  # else the reader of this one would read on into the next

    for _ in range(5):
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        assert vit.predict([pipe] * len(files)) == right
        writer.join()


def test_two_threads_use_one_model_and_the_last_puts_its_modes_back(vit):
    vit.train()
    vit.blocks[0].norm1.eval()
    modes = [module.training for module in vit.modules()]
    began, second_began, seen = threading.Event(), threading.Event(), []

    def first(images):
        began.set()
        assert second_began.wait(20)
        return [0]

    def second(images):
        second_began.set()
        thread.join(20)  # the first is done with the model
        seen.extend(module.training for module in vit.modules())
        return [0]

    thread = threading.Thread(target=lambda: list(work_through(vit, pictures(1), first)))
    thread.start()
    assert began.wait(20)
    list(work_through(vit, pictures(1), second))
    assert seen
    assert not any(seen)
    assert [module.training for module in vit.modules()] == modes


@pytest.mark.parametrize("training", [True, False])
def test_leaves_everything_as_it_was(vit, training):
    vit.train(training)
    vit.blocks[0].norm1.train(not training)
    modes = [module.training for module in vit.modules()]
    seen = []
    vit.blocks[0].attn.register_forward_hook(lambda *_: seen.append((vit.training, torch.is_grad_enabled())))
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def as_before():
        return (
            [module.training for module in vit.modules()] == modes
            and torch.get_num_threads() == threads
            and torch.is_grad_enabled() == gradients
            and all(p.requires_grad and p.grad is None for p in vit.parameters())
        )

    vit.predict(pictures(3))
    assert as_before()
    stream = vit.predict(iter(pictures(40)))
    next(stream)
    assert as_before()  # also between two answers
    del stream
    assert as_before()
    with pytest.raises(ImageError) as raised:  # kept, and with it every frame that the error passed
        vit.predict([None, *pictures(40)])
    assert as_before()
    assert not background_threads(), raised
    vit.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vit.predict(pictures(1))
    assert as_before()
    assert not background_threads()
    assert set(seen) == {(False, False)}


def test_a_broken_picture_stops_predict_and_names_itself(vit, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    images = [*pictures(33), tmp_path / "broken.jpg"]
    with pytest.raises(ImageError, match=r"Picture 33: Cannot read .*broken.jpg"):
        vit.predict(images)
    stream = vit.predict(iter(images))
    assert len([next(stream) for _ in range(33)]) == 33
    with pytest.raises(ImageError, match=r"Picture 33: Cannot read .*broken.jpg"):
        next(stream)


def test_a_broken_picture_does_not_stop_the_rest(vit, tmp_path):
    paths = [PHOTOS / "coffee.png", tmp_path / "missing.jpg", PHOTOS / "chelsea.png", PHOTOS / "README.md"]
    results = list(classify(vit, iter(paths), top=2, batch=2))
    assert [path for path, _ in results] == paths
    assert [type(result) for _, result in results] == [list, ImageError, list, ImageError]
    assert [p.index for p in results[0][1]] == [p.index for p in vit.predict(paths[0], top=2)]
    assert "missing.jpg as a picture: no such file" in str(results[1][1])
    vectors = list(embed(vit, paths, batch=3))
    assert isinstance(vectors[3][1], ImageError)
    assert torch.allclose(vectors[2][1], vit.embed(vit.preprocess(paths[2]))[0].detach(), atol=1e-6)
    assert vectors[0][1].shape == (16,)
    assert isinstance(next(embed(vit, [None]))[1], ImageError)  # a batch without a single picture


def test_half_precision_answers_in_float32(vit):
    vit.bfloat16()
    assert sum(p.score for p in vit.predict(pictures(1)[0])) == pytest.approx(1, abs=1e-6)
    assert next(embed(vit, pictures(1)))[1].dtype == torch.float32


def test_vectors_that_are_not_finite(vit):
    torch.nn.init.constant_(vit.norm.bias, 1e5)  # more than float16 holds
    assert next(embed(vit, pictures(1)))[1].isfinite().all()
    with pytest.raises(InputError, match=r"not finite in torch.float16\. Use float32 or bfloat16"):
        next(embed(vit.half(), pictures(1)))


def test_answers_that_are_not_finite(vit):
    torch.nn.init.constant_(vit.head.bias, float("nan"))
    with pytest.raises(InputError, match=r"not finite in torch.float32\. Use float32 or bfloat16"):
        vit.predict(pictures(1)[0])


@pytest.mark.parametrize("classes", [2, 5])
def test_a_head_put_in_by_hand_is_not_read_with_the_old_labels(vit, classes):
    vit.head = torch.nn.Linear(16, classes)
    with pytest.raises(InputError, match=rf"has 3 labels and gave {classes} numbers: its head was replaced"):
        vit.predict(pictures(1)[0], top=1)


def test_what_is_missing_is_named(vit):
    image = pictures(1)[0]
    for top in (0, -1, 2.0, True, "5"):
        with pytest.raises(InputError, match="top must be a positive integer, got"):
            vit.predict(image, top=top)
    vit.labels = ["cat"]
    with pytest.raises(InputError, match=r"model.labels has 1 names, and the model 3 classes"):
        vit.predict(iter([image]))  # at once, not when the first answer is asked for
    vit.labels = None
    with pytest.raises(InputError, match=r"Name its 3 classes in order: model.labels = \["):
        vit.predict(image)
    vit.reset_head(0)
    with pytest.raises(InputError, match=r"no head. For vectors: model.embed\(model.preprocess\(images\)\)"):
        vit.predict(image)
    vit.preprocess = None
    with pytest.raises(ImageError, match=r"Set it: model.preprocess = vitlite.images.Preprocess\("):
        work_through(vit, [image], list)


def test_what_is_missing_is_named_in_the_words_of_the_command_line(vit):
    torch.nn.init.constant_(vit.head.bias, float("nan"))
    with pytest.raises(InputError) as not_finite:
        vit.predict(pictures(1)[0])
    vit.labels = None
    with pytest.raises(InputError) as no_labels:
        vit.predict([])
    vit.reset_head(0)
    with pytest.raises(InputError) as no_head:
        vit.predict([])
    vit.preprocess = None
    with pytest.raises(ImageError) as no_preprocess:
        embed(vit, [])
    words = [error.value.for_command_line() for error in (not_finite, no_labels, no_head, no_preprocess)]
    assert words == [
        "The model's outputs are not finite in torch.float32. Use float32 or bfloat16 (--dtype).",
        "The model has no labels. Name its 3 classes in order in its config.json, or name a checkpoint like it: "
        "--model NAME --weights PATH.",
        "This model has no head. For vectors: vitlite embed.",
        "These weights came without their preprocessing: the model does not know how to prepare pictures. "
        "Name a checkpoint like it: --model NAME --weights PATH.",
    ]


def test_deit_tiny_knows_the_photos(shared):
    """The five best, with the probabilities that timm's own pipeline gives."""
    from safetensors.torch import load_file

    from vitlite.zoo import registry
    from vitlite.zoo.labels import labels_of

    model = ViT(preset("vit_tiny_16")).eval()
    model.load_state_dict(load_file(shared / "weights" / "deit_tiny_16.timm.safetensors"))
    record = registry.find("deit_tiny_patch16_224.fb_in1k")
    model.preprocess = Preprocess(transform_from_record(record, (224, 224)), model)
    model.labels = labels_of(record)
    cat, coffee = model.predict([shared / "photos" / "chelsea.png", shared / "photos" / "coffee.png"])
    assert [(p.label, p.index) for p in cat[:3]] == [("Egyptian cat", 285), ("tabby", 281), ("tiger cat", 282)]
    assert [p.score for p in cat[:3]] == pytest.approx([0.4388, 0.2272, 0.1866], abs=5e-4)
    assert coffee[0][:2] == ("espresso", 967)
    assert coffee[0].score == pytest.approx(0.8182, abs=5e-4)


@pytest.mark.parametrize(
    "picture",
    [
        PHOTOS / "chelsea.png",
        str(PHOTOS / "chelsea.png"),
        (PHOTOS / "chelsea.png").read_bytes(),
        io.BytesIO((PHOTOS / "chelsea.png").read_bytes()),
        np.zeros((3, 40, 40), np.uint8),  # whose channels would pass for three grey pictures
        torch.zeros(40, 40, 3, dtype=torch.uint8),
        np.zeros((40, 40), np.uint8),
        Image.new("RGB", (40, 40)),
    ],
    ids=lambda picture: type(picture).__name__,
)
def test_one_picture_is_not_taken_for_several(vit, picture):
    for several in (classify, embed):
        with pytest.raises(InputError, match=r"a list or an iterator of pictures, got one .* Put it into a list"):
            several(vit, picture)
    assert len(list(classify(vit, [picture]))) == 1


def test_bytes_are_a_picture(vit):
    path = PHOTOS / "chelsea.png"
    assert vit.predict(path.read_bytes()) == vit.predict(path)
    assert vit.predict([path.read_bytes(), bytearray(path.read_bytes())]) == vit.predict([path, path])


def test_results_that_are_not_one_for_each_picture(vit):
    for made in (list, lambda images: [*images, images[0]], lambda images: images[1:]):
        results = work_through(vit, pictures(3), made)
        if made is list:
            assert len(list(results)) == 3
        else:
            with pytest.raises(InputError, match=r"Of 3 pictures, (4|2) images or results were made"):
                list(results)


# several readers


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def at_once(vit, images, monkeypatch, wait):
    """How many of these pictures were prepared at the same time."""
    pixels, lock, now, most = Preprocess.pixels, threading.Lock(), 0, 0

    def counted(self, image):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(wait)
        with lock:
            now -= 1
        return pixels(self, image)

    with monkeypatch.context() as patch:
        patch.setattr(Preprocess, "pixels", counted)
        assert [image for image, _ in classify(vit, images)] == list(images)
    return most


def test_the_score_of_the_only_class_would_say_nothing(vit):
    """A softmax gives it 1.0, of every picture; transformers takes a sigmoid."""
    one = ViT(vit.config.replace(num_classes=1)).eval()
    one.preprocess, one.labels = vit.preprocess, ["defect"]
    with pytest.raises(InputError, match=r"The model has one class, .*torch\.sigmoid"):
        one.predict(pictures(1)[0])
    assert one(one.preprocess(pictures(2))).shape == (2, 1)


def test_the_best_come_first_however_far_apart(vit):
    """Where all but the first have a score of zero, their logits still tell their order, as `eval` counts it."""
    wide = ViT(vit.config.replace(num_classes=40)).eval()
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(wide.head.weight, std=300, generator=generator)
    wide.preprocess, wide.labels = vit.preprocess, [str(number) for number in range(40)]
    for scale in (1.0, 1e-11):  # and where all scores are equal
        with torch.no_grad():
            wide.head.weight.mul_(scale)
        for picture in pictures(3):
            logits = wide(wide.preprocess(picture))[0]
            answers = wide.predict(picture, top=40)
            assert [answer.index for answer in answers] == logits.argsort(descending=True).tolist()
            assert [answer.score for answer in answers] == logits.softmax(0)[[a.index for a in answers]].tolist()


def test_files_are_read_by_several_threads_in_order_and_within_a_room(vit, two_threads, monkeypatch):
    files = [PHOTOS / "chelsea.png", PHOTOS / "coffee.png"] * 4
    assert at_once(vit, files, monkeypatch, 0.05) == 2
    monkeypatch.setattr("vitlite.inference.predict.ROOM", 600 * 400)  # of the larger of them, alone
    assert at_once(vit, files, monkeypatch, 0.02) == 1


def test_what_is_no_file_is_prepared_one_by_one(vit, two_threads, monkeypatch):
    with open(PHOTOS / "chelsea.png", "rb") as file:
        assert at_once(vit, [file] * 6, monkeypatch, 0.02) == 1

    class Own(Preprocess):
        def pixels(self, image):
            return super().pixels(image)

    vit.preprocess = Own(TRANSFORM, vit)
    assert at_once(vit, [PHOTOS / "chelsea.png"] * 6, monkeypatch, 0.02) == 1


def in_turn(number):
    """A picture that says where it stands; every third is large, and takes longer."""
    return torch.full((3, 40 + 400 * (number % 3), 50), number, dtype=torch.uint8)


@pytest.mark.parametrize("way", [list, iter])
@pytest.mark.parametrize("task", [classify, embed])
def test_a_class_of_one_s_own_gets_the_pictures_in_their_order(vit, two_threads, task, way):
    seen = []

    class Own(Preprocess):
        def pixels(self, image):
            seen.append(int(image[0, 0, 0]))
            return super().pixels(image)

    vit.preprocess = Own(TRANSFORM, vit)
    for _ in range(3):
        seen.clear()
        list(task(vit, way([in_turn(number) for number in range(40)]), batch=8))
        assert seen == list(range(40))


def test_a_pace_says_what_takes_long(vit):
    pace = Pace()
    list(classify(vit, [PHOTOS / "coffee.png"] * 8, batch=4, pace=pace))
    assert pace.waited > 0
    assert pace.worked > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves the pipe open
def test_a_pipe_is_read_once(vit: ViT, tmp_path: Path) -> None:
    photo, pipe = tmp_path / "photo.png", tmp_path / "pipe.png"
    Image.new("RGB", (40, 40), (200, 30, 60)).save(photo)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(photo.read_bytes()), daemon=True)
    writer.start()
    (_, of_pipe), (_, of_file) = embed(vit, [pipe, photo])
    assert isinstance(of_pipe, torch.Tensor)
    assert isinstance(of_file, torch.Tensor)
    assert torch.equal(of_pipe, of_file)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves the pipe open
def test_a_pipe_that_comes_several_times_is_read_in_order(
    vit: ViT, two_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = []
    for level in range(0, 250, 25):
        photos.append(tmp_path / f"{level}.png")
        Image.new("RGB", (40, 40), (level, 255 - level, 60)).save(photos[-1])
    of_files = [vector for _, vector in embed(vit, photos)]
    pipe, pixels, is_read = tmp_path / "pipe.png", Preprocess.pixels, threading.Semaphore()
    os.mkfifo(pipe)

    def write() -> None:
        for photo in photos:
            is_read.acquire()
            pipe.write_bytes(photo.read_bytes())

    def read(self: Preprocess, image: Path) -> torch.Tensor:
        made = pixels(self, image)
        is_read.release()
        return made

    monkeypatch.setattr(Preprocess, "pixels", read)
    threading.Thread(target=write, daemon=True).start()
    of_pipe = [vector for _, vector in embed(vit, [pipe] * len(photos), batch=4)]
    for i, (there, wanted) in enumerate(zip(of_pipe, of_files, strict=True)):
        assert isinstance(there, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        torch.testing.assert_close(there, wanted, rtol=1e-4, atol=1e-5, msg=f"picture {i}")  # of batches of other sizes

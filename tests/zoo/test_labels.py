import doctest
from collections import Counter
from dataclasses import replace

from vitlite.zoo import labels, registry
from vitlite.zoo.labels import labels_of, read_label_set


def test_each_class_of_a_head_has_its_label():
    for record in registry.RECORDS.values():
        assert record.labels_name is None or record.config.num_classes == len(labels_of(record))
    assert labels_of(registry.info("vit_nano_4"))[3] == "cat"


def test_labels_are_those_of_the_row_and_not_guessed_from_the_number_of_classes():
    record = registry.info("vit_base_16")
    assert record.config.num_classes == 1000
    assert labels_of(replace(record, labels_name=None)) is None


def test_every_label_set_is_some_rows():
    named = {record.labels_name for record in registry.RECORDS.values()}
    assert {path.stem for path in (registry.DATA / "labels").iterdir()} == named - {None}


def test_labels_are_known_and_tell_classes_apart():
    imagenet = labels_of(registry.info("vit_base_16"))
    assert [imagenet[i] for i in (0, 281, 285, 657, 967)] == ["tench", "tabby", "Egyptian cat", "missile", "espresso"]
    assert imagenet[134].startswith("crane (large long-necked wading bird")
    assert imagenet[517] == "crane (lifts and moves heavy objects)"
    assert labels_of(registry.info("vit_base_16.dino")) is None
    assert labels_of(registry.info("vit_base_16.clip_openai")) is None  # 512 numbers, not classes
    counts = Counter(record.labels_name for record in registry.RECORDS.values())
    assert counts["imagenet-1k"] == 128
    for name in set(counts) - {None}:
        label_set = read_label_set(name)
        assert len(set(label_set)) == len(label_set)
        assert all(label == label.strip() != "" for label in label_set)


def test_examples():
    assert doctest.testmod(labels).failed == 0
    assert doctest.testmod(labels).attempted > 0

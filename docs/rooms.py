"""The rooms of vitlite, and who may import whom: for the test of imports, and for the plan on the page inside.md.

A room is a folder, or a module that stands by itself. Each line says what the room does, and which rooms it may use.
"""

from typing import NamedTuple


class Room(NamedTuple):
    """A room: what it does, in words for the plan, and the rooms that it uses."""

    does: str
    uses: str = ""


ROOMS = {
    # The floor that a reader meets, from the ground up.
    "errors": Room("what went wrong, and what to do, in Python and at the command line"),
    "versions": Room("where it matters which version of something is installed"),
    "schema": Room("JSON that others wrote, checked where it is read", "errors"),
    "habits": Room("what other libraries call it, and what to write instead"),
    "config": Room("what a ViT is made of, and the presets", "habits errors"),
    "costs": Room("parameters and multiply-adds, counted from a config", "config"),
    "disk": Room("files whole or not at all, one process at a time"),
    "folders": Room("where files are kept", "disk errors"),
    "positions": Room("where each patch is", "config"),
    "stem": Room("pixels become a feature map, in the hybrids", "config"),
    "pooling": Room("the tokens become one vector", "config"),
    "inputs": Room("images that fit, or an error", "config errors"),
    "speed.cpu": Room("what this CPU is, and which instructions it has"),
    "speed.threads": Room("threads in each of which torch computes alone"),
    "speed.verdicts": Room(
        "which kernels pay here, timed once and kept", "speed.cpu speed.threads folders schema disk errors"
    ),
    "speed.onednn": Room("which operators this CPU is quick with, each proved before its use", "speed.verdicts errors"),
    "model": Room("the network", "positions stem pooling inputs speed.onednn config habits errors"),
    "fingerprint": Room("what weights are known again by", "model errors"),
    "tiff": Room("which TIFFs Pillow takes for another picture", "errors"),
    "jpeg2000": Room("which JPEG 2000s Pillow takes for another picture", "errors"),
    "headers": Room("JPEGs, PNGs and BMPs that are damaged, or that Pillow takes for others", "errors"),
    "decode": Room("a picture file becomes pixels, by Pillow", "headers jpeg2000 tiff errors"),
    "images": Room("pictures become tensors, as the weights saw them", "decode errors"),
    "predict": Room("pictures become answers", "images errors"),
    # Behind it.
    "weights": Room(
        "a name or a place becomes verified bytes, and these a filled model; and back",
        "model fingerprint positions images config costs schema folders disk errors",
    ),
    "factory": Room("create and load", "weights fingerprint model images config habits errors"),
    "convert": Room("weights in another library's layout", "factory weights model images config disk errors"),
    "speed": Room(
        "a model becomes a fast one",
        "fingerprint model pooling stem costs config errors speed.onednn speed.cpu speed.threads",
    ),
    "export": Room("a model becomes a file for other runtimes", "weights speed model images disk versions errors"),
    "draw": Room("what a model looks at, as pictures; and the curves of a run", "predict positions images disk errors"),
    "training": Room(
        "labelled pictures become weights",
        "factory weights fingerprint model predict images config speed.onednn schema disk errors",
    ),
    "bulk": Room("many pictures become rows", "fingerprint speed predict images model schema disk errors"),
    "vectors": Room(
        "pictures found by their vectors, and how good the vectors are", "bulk draw predict images schema errors"
    ),
    "cli": Room(
        "words of a command line become calls of all the others",
        "vectors bulk training draw export convert speed speed.verdicts factory weights predict images model config "
        "costs disk errors",
    ),
}

# Inside a function, for convenience: the only arrows up.
UP = {("model", "images"), ("model", "predict"), ("model", "weights")}


def room_of(module: str) -> str:
    """The room of a module, by its dotted name without `vitlite.`: "weights.zoo" is in "weights".

    >>> room_of("weights.metadata.timm"), room_of("speed.onednn"), room_of("config")
    ('weights', 'speed.onednn', 'config')
    """
    if module in ROOMS:
        return module
    return module.split(".")[0]

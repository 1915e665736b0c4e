"""Temporary: the old comparison of a model with its config. Replaced by checkpoints/compare.py."""

from collections.abc import Iterator
from types import MethodType
from typing import NamedTuple

from torch import nn

from vitlite.nn.vit import ViT, model_on_meta

COMPUTING = (  # methods by which a ViT and its layers compute: with another, it is another network
    "forward", "embed", "features", "attention_maps", "_tokens", "_grid", "_positions", "_rotation", "_pool",
    "residuals", "split", "map", "standardised",
)  # fmt: skip
CHANGES_NO_ANSWER = ("training", "checkpointing")  # settings of a layer


def replaced_method(module: nn.Module) -> str:
    """The name of a method by which a module computes, and which is its own; nothing where it has none.

    That of its class, set back as accelerate does it, is not its own; one that was put into its class is.
    """
    for name in COMPUTING:
        usual, found = getattr(type(module), name, None), vars(module).get(name)
        if usual is None:
            continue
        if not _stands_in_its_class(type(module), name):
            return name
        if found is not None and found != MethodType(usual, module):
            return name
    return ""


def _stands_in_its_class(kind: type, name: str) -> bool:
    """Whether a class has a method by this name from its own text, or that of a class it is made of."""
    owner = next(owner for owner in kind.__mro__ if name in vars(owner))
    if owner is nn.Module:  # which has none of its own
        return True
    method = vars(owner)[name]
    written = (getattr(method, "__module__", ""), getattr(method, "__qualname__", ""))
    return written == (owner.__module__, f"{owner.__qualname__}.{name}") and not hasattr(method, "__wrapped__")


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook, of this module or of all, sees what goes in or comes out, and may change it."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or is_all_hooked()


def is_all_hooked() -> bool:
    """Whether there is a hook of all modules, as `torch.nn.modules.module.register_module_forward_hook` makes one."""
    of_all = nn.modules.module
    return bool(of_all._global_forward_hooks or of_all._global_forward_pre_hooks)


def order_within(module: nn.Module) -> tuple[str, ...]:
    """The names of the layers that a module runs one after the other, in that order; of others none."""
    return tuple(module._modules) if isinstance(module, (nn.Sequential, nn.ModuleList)) else ()


class Difference(NamedTuple):
    """Where a model is not what its config says: at which name, what is there, and what belongs there."""

    name: str
    found: str
    wanted: str


def differences(model: ViT) -> Iterator[Difference]:
    """By the layers of a new model of the same config: they are all there, no others are, and in the same order."""
    every_name = model.named_modules(remove_duplicate=False)  # a layer that is there twice computes twice
    found: dict[str, nn.Module] = dict(every_name)
    expected: dict[str, nn.Module] = dict(model_on_meta(model.config).named_modules())
    for name, wanted in expected.items():
        yield from _differences_of(name, found.get(name), wanted)
    for name, layer in found.items():
        if name not in expected:
            yield Difference(name, _named(layer), "to be there")
    for name, wanted in expected.items():
        order, its_own = order_within(wanted), order_within(found.get(name, wanted))
        if its_own != order:
            yield Difference(name, f"made of {', '.join(its_own)}", f"of {', '.join(order)}")


def _differences_of(name: str, layer: nn.Module | None, wanted: nn.Module) -> Iterator[Difference]:
    if layer is None or (name and not _is_alike(layer, wanted)):
        yield Difference(name, _named(layer), _named(wanted))
        return
    own = replaced_method(layer)
    if own:
        yield Difference(f"{name}.{own}".lstrip("."), "set on it", "that of its class")
    for setting, value in _settings(wanted):
        its_own = vars(layer).get(setting, value)
        if its_own != value:
            yield Difference(f"{name}.{setting}", repr(its_own), repr(value))


def _settings(layer: nn.Module) -> Iterator[tuple[str, object]]:
    """What a layer computes by beside its tensors, such as how many heads it has."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and name not in CHANGES_NO_ANSWER and isinstance(value, (int, float, str)):
            yield name, value


def _is_alike(layer: nn.Module, wanted: nn.Module) -> bool:
    """Whether a layer is of the class that belongs there, with the same settings; torch's own linear computes alike."""
    return type(layer) is type(wanted) and layer.extra_repr() == wanted.extra_repr()


def _named(layer: nn.Module | None) -> str:
    return "missing" if layer is None else f"{type(layer).__name__}({layer.extra_repr()})"

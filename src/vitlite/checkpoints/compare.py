"""Compare a model with a new model of the same config, before saving, optimizing or hashing the model."""

from torch import nn

from vitlite.errors import CheckpointError, VitliteError
from vitlite.nn.vit import ViT, model_on_meta


def check_unmodified(model: ViT, task: str, error: type[VitliteError] = CheckpointError) -> None:
    """Check that a model has the modules and tensors that its config describes.

    The types and settings of modules and the names and shapes of tensors are compared. Hooks, replaced methods and
    values are not compared.

    Args:
        model: The model to check.
        task: A verb such as "save", for the error message "Cannot save a modified model".
        error: The type of the error to raise.

    Raises:
        VitliteError: The model differs from its config.
    """
    difference = find_difference(model)
    if difference:
        raise error(
            f"Cannot {task} a modified model: {difference}. Merge adapters such as LoRA first. To change the head, "
            "call model.reset_head(num_classes) instead of replacing modules."
        )


def find_difference(model: ViT) -> str:
    """Return the first difference between a model and its config as a clause, or "" if there is none."""
    if type(model) is not ViT:
        return f"it is a {type(model).__name__}, not a ViT"
    fresh = model_on_meta(model.config)
    modules = dict(model.named_modules(remove_duplicate=False))
    fresh_modules = dict(fresh.named_modules())
    for name in fresh_modules | modules:
        found, expected = _describe(modules.get(name), "missing"), _describe(fresh_modules.get(name), "no such module")
        if name and found != expected:
            return f"{name} is {found}, expected {expected}"
    shapes = {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    fresh_shapes = {name: str(tuple(tensor.shape)) for name, tensor in fresh.state_dict().items()}
    for name in fresh_shapes | shapes:
        found, expected = shapes.get(name, "missing"), fresh_shapes.get(name, "no such tensor")
        if found != expected:
            return f"{name} is {found}, expected {expected}"
    return ""


def _describe(module: nn.Module | None, absent: str) -> str:
    return absent if module is None else f"{type(module).__name__}({module.extra_repr()})"

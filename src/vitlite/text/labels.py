"""Give a model your own labels without training (zero-shot classification)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from vitlite.checkpoints.compare import check_unmodified
from vitlite.errors import InputError
from vitlite.nn.layers import CosineHead
from vitlite.nn.vit import ViT, model_on_meta
from vitlite.text.half import TextHalf, open_text_half
from vitlite.text.templates import TEMPLATES

if TYPE_CHECKING:
    from vitlite.text.weights import JointWeights


def with_labels(model: ViT, labels: Sequence[str], template: str | Sequence[str] = "a photo of a {}") -> ViT:
    """Return a model that classifies images by your own labels, without training.

    The text half of the checkpoint turns each label into a vector, and these vectors become the head. The new model is
    an ordinary classifier, which can be saved, optimized and exported. The scores of CLIP sum to 1 over all labels.
    SigLIP gives each label a separate probability.

    Args:
        model: A CLIP or SigLIP checkpoint from the zoo, or a CLIPModel or SiglipModel from transformers. It is not
            changed, and the new model shares its weights.
        labels: The names of the classes.
        template: A sentence with {} for the label, a list of sentences whose vectors are averaged, or "imagenet" for
            the 80 sentences that OpenAI used for ImageNet.

    Raises:
        InputError: The checkpoint has no text half, the model was modified, a template does not contain {} exactly
            once, a sentence is too long, a label is empty, or the checkpoint reads two labels as the same text.
        CheckpointError: The text half is damaged, or vitlite does not support it.
        DownloadError: The text half cannot be downloaded.
        MissingExtraError: The packages for text are not installed: pip install 'vitlite[text]'.
    """
    if type(model) is not ViT:
        kind = type(model).__name__
        raise InputError(f"with_labels needs a ViT, got {kind}. Call with_labels before vitlite.optimize.")
    check_unmodified(model, "give labels to", InputError)
    half = open_text_half(model)
    _check_labels(labels, half)
    templates = _templates(template)
    sentences = [sentence.replace("{}", label) for label in labels for sentence in templates]
    vectors = half.vectors(sentences).view(len(labels), len(templates), -1).mean(1)
    return _with_head(model, tuple(labels), F.normalize(vectors, dim=-1), half.weights)


def _check_labels(labels: Sequence[str], half: TextHalf) -> None:
    """Check that all labels are different after the text cleaning of the tokenizer.

    Raises:
        InputError: There are no labels, a label is empty, or two labels are the same after the cleaning.
    """
    if isinstance(labels, str) or not labels:
        raise InputError(f"labels must be a list of at least one label, got {labels!r}.")
    seen: dict[str, str] = {}
    for label in labels:
        text = half.tokenizer.clean(label)
        if not text:
            raise InputError(f"This checkpoint reads the label {label!r} as an empty text. Use letters or digits.")
        if text in seen:
            raise InputError(
                f"This checkpoint reads the labels {seen[text]!r} and {label!r} both as {text!r}. Remove one of them."
            )
        seen[text] = label


def _templates(template: str | Sequence[str]) -> Sequence[str]:
    if isinstance(template, str):
        template = TEMPLATES.get(template, [template])
    if not template:
        raise InputError("template must contain at least one sentence, got an empty list.")
    for each in template:
        if not isinstance(each, str) or each.count("{}") != 1:
            names = " or ".join(map(repr, TEMPLATES))
            raise InputError(f"A template must be a sentence with one {{}} for the label, or {names}, got {each!r}.")
    return template


def _with_head(model: ViT, labels: tuple[str, ...], vectors: torch.Tensor, joint: "JointWeights") -> ViT:
    """Return a model with the same image tower and with the vectors of the labels (k, e) as its head."""
    projection, width = projection_of(model, joint), vectors.shape[1]
    config = model.config.replace(num_classes=len(labels), cosine_head=width if projection is not None else 0)
    new = model_on_meta(config)
    # Detach the parameters, because load_state_dict would change their `requires_grad` in the caller's model.
    state = {name: weight.detach() for name, weight in model.named_parameters() if not name.startswith("head.")}
    if projection is not None:
        state |= {"head.proj.weight": projection.weight.detach(), "head.proj.bias": projection.bias.detach()}
    state["head.weight"] = nn.Parameter((joint.scale * vectors).to(model.device, model.dtype))
    bias = torch.full((len(labels),), joint.bias or 0.0, dtype=model.dtype, device=model.device)
    state["head.bias"] = nn.Parameter(bias)
    new.load_state_dict(state, assign=True)
    new.labels = labels
    new.scores = "softmax" if joint.bias is None else "sigmoid"
    new.source = model.source
    new.preprocess = model.preprocess
    new.loaded_sample = model.loaded_sample  # which leaves out the head, so it is still valid
    return new.train(model.training)


def projection_of(model: ViT, joint: "JointWeights") -> nn.Linear | None:
    """Return CLIP's projection of the image vectors, or None for SigLIP, which has no projection.

    Raises:
        InputError: The head was replaced or reset, or the image vectors and the text vectors differ in width.
    """
    head = model.head.proj if isinstance(model.head, CosineHead) else model.head  # CosineHead is from `with_labels`
    projection = head if isinstance(head, nn.Linear) else None
    is_clip = joint.bias is None
    width = model.config.embed_dim if projection is None else projection.out_features
    is_new = any(name.startswith("head.") for name in model.source.report.reinitialised)
    is_new = is_new or (projection is not None and not projection.weight.any())  # after reset_head
    if is_clip != (projection is not None) or is_new or width != joint.tower.config.embed_dim:
        raise InputError(
            "The vectors of the model cannot be compared with text, because its head or its pooling differs from that "
            "of its checkpoint. Create the model without num_classes= and pool=, and do not call reset_head."
        )
    return projection

"""What tensors, files, records and callers say of a model -> its config, each value with who said it.

Everybody's word is a `Claim`. For each field of the config, `RULES` says how the claims about it become one value. What
the rows of the position table mean is worked out last, since it depends on several fields at once. What nobody says,
and no tensor tells, is asked for: never guessed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitlite.checkpoints.key_mapping import (
    CheckpointFormat,
    KeyMapping,
    fold_token_rows,
    infer_geometry,
    map_keys,
)
from vitlite.checkpoints.look_alikes import look_alike
from vitlite.checkpoints.reader import Shape, WeightsFile
from vitlite.config import DEFAULTS, ViTConfig, refuse_unknown_fields
from vitlite.errors import CheckpointError, ConfigError, VitliteError, shown
from vitlite.zoo import registry

TENSORS, CALLER = "the tensors say", "config= says"
METADATA, ARCHITECTURE = "its config.json says", "its architecture says"
OPTION = "pool= says"  # what shall be, which is believed of what is only where nobody says anything

# Fields that tensors may leave open, in the order in which they are asked for.
NOT_IN_TENSORS = ("patch_size", "image_size", "positions", "heads", "norm_eps", "mlp", "gelu", "pool", "final_norm")
# No facts of a file: how it is run.
RUNTIME_FIELDS = ("resample", "dropout", "drop_path", "checkpointing")
# A file may differ here from the record of what it began as (a fine-tune, a fork): the file is followed.
FILE_WINS = ("pool", "norm_eps", "gelu", "cls_position", "head_dim")
# Contradictions here mean that the file is another model.
GEOMETRY = (
    "image_size", "patch_size", "dim", "depth", "heads", "mlp_dim", "num_classes", "channels", "class_token",
    "registers", "positions", "qkv_bias", "pre_norm", "patch_norm", "inner_norm", "fc_norm", "final_norm", "pre_logits",
    "mlp", "stem",
)  # fmt: skip


# What a field is, where its name alone says little to who meets it in an error.
WHAT_IS = {"registers": "registers (tokens beside the class token; the distillation token of a DeiT is one)"}
MOST_CANDIDATES = 4  # that an error names

# Layouts whose code averages where there is no class token: I-JEPA's, and SigLIP's with a classifier.
AVERAGED = ("transformers", "transformers-siglip-classifier")
# Layouts whose heads always read the class token beside the mean.
READ_BOTH = ("transformers-dinov2", "transformers-dinov2-gated")
# Layouts whose heads never do.
READ_ONE = (
    "transformers", "transformers-clip", "openai", "torchvision", "vit-pytorch", "vit-pytorch before 1.0", "google",
    "google-hybrid", "google-hybrid, root alone", "big_vision",
)  # fmt: skip
# Layouts whose code takes square images only: of others, as many patches may stand in another shape.
SQUARE = ("torchvision", "google")
# Layouts whose code takes any activation for the gate of an MLP.
ANY_GATE = ("timm", "transformers-dinov3")
# What names cannot tell, and nobody is asked: networks of the same names that nobody publishes weights of.
SAME_NAMES = {
    "timm": ("norms", "assumed, because timm's ResPostBlock has the same names: before attention and MLP, not after"),
    "vit-pytorch": ("tokens", "assumed, because vit-pytorch's ats_vit has the same names: all go through all blocks"),
}
SAME_NAMES["vit-pytorch before 1.0"] = SAME_NAMES["vit-pytorch"]


class Claim(NamedTuple):
    """What somebody says of a config. Firm: contradicting what is known is an error; else it fills in the rest."""

    who: str
    fields: Mapping[str, Any]
    firm: bool = True
    shape_alone: bool = False  # it is a preset's
    knows_network: bool = False  # it names the very class that computes, of which nothing has to be assumed
    checkpoint: str = ""  # it is the record of this one, of which the file may be a fine-tune
    own_classes: int | None = None  # how many classes the caller says that such a fine-tune has


class Evidence(NamedTuple):
    """All that is known of a file before its config is worked out."""

    layout: CheckpointFormat  # whose names its tensors have
    facts: Mapping[str, Any]  # what they say: `infer_geometry`
    claims: Sequence[Claim]  # of others, the weightiest first
    unclear: Mapping[str, str] = {}  # fields of which tensors and layout are no witness, and why: `ambiguities`
    look_alike: str = ""  # which other networks have such tensors, where there are some: `look_alike`


class Word(NamedTuple):
    """One claim about one field."""

    value: Any
    who: str
    firm: bool

    def __str__(self) -> str:
        return f"{self.who} {shown(str(self.value))}"


@dataclass(frozen=True)
class Resolved:
    """A config, and who said each of its values: {"image_size": "the record of vit_base_16.dino says", ...}."""

    config: ViTConfig
    provenance: Mapping[str, str]


class Contradiction(Exception):  # gathered, and raised as one CheckpointError
    """Two words about one field that cannot both be true."""


def understand(file: WeightsFile, claims: Sequence[Claim]) -> tuple[KeyMapping, Resolved]:
    """Where our tensors are in a file, and its config.

    Raises:
        CheckpointError: It is no plain ViT, or claims contradict it.
        ConfigError: Neither the tensors nor the claims tell all of the config.
    """
    try:
        mapping = map_keys(file.shapes, _claimed_patch(claims))
        facts = infer_geometry(mapping, file.shapes)
        file.check_dtypes(mapping.parts)
        unclear = ambiguities(mapping, file.shapes, facts)
        if any(claim.knows_network for claim in claims):  # a class that is computed has the gate that is computed
            unclear.pop("mlp", None)
        resolved = resolve(Evidence(mapping.format, facts, claims, unclear, look_alike(mapping, facts)))
        if facts["token_rows"] and facts["position_rows"] != math.prod(resolved.config.grid):
            mapping = fold_token_rows(mapping)
        return mapping, resolved
    except (CheckpointError, ConfigError) as error:
        raise error.within(shown(str(file.path))) from None


def _claimed_patch(claims: Sequence[Claim]) -> int | None:
    for claim in claims:
        if "patch_size" in claim.fields:
            patch: int | None = claim.fields["patch_size"]
            return patch
    return None


def ambiguities(mapping: KeyMapping, shapes: Mapping[str, Shape], facts: Mapping[str, Any]) -> dict[str, str]:
    """Fields of which the tensors fit more than one reading, and why: there they are no witness."""
    layout, found = mapping.format, mapping.tensors
    unclear = {}
    kernel = found["patch_embed.proj.weight"]
    if mapping.patch_size is None and len(shapes[kernel.parts[0]]) == 2:
        unclear["patch_size"] = "pixels are flattened: patches of other sides and channels have as many"
    pools = _unclear_pool(layout, facts)
    if pools:
        unclear["pool"] = pools
    scale = found.get("blocks.0.ls1.gamma")
    if scale is not None and scale.parts[0].endswith("gamma_1") and facts["position_rows"]:
        unclear["positions"] = "DeiT III calls its scales gamma_1, and so do networks that turn queries and keys"
    gate = found["blocks.0.mlp.fc1.weight"].parts[0]
    if facts["mlp"] == "swiglu" and layout.name in ANY_GATE and not gate.endswith("w12.weight"):  # which is Meta's name
        unclear["mlp"] = "a gate may be of any activation; vitlite's is of SiLU, 'swiglu'"
    return unclear


def _unclear_pool(layout: CheckpointFormat, facts: Mapping[str, Any]) -> str:
    """Why the tensors do not tell what is pooled; nothing where they do, or where there is a usual way."""
    if layout.name == "openai":
        return "open_clip's may be the class token or a mean"
    if facts.get("pool") == "mean" and not layout.bare_proj and layout.name not in AVERAGED:
        return "without a class token it may be the mean, the maximum, both, or by attention"
    return ""


def resolve(evidence: Evidence, *, suggest: bool = True) -> Resolved:
    """The config of a file, from what its tensors say, what its layout's code fixes, and what others claim.

    Args:
        evidence: What they say.
        suggest: Where something remains unknown, name the checkpoints that it may be, for which all are tried.

    Raises:
        CheckpointError: Claims contradict the tensors or each other.
        ConfigError: Something remains unknown.
    """
    layout, facts = evidence.layout, evidence.facts
    words = _words_by_field(evidence)
    settled, contradictions = _settle(words)
    if facts["position_rows"] and "positions" in settled and settled["positions"].value != "learned":
        contradictions.append(f"positions: {TENSORS} learned, {settled['positions']}")
    _refuse_contradictions(contradictions, evidence)
    _ask_for_the_network(evidence, suggest)
    of_the_table = settle_positions(layout, facts, settled)
    _refuse_another_table(of_the_table, words["cls_position"], facts)
    settled |= of_the_table
    _refuse_without_rotation(facts, settled)
    _work_out_heads(facts, settled)
    _ask_for_the_rest(evidence, settled, suggest)
    _check_heads(facts, settled)
    _check_pool(layout, facts, settled)
    _check_norm_of_mean(layout, settled, words)
    config = ViTConfig(**{field: word.value for field, word in settled.items()})
    provenance = {field: word.who for field, word in settled.items()}
    if not any(claim.knows_network for claim in evidence.claims):
        provenance |= _assumed(layout, facts, config)
    return Resolved(config, provenance)


def _refuse_contradictions(contradictions: Sequence[str], evidence: Evidence) -> None:
    """Raises them as one error; of a fine-tune whose classes nobody spoke of, it says how to do so."""
    if not contradictions:
        return
    text = f"It is not what it is said to be. {'; '.join(contradictions)}."
    checkpoint = next((claim.checkpoint for claim in evidence.claims if claim.checkpoint), "")
    if not checkpoint or len(contradictions) > 1 or not contradictions[0].startswith("num_classes"):
        raise CheckpointError(text)
    classes = evidence.facts["num_classes"]
    raise CheckpointError(
        text,
        python=f"If it is a fine-tune with {classes} classes of its own, say so: num_classes={classes}.",
        command=f"If it is a fine-tune with {classes} classes of its own: vitlite convert PATH FOLDER --to vitlite "
        f"--like {checkpoint} --num-classes {classes}, then --model FOLDER.",
    )


def _ask_for_the_network(evidence: Evidence, suggest: bool) -> None:
    """Makes sure that somebody knows which network it is, where published ones that are no plain ViTs look like it.

    Raises:
        ConfigError: Nobody does; what they are, and which checkpoints the file may be.
    """
    if not evidence.look_alike or any(claim.knows_network for claim in evidence.claims):
        return
    alike = _named(candidates(evidence)) if suggest else ""
    raise ConfigError(
        f"The tensors do not tell which network it is, and no config says it: {evidence.look_alike}.{alike}",
        python="If it is a plain ViT: vitlite.create(name, weights=...) with the name of a checkpoint like it, or put "
        "the config.json beside it that its library wrote.",
        command="If it is a plain ViT: --model NAME --weights PATH, or convert's --like NAME, with the name of a "
        "checkpoint like it; or put the config.json beside it that its library wrote.",
    )


def _assumed(layout: CheckpointFormat, facts: Mapping[str, Any], config: ViTConfig) -> dict[str, str]:
    """What no tensor tells of a network, and is not asked for: for the report."""
    assumed = dict([SAME_NAMES[layout.name]]) if layout.name in SAME_NAMES else {}
    if layout.name == "timm" and config.positions == "learned" and config.layer_scale is None:
        assumed["rotation"] = "assumed, because timm's Eva may turn queries and keys beside a position table: none"
    if config.positions == "rope" and facts["rotary"] is not None:  # it has no periods
        assumed["rotation"] = "assumed, because the file has no periods: DINOv3's, which begin at 1 and end before 100"
    return assumed


def _words_by_field(evidence: Evidence) -> dict[str, list[Word]]:
    """All that is said of each field, the weightiest first: by tensors, the layout's code, others, what is usual."""
    layout, facts = evidence.layout, evidence.facts
    words: dict[str, list[Word]] = {field: [] for field in DEFAULTS}
    for claim in _everybody(evidence):
        refuse_unknown_fields(claim.fields)
        for field, value in claim.fields.items():
            if _is_of_others(claim, field, evidence):
                continue
            word = Word(_comparable(field, value), claim.who, claim.firm)
            if field != "image_size" or claim.firm or _fits_table(layout, facts, word.value):
                words[field].append(word)
    return words


def _is_of_others(claim: Claim, field: str, evidence: Evidence) -> bool:
    """Whether what a record says of its own weights is none of this file's, which was made of them."""
    if field == "num_classes":
        return claim.own_classes == evidence.facts["num_classes"]
    if field == "resample" and claim.checkpoint:  # as the library does it that wrote the file
        return _family(registry.RECORDS[claim.checkpoint].layout) != _family(evidence.layout.name)
    return False


def _family(layout: str) -> str:
    """Whose layout it is, by its name."""
    return layout.partition("-")[0]


def _comparable(field: str, value: Any) -> Any:
    """A value as the tensors would say it: JSON has lists for tuples, and a square may be said by its side."""
    if isinstance(value, list):
        value = tuple(value)
    if field == "image_size":
        value = ViTConfig(image_size=value, patch_size=1).size  # or what is wrong with it
    return value


def _everybody(evidence: Evidence) -> list[Claim]:
    """The claims of tensors and layout, as far as they are witnesses, among those of others."""
    layout, facts, claims, unclear, _ = evidence
    told: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    usual: dict[str, Any] = {"resample": layout.resample[facts["registers"] > 0]}
    for field in DEFAULTS.keys() - unclear:
        if field in facts:
            told[field] = facts[field]
        if field in layout.fixed:
            (usual if field in layout.assumed else fixed)[field] = layout.fixed[field]
    code = f"the {layout.name} layout says"
    options = [claim for claim in claims if claim.who == OPTION]
    others = [claim for claim in claims if claim.who != OPTION]
    return [
        Claim(TENSORS, told), Claim(code, fixed, firm=False), *others, Claim(code, usual, firm=False), *options
    ]  # fmt: skip


def _settle(words: Mapping[str, Sequence[Word]]) -> tuple[dict[str, Word], list[str]]:
    """What each field's rule makes of the words about it; and the contradictions, as sentences."""
    settled: dict[str, Word] = {}
    contradictions: list[str] = []
    for field, spoken in words.items():
        try:
            word = RULES[field](spoken)
        except Contradiction as problem:
            contradictions.append(f"{WHAT_IS.get(field, field)}: {problem}")
            word = spoken[0]
        if word is not None:
            settled[field] = word
    return settled, contradictions


def all_agree(spoken: Sequence[Word]) -> Word | None:
    """The first word counts, and whoever is firm must say the same."""
    for word in spoken[1:]:
        if word.firm and word.value != spoken[0].value:
            raise Contradiction(f"{spoken[0]}, {word}")
    return spoken[0] if spoken else None


def file_wins(spoken: Sequence[Word]) -> Word | None:
    """The first word counts, and only the caller must not say otherwise."""
    for word in spoken[1:]:
        if word.who == CALLER and word.value != spoken[0].value:
            raise Contradiction(f"{spoken[0]}, {word}")
    return spoken[0] if spoken else None


def pool(spoken: Sequence[Word]) -> Word | None:
    """As `file_wins`; None is said by a config.json that leaves it open: then only the caller knows.

    What pools by attention is there or not, so that a config.json which says otherwise is that of another network.
    """
    by_attention = bool(spoken) and spoken[0] == Word("map", TENSORS, True)
    for word in spoken:
        if by_attention and word.who == METADATA and word.value not in ("map", None):
            raise Contradiction(f"{spoken[0]}, {word}")
    if any(word.value is None for word in spoken):
        spoken = [word for word in spoken if word.who in (TENSORS, CALLER, OPTION)]
    return file_wins(spoken)


def head_dim(spoken: Sequence[Word]) -> Word | None:
    """As `file_wins`; None stands for dim / heads, whatever that is, and is no claim."""
    return file_wins([word for word in spoken if word.value is not None])


def caller_first(spoken: Sequence[Word]) -> Word | None:
    """The caller's word; else the first that is firm, which is the file's; else the first of what is usual."""
    for word in spoken:
        if word.who == CALLER:
            return word
    firm = [word for word in spoken if word.firm]
    return next(iter(firm or spoken), None)


def layer_scale(spoken: Sequence[Word]) -> Word | None:
    """The tensors say whether there is one; with which number it began, only others can."""
    there, others = spoken[0], spoken[1:]
    for word in others:
        if word.firm and there.value == (word.value is None):
            raise Contradiction(f"the tensors have {'one' if there.value else 'none'}, {word}")
    if not there.value:
        return Word(None, TENSORS, True)
    for word in others:
        if word.value is not None:
            return word
    return Word(1e-5, "assumed, since only training from the start needs it:", False)


Rule = Callable[[Sequence[Word]], Word | None]
RULES: dict[str, Rule] = {
    **dict.fromkeys(GEOMETRY, all_agree),
    **dict.fromkeys(FILE_WINS, file_wins),
    **dict.fromkeys(RUNTIME_FIELDS, caller_first),
    "pool": pool,
    "head_dim": head_dim,
    "layer_scale": layer_scale,
}


class TableReading(NamedTuple):
    """One way to read a position table: an image of this size, and so many rows of tokens before the patches."""

    size: tuple[int, int]
    token_rows: int


def settle_positions(
    layout: CheckpointFormat, facts: Mapping[str, Any], settled: Mapping[str, Word]
) -> dict[str, Word]:
    """image_size and cls_position: from the rows of the position table, and what is said of the size.

    Raises:
        CheckpointError: The table is not that of an image of the size that is claimed.
    """
    rows, patch = facts["position_rows"], facts["patch_size"]
    if not rows:
        return _square_as_number(settled)
    if "patch_size" not in settled:  # which is asked for
        return {}
    claimed = settled["image_size"].value if "image_size" in settled else None
    _refuse_oblong(layout, facts, settled)
    for count in _possible_token_rows(layout, facts):
        side = math.isqrt(max(rows - count, 0)) * patch
        size = claimed or ((side, side) if layout.name.startswith(SQUARE) else None)
        if size is not None and _patches_in(size, patch) == rows - count > 0:
            return _words_of(TableReading(size, count), facts, settled)
    if claimed is None:
        return {}
    raise CheckpointError(
        f"Its position table has {rows} rows, which is not an image of {claimed} in patches of {patch}.",
        python="To run it at another size: image_size=.",
        command="To run it at another size: --size.",
    )


def _refuse_oblong(layout: CheckpointFormat, facts: Mapping[str, Any], settled: Mapping[str, Word]) -> None:
    """Makes sure that a table which may be a square's is one, where the library takes squares alone.

    Raises:
        CheckpointError: It is said to be another's.
    """
    said = settled.get("image_size")
    if said is None or not said.firm or not layout.name.startswith(SQUARE):
        return
    height, width = said.value
    patches = [max(facts["position_rows"] - count, 0) for count in _possible_token_rows(layout, facts)]
    if height != width and any(math.isqrt(count) ** 2 == count for count in patches):
        raise CheckpointError(
            f"It is not what it is said to be. image_size: the {layout.name} layout says a square, {said}.",
            python="To run it at another size: image_size=.",
            command="To run it at another size: --size.",
        )


def _refuse_another_table(of_the_table: Mapping[str, Word], spoken: Sequence[Word], facts: Mapping[str, Any]) -> None:
    """Makes sure that of the class token's row nothing is said but what the table shows, where it could be either.

    Raises:
        CheckpointError: It is said otherwise.
    """
    found = of_the_table.get("cls_position")
    if found is None or not facts["position_rows"] or not facts["class_token"] or facts["registers"]:
        return
    for word in spoken:
        if word.who in (CALLER, METADATA, ARCHITECTURE) and word.value != found.value:
            raise CheckpointError(f"It is not what it is said to be. cls_position: {found}, {word}.")


def _possible_token_rows(layout: CheckpointFormat, facts: Mapping[str, Any]) -> list[int]:
    """How many rows of the table may be of the class token and the registers, the likelier first."""
    if facts["token_rows"]:
        return [0, facts["token_rows"]]
    if not facts["class_token"] or facts["registers"]:
        return [0]
    return [int(has_row) for has_row in layout.cls_rows]


def _patches_in(size: tuple[int, int], patch: int) -> int:
    return (size[0] // patch) * (size[1] // patch)


def _fits_table(layout: CheckpointFormat, facts: Mapping[str, Any], size: tuple[int, int]) -> bool:
    """Whether the position table may be that of an image of this size; where there is none, of any."""
    rows, patch = facts["position_rows"], facts["patch_size"]
    if any(side % patch for side in size):
        return False
    return not rows or any(_patches_in(size, patch) == rows - count for count in _possible_token_rows(layout, facts))


def _words_of(reading: TableReading, facts: Mapping[str, Any], settled: Mapping[str, Word]) -> dict[str, Word]:
    height, width = reading.size
    who = "the position table, which is a square's, says"
    if "image_size" in settled:
        who = settled["image_size"].who
    found = {"image_size": Word(height if height == width else reading.size, who, True)}
    if facts["class_token"] or facts["registers"]:
        # rows of registers, and of a class token beside them, are added to the tokens when they are read
        has_row = reading.token_rows > 0 and not facts["registers"]
        found["cls_position"] = Word(has_row, "the position table says", True)
    return found


def _square_as_number(settled: Mapping[str, Word]) -> dict[str, Word]:
    if "image_size" not in settled:
        return {}
    word = settled["image_size"]
    height, width = word.value
    return {"image_size": word._replace(value=height)} if height == width else {}


def _refuse_without_rotation(facts: Mapping[str, Any], settled: Mapping[str, Word]) -> None:
    """Makes sure that no answer turns a file with rotary positions, which have no weights, into a model without.

    Raises:
        CheckpointError: The caller's word on positions cannot be true of such tensors.
    """
    word = settled.get("positions")
    if word is None or word.who != CALLER:
        return
    if facts["rotary"] is None and word.value == "rope":
        raise CheckpointError(
            "It is not of the DINOv3 family, whose rotary positions are the only ones that vitlite runs. A class "
            "token, registers, layer scale and no position table tell of them, or the periods of the rotation."
        )
    if facts["rotary"] == "other":
        raise CheckpointError(
            "It has layer scale and no position table, as models have whose attention turns by position in another way "
            "than DINOv3's (RoPE-ViT, EVA-02, Perception Encoder). DINOv3's are told from them by a class token and "
            "registers, and are the only ones that vitlite runs."
        )
    if facts["rotary"] == "dinov3" and word.value != "rope":
        raise CheckpointError(
            "It is of the DINOv3 family: a class token, registers, layer scale, and no position table. Its attention "
            f"turns queries and keys by position, and positions of the kind {word.value!r} would leave that out.",
            python="Say positions='rope'.",
            command="Say --model NAME --weights PATH, or convert's --like NAME, with the name of a DINOv3 model.",
        )


def _work_out_heads(facts: Mapping[str, Any], settled: dict[str, Word]) -> None:
    if "heads" not in settled and "head_dim" in settled:
        width = settled["head_dim"]
        settled["heads"] = Word(facts["attention_dim"] // width.value, width.who, width.firm)


def _ask_for_the_rest(evidence: Evidence, settled: Mapping[str, Word], suggest: bool) -> None:
    """Makes sure that every field is known.

    Raises:
        ConfigError: Some are not: which, why, how to say them, and which checkpoints the file may be.
    """
    unknown = _unknown(settled)
    if not unknown:
        return
    layout, facts, claims, unclear, _ = evidence
    remarks = [f"{field}: {unclear[field]}" for field in unknown if field in unclear]
    if "pool" in unknown and settled["class_token"].value and facts.get("pool") != "map":
        remarks.append(f"{layout.name} files pool {' or '.join(layout.pools)}")
    remarks += _shapes_alone(claims)
    hint = f" ({'; '.join(remarks)})" if remarks else ""
    blanks = ", ".join(_blank(field, facts, settled) for field in unknown)
    alike = _named(candidates(evidence)) if suggest else ""
    raise ConfigError(
        f"The tensors do not tell {', '.join(unknown)}{hint}.{alike}",
        python=f"Say so: vitlite.load(..., config=ViTConfig({blanks})), or vitlite.create(name, weights=...) with the "
        "name of a checkpoint like it.",
        command="Say --model NAME --weights PATH, or convert's --like NAME, with the name of a checkpoint like it; or "
        f"tell convert what it is, by its options: {', '.join(map(_option_of_convert, unknown))}.",
    )


def _unknown(settled: Mapping[str, Word]) -> list[str]:
    """The fields that no tensor tells, and nobody said."""
    unknown = [field for field in NOT_IN_TENSORS if field not in settled]
    gated = ("mlp" not in settled or settled["mlp"].value == "swiglu") and (
        "pool" not in settled or settled["pool"].value != "map"
    )
    if gated and "gelu" in unknown:  # which such a model has none of
        unknown.remove("gelu")
    return unknown


def candidates(evidence: Evidence) -> list[registry.Record]:
    """The checkpoints of the zoo whose tensors have these names and shapes, and which nobody's claim contradicts.

    They answer differently for all that: which of them a file is, if it is any, its tensors do not tell.
    """
    family = _family(evidence.layout.name)
    unclear = {field: why for field, why in evidence.unclear.items() if field != "mlp"}  # a record knows its gate
    fitting = []
    for record in registry.RECORDS.values():
        if _family(record.layout) != family:
            continue
        claim = Claim(f"the record of {record.name} says", record.config.to_dict(), knows_network=True)
        try:
            resolve(evidence._replace(claims=[claim, *evidence.claims], unclear=unclear), suggest=False)
        except VitliteError:
            continue
        fitting.append(record)
    return fitting


def _named(fitting: Sequence[registry.Record]) -> str:
    """A sentence that names a few checkpoints, and says what tells them apart; empty where there are none."""
    if not fitting:
        return ""
    names = ", ".join(record.name for record in fitting[:MOST_CANDIDATES])
    more = len(fitting) - MOST_CANDIDATES
    others = f" and {more} others" if more > 1 else " and another" if more == 1 else ""
    return (
        f" In the zoo, tensors of these names and shapes are those of {names}{others}. Which of them it is, if any, "
        "they do not tell: look where the file was fetched from."
    )


def _option_of_convert(field: str) -> str:
    """What says a field at the command line."""
    if field in ("mlp", "final_norm"):
        return f"of {field} only --like"
    return "--size" if field == "image_size" else f"--{field.replace('_', '-')}"


def _shapes_alone(claims: Sequence[Claim]) -> list[str]:
    """Why the name of a preset did not answer."""
    return [f"{claim.who.removesuffix(' says')} is a shape alone" for claim in claims if claim.shape_alone]


def _blank(field: str, facts: Mapping[str, Any], settled: Mapping[str, Word]) -> str:
    """How a field is asked for, with what a config needs beside it, of which it could not be made otherwise."""
    if field == "heads":  # have to divide dim
        return f"dim={settled['dim'].value}, heads=..."
    if field == "image_size" and "patch_size" in settled:  # which patches have to divide
        return f"image_size=..., patch_size={settled['patch_size'].value}"
    if field == "positions" and facts["rotary"] == "dinov3":
        return "positions='rope'"
    return f"{field}=..."


def _check_heads(facts: Mapping[str, Any], settled: dict[str, Word]) -> None:
    """Makes sure that the heads share the width of attention equally, and says how wide they are if that is unusual."""
    heads, width = settled["heads"], facts["attention_dim"]
    whole = type(heads.value) is int and heads.value > 0 and width % heads.value == 0
    claimed = settled.pop("head_dim", None)
    if not whole or (claimed and claimed.value != width // heads.value):
        raise CheckpointError(f"Its attention is {width} wide, which is not {heads.value} heads of equal width.")
    if width != settled["dim"].value:
        settled["head_dim"] = Word(width // heads.value, heads.who, heads.firm)


def _check_pool(layout: CheckpointFormat, facts: Mapping[str, Any], settled: Mapping[str, Word]) -> None:
    way = settled["pool"].value
    told = settled["pool"].who == TENSORS or way == facts.get("pool") == "map"
    distilled = way == "cls_and_distillation" and settled["registers"].value == 1
    if settled["class_token"].value and way not in layout.pools and not told and not distilled:
        raise CheckpointError(f"{layout.name} files pool {' or '.join(layout.pools)}, not {way!r}.")
    if layout.name in READ_BOTH and settled["num_classes"].value and way != "cls_and_mean":
        raise CheckpointError(
            f"{layout.name} files have a head that reads the class token and the mean of the patches, twice the "
            "width of a token; this one is narrower."
        )
    if layout.name in READ_ONE and way == "cls_and_mean":
        raise CheckpointError(
            f"{layout.name} files have a head that reads one vector; this one is twice as wide, as if it read two."
        )


def _check_norm_of_mean(
    layout: CheckpointFormat, settled: Mapping[str, Word], words: Mapping[str, Sequence[Word]]
) -> None:
    """Makes sure that somebody knows where the last norm of an open_clip model with a mean stands.

    Raises:
        ConfigError: Nobody said it, and its name is the same in both places.
    """
    if layout.name == "openai" and settled["pool"].value == "mean" and len(words["fc_norm"]) < 2:
        raise ConfigError(
            "The tensors do not tell fc_norm: open_clip's ln_post stands before the mean, or with "
            "final_ln_after_pool after it, which vitlite does not compute for this layout.",
            python="If it stands before: config=ViTConfig(fc_norm=False, ...).",
            command="Say --model NAME --weights PATH with the name of a checkpoint like it.",
        )

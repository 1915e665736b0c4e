"""`optimize`: the same calls and the same answers, for inference only, as fast as plain PyTorch can give them.

On a CPU, weights are packed once in oneDNN's own order, with GELU and the residuals fused into the products (`blocks`),
attention runs as two batched products in buffers that stay in cache (`attention`), and large batches go in slices
(`slices`). Where `onednn` finds an operator missing, wrong or slower, torch's public one serves; `verdicts` keeps what
it found, so that every process of a machine computes alike.
"""

import copy
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from vitlite.checkpoints.fingerprint import hash_of_file, packing_of
from vitlite.checkpoints.forensics import is_all_hooked, is_hooked, order_within, replaced_method
from vitlite.errors import OptimizedError, shown
from vitlite.fast.blocks import Arithmetic, FastAttentionPool, FastBlock, FastPatches, Floats, Kernels, fastest_kernels
from vitlite.fast.calibrate import calibrated, fingerprint
from vitlite.fast.cpu import is_quick_with
from vitlite.fast.int8 import Bytes, bytes_are_right
from vitlite.fast.kernels import (
    PackedLinear,
    bfloat16_pays,
    float32_products,
    float32_products_pay,
    is_allowed,
    is_followed,
    kernels_as_created,
)
from vitlite.fast.slices import compute, cut, join
from vitlite.nn.layers import AttentionPool, Block
from vitlite.nn.vit import Features, ViT, check_images, model_on_meta

NARROW = (torch.bfloat16, torch.float16)
PACKED = ("patch_embed", "blocks", "attn_pool")  # parts of which nothing stays as it was; the others are copied
TOKENS = ("cls_token", "reg_token", "pos_embed")  # parameters of the model itself
MOST_GRIDS = 16  # for which what is added to the patches is kept


def optimize(model: ViT, *, dtype: torch.dtype | None = None, calibrate: Iterable[Any] | None = None) -> ViT:
    """Takes a model over and makes it fast, for inference only: the same calls, the same answers.

    The packed weights replace the old ones, which are kept until all are packed: where that fails, the model is as it
    was. Images and answers keep the dtype of the model; `dtype` is what it computes in. It cannot be trained, moved,
    copied, exported or saved afterwards: optimize last. torch.compile leaves it as it is. Hooks of blocks see whole
    batches, as before: as long as there are any, a batch is computed in one piece, which takes longer.

    Args:
        model: A `ViT`, as created or loaded. A second call changes nothing.
        dtype: What to compute in, such as `torch.bfloat16`. None: what the model is made of. A CPU that has no
            instructions for it computes in it all the same, after a warning. `torch.int8` is for CPUs: linear layers
            take and multiply bytes where these are good enough, and all the rest is bfloat16 or float32.
        calibrate: For int8: pictures like those to come, as `model.preprocess` takes them. The scale of each layer is
            chosen by them; 32 will do, and all are used.

    Returns:
        The same object.

    Raises:
        OptimizedError: The model has hooks or replaced modules, or `dtype` is none to compute in; or it is optimized
            already, and another dtype is asked for, or pictures to calibrate with.

    >>> import torch, vitlite
    >>> config = vitlite.ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5)
    >>> model = vitlite.optimize(vitlite.ViT(config))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """
    if isinstance(model, OptimizedViT):
        _refuse_change(model, dtype, calibrate)
        return model
    _check_plain(model)
    _check_dtype(model, dtype)
    with torch.device(model.device), torch.autocast(model.device.type, enabled=False):  # whatever the default is
        _take_over(model, _plan(model, dtype or model.dtype, calibrate))
    return model


def _refuse_change(model: "OptimizedViT", dtype: torch.dtype | None, pictures: Iterable[Any] | None) -> None:
    """Makes sure that a model which is optimized already is what a second call asks for.

    Raises:
        OptimizedError: It computes in something else, or its scales would have to be chosen anew.
    """
    wanted = model.compute_dtype if dtype is None else dtype
    if wanted != model.compute_dtype:
        problem = f"The model already computes in {model.compute_dtype}, so it cannot in {wanted}."
    elif pictures is not None:
        problem = f"The model is optimized already, in {wanted}, so it cannot be calibrated with these pictures."
    else:
        return
    calibrate = ", calibrate=pictures" if wanted is torch.int8 else ""
    raise OptimizedError(
        problem,
        python=f"Create it again: vitlite.optimize(vitlite.create(...), dtype={wanted}{calibrate}).",
        command="Leave --fast out.",
    )


class Plan(NamedTuple):
    """How a model is to compute."""

    dtype: torch.dtype  # what was asked for
    stream: torch.dtype  # of the tokens between two layers
    kernels: Kernels
    arithmetic: list[Arithmetic]  # of each block
    calibration: str = ""  # of int8: the scales, in short

    @property
    def rest(self) -> torch.dtype:
        """Of what is not in bytes, between the layers of a block."""
        return self.arithmetic[0].dtype


def _plan(model: ViT, dtype: torch.dtype, pictures: Iterable[Any] | None) -> Plan:
    """Everything that has to be known before anything is changed."""
    if dtype is torch.int8:
        return _plan_of_bytes(model, pictures)
    if pictures is not None:
        raise OptimizedError(
            f"Calibration pictures are for int8, and {dtype} needs none.",
            python="Leave calibrate out, or pass dtype=torch.int8.",
            command="Leave --calibrate out, or say --dtype int8.",
        )
    kernels = fastest_kernels(model.device, dtype, model.config.tokens)
    return Plan(dtype, dtype, kernels, [Floats(dtype, kernels.linear)] * model.config.depth)


def _plan_of_bytes(model: ViT, pictures: Iterable[Any] | None) -> Plan:
    """int8: the stream is float32, and what is not in bytes is bfloat16 where the CPU is faster with it."""
    if model.device.type != "cpu":
        raise OptimizedError(
            f"int8 is for CPUs, and the model is on {model.device}.",
            python="Use dtype=torch.bfloat16 or torch.float16 there, or model.cpu() first.",
            command="Use --dtype bfloat16 or float16 there, or --device cpu.",
        )
    pictures = _checked_pictures(pictures)
    rest = torch.bfloat16 if bfloat16_pays() else torch.float32
    if not (is_allowed() and bytes_are_right(rest)):
        raise OptimizedError(
            "oneDNN's products of bytes are missing here, or not exact on this CPU, or VITLITE_KERNELS=torch leaves "
            "them out.",
            python="Use float32 or bfloat16: leave dtype out, or pass dtype=torch.bfloat16.",
            command="Leave --dtype out, or use --dtype bfloat16.",
        )
    scales = calibrated(model, pictures)
    kernels = fastest_kernels(model.device, rest, model.config.tokens)
    arithmetic: list[Arithmetic] = [Bytes(of_block, Floats(rest, kernels.linear)) for of_block in scales]
    return Plan(torch.int8, torch.float32, kernels, arithmetic, fingerprint(scales))


def _checked_pictures(pictures: Iterable[Any] | None) -> Iterable[Any]:
    """The calibration pictures, once it is known that there may be some to go through.

    Raises:
        OptimizedError: There are none, or one is there, or the name of a folder.
    """
    if pictures is None:
        raise OptimizedError(
            "int8 needs some 32 pictures like those to come, by which the scale of each layer is chosen.",
            python="Pass them: vitlite.optimize(model, dtype=torch.int8, calibrate=[...]).",
            command="Say --calibrate and a folder of pictures.",
        )
    if isinstance(pictures, (str, bytes, os.PathLike)) or not isinstance(pictures, Iterable):
        raise OptimizedError(
            f"Calibration takes pictures, one after the other, not {shown(repr(pictures))}.",
            python="Pass a list: calibrate=sorted(pathlib.Path(folder).glob('*.jpg')).",
            command="Say --calibrate and a folder of pictures.",
        )
    return pictures


def kernels_of(model: ViT) -> str:
    """What computes a model's answers on this machine, in words: a run that goes on must have the same.

    >>> import vitlite
    >>> kernels_of(vitlite.create("vit_nano_4.cifar10", dtype=torch.float64))
    'linear layers by torch'
    """
    if not isinstance(model, OptimizedViT):
        return kernels_as_created(model.device, model.dtype)
    kernels = model._plan.kernels
    linear = "packed linear layers by oneDNN" if kernels.linear is PackedLinear else "linear layers by torch"
    softmax = "softmax by torch" if kernels.unit == 1 else "softmax by powers of two"
    products = "oneDNN" if model._products_pay(model.config.tokens) else "torch"
    scales = f", bytes by scales {model.calibration}" if model.calibration else ""
    return f"{linear}, {softmax}, products of attention by {products}{scales}"


class OwnTokens(NamedTuple):
    """What an optimized model keeps of its tokens, out of reach: they go into tensors that are kept for each grid."""

    cls: Tensor | None
    registers: Tensor | None
    positions: Tensor | None


class OptimizedViT(ViT):
    """What `optimize` turns a `ViT` into: (b, c, h, w) -> (b, k) as before, and nothing that needs the old weights."""

    _plan: Plan
    _device: torch.device
    _dtype: torch.dtype
    _own_tokens: OwnTokens
    _by_grid: dict[tuple[int, int], tuple[Tensor, tuple[Tensor, ...]]]  # what is added to patches, and the rotation
    patch_embed: FastPatches  # type: ignore[assignment]

    @property
    def compute_dtype(self) -> torch.dtype:
        """What it was optimized for."""
        return self._plan.dtype

    @property
    def calibration(self) -> str:
        """Of int8: the scales, in short, which are the same for the same pictures; else nothing."""
        return self._plan.calibration

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """What images and answers are made of."""
        return self._dtype

    def forward(self, images: Tensor) -> Tensor:
        """As `ViT.forward`: (b, c, h, w) -> (b, k)."""
        return self._run(images, lambda part: self.head(self._embed(part)))

    def embed(self, images: Tensor) -> Tensor:
        """As `ViT.embed`: (b, c, h, w) -> (b, d)."""
        return self._run(images, self._embed)

    def features(self, images: Tensor, layers: Iterable[int] | int = (), norm: bool = False) -> Features:
        """As `ViT.features`."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).features(part, wanted, norm))

    def attention_maps(self, images: Tensor, layers: Iterable[int] | int = (-1,)) -> Tensor:
        """As `ViT.attention_maps`: (b, c, h, w) -> (layers, b, heads, n, n)."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).attention_maps(part, wanted), batch_axis=1)

    def _embed(self, images: Tensor) -> Tensor:
        x, rotation = self._tokens(images), self._rotation(images)
        *blocks, last = cast("Sequence[FastBlock]", self.blocks)
        for block in blocks:
            x = block(x, *rotation)
        seen = is_hooked(last)  # by whom all tokens are wanted
        return self.pre_logits(self.fc_norm(self._pool(last(x, *rotation, last=not seen))))

    def _tokens(self, images: Tensor) -> Tensor:
        added, _ = self._of_grid(self._grid(images))
        return self.norm_pre(self.drop(self.patch_embed(images, added).to(self._plan.stream)))

    def _rotation(self, images: Tensor) -> tuple[Tensor, ...]:
        _, rotation = self._of_grid(self._grid(images))
        return rotation

    def _of_grid(self, grid: tuple[int, int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What depends on the grid alone, computed once: what is added to the patches, and the rotation."""
        known = self._by_grid
        if grid not in known:
            if len(known) >= MOST_GRIDS:  # replaced, not emptied: another thread may be reading it
                known = self._by_grid = {}
            known[grid] = self._added_to_patches(grid), self._rotation_tables(grid)
        return known[grid]

    def _rotation_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        config = self.config
        if config.positions != "rope":
            return ()
        like = self.patch_embed.bias  # the weights are packed, and perhaps narrower
        cosines, sines = self.tables.rotation(like, grid, config.prefix_tokens, config.head_width)
        return (torch.complex(cosines, sines),)

    def _added_to_patches(self, grid: tuple[int, int]) -> Tensor:
        """Everything that is added to the projected patches and the zeros before them: (1, n, d)."""
        patches: Tensor = self.patch_embed.bias.expand(1, math.prod(grid), -1)
        cls, registers = self._own_tokens.cls, self._own_tokens.registers
        positions = self._positions(grid)
        if positions is not None:
            patches = patches + positions[:, -patches.shape[1] :]
            if cls is not None and self.config.cls_position:
                cls = cls + positions[:, :1]
        tokens = [token for token in (cls, registers, patches) if token is not None]
        return torch.cat(tokens, dim=1).to(self._plan.rest)

    def _positions(self, grid: tuple[int, int]) -> Tensor | None:
        if self.config.positions == "sincos2d":  # like the bias: the weights are packed, and perhaps narrower
            cls_row = self.config.class_token and self.config.cls_position
            return self.tables.sincos(self.patch_embed.bias, grid, cls_row)
        table = self._own_tokens.positions
        if table is None:
            return None
        return self.tables.learned(table, self.config.grid, grid, self.config.resample)

    @property
    def cls_token(self) -> NoReturn:  # type: ignore[override]
        """Went into what is kept for each grid: a change would not be seen."""
        _refuse("give its class token")

    @property
    def reg_token(self) -> NoReturn:  # type: ignore[override]
        """As `cls_token`."""
        _refuse("give its registers")

    @property
    def pos_embed(self) -> NoReturn:  # type: ignore[override]
        """As `cls_token`."""
        _refuse("give its position table")

    def _run(self, images: Tensor, answer: Callable[[Tensor], Any], batch_axis: int = 0) -> Any:
        """What `answer` answers. torch.compile is told to look no further: of packed weights it would make errors."""
        if torch.compiler.is_compiling():
            if not torch.compiler.is_dynamo_compiling():  # torch.export, which needs all of it
                _refuse("be exported")
            return torch.compiler.disable(OptimizedViT._answers)(self, images, answer, batch_axis)  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:  # which takes seconds to import; where nobody did, nobody compiles
            return _left_alone(OptimizedViT._answers)(self, images, answer, batch_axis)
        return self._answers(images, answer, batch_axis)

    def _answers(self, images: Tensor, answer: Callable[[Tensor], Any], batch_axis: int) -> Any:
        """Checks the images, and lets `answer` answer slice by slice."""
        check_images(images, self.config)
        if images.requires_grad and torch.is_grad_enabled():
            raise OptimizedError(
                "An optimized model gives no gradients, and these images require them.",
                python="Pass images.detach(), or create the model again and do not optimize it.",
            )
        if is_followed(images):
            raise OptimizedError(
                "An optimized model knows neither forward-mode AD nor the transforms of torch.func, which follow these "
                "images.",
                python="Create the model again and do not optimize it.",
            )
        if is_all_hooked():
            raise OptimizedError(
                "There is a hook of all modules (register_module_forward_hook), and an optimized model does not call "
                "those inside of its blocks.",
                python="Remove the hook, or create the model again and do not optimize it.",
            )

        def without_gradients(part: Tensor) -> Any:
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):  # each thread has these of its own
                return answer(part)

        slices: Sequence[Tensor] = [images]
        streams = 1
        if images.device.type == "cpu" and not self._is_watched():
            slices, streams = cut(images, self._widest_temporary(images))
        with self._products(images):
            answers = compute(slices, streams, without_gradients)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            return join(answers, self._dtype, batch_axis)

    def _is_watched(self) -> bool:
        """Whether a part has hooks, which are to see the whole batch at once, as of a model as it was created."""
        return any(is_hooked(part) for part in self.modules() if part is not self)

    def _products(self, images: Tensor) -> AbstractContextManager[None]:
        """oneDNN for the products of attention, where that pays."""
        return float32_products if self._products_pay(self._token_count(images)) else nullcontext()

    def _products_pay(self, tokens: int) -> bool:
        if self._device.type != "cpu" or self._plan.rest is not torch.float32:
            return False
        return float32_products_pay(tokens, self.config.head_width)

    def _widest_temporary(self, images: Tensor) -> int:
        """Bytes of the widest tensor between two layers, for one image."""
        width = max(3 * self.config.attention_dim, self.config.mlp_dim)
        return self._token_count(images) * width * self._plan.rest.itemsize

    def _token_count(self, images: Tensor) -> int:
        return self.config.prefix_tokens + math.prod(self._grid(images))

    def train(self, mode: bool = True) -> "OptimizedViT":
        """Refuses training; `eval()` changes nothing."""
        if mode:
            _refuse("be trained")
        return self

    def parameters(self, recurse: bool = True) -> NoReturn:
        _refuse("list its parameters")

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("list its parameters")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("give its weights")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("take other weights")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What torch calls where this is part of a larger module."""
        _refuse("take other weights")

    def save(self, folder: str | os.PathLike[str]) -> NoReturn:
        _refuse("be saved")

    def reset_head(self, num_classes: int) -> NoReturn:
        _refuse("change its head")

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("be moved or converted")

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks for first."""
        _refuse("become TorchScript")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("be copied or pickled")


@lru_cache(maxsize=1)
def _left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile does not look into, nor into what it calls: making one takes as long as a call."""
    left: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left


def _refuse(action: str) -> NoReturn:
    raise OptimizedError(
        f"An optimized model cannot {action}: its weights are packed for this machine.",
        python="Do that first and optimize last, or create the model again. torch.compile, torch.export and "
        "torch.jit.trace take it as it was created.",
        command="Leave --fast out.",
    )


@torch.no_grad()
def _take_over(model: ViT, plan: Plan) -> None:
    """Turns `model` into an `OptimizedViT`, once all its weights are packed: until then nothing of it is changed."""
    device, own_dtype = model.device, model.dtype
    weights = hash_of_file(model) or f"of no file {secrets.token_hex(16)}"  # as of no other model
    alone = _alone(model, plan)
    packed = _packed(alone, plan)
    modules = model._modules | packed
    tokens = [getattr(alone, name) for name in TOKENS]
    own_tokens = OwnTokens(*(None if token is None else token.detach() for token in tokens))
    parameters = {name: value for name, value in model._parameters.items() if name not in TOKENS}
    alone.__dict__.update(_modules=modules, _parameters=parameters)
    packing = packing_of(alone, weights, OptimizedViT, [name for name in PACKED if name in packed])
    model.__dict__.update(_modules=modules, _parameters=parameters)  # new ones: a shallow copy has the old
    model.__dict__.update(_own_tokens=own_tokens, _device=device, _dtype=own_dtype, _by_grid={}, _plan=plan)
    model.__dict__["_packing"] = packing
    model.eval()
    model.__class__ = OptimizedViT


def _alone(model: ViT, plan: Plan) -> ViT:
    """A copy of the model with weights of its own, but for those that packing copies.

    Whoever holds the others, such as an optimizer or a copy of the model, may go on to change them: of some old weights
    and some new ones nobody knows the answers.
    """
    packs = plan.kernels.linear is PackedLinear
    shared = {id(weight): weight for weight in model.parameters() if packs and weight.ndim == 2}
    alone = copy.copy(model)
    modules, parameters = copy.deepcopy((model._modules, model._parameters), shared)
    alone.__dict__.update(_modules=modules, _parameters=parameters)
    return alone


def _packed(model: ViT, plan: Plan) -> dict[str, nn.Module]:
    """The parts of an `OptimizedViT`, by their names, beside those of `model`."""
    kernels, blocks = plan.kernels, cast("Sequence[Block]", model.blocks)
    fast_blocks = []
    for i, block in enumerate(blocks):
        class_token_only = i == len(blocks) - 1 and model.config.pool == "cls"
        fast_blocks.append(FastBlock(block, plan.arithmetic[i], kernels, class_token_only))
    parts: dict[str, nn.Module] = {
        "patch_embed": FastPatches(model.patch_embed, model.config.prefix_tokens, plan.rest, kernels.linear),
        "blocks": nn.ModuleList(fast_blocks),
    }
    if isinstance(model.attn_pool, AttentionPool):
        parts["attn_pool"] = FastAttentionPool(model.attn_pool, plan.stream, kernels.linear)
    for name in ("norm_pre", "norm", "fc_norm", "pre_logits", "head"):
        parts[name] = copy.deepcopy(model.get_submodule(name)).to(plan.stream)
    return parts


def _check_dtype(model: ViT, dtype: torch.dtype | None) -> None:
    """Refuses what is no dtype to compute in, and warns of one that this CPU has to emulate."""
    if dtype is None or dtype in (model.dtype, torch.float32, torch.int8):
        return
    if dtype not in NARROW:
        raise OptimizedError(
            f"optimize cannot compute in {dtype!r}.",
            python="Pass dtype=torch.float32, torch.bfloat16, torch.float16 or torch.int8, "
            f"or none for the model's own, {model.dtype}.",
            command="Say --dtype float32, bfloat16, float16 or int8.",
        )
    if model.device.type == "cpu" and not is_quick_with(dtype):
        warnings.warn(
            f"This CPU has no instructions for {dtype}: float32 is probably faster, and it rounds less.", stacklevel=3
        )


def _check_plain(model: ViT) -> None:
    """Refuses models whose modules were changed: what was added would be lost without a word."""
    if type(model) is not ViT:
        raise OptimizedError(f"optimize takes a vitlite.ViT, got {type(model).__name__}.")
    for name, module in model.named_modules():
        own = replaced_method(module)
        if own or is_hooked(module):
            what = f"its own {own}" if own else "hooks"
            raise OptimizedError(
                f"{name or 'The model'} has {what}, which optimize would lose.",
                python="Remove them, or use the model as it is.",
            )
    changed = _layout(model) ^ _layout(model_on_meta(model.config))
    if changed:
        names = sorted({name for name, _ in changed})
        raise OptimizedError(
            f"The model's modules are not those of its config: {', '.join(names[:5])}.",
            python="optimize rebuilds what the config describes; undo the change, or use the model as it is.",
        )
    _check_dropout(model)
    _check_parameters(model)


def _check_dropout(model: ViT) -> None:
    """Refuses dropout that goes on while the rest of the model is in eval mode: optimized, there would be none."""
    drops = [name for name, module in model.named_modules() if module.training]
    if drops and not model.training:
        raise OptimizedError(
            f"{drops[0]} is in training mode, and the model is not: optimized, nothing is ever dropped.",
            python="model.eval() first; or use the model as it is.",
        )


def _check_parameters(model: ViT) -> None:
    """Refuses weights that cannot be packed: sharded or quantised ones, and those that are not all alike."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise OptimizedError(
                f"{name} is a {type(parameter).__name__}, and no plain tensor, which alone can be packed.",
                python="For int8: vitlite.optimize(model, dtype=torch.int8, calibrate=pictures), as it was created.",
            )
    places = sorted({f"{parameter.device} in {parameter.dtype}" for parameter in model.parameters()})
    if len(places) > 1 or model.device.type == "meta":
        raise OptimizedError(
            f"The weights are on {', '.join(places)}.",
            python="optimize needs them in one place and one dtype: model.to(...) first.",
        )


def _layout(model: ViT) -> set[tuple[str, Any]]:
    """The name of every module with its class and the order of what it runs; of every parameter with its shape.

    Of a convolution its stride too. What is there twice computes twice, and has two names.
    """
    modules: set[tuple[str, Any]] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        settings = module.extra_repr()
        stride = settings if isinstance(module, nn.Conv2d) else ""
        modules.add((name, (type(module), stride, order_within(module))))
    parameters = model.named_parameters(remove_duplicate=False)
    return modules | {(name, parameter.shape) for name, parameter in parameters}

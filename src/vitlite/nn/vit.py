"""The Vision Transformer: images become tokens, blocks mix the tokens, and the head classifies a pooled vector.

Shapes: b images, c channels, n tokens, d width of a token, k classes. State-dict keys are those of timm's
VisionTransformer, with these exceptions: `reg_token` also holds DeiT's distillation token, `rope.freqs` is a key of
timm's Eva, and timm has no `pre_logits`, `patch_embed.norm_in` or `head.proj`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlite.config import Rotation, ViTConfig, fitting
from vitlite.errors import ConfigError, InputError
from vitlite.nn.layers import NORMS, AttentionPool, Block, CosineHead, PatchEmbed, RopeFrequencies
from vitlite.nn.positions import PositionTables
from vitlite.nn.timm_interface import TimmInterface

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    from vitlite.checkpoints.build import Source
    from vitlite.checkpoints.metadata import Scores
    from vitlite.images import Preprocess, TransformConfig
    from vitlite.images.decode import ImageFile
    from vitlite.inference.predict import Prediction


class Features(NamedTuple):
    """The tokens of a batch of images after the final norm, and the outputs of selected blocks.

    Attributes:
        cls: The class token (b, d), or None.
        patches: The patch tokens (b, patches, d), in row-major order.
        registers: The registers (b, r, d), or None.
        grid: The number of patches down and across.
        layers: The output of each selected block (b, cls + registers + patches, d).
    """

    cls: Tensor | None
    patches: Tensor
    registers: Tensor | None
    grid: tuple[int, int]
    layers: tuple[Tensor, ...]

    def __repr__(self) -> str:
        cls, registers = (None if x is None else tuple(x.shape) for x in (self.cls, self.registers))
        layers = [tuple(layer.shape) for layer in self.layers]
        patches = tuple(self.patches.shape)
        return f"Features(cls={cls}, patches={patches}, registers={registers}, grid={self.grid}, layers={layers})"

    def map(self, layer: int | None = None) -> Tensor:
        """Return patch tokens as a feature map: (b, d, h, w).

        Args:
            layer: An index into `layers`, such as 0 for the first block that was selected. None means the tokens after
                the final norm (`patches`).
        """
        if layer is not None and not -len(self.layers) <= layer < len(self.layers):
            raise InputError(
                f"map() takes an index into the {len(self.layers)} selected layers, got {layer}. Pass layers= to "
                "features() to select others."
            )
        tokens = self.patches if layer is None else self.layers[layer]
        h, w = self.grid
        return rearrange(tokens[:, -h * w :], "b (h w) d -> b d h w", h=h, w=w)


class ViT(TimmInterface, nn.Module):
    """A pre-norm Vision Transformer: (b, c, h, w) -> (b, k).

    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """

    def __init__(self, config: ViTConfig) -> None:
        if not isinstance(config, ViTConfig):
            raise ConfigError(
                f"ViT expects a ViTConfig, got {type(config).__name__}. To create a model by name, call vitlite.create."
            )
        super().__init__()
        d, eps, norm = config.dim, config.norm_eps, NORMS[config.norm]
        self.config = config
        self.labels: Sequence[str] | None = None  # names of the classes
        self.scores: Scores = "softmax"  # "sigmoid": each class by itself
        self.thresholds: Sequence[float] | None = None  # minimum scores of several labels
        self.source: Source | Any = None  # where the weights came from; None: random initialisation
        self.loaded_sample: Tensor | None = None  # some of the loaded values, to detect later changes
        self.preprocess = None  # calls the setter below

        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, d)) if config.registers else None
        learned = config.positions == "learned"
        self.pos_embed = nn.Parameter(torch.zeros(1, config.position_rows, d)) if learned else None
        self.rope = RopeFrequencies(config) if config.rope is not None and config.rope.learned else None
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.norm_pre = norm(d, eps) if config.input_norm == "tokens" else nn.Identity()
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList(Block(config, config.drop_path * i / last) for i in range(config.depth))
        self.norm = norm(d, eps) if config.final_norm == "tokens" else nn.Identity()

        self.attn_pool = AttentionPool(config) if config.pool in ("map", "map_all") else nn.Identity()
        pooled, plain = config.final_norm.startswith("pooled"), config.final_norm == "pooled_plain"
        self.fc_norm = norm(config.pooled_dim, eps, elementwise_affine=not plain) if pooled else nn.Identity()
        self.pre_logits = nn.Linear(config.pooled_dim, config.pre_logits) if config.pre_logits else nn.Identity()
        self.head = _head(config)
        self.tables = PositionTables()
        if not self.patch_embed.proj.weight.is_meta:  # weights on the meta device have no values
            initialise(self)

    if TYPE_CHECKING:  # torch's types say that it returns anything

        def __call__(self, images: Tensor) -> Tensor: ...

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, or the vectors of `embed` if the model has no head: (b, c, h, w) -> (b, k)."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """Return one vector per image, which is the input of the head: (b, c, h, w) -> (b, embed_dim)."""
        x, rotations = self._tokens(images)
        for block, rotation in zip(self.blocks, rotations, strict=True):
            x = block(x, *rotation)
        x = self.fc_norm(self._pool(x))
        return self.pre_logits(x).tanh() if self.config.pre_logits else x

    def features(self, images: Tensor, layers: Iterable[int] | int = (), norm: bool = False) -> Features:
        """Return every token after the final norm, and the outputs of selected blocks.

        Args:
            images: The images (b, c, h, w).
            layers: The indices of the blocks, not a count. (-1,) selects the last block, (-4, -3, -2, -1) the last
                four.
            norm: If True, also apply the final norm to the outputs of the selected blocks; otherwise, return them as
                they are.
        """
        wanted = self._layers(layers)
        x, rotations = self._tokens(images)
        outputs = {}
        for i, (block, rotation) in enumerate(zip(self.blocks, rotations, strict=True)):
            x = block(x, *rotation)
            if i in wanted:
                outputs[i] = self.norm(x) if norm else x
        cls, registers, patches = self.norm(x).split(
            [int(self.config.class_token), self.config.registers, x.shape[1] - self.config.prefix_tokens], dim=1
        )
        return Features(
            cls=cls[:, 0] if self.config.class_token else None,
            patches=patches,
            registers=registers if self.config.registers else None,
            grid=self._grid(images),
            layers=tuple(outputs[i] for i in wanted),
        )

    def attention_maps(self, images: Tensor, layers: Iterable[int] | int = (-1,)) -> Tensor:
        """Return the attention maps of selected blocks: (b, c, h, w) -> (layers, b, heads, n, n).

        Each row of a map sums to 1 and is the attention of one token to all tokens. The order of the tokens is class
        token, registers, patches.

        Args:
            images: The images (b, c, h, w).
            layers: The indices of the blocks. Negative indices count from the last block.
        """
        wanted = self._layers(layers)
        if not wanted:
            raise InputError("attention_maps got no layers. Pass at least one block index, such as layers=(-1,).")
        x, rotations = self._tokens(images)
        maps = {}
        for i in range(max(wanted) + 1):
            block: Block = self.blocks[i]  # type: ignore[assignment]
            if i in wanted:
                maps[i] = block.map(x, *rotations[i])
            if i < max(wanted):
                x = block(x, *rotations[i])
        return torch.stack([maps[i] for i in wanted])

    def reset_head(self, num_classes: int) -> None:
        """Replace the head with a linear layer initialised to zero, remove the labels, and set `scores` to "softmax".

        Args:
            num_classes: The number of classes. If 0, the head is removed, and the model returns embeddings.
        """
        config = self.config.replace(num_classes=num_classes, cosine_head=None)
        with torch.device(self.device):
            self.head = _head(config).to(self.dtype).train(self.training)
        self.config = config
        self.labels, self.scores, self.thresholds = None, "softmax", None

    @overload
    def predict(self, images: "ImageFile", top: int = 5) -> "list[Prediction]": ...
    @overload
    def predict(self, images: list[Any] | tuple[Any, ...], top: int = 5) -> "list[list[Prediction]]": ...
    @overload
    def predict(self, images: Iterator[Any], top: int = 5) -> "Iterator[list[Prediction]]": ...
    @overload
    def predict(self, images: Any, top: int = 5) -> Any: ...  # an array is one image or several
    def predict(self, images: Any, top: int = 5) -> Any:
        """Return the `top` most probable labels of each image, with their scores.

        Args:
            images: One image, or a list or an iterator of images, in any form that `preprocess` accepts.
            top: The number of labels. If the model has fewer, all of them are returned.

        Returns:
            For one image, a list of predictions. For several images, such a list for each image: in a list if `images`
            is a list, and in an iterator if it is an iterator.
        """
        from vitlite.inference.predict import predict

        return predict(self, images, top)

    def vectors(self, images: Iterable[Any], batch: int = 32) -> "NDArray[float32]":
        """Return one vector per image as a numpy array (n, embed_dim) in float32, in the order of the images.

        For tensors that are already preprocessed, call `embed`.

        Args:
            images: A list or an iterator of images, such as paths, in any form that `preprocess` accepts.
            batch: The number of images per batch.
        """
        from vitlite.inference.predict import vectors

        return vectors(self, images, batch)

    def save(self, folder: str | PathLike[str]) -> None:
        """Save the config, weights, labels and preprocessing to a folder. Load it with `vitlite.load(folder)`."""
        from vitlite.checkpoints.save import save

        save(self, folder)

    # The stored `Preprocess` has no model, because a reference cycle would delay freeing the memory of the model. Each
    # access returns a copy with the model.
    @property
    def preprocess(self) -> "Preprocess":
        """The function that turns one image or a list of images into an input tensor for the model."""
        from vitlite.images import Preprocess

        stored: Any = self.__dict__["_preprocess"]
        return stored.replace(model=self) if isinstance(stored, Preprocess) else stored

    @preprocess.setter
    def preprocess(self, value: "Callable[[Any], Tensor] | TransformConfig | None") -> None:
        from vitlite.images.transform import as_preprocess

        self.__dict__["_preprocess"] = as_preprocess(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "preprocess":  # nn.Module would register a torchvision transform as a submodule
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.patch_embed.proj.weight.dtype

    def _tokens(self, images: Tensor) -> tuple[Tensor, Sequence[tuple[Tensor, ...]]]:
        """Return the tokens with positions added (b, n, d), and the rotation of queries and keys in each block.

        A rotation is a pair of cosines and sines, each ([heads,] n, head_dim / 2). Without rotary positions, it is
        empty.
        """
        check_images(images, self.config)
        config, grid = self.config, self._grid(images)
        patches = self.patch_embed(images)
        cls: Tensor | None = self.cls_token
        positions = self._positions(grid, patches)
        if positions is not None:
            n, width = patches.shape[1:]  # the width is not config.dim if the model was pruned
            if cls is not None and config.cls_position:
                cls = cls + positions[:, :-n]
            # Rows and columns are added as two axes only so that a traced model raises an error for another grid, even
            # for 7 x 28 patches instead of 14 x 14. In a traced model, `config.grid` and the shape of the table are
            # constants, and `grid` depends on the images. Otherwise, the table always fits `grid`.
            table = positions[:, -n:]
            table_grid = config.grid if positions is self.pos_embed else grid
            patches = patches.view(-1, *grid, width) + table.view(1, *table_grid, width)
            patches = patches.reshape(images.shape[0], *table.shape[1:])
        prefix = [token.expand(images.shape[0], -1, -1) for token in (cls, self.reg_token) if token is not None]
        tokens = self.norm_pre(self.drop(torch.cat([*prefix, patches], dim=1)))
        return tokens, self._rotations(grid, tokens, config.rope) if config.rope else [()] * len(self.blocks)

    def _rotations(self, grid: tuple[int, int], tokens: Tensor, rope: Rotation) -> Sequence[tuple[Tensor, ...]]:
        """Return the cosines and sines by which each block rotates queries and keys, for a grid of patches."""
        if self.rope is not None:
            return self.rope(grid)[: len(self.blocks)]  # a pruned model has fewer blocks than frequencies
        config, like = self.config, self._like(tokens)
        return [self.tables.rotation(like, grid, config.prefix_tokens, config.head_width, rope)] * len(self.blocks)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        p = self.config.patch_size
        return images.shape[2] // p, images.shape[3] // p

    def _like(self, tokens: Tensor) -> Tensor:
        """Return a tensor like position tables: a weight, or an empty copy if accelerate has offloaded the weight."""
        weight = self.patch_embed.proj.weight
        return torch.empty_like(weight, device=tokens.device) if weight.is_meta else weight

    def _positions(self, grid: tuple[int, int], tokens: Tensor) -> Tensor | None:
        """Return the position table for a grid of patches (1, rows, d), or None if the model adds no positions."""
        config = self.config
        if config.positions == "sincos2d":
            cls_row = config.class_token and config.cls_position
            return self.tables.sincos(self._like(tokens), grid, cls_row)
        # While exporting, sizes are symbolic. Comparing them would fix the image size in the exported graph.
        dynamic = isinstance(grid[0], torch.SymInt) or isinstance(grid[1], torch.SymInt)
        if self.pos_embed is None or (not dynamic and grid == config.grid):
            return self.pos_embed
        return self.tables.learned(self.pos_embed, config.grid, grid, config.resample)

    def _pool(self, x: Tensor) -> Tensor:
        """Apply the final norm and pool the tokens: (b, n, d) -> (b, pooled_dim)."""
        pool, prefix = self.config.pool, self.config.prefix_tokens
        if pool == "cls":
            return self.norm(x[:, 0])
        if pool == "cls_and_distillation":  # one head on both tokens equals the mean of DeiT's two heads
            return self.norm(x[:, :2]).flatten(1)
        x = self.norm(x)
        if pool == "mean":
            return x[:, prefix:].mean(1)
        if pool == "mean_with_cls":
            return x.mean(1)
        if pool == "cls_and_mean":
            return torch.cat([x[:, 0], x[:, prefix:].mean(1)], dim=1)
        return self.attn_pool(x if pool == "map_all" else x[:, prefix:])

    def _layers(self, layers: Iterable[int] | int) -> list[int]:
        """Return block indices as a list of integers from 0 to depth - 1.

        Raises:
            InputError: An index is not an integer, or the model has no such block.
        """
        depth = len(self.blocks)
        wanted = [layers] if isinstance(layers, int) else list(layers)
        for i in wanted:
            if type(i) is not int or not -depth <= i < depth:
                raise InputError(
                    f"layers (--layer) must be block indices from {-depth} to {depth - 1}, got {i!r}. "
                    "For the last two blocks, pass layers=(-2, -1)."
                )
        return [i % depth for i in wanted]


def check_images(images: Any, config: ViTConfig) -> None:
    """Check the type, dtype and shape of a batch of images.

    Raises:
        InputError: The images do not fit the model.
    """
    c, p = config.channels, config.patch_size
    if not isinstance(images, Tensor):
        kind = type(images).__name__
        raise InputError(f"The input must be a tensor, got {kind}. For a file, call model.predict(path).")
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != c:
        hint = " Add a batch dimension with images[None]." if len(shape) == 3 else ""
        if len(shape) == 4 and shape[3] == c:
            hint = " Move the channels with images.permute(0, 3, 1, 2)."
        raise InputError(f"The input must have the shape (batch, {c}, height, width), got {shape}.{hint}")
    if not images.is_floating_point():
        raise InputError(
            f"The input must be normalised floats, got {images.dtype}. Call model.preprocess(images) first."
        )
    _, _, height, width = shape
    if height % p or width % p or not height or not width:
        raise InputError(
            f"Images of {height} x {width} pixels do not divide into patches of {p}. {fitting((height, width), p)}"
        )


def _head(config: ViTConfig) -> nn.Module:
    """Return a head with weights of zero for a config, or an identity if there are no classes."""
    if not config.num_classes:
        return nn.Identity()
    linear = config.cosine_head is None
    head = nn.Linear(config.embed_dim, config.num_classes) if linear else CosineHead(config)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def initialise(model: ViT) -> None:
    """Initialise the weights of a model as in google-research/vision_transformer.

    Parameters that do not exist there, such as registers, are initialised with random numbers.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            outputs = module.out_features // stacked_matrices(f"{name}.weight", model.config)
            bound = math.sqrt(6 / (module.in_features + outputs))
            nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6 if ".mlp." in name else 0.0)
    if isinstance(model.pre_logits, nn.Linear):
        _lecun_normal(model.pre_logits.weight)
    kernel = model.patch_embed.proj
    _lecun_normal(kernel.weight)
    if kernel.bias is not None:
        nn.init.zeros_(kernel.bias)
    if isinstance(model.attn_pool, AttentionPool):
        nn.init.normal_(model.attn_pool.latent, std=model.config.dim**-0.5)
    if model.rope is not None:
        nn.init.normal_(model.rope.freqs, std=0.5)
    if model.pos_embed is not None:
        nn.init.normal_(model.pos_embed, std=0.02)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=1e-6)


def stacked_matrices(name: str, config: ViTConfig) -> int:
    """Return the number of matrices stacked in a weight, for example 3 for queries, keys and values.

    >>> stacked_matrices("blocks.0.attn.qkv.weight", ViTConfig())
    3
    """
    if name.endswith(".attn.qkv.weight"):
        return 3
    gated = config.mlp == "swiglu" and name.startswith("blocks.") and name.endswith(".mlp.fc1.weight")
    return 2 if gated or name == "attn_pool.kv.weight" else 1


def _lecun_normal(weight: Tensor) -> None:
    """Initialise a weight as Flax does by default: variance 1 / inputs, truncated at two standard deviations."""
    std = weight[0].numel() ** -0.5 / 0.87962566  # truncation multiplies the standard deviation by 0.88
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def model_on_meta(config: ViTConfig) -> ViT:
    """Return a model on the meta device, where weights take no memory."""
    with torch.device("meta"), _SkipInit():
        return ViT(config)


class _SkipInit(TorchFunctionMode):
    """A function mode that skips the random initialisation of torch's layers.

    On the meta device, initialising has no effect, but takes a tenth of the time of loading a ViT-B. A function mode
    can skip it, because the functions of `torch.nn.init` dispatch through function modes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))

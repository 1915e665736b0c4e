"""The members that timm's utilities expect of a model: `timm.optim`, `timm.data` and `timm.utils`."""

from typing import Any

from vitlite.config import ViTConfig


class TimmInterface:
    """A mixin with timm's names for what our config and our transform contain."""

    config: ViTConfig

    @property
    def num_features(self) -> int:
        """Width of the vectors that `embed` returns."""
        return self.config.embed_dim

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: the class token and the registers."""
        return self.config.prefix_tokens

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Input size, preprocessing and names of layers, for `timm.data.resolve_model_data_config` and others.

        If timm cannot describe the preprocessing, `timm.data.create_transform` ends in a KeyError with the reason.
        """
        from vitlite.checkpoints.formats.timm import pretrained_cfg_of

        return pretrained_cfg_of(self)

    default_cfg = pretrained_cfg  # the older name

    def no_weight_decay(self) -> set[str]:
        """Return the parameters with more than one dimension that weight decay should leave out."""
        return {"pos_embed", "cls_token", "reg_token", "rope.freqs"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that assign parameters to depths for layer-wise learning rates: the stem, then the blocks.

        The final norm belongs to the last block. What no pattern matches, such as the head, comes last.
        """
        return {
            "stem": "cls_token|reg_token|pos_embed|patch_embed|norm_pre",
            "blocks": [(r"blocks\.(\d+)", None), (r"norm\.", (99999,))],
        }

"""The properties and methods of a model that timm's utilities need: `timm.optim`, `timm.data` and `timm.utils`."""

from typing import Any

from vitlite.config import ViTConfig


class TimmInterface:
    """A mixin that provides properties of a model under the names that timm uses."""

    config: ViTConfig

    @property
    def num_features(self) -> int:
        """The width of the vectors that `embed` returns."""
        return self.config.embed_dim

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches: the class token and the registers."""
        return self.config.prefix_tokens

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The input size, preprocessing and layer names, for functions such as `timm.data.resolve_model_data_config`.

        If timm cannot describe the preprocessing, `timm.data.create_transform` raises a KeyError with the reason.
        """
        from vitlite.checkpoints.formats.timm import pretrained_cfg_of

        return pretrained_cfg_of(self)

    default_cfg = pretrained_cfg  # the older name

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters with more than one dimension to which weight decay should not be applied."""
        return {"pos_embed", "cls_token", "reg_token", "rope.freqs"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth for layer-wise learning rates: the stem, then each block.

        The final norm belongs to the last block. Parameters that match no pattern, such as the head, come last.

        Args:
            coarse: Accepted for compatibility with timm, and ignored.
        """
        return {
            "stem": "cls_token|reg_token|pos_embed|patch_embed|norm_pre",
            "blocks": [(r"blocks\.(\d+)", None), (r"norm\.", (99999,))],
        }

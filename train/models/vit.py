"""torchvision's vision transformer, adapted to the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from muster.errors import ConfigError
from muster.train.models.attention import Attention
from muster.train.models.inputs import image_shape


class Vit(nn.Module):
    """torchvision's vision transformer for square images with any number of channels. `[B, C, H, W]` to `[B, classes]`.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "vit.encoder.layers.*.self_attention.qkv": "colwise",
        "vit.encoder.layers.*.self_attention.out": "rowwise",
        "vit.encoder.layers.*.mlp.0": "colwise",
        "vit.encoder.layers.*.mlp.3": "rowwise",
    }

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
    ):
        super().__init__()
        from torchvision.models import VisionTransformer

        channels, height, width = image_shape(input_shape, model="vit")
        if height != width or height % patch_size:
            raise ConfigError(
                f"model.patch_size={patch_size} must divide a square image, and the data's are {height}x{width}"
            )
        if hidden_dim % num_heads:
            raise ConfigError(f"model.num_heads={num_heads} must divide model.hidden_dim={hidden_dim}")
        self.vit = VisionTransformer(
            height, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, num_classes=num_classes
        )
        for block in self.vit.encoder.layers:
            block.self_attention = SelfAttention(block.self_attention)
        if channels != 3:
            self.vit.conv_proj = nn.Conv2d(channels, hidden_dim, patch_size, stride=patch_size)
        nn.init.trunc_normal_(self.vit.heads.head.weight, std=0.02)  # torchvision's is zero, for fine-tuning

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.vit(images)
        return logits


class SelfAttention(Attention):
    """Replaces torch's MultiheadAttention, which cannot be split by heads, and starts with its weights."""

    def __init__(self, attention: Any):
        super().__init__(attention.embed_dim, attention.num_heads, dropout=attention.dropout)
        with torch.no_grad():
            self.qkv.weight.copy_(self._by_head(attention.in_proj_weight))
            self.qkv.bias.copy_(self._by_head(attention.in_proj_bias))
        self.out = attention.out_proj

    def forward(self, x: Tensor, *_: Tensor, **__: bool) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return (output, None), as MultiheadAttention does without attention weights."""
        return super().forward(x), None

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(3, self.num_heads, self.head_dim, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)

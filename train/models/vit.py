"""torchvision's vision transformer, fitted to the data."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from train.errors import ConfigError
from train.models.images import image_shape


class Vit(nn.Module):
    """torchvision's vision transformer for square images of any channel count. `[B, C, H, W]` to `[B, classes]`.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.
    """

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
        if channels != 3:
            self.vit.conv_proj = nn.Conv2d(channels, hidden_dim, patch_size, stride=patch_size)
        nn.init.trunc_normal_(self.vit.heads.head.weight, std=0.02)  # torchvision leaves it zero, to be fine-tuned

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.vit(images)
        return logits

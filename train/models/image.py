"""Image classifiers: an MLP and a small convolutional net of our own, the rest from torchvision, fitted to the data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from train.errors import ConfigError


class Mlp(nn.Sequential):
    """Flattened pixels - hidden layers with ReLU - classes: 784-512-10 on MNIST. `[B, ...]` to `[B, classes]`."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (512,)):
        widths = [prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))


class ConvNet(nn.Sequential):
    """Two 3x3 convolutions with batch norm and pooling, then a linear layer. `[B, C, H, W]` to `[B, classes]`."""

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, width: int = 32):
        channels, _, _ = _image(input_shape, "convnet")
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip


def resnet18(*, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """ResNet-18. Source: He et al., "Deep Residual Learning for Image Recognition", 2015."""
    from torchvision.models import resnet18 as build

    return _fit_stem(build(num_classes=num_classes), input_shape)


def resnet50(*, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """ResNet-50. Source: He et al., "Deep Residual Learning for Image Recognition", 2015."""
    from torchvision.models import resnet50 as build

    return _fit_stem(build(num_classes=num_classes), input_shape)


def _fit_stem(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Other channel counts, and for images of at most 64 pixels the paper's CIFAR stem: 3x3, stride 1, no pooling."""
    channels, height, width = _image(input_shape, "resnet")
    if max(height, width) <= 64:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model


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

        channels, height, width = _image(input_shape, "vit")
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


def _image(input_shape: Sequence[int], model: str) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"model={model} takes images [C, H, W], and the data's inputs are {list(input_shape)}: choose another model or data"
        )
    return input_shape[0], input_shape[1], input_shape[2]

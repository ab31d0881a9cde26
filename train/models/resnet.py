"""torchvision's ResNets, adapted to the data."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from muster.train.models.inputs import image_shape


def resnet18(*, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """ResNet-18. Source: He et al., "Deep Residual Learning for Image Recognition", 2015."""
    from torchvision.models import resnet18 as build

    return _fit_stem(build(num_classes=num_classes), input_shape)


def resnet50(*, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """ResNet-50. Source: He et al., "Deep Residual Learning for Image Recognition", 2015."""
    from torchvision.models import resnet50 as build

    return _fit_stem(build(num_classes=num_classes), input_shape)


def _fit_stem(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Adapt the stem to other channel counts; up to 64 pixels use the paper's CIFAR stem: 3x3, stride 1, no pooling."""
    channels, height, width = image_shape(input_shape, model="resnet")
    if max(height, width) <= 64:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model

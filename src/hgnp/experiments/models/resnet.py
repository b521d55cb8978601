"""ResNet-18 (K. He et al., *Deep residual learning for image recognition*)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.errors import InputError
from hgnp.experiments.models.vgg import narrowed


class ResNet18(nn.Module):
    """Four stages of two residual blocks: 4,800 filters.

    `stem="cifar"`: for images of 32 px; a 3 × 3 convolution that keeps their size. `stem="imagenet"`: for larger ones; a
    7 × 7 convolution and max pooling, which divide each side by four. `width` multiplies the channels of every convolution.
    """

    def __init__(
        self, num_classes: int = 10, *, stem: Literal["cifar", "imagenet"] = "cifar", width: float = 1.0
    ) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise InputError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")
        small = stem == "cifar"
        a, b, c, d = (narrowed(channels, width) for channels in (64, 128, 256, 512))
        self.conv1 = nn.Conv2d(3, a, 3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(a)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(a, a), BasicBlock(a, a))
        self.layer2 = nn.Sequential(BasicBlock(a, b, stride=2), BasicBlock(b, b))
        self.layer3 = nn.Sequential(BasicBlock(b, c, stride=2), BasicBlock(c, c))
        self.layer4 = nn.Sequential(BasicBlock(c, d, stride=2), BasicBlock(d, d))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(d, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class BasicBlock(nn.Module):
    """Two convolutions, added to their input; the input goes through a 1 × 1 convolution where its shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))

"""VGG-16 with batch normalisation (K. Simonyan and A. Zisserman, *Very deep convolutional networks*, configuration D)."""

from typing import Literal

from torch import Tensor, nn

from hgnp.errors import InputError

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def narrowed(channels: int, width: float) -> int:
    """`channels` times `width`, rounded; at least one."""
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < float("inf"):
        raise InputError(f"width must be a finite number > 0, got {width!r}")
    return max(1, round(channels * width))


class VGG16(nn.Module):
    """Thirteen convolutions, each with a norm, and a classifier after the features are averaged.

    `form="cifar"`: for images of 32 px, whose features have a single position; one linear layer from 512 channels to the
    classes. `form="imagenet"`: for images of 224 px; features of 7 × 7 positions and three linear layers. `width` multiplies
    the channels of every convolution: 0.5 is the network of half the width.
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        form: Literal["cifar", "imagenet"] = "cifar",
        dropout: float = 0.5,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        if form not in ("cifar", "imagenet"):
            raise InputError(f"form must be 'cifar' or 'imagenet', got {form!r}")
        layers: list[nn.Module] = []
        inputs = 3
        for stage in STAGES:
            for outputs in (narrowed(channels, width) for channels in stage):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1 if form == "cifar" else 7)
        self.classifier: nn.Module
        if form == "cifar":
            self.classifier = nn.Linear(inputs, num_classes)
        else:
            self.classifier = nn.Sequential(
                nn.Linear(inputs * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
                nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
                nn.Linear(4096, num_classes),
            )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))

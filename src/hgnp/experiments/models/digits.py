"""The demo's network."""

from torch import Tensor, nn


class DigitsNet(nn.Module):
    """Four 3 × 3 convolutions with norms, for images of 8 px, then one linear layer from the averaged channels."""

    def __init__(self, num_classes: int = 10, *, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            nn.MaxPool2d(2),
            *_block(width, 2 * width),
            *_block(2 * width, 2 * width),
        )
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

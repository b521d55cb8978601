"""The paper's networks, with torchvision's parameter names, so that published weights fit, and the demo's."""

from hgnp.experiments.models.alexnet import AlexNet
from hgnp.experiments.models.digits import DigitsNet
from hgnp.experiments.models.resnet import ResNet18
from hgnp.experiments.models.vgg import VGG16
from hgnp.experiments.models.weights import Loaded, load_weights

__all__ = ["VGG16", "AlexNet", "DigitsNet", "Loaded", "ResNet18", "load_weights"]

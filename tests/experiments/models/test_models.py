"""The networks have torchvision's names and shapes, and all their neurons but the classes can go."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hgnp
from hgnp.experiments.models import VGG16, AlexNet, ResNet18

# of "name shape" lines of torchvision's state_dict: alexnet, vgg16_bn, resnet18
TORCHVISION = {
    "alexnet": (lambda: AlexNet(1000), "9c198ebdae1863e4"),
    "vgg16_bn": (lambda: VGG16(1000, form="imagenet"), "347371586a8ea365"),
    "resnet18": (lambda: ResNet18(1000, stem="imagenet"), "84fb10d9c6905a1c"),
}
NETS: dict[str, tuple[Callable[[], nn.Module], int, int, str]] = {
    "alexnet": (lambda: AlexNet(7), 224, 9344, "classifier.6"),
    "vgg": (lambda: VGG16(10), 32, 4224, "classifier"),
    "resnet": (lambda: ResNet18(10), 32, 4800, "fc"),
    "resnet, imagenet": (lambda: ResNet18(200, stem="imagenet"), 160, 4800, "fc"),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_are_those_of_torchvision(name: str) -> None:
    make, digest = TORCHVISION[name]
    with torch.device("meta"):
        state = make().state_dict()
    lines = "\n".join(f"{key} {tuple(tensor.shape)}" for key, tensor in state.items())
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", NETS)
def test_all_neurons_but_the_classes_are_prunable(name: str) -> None:
    make, side, count, last = NETS[name]
    net = make()
    neurons = hgnp.Neurons(net, torch.zeros(2, 3, side, side))
    assert neurons.count == count
    assert [frozen.name for frozen in neurons.frozen] == [last]
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, count // 2))
    assert neurons.kept < 0.5
    assert net(torch.randn(2, 3, side, side)).isfinite().all()


def test_the_imagenet_vgg_differs_from_the_small_one_by_its_classifier_alone() -> None:
    with torch.device("meta"):
        small, large = VGG16(10).state_dict(), VGG16(10, form="imagenet").state_dict()
        assert VGG16(10, form="imagenet")(torch.zeros(2, 3, 224, 224)).shape == (2, 10)
    shapes = [{name: t.shape for name, t in net.items() if name.startswith("features")} for net in (small, large)]
    assert shapes[0] == shapes[1]
    assert {name for name in small if "features" not in name} == {"classifier.weight", "classifier.bias"}


def test_the_small_stem_keeps_the_size() -> None:
    with torch.device("meta"):
        for stem, places in (("cifar", 32), ("imagenet", 8)):
            net = ResNet18(10, stem=stem)
            assert net.layer1(net.maxpool(net.conv1(torch.zeros(1, 3, 32, 32)))).shape[-1] == places


@pytest.mark.parametrize(
    ("make", "word"), [(lambda: ResNet18(stem="large"), "stem"), (lambda: VGG16(form="c"), "form")]
)
def test_an_unknown_form_is_refused(make: Callable[[], nn.Module], word: str) -> None:
    with pytest.raises(ValueError, match=rf"^{word} must be 'cifar' or 'imagenet', got '.*'$"):
        make()

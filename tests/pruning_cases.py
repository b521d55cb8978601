"""Helpers of the pruning tests: random scores, prunable layers, and removal compared with masking."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cases import Net
from hgnp import Neurons, Selection
from oracles import Inputs, masked, run, worst_error

VECTORS = torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def two_layers(forward: Any, **modules: Any) -> nn.Module:
    """Layers `a` (5 to 12) and `out` (12 to 3) with a forward of one's own."""
    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(5, 12), out=nn.Linear(12, 3), **modules).double().eval()


def three_layers(middle: nn.Module) -> nn.Sequential:
    """A linear layer before and after `middle`, which maps 6 features to 7."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), middle, nn.Tanh(), nn.Linear(7, 2)).double().eval()


def prunable_layers(net: nn.Module, x: Any = VECTORS) -> list[str]:
    return [layer.name for layer in Neurons(net, x).layers]


def widths(neurons: Neurons) -> dict[str, int]:
    return {layer.name: layer.alive for layer in neurons.layers}


def random_scores(neurons: Neurons, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(width, generator=generator) for name, width in widths(neurons).items()}


def assert_pruned_equals_masked(pruned: nn.Module, whole: nn.Module, removed: Selection, inputs: Inputs) -> None:
    with torch.no_grad():
        with masked(whole, removed, inputs):
            expected = run(whole, inputs)
        assert worst_error(run(pruned, inputs), expected) < 1e-10


def assert_removal_equals_masking(net: nn.Module, x: Tensor, selection: dict[str, list[int]]) -> None:
    net = net.double().eval()
    pruned = copy.deepcopy(net)
    removed = Neurons(pruned, x).remove(selection)
    assert_pruned_equals_masked(pruned, net, removed, ((x,), {}))

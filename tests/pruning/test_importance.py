"""Scores computed from weights alone, against their definitions."""

from typing import Any

import torch
from torch import Tensor, nn

import hgnp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na, self.b = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(torch.tanh(self.na(self.a(x)))).mean((2, 3)))


def test_weight_scores_equal_their_definitions() -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 2, 7, 7).double()
    nn.init.normal_(net.na.weight)
    neurons = hgnp.Neurons(net, x)
    neurons.remove({"a": [1]})
    batches: list[Any] = []
    w = net.a.weight.detach().flatten(1)
    l1 = hgnp.sensitivity(net, neurons, batches, criterion="l1")
    torch.testing.assert_close(l1["a"], w.abs().sum(1) / w.abs().sum(1).norm())
    l2 = hgnp.sensitivity(net, neurons, batches, criterion="l2")
    torch.testing.assert_close(l2["a"], w.norm(dim=1) / w.norm())
    wb = net.b.weight.detach().flatten(1)
    torch.testing.assert_close(l2["b"], wb.norm(dim=1) / wb.norm())
    scale = hgnp.sensitivity(net, neurons, batches, criterion="bn_scale")
    assert scale.keys() == {"a"}
    torch.testing.assert_close(scale["a"], net.na.weight.detach().abs() / net.na.weight.detach().norm())
    median = hgnp.sensitivity(net, neurons, batches, criterion="geometric_median")
    sums = torch.stack([torch.stack([(p - q).norm() for q in wb]).sum() for p in wb])
    torch.testing.assert_close(median["b"], sums / sums.norm())
    torch.manual_seed(0)
    one = hgnp.sensitivity(net, neurons, batches, criterion="random")
    torch.manual_seed(0)
    two = hgnp.sensitivity(net, neurons, batches, criterion="random")
    assert torch.equal(one["a"], two["a"])
    stream = torch.get_rng_state()
    hgnp.sensitivity(net, neurons, batches, criterion="random")
    assert torch.equal(stream, torch.get_rng_state())
    torch.rand(1)
    assert not torch.equal(one["a"], hgnp.sensitivity(net, neurons, batches, criterion="random")["a"])
    assert sum(len(neurons.least(s, 3)) > 0 for s in (l1, l2, scale, median, one)) == 5


def test_random_scores_differ_after_a_removal() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    neurons = hgnp.Neurons(net, torch.randn(2, 4))
    before = hgnp.sensitivity(net, neurons, [], criterion="random")["2"]
    neurons.remove({"0": [1]})
    assert not torch.equal(before, hgnp.sensitivity(net, neurons, [], criterion="random")["2"])

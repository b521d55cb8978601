"""Scores computed from weights alone, against their definitions."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

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


class Tokens(nn.Module):
    """A norm over the tokens of a layer's output, of which there are as many as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.a(x))).mean(1))


@pytest.mark.parametrize("positions", [6, 7])
def test_the_scale_of_a_norm_over_positions_or_tokens_is_no_score_of_channels(positions: int) -> None:
    norm = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6), nn.ReLU())
    over_positions = nn.Sequential(nn.Conv1d(6, 6, 1), nn.LayerNorm(positions), nn.ReLU())
    net = nn.Sequential(*norm, *over_positions, nn.Flatten(), nn.Linear(6 * positions, 3))
    neurons = hgnp.Neurons(net, torch.randn(2, 4, positions))
    assert [layer.name for layer in neurons.layers] == ["0", "3"]
    assert hgnp.sensitivity(net, neurons, [], criterion="bn_scale").keys() == {"0"}
    tokens = Tokens()
    neurons = hgnp.Neurons(tokens, torch.randn(4, 6, 5), approximate=True)
    assert [layer.name for layer in neurons.layers] == ["a"]
    assert neurons.norm_scale("a") is None


class Gain(nn.Linear):
    """Its weight is scaled by row, with the scale first."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gain = nn.Parameter(torch.rand(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gain * self.weight, self.bias)


class LowRank(nn.Linear):
    """Adds a product of two small matrices to its weight, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.left @ self.right, self.bias)


class Product(nn.Linear):
    """Its weight is a product of two small matrices."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        del self.weight
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.left @ self.right, self.bias)


class GainInPlace(Gain):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone().mul_(self.gain)
        weight[:, :4] *= 3.0
        return F.linear(x, weight, self.bias)


class LowRankBeside(LowRank):
    """Adds the output of two small matrices, as LoRA does, in several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.gain = spelling, nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "sum":
            return F.linear(x, self.weight, self.bias) + 0.5 * (x @ self.right.T @ self.left.T)
        if self.spelling == "difference":
            result = torch.add(F.linear(x, self.weight), x @ self.right.T @ self.left.T, alpha=0.5)
            return result - F.linear(x, self.weight.T) / self.gain
        if self.spelling == "low rank first":
            return F.linear(F.linear(x, self.right), self.left) / 2 + F.linear(x, self.weight, self.bias)
        result = F.linear(x, self.weight) * self.gain
        result += F.dropout(x, 0.5, self.training) @ self.right.transpose(0, 1) @ self.left.transpose(0, 1) * 0.5
        return result + self.bias  # type: ignore[no-any-return]


class TwoConvolutions(nn.Conv2d):
    """Two kernels read the same channels."""

    def __init__(self) -> None:
        super().__init__(8, 8, 1)
        self.other, self.gain = nn.Parameter(torch.randn(8, 8, 1, 1)), nn.Parameter(torch.rand(8, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * F.conv2d(x, self.other) + super().forward(x)


class Channels(nn.Module):
    """A convolution between linear layers."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, :, None, None]).sum((2, 3))


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


def masked(module: nn.Module) -> nn.Module:
    return prune.random_unstructured(module, "weight", amount=0.4)


COMPUTED_WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "weight norm by hook": lambda: old_weight_norm(nn.Linear(8, 8)),
    "mask": lambda: masked(nn.Linear(8, 8)),
    "gain": Gain,
    "gain in place": GainInPlace,
    "low rank": LowRank,
    "product": Product,
    "low rank beside": lambda: LowRankBeside("sum"),
    "low rank beside, first": lambda: LowRankBeside("low rank first"),
    "low rank beside, difference": lambda: LowRankBeside("difference"),
    "low rank beside, in place": lambda: LowRankBeside("in place"),
    "two convolutions": TwoConvolutions,
    "weight norm of a convolution": lambda: parametrizations.weight_norm(nn.Conv2d(8, 8, 1)),
    "mask of a depthwise convolution": lambda: masked(nn.Conv2d(8, 8, 1, groups=8)),
    "mask of a grouped convolution": lambda: masked(nn.Conv2d(8, 8, 1, groups=2)),
    "mask of a transposed convolution": lambda: masked(nn.ConvTranspose2d(8, 8, 1)),
    "mask of a grouped transposed convolution": lambda: masked(nn.ConvTranspose2d(8, 8, 1, groups=2)),
}


@pytest.mark.parametrize("make", COMPUTED_WEIGHTS.values(), ids=COMPUTED_WEIGHTS)
def test_computed_weights_are_scored_as_the_layer_uses_them(make: Callable[[], nn.Module]) -> None:
    """The rows are read off the layer's output for the unit vectors."""
    torch.manual_seed(0)
    layer = make()
    name = "2" if isinstance(layer, nn.Linear) else "2.conv"
    middle = layer if name == "2" else Channels(layer)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), middle, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 5, dtype=torch.double))
    for selection in ({}, {name: [1, 2]}):
        neurons.remove(selection)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1 + torch.rand_like(parameter))
            inputs = torch.eye(net[0].out_features, dtype=torch.double)
            rows = (net[2](inputs) - net[2](torch.zeros_like(inputs))).T
        found = hgnp.sensitivity(net, neurons, [], criterion="l1")[name]
        torch.testing.assert_close(found, rows.abs().sum(1) / rows.abs().sum(1).norm())
        found = hgnp.sensitivity(net, neurons, [], criterion="l2")[name]
        torch.testing.assert_close(found, rows.norm(dim=1) / rows.norm())


class TwoInputs(nn.Linear):
    """Two weights read different features of the same input, as in a Kolmogorov–Arnold layer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.other = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(x), self.weight, self.bias) + F.linear(torch.sin(x), self.other)


def test_a_layer_of_two_inputs_is_scored_by_the_weights_of_both() -> None:
    torch.manual_seed(0)
    layer = TwoInputs()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 5, dtype=torch.double))
    neurons.remove({"0": [3], "2": [1, 2]})
    weights = torch.cat([layer.weight, layer.other], 1).detach()
    found = hgnp.sensitivity(net, neurons, [], criterion="l2")["2"]
    torch.testing.assert_close(found, weights.norm(dim=1) / weights.norm())


class SharedRow(nn.Linear):
    """A single row is added to all neurons: of other features and, scaled, of the same."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.same, self.other = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.same) * 2 + F.linear(torch.sin(x), self.other)


def test_a_row_that_is_added_to_all_neurons_counts_for_each() -> None:
    torch.manual_seed(0)
    layer = SharedRow()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 5, dtype=torch.double))
    for selection in ({}, {"0": [3], "2": [1, 2]}):
        neurons.remove(selection)
        weights = torch.cat([layer.weight + 2 * layer.same, layer.other.expand(len(layer.weight), -1)], 1).detach()
        found = hgnp.sensitivity(net, neurons, [], criterion="l2")["2"]
        torch.testing.assert_close(found, weights.norm(dim=1) / weights.norm())


class MaskedForTwo(nn.Linear):
    """A weight that is computed once reads two inputs."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mask = nn.Parameter((torch.rand(8, 8) > 0.4).double(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.mask
        return F.linear(x, weight, self.bias) * F.linear(torch.sin(x), weight)


def test_a_computed_weight_that_reads_two_inputs_is_scored_as_computed() -> None:
    torch.manual_seed(0)
    layer = MaskedForTwo()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 5, dtype=torch.double))
    weights = (layer.weight * layer.mask).detach()
    found = hgnp.sensitivity(net, neurons, [], criterion="l2")["2"]
    torch.testing.assert_close(found, weights.norm(dim=1) / weights.norm())


def test_a_layer_that_is_called_twice_is_scored_by_its_weights_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    net = nn.Sequential(nn.Linear(5, 8), layer, layer, nn.Linear(8, 3)).double().eval()
    neurons = hgnp.Neurons(net, torch.randn(2, 5, dtype=torch.double))
    assert torch.equal(neurons.weights("1"), layer.weight)

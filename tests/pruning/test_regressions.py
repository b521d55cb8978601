"""Networks that once came out wrong or frozen, each reduced to the least that shows it."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hgnp
from oracles import masked, worst_error


def conv(inside: int, outside: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, padding=1)


def assert_removal_equals_masking(net: nn.Module, x: Tensor, selection: dict[str, list[int]]) -> None:
    net = net.double().eval()
    small = copy.deepcopy(net)
    gone = hgnp.Neurons(small, x).remove(selection)
    with torch.no_grad():
        with masked(net, gone, ((x,), {})):
            want = net(x)
        assert worst_error(small(x), want) < 1e-10


@pytest.fixture
def image() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8, dtype=torch.double)


def shifted(norm: nn.GroupNorm) -> nn.GroupNorm:
    nn.init.normal_(norm.bias)
    return norm


def test_group_norm_with_a_group_for_each_channel_is_exact(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), conv(8, 8), shifted(nn.GroupNorm(8, 8)), conv(8, 4))
    assert_removal_equals_masking(net, image, {"0": [1, 4], "2": [0, 7]})


def test_rows_of_a_weight_normed_layer_can_go_and_its_columns_stay(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.utils.parametrizations.weight_norm(conv(8, 8)), nn.ReLU(), conv(8, 4))
    frozen = {entry.name: entry.reason for entry in hgnp.Neurons(net.double(), image).frozen}
    assert frozen.keys() == {"0", "3"}
    assert "norm mixes" in frozen["0"]
    assert_removal_equals_masking(net, image, {"1": [0, 3, 5]})


class StandardisedConv(nn.Conv2d):
    """Weights with mean 0 and variance 1 over each filter, as in NFNets and Big Transfer."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return self._conv_forward(x, weight, self.bias)


def test_columns_of_a_standardised_weight_stay_and_the_reason_says_why(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.ReLU(), StandardisedConv(8, 8, 3), nn.ReLU(), conv(8, 4))
    frozen = {entry.name: entry.reason for entry in hgnp.Neurons(net.double(), image).frozen}
    assert frozen.keys() == {"0", "4"}
    assert "norm mixes" in frozen["0"]
    assert_removal_equals_masking(net, image, {"2": [0, 3, 5]})


class Conv1D(nn.Module):
    """Hugging Face's linear layer with its weight the other way round, as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view((*x.shape[:-1], self.nf))


def test_hidden_units_of_gpt2s_mlp_can_go() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Conv1D(16, 6), nn.GELU(), Conv1D(6, 16))
    assert_removal_equals_masking(net, torch.randn(2, 5, 6, dtype=torch.double), {"0": [2, 3, 11]})
    assert (net[0].nf, net[2].nx) == (16, 16)


class PlacesAndToken(nn.Module):
    """A vision transformer's beginning: an embedding of rows and columns is flattened and a token put in front."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 4)
        self.place, self.token = nn.Parameter(torch.randn(1, 6, 4, 4)), nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.patch(x) + self.place).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_a_token_in_front_of_flattened_places(image: Tensor) -> None:
    net = PlacesAndToken()
    with torch.no_grad():  # what a channel is learned to start from goes with it, and masking leaves that alone
        net.place[:, [1, 2]] = 0
        net.token[..., [1, 2]] = 0
    assert_removal_equals_masking(net, image, {"patch": [1, 2]})


class Queries(nn.Module):
    """A layer that is applied to a parameter, as to learned queries or a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.layer = nn.Parameter(torch.randn(6, 5)), nn.Linear(5, 8)
        self.mix, self.head = nn.Linear(3, 6), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x) @ torch.tanh(self.layer(self.query)))


def test_neurons_of_a_layer_applied_to_a_parameter_are_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.double)
    alive = {layer.name: layer.alive for layer in hgnp.Neurons(Queries().double(), x).layers}
    assert alive["layer"] == 8
    assert_removal_equals_masking(Queries(), x, {"layer": [2, 7]})


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_pooling_to_one_position_lets_channels_go_in_every_layout(coupling: str) -> None:
    """PyTorch gives the result channels-last strides in place, which moves nothing."""
    net = nn.Sequential(
        conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    net = net.double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    neurons = hgnp.Neurons(net, x)
    for left in (12, 10):  # with "paper" the network is recorded anew after a removal
        scores = {layer.name: torch.arange(layer.alive).double() for layer in neurons.layers}
        neurons.remove(neurons.least(scores, 2, coupling=coupling))
        assert [entry.name for entry in neurons.frozen] == ["6"]
        assert neurons.count == left
    assert_removal_equals_masking(copy.deepcopy(net), x, {"0": [1], "3": [0, 4]})

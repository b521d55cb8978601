"""Operators and layouts that need care: removal equals masking, in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from cases import Net, conv
from hgnp import Neurons
from pruning_cases import (
    IMAGES,
    VECTORS,
    assert_pruned_equals_masked,
    assert_removal_equals_masking,
    random_scores,
    two_layers,
)


@pytest.mark.parametrize("bias", [True, False])
def test_token_mixing_with_a_bias_freezes_the_channels(bias: bool) -> None:
    """With a bias over tokens a masked channel does not stay zero; without one it does."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        h = h + n.tokens(h.transpose(1, 2)).transpose(1, 2)
        return n.out(h.mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(5, 6), tokens=nn.Linear(4, 4, bias=bias), out=nn.Linear(6, 2)).double().eval()
    x = torch.randn(2, 4, 5).double()
    whole, neurons = copy.deepcopy(net), Neurons(net, x)
    assert [layer.name for layer in neurons.layers] == ([] if bias else ["a"])
    if not bias:
        removed = neurons.remove({"a": [1, 3]})
        assert_pruned_equals_masked(net, whole, removed, ((x,), {}))


def test_gather_couples_the_layers_of_its_operands() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        where = n.g(x).flatten(2).argmax(2, keepdim=True)
        return n.out(torch.gather(n.a(x).flatten(2), 2, where)[..., 0])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=conv(3, 8), g=conv(3, 8), out=nn.Linear(8, 2)).double().eval()
    whole = copy.deepcopy(net)
    removed = Neurons(net, IMAGES).remove({"a": [2]})
    assert removed == {"a": [2], "g": [2]}
    assert_pruned_equals_masked(net, whole, removed, ((IMAGES,), {}))


@pytest.fixture
def image() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8, dtype=torch.double)


def shifted(norm: nn.GroupNorm) -> nn.GroupNorm:
    nn.init.normal_(norm.bias)
    return norm


def test_group_norm_with_one_group_per_channel_is_exact(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), conv(8, 8), shifted(nn.GroupNorm(8, 8)), conv(8, 4))
    assert_removal_equals_masking(net, image, {"0": [1, 4], "2": [0, 7]})


def test_weight_norm_keeps_its_columns_and_prunes_its_rows(image: Tensor) -> None:
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


def test_a_standardised_weight_keeps_its_columns_and_prunes_its_rows(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.ReLU(), StandardisedConv(8, 8, 3), nn.ReLU(), conv(8, 4))
    frozen = {entry.name: entry.reason for entry in hgnp.Neurons(net.double(), image).frozen}
    assert frozen.keys() == {"0", "4"}
    assert "norm mixes" in frozen["0"]
    assert_removal_equals_masking(net, image, {"2": [0, 3, 5]})


class Conv1D(nn.Module):
    """Hugging Face's linear layer with a transposed weight, as in GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view((*x.shape[:-1], self.nf))


def test_gpt2_mlp_units_are_pruned() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Conv1D(16, 6), nn.GELU(), Conv1D(6, 16))
    assert_removal_equals_masking(net, torch.randn(2, 5, 6, dtype=torch.double), {"0": [2, 3, 11]})
    assert (net[0].nf, net[2].nx) == (16, 16)


class PositionsAndToken(nn.Module):
    """The stem of a vision transformer: a flattened embedding of rows and columns, with a class token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 4)
        self.position, self.token = nn.Parameter(torch.randn(1, 6, 4, 4)), nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.patch(x) + self.position).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_a_class_token_is_cut_with_the_patch_embedding(image: Tensor) -> None:
    net = PositionsAndToken()
    with torch.no_grad():  # removal also removes these parameters, while masking the layer keeps them
        net.position[:, [1, 2]] = 0
        net.token[..., [1, 2]] = 0
    assert_removal_equals_masking(net, image, {"patch": [1, 2]})


class Queries(nn.Module):
    """A layer that is applied to a parameter: learned queries or a position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.layer = nn.Parameter(torch.randn(6, 5)), nn.Linear(5, 8)
        self.mix, self.head = nn.Linear(3, 6), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x) @ torch.tanh(self.layer(self.query)))


def test_a_layer_applied_to_a_parameter_has_its_own_neurons() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.double)
    alive = {layer.name: layer.alive for layer in hgnp.Neurons(Queries().double(), x).layers}
    assert alive["layer"] == 8
    assert_removal_equals_masking(Queries(), x, {"layer": [2, 7]})


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_pooling_to_one_position_prunes_in_every_memory_format(coupling: str) -> None:
    """PyTorch gives the result channels-last strides in place, which moves no entry."""
    net = nn.Sequential(
        conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    net = net.double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.double).contiguous(memory_format=torch.channels_last)
    neurons = hgnp.Neurons(net, x)
    for left in (12, 10):  # with "paper" the network is analysed anew after a removal
        scores = {layer.name: torch.arange(layer.alive).double() for layer in neurons.layers}
        neurons.remove(neurons.least(scores, 2, coupling=coupling))
        assert [entry.name for entry in neurons.frozen] == ["6"]
        assert neurons.count == left
    assert_removal_equals_masking(copy.deepcopy(net), x, {"0": [1], "3": [0, 4]})


def test_a_tensor_without_entries_has_no_channels() -> None:
    """No channels of a layer's output; and none of its rows, which leaves a width that cannot be followed."""

    def without_entries(dim: int) -> nn.Module:
        return two_layers(lambda n, x: (n.out(h := n.a(x).tanh()), h.narrow(dim, 0, 0).sum())[0])

    assert_removal_equals_masking(without_entries(1), VECTORS, {"a": [1, 4]})
    assert "fixes a size: expected shape (0, 12)" in Neurons(without_entries(0), VECTORS).frozen[0].reason


def linear_attention(n: Any, x: Tensor) -> Tensor:
    q, k, v = n.q(x).relu(), n.k(x).relu(), n.v(x)
    return n.out(torch.einsum("nld,nde->nle", q, torch.einsum("nld,nle->nde", k, v)))  # type: ignore[no-any-return]


def every_other(n: Any, x: Tensor) -> Tensor:
    h = n.a(x) * 1
    h[:, ::2] += n.b(x)
    return n.out(h.tanh())  # type: ignore[no-any-return]


DIFFICULT = {
    "linear attention": lambda: (
        Net(linear_attention, q=nn.Linear(5, 4), k=nn.Linear(5, 4), v=nn.Linear(5, 6), out=nn.Linear(6, 2)),
        torch.randn(2, 3, 5).double(),
    ),
    "squeeze": lambda: (
        Net(lambda n, x: n.out(n.a(x).mean((2, 3), keepdim=True).squeeze()), a=conv(3, 6), out=nn.Linear(6, 2)),
        IMAGES,
    ),
    "every other channel": lambda: (
        Net(every_other, a=nn.Linear(5, 12), b=nn.Linear(5, 6), out=nn.Linear(12, 2)),
        VECTORS,
    ),
}


@pytest.mark.parametrize("make", DIFFICULT.values(), ids=DIFFICULT)
def test_remove_accepts_what_least_selects(make: Any) -> None:
    net, x = make()
    net = net.double().eval()
    whole = copy.deepcopy(net)
    neurons = Neurons(net, x)
    removed = neurons.remove(neurons.least(random_scores(neurons), 10_000))
    assert_pruned_equals_masked(net, whole, removed, ((x,), {}))


NODES, EDGES, WIDTH = 6, 10, 8
SOURCE, TARGET = torch.arange(EDGES) % NODES, (3 * torch.arange(EDGES) + 1) % NODES


def scattered(messages: Tensor) -> Tensor:
    """As PyTorch Geometric sums messages: one index for each entry."""
    index = TARGET.view(-1, 1).expand_as(messages)
    return torch.zeros(NODES, messages.shape[1], dtype=messages.dtype).scatter_add_(0, index, messages)


MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda nodes, messages: torch.zeros_like(nodes).index_add(0, TARGET, messages),
    "index_add to the nodes": lambda nodes, messages: nodes.index_add(0, TARGET, messages, alpha=0.5),
    "index_add_": lambda nodes, messages: torch.zeros_like(nodes).index_add_(0, TARGET, messages),
    "scatter_add_": lambda nodes, messages: scattered(messages),
    "greatest": lambda nodes, messages: torch.zeros_like(nodes).scatter_reduce(
        0, TARGET.view(-1, 1).expand_as(messages), messages, "amax", include_self=False
    ),
    "index_reduce": lambda nodes, messages: nodes.index_reduce(0, TARGET, messages, "mean"),
    "scatter": lambda nodes, messages: nodes.scatter(0, TARGET[:2].view(-1, 1).expand(-1, messages.shape[1]), 0.0),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_between_nodes_keep_their_channels(name: str) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        nodes = n.a(x)
        return n.out(torch.tanh(MESSAGES[name](nodes, nodes[SOURCE])))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    x = torch.randn(NODES, 5).double()
    assert [layer.name for layer in Neurons(net, x).layers] == ["a"]
    assert_removal_equals_masking(net, x, {"a": [1, 4, 5]})


def test_messages_along_the_channels_freeze_them() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        return n.out(torch.zeros_like(h).index_add(1, torch.arange(WIDTH).flip(0), h))  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    neurons = Neurons(net, torch.randn(4, 5).double())
    assert not neurons.layers
    assert any("looked up by index" in frozen.reason for frozen in neurons.frozen)


def test_scores_of_a_network_with_messages() -> None:
    """Against a gate on each channel of each node where it is read, in float64."""

    def forward(n: Any, x: Tensor) -> Tensor:
        nodes = n.a(x)
        return n.out(torch.zeros_like(nodes).index_add(0, TARGET, nodes[SOURCE]))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    x, y = torch.randn(NODES, 5).double(), torch.arange(NODES) % 3
    scores = hgnp.sensitivity(net, Neurons(net, x), [(x, y)])["a"]
    gate = torch.ones(NODES, WIDTH).double().requires_grad_()
    net.out.register_forward_pre_hook(lambda module, inputs: inputs[0] * gate)
    (slopes,) = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), gate)
    expected = slopes.abs().mean(0)
    torch.testing.assert_close(scores, expected / expected.norm(), rtol=1e-10, atol=1e-12)


def test_a_sum_that_is_written_in_place_into_zeros() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x).tanh()
        total = torch.zeros_like(h)
        total += h
        total.mul_(2).add_(n.b(x))
        return n.out(total)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(5, WIDTH), b=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["a", "b"]
    assert neurons.preview({"a": [1]}).neurons == 2 * WIDTH - 2
    assert_removal_equals_masking(net, VECTORS, {"a": [1, 4, 5]})


def test_a_sum_that_is_written_into_part_of_a_tensor_freezes_it() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 2 * WIDTH, dtype=x.dtype)
        total[:, :WIDTH] += n.a(x)
        return n.out(total)  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, WIDTH), out=nn.Linear(2 * WIDTH, 3)).double()
    assert not Neurons(net, VECTORS).layers


@pytest.mark.parametrize("write", ["scatter_add", "scatter", "scatter_add into zeros"])
def test_an_index_narrower_than_the_channels_freezes_them(write: str) -> None:
    """It covers the first channels, whichever they are."""
    index = TARGET[:NODES].view(-1, 1).expand(-1, 4)

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x).relu()
        if write == "scatter_add":
            h = h.scatter_add(0, index, n.b(x))
        elif write == "scatter":
            h = h.scatter(0, index, 1.0) + n.b(x)
        else:
            h = torch.zeros_like(h).scatter_add(0, index, h) + n.b(x)
        return n.out(h)  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, WIDTH), b=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    assert "a" not in {layer.name for layer in Neurons(net, torch.randn(NODES, 5).double()).layers}


def test_an_index_as_narrow_as_its_source() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        index = TARGET[:NODES].view(-1, 1).expand(-1, 4)
        return n.out(n.a(x).scatter_add(0, index, n.b(x)))  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, WIDTH), b=nn.Linear(5, 4), out=nn.Linear(WIDTH, 3)).double()
    assert not Neurons(net, torch.randn(NODES, 5).double()).layers


@pytest.mark.parametrize("later", ["view", "detach", "part", "linear in three dimensions"])
def test_later_views_of_a_sum_written_in_place_do_not_freeze_it(later: str) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        total = torch.zeros_like(h)
        total += h.tanh()
        if later == "view":
            return n.out(total.view(len(x), -1))  # type: ignore[no-any-return]
        if later == "detach":
            return n.out(total) + n.out(total.detach())  # type: ignore[no-any-return]
        return n.out(total[:2] if later == "part" else total)  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, WIDTH), out=nn.Linear(WIDTH, 3)).double()
    x = torch.randn(2, 4, 5).double() if "three" in later else VECTORS
    assert_removal_equals_masking(net, x, {"a": [1, 4, 5]})

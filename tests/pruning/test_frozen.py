"""Neurons that cannot be removed exactly are frozen, with the reason."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import Net, conv
from hgnp import Neurons
from pruning_cases import (
    IMAGES,
    VECTORS,
    prunable_layers,
    three_layers,
    two_layers,
)

WIDTH_IN_A_CONSTANT = {
    "ones summed": lambda n, h: n.out(h / torch.ones_like(h).sum(1, keepdim=True)),
    "ones counted": lambda n, h: n.out(h * torch.ones_like(h).cumsum(1)),
    "softmax of zeros": lambda n, h: n.out(h * torch.zeros_like(h).softmax(1)),
    "norm of ones": lambda n, h: n.out(h) / torch.ones(h.size(1)).double().norm(),
    "halves": lambda n, h: n.out(h * torch.cat([h.new_zeros(h.size(1) // 2), h.new_ones(h.size(1) - h.size(1) // 2)])),
    "expanded and summed": lambda n, h: n.out(h) * h.new_tensor(2.0).expand(h.size(1)).sum(),
    "a list of numbers": lambda n, h: n.out(h) * torch.tensor([1.0, 2.0, h.size(1)]).double(),
    "one of a list": lambda n, h: n.out(h * torch.tensor([1.0, h.size(1) ** -0.5]).double()[1]),
    "from NumPy": lambda n, h: n.out(h) * torch.from_numpy(np.array([1.0, 2.0, h.size(1)])),
    "the shape": lambda n, h: n.out(h) / torch.tensor(h.shape).prod(),
    "the order of a norm": lambda n, h: n.out(h) * h.norm(p=h.size(1), dim=1, keepdim=True),
    "weights summed with ones": lambda n, h: n.out(h * n.w) * (n.w @ torch.ones(len(n.w)).double()),
}


@pytest.mark.parametrize("code", WIDTH_IN_A_CONSTANT.values(), ids=WIDTH_IN_A_CONSTANT)
def test_a_constant_that_depends_on_the_width_freezes_the_layer(code: Any) -> None:
    net = two_layers(lambda n, x: code(n, n.a(x)), w=nn.Parameter(torch.rand(12)))
    assert prunable_layers(net) == []


def test_a_spatial_roll_by_the_width_freezes_the_layer() -> None:
    net = Net(lambda n, x: n.b(torch.roll(n.a(x), n.a.out_channels, 2)), a=conv(3, 8), b=conv(8, 2)).double()
    assert prunable_layers(net, IMAGES) == []


def test_a_partial_convolution_that_counts_its_inputs_freezes_the_layer() -> None:
    """A partial convolution divides by the number of its inputs."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        return n.b(h) / F.conv2d(torch.ones_like(h), torch.ones(1, h.size(1), 1, 1).double())  # type: ignore[no-any-return]

    assert prunable_layers(Net(forward, a=conv(3, 8), b=nn.Conv2d(8, 2, 1)).double(), IMAGES) == []


def test_a_softmax_freezes_the_channels_that_it_reads() -> None:
    """Talking heads: after a softmax over keys a masked head is not zero."""

    def forward(n: Any, x: Tensor) -> Tensor:
        return n.out(n.b(n.a(x).softmax(1)).mean(1))  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 7), out=nn.Linear(7, 2)).double()
    assert prunable_layers(net, torch.randn(2, 4, 5).double()) == ["b"]


def test_padded_channels_in_a_grid_are_frozen() -> None:
    """Channels and zero padding in one grid are frozen, and the search for rectangular cuts terminates."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = F.pad(n.a(x), (0, 0, 0, 0, 1, 1)).unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)
        return n.b(h)  # type: ignore[no-any-return]

    assert prunable_layers(Net(forward, a=conv(3, 4), b=conv(6, 2)).double(), IMAGES) == []


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_a_branch_on_python_random_numbers_freezes_everything(draw: Any) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        return n.out(h + n.b(h) if n.training and draw() < 0.5 else h)  # type: ignore[no-any-return]

    neurons = Neurons(two_layers(forward, b=nn.Linear(12, 12)), VECTORS)
    assert neurons.count == 0
    assert "random numbers" in neurons.frozen[0].reason


@pytest.mark.parametrize(("probability", "expected"), [(0.0, ["a", "b"]), (1.0, ["a", "b"]), (0.1, [])])
def test_a_layer_dropped_with_probability_0_or_1_stays_prunable(probability: float, expected: list[str]) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        if not (n.training and torch.rand([]) < probability):
            h = n.c(n.b(h).tanh())
        return n.out(h)  # type: ignore[no-any-return]

    net = two_layers(forward, b=nn.Linear(12, 7), c=nn.Linear(7, 12)).train()
    assert [name for name in prunable_layers(net) if name in "ab"] == expected


def test_a_branch_on_tensor_values_freezes_everything() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(x if x.sum() > 0 else -x)

    net = Net(forward, a=nn.Linear(5, 6), out=nn.Linear(6, 2)).double()
    neurons = Neurons(net, VECTORS)
    assert neurons.count == 0
    assert all("depends on its data" in entry.reason for entry in neurons.frozen)
    assert neurons.least({}, 5).taken == 0


def test_a_cut_that_takes_another_branch_is_refused() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(x.tanh() if x.shape[1] > 5 else x.relu())

    net = Net(forward, a=nn.Linear(5, 12), out=nn.Linear(12, 2)).double()
    neurons = Neurons(net, VECTORS)
    neurons.remove({"a": [0, 1, 2]})
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="takes another path"):
        neurons.remove({"a": [0, 1, 2, 3]})
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


WRITES_INTO_ZEROS = {
    "nothing": lambda h: None,
    "a number": lambda h: h.fill_(1),
    "noise": lambda h: h.normal_(),
    "into a part": lambda h: h[:, :2].add_(1),
    "into a view": lambda h: h.view(-1).add_(1),
    "into data": lambda h: h.data.fill_(1),
    "ones": lambda h: h.copy_(torch.ones_like(h)),
    "out": lambda h: torch.add(h, 1, out=h),
    "by an operator that returns nothing": lambda h: torch._foreach_add_([h], 1.0),
    "by an operator that returns another": lambda h: torch.ops.aten.rrelu_with_noise(
        -torch.ones_like(h), h, 0.5, 0.6, True
    ),
    "its data": lambda h: setattr(h, "data", torch.ones_like(h)),
}


WRITES_INTO_A_PART: dict[str, Any] = {
    "zeros": lambda m: m[:, 3:].zero_(),
    "a number": lambda m: m[:, 3:].fill_(0.0),
    "a tensor of zeros": lambda m: m[:, :2].copy_(torch.zeros(2, dtype=m.dtype)),
    "random numbers": lambda m: m[:, 3].bernoulli_(0.0),
    "an assignment": lambda m: m.__setitem__((slice(None), slice(0, 2)), 0.0),
    "out": lambda m: torch.zeros(len(m), 1, out=m[:, :1], dtype=m.dtype),
}


@pytest.mark.parametrize("make", [torch.ones_like, lambda h: h.new_ones(h.shape)])
@pytest.mark.parametrize("write", WRITES_INTO_A_PART.values(), ids=WRITES_INTO_A_PART)
def test_a_constant_tensor_written_in_part_freezes_what_it_multiplies(write: Any, make: Any) -> None:
    """Its entries are no longer alike: those of a smaller one would meet other channels."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x)
        gate = make(h)
        write(gate)
        return n.out(h * gate)

    assert prunable_layers(two_layers(forward)) == []


@pytest.mark.parametrize("write", WRITES_INTO_ZEROS.values(), ids=WRITES_INTO_ZEROS)
def test_a_state_that_no_longer_is_zero_freezes_the_layer_that_multiplies_it(write: Any) -> None:
    """The sum over a state of ones depends on its width; that over zeros does not."""

    def forward(n: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), n.h.in_features)
        write(h)
        for _ in range(2):
            h = torch.tanh(n.a(x) + n.h(h))
        return n.out(h)

    net = two_layers(forward, h=nn.Linear(12, 12))
    assert prunable_layers(net) == ([] if write is not WRITES_INTO_ZEROS["nothing"] else ["a", "h"])


def test_a_tensor_attribute_that_is_no_buffer_freezes_the_layer() -> None:
    net = Net(lambda n, x: n.out(n.a(x).tanh() * n.scale), a=nn.Linear(5, 6), out=nn.Linear(6, 2)).double()
    net.scale = torch.linspace(1, 2, 6).double()  # type: ignore[assignment]
    assert prunable_layers(net, VECTORS) == []


def test_parameters_that_share_memory_are_frozen() -> None:
    net = three_layers(nn.Linear(6, 7))
    net[4].weight = nn.Parameter(net[2].weight.data[:2, :6].new_zeros(2, 7))
    net[2].bias = nn.Parameter(net[4].weight.data.view(-1)[:7])
    neurons = Neurons(net, VECTORS)
    assert any("share memory" in entry.reason for entry in neurons.frozen)


def test_unused_layers_are_frozen() -> None:
    net = Net(lambda n, x: n.out(n.a(x)), a=nn.Linear(5, 6), spare=nn.Linear(3, 3), out=nn.Linear(6, 2)).double()
    entry = next(entry for entry in Neurons(net, VECTORS).frozen if entry.name == "spare")
    assert entry.reason == "it is not used in the forward pass"


class PairOfHeads(nn.Module):
    """The code states the shape of both heads: neither can be removed, and no position inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (layer(x).reshape(b, n, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, 8))  # type: ignore[no-any-return]


def test_the_reason_of_frozen_heads_names_their_own_module() -> None:
    """One module is tried for all of its class."""
    blocks = [nn.Sequential(nn.LayerNorm(8), PairOfHeads()) for _ in range(3)]
    neurons = Neurons(nn.Sequential(*blocks, nn.Linear(8, 2)), torch.zeros(2, 5, 8))
    reasons = {entry.name: entry.reason for entry in neurons.frozen}
    for index in range(3):
        assert reasons[f"{index}.1"].endswith(f"(view in {index}.1)")


class HeadsOfTheInputsWidth(nn.Module):
    """The number of heads is an attribute, which can change; the width of all of them is taken to be that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


def test_the_reason_of_frozen_heads_is_what_no_attribute_can_change() -> None:
    """Not the first reshape, which fails without a change of the number of heads."""
    net = nn.Sequential(nn.LayerNorm(8), HeadsOfTheInputsWidth(), nn.Linear(8, 2))
    (reason,) = [entry.reason for entry in Neurons(net, torch.zeros(2, 5, 8)).frozen if entry.name == "1"]
    assert "shape '[2, 5, 8]' is invalid" in reason
    assert reason.endswith("view in 1)")


@pytest.mark.parametrize("order", [1, -1])
def test_a_softmax_freezes_what_is_added_to_it_in_either_order(order: int) -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        one, other = (n.a(x).softmax(1), n.b(x))[::order]
        return n.out(one + other).mean(1)  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(6, 5), b=nn.Linear(6, 5), out=nn.Linear(5, 3))
    assert not Neurons(net, torch.zeros(2, 4, 6)).layers


def test_a_network_whose_values_are_infinite_on_purpose_is_frozen_at_its_check() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x).tanh()
        out = n.out(h)
        if torch.isinf(h.masked_fill(x[:, :1] > 0, -torch.inf)).any():
            out = out + h[:, 3:4]
        return out  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(6, 5), out=nn.Linear(5, 3))
    assert not Neurons(net, torch.ones(2, 6)).layers


def test_a_repair_of_values_that_are_not_finite_freezes_nothing() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        h = n.a(x).relu()
        if torch.isinf(h).any() or torch.isnan(h).any():
            h = h.clamp(-1e4, 1e4)
        return n.out(h)  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(6, 5), out=nn.Linear(5, 3))
    assert [layer.name for layer in Neurons(net, torch.ones(2, 6)).layers] == ["a"]


def test_a_check_for_values_that_are_not_finite_freezes_nothing() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        if torch.isnan(x).any() or not torch.isfinite(x).all():
            raise ValueError("not finite")
        return n.out(x.relu())  # type: ignore[no-any-return]

    net = Net(forward, a=nn.Linear(6, 5), out=nn.Linear(5, 3))
    assert [layer.name for layer in Neurons(net, torch.zeros(2, 6)).layers] == ["a"]

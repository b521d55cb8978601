"""A network whose settings, hooks or code changed after `Neurons` was created: removal continues, or says why it cannot."""

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp import Neurons
from hgnp.errors import InputError
from hgnp.pruning.selection import CouplingMode
from hgnp.training.task import CallbackState
from pruning_cases import assert_pruned_equals_masked, random_scores, two_layers

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.activation = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.LeakyReLU(0.2)
        self.drop, self.hidden, self.out = nn.Dropout(0.1), nn.Linear(12, 10), nn.Linear(10, 4)
        self.rate, self.temperature = 0.1, 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout2d(self.activation(self.norm(self.conv(x))), self.rate, self.training)
        h = F.silu(self.hidden(self.drop(h.mean((2, 3)))))
        return self.out(h) / self.temperature  # type: ignore[no-any-return]


def hooked(net: Net) -> None:
    net.conv.register_forward_hook(lambda module, inputs, output: output * 0.5)


CHANGES: dict[str, Callable[[Net], object]] = {
    "dropout module": lambda net: setattr(net.drop, "p", 0.5),
    "no dropout": lambda net: setattr(net, "drop", nn.Identity()),
    "dropout function": lambda net: setattr(net, "rate", 0.3),
    "temperature": lambda net: setattr(net, "temperature", 0.5),
    "momentum": lambda net: setattr(net.norm, "momentum", 0.01),
    "eps": lambda net: setattr(net.norm, "eps", 1e-3),
    "slope": lambda net: setattr(net.activation, "negative_slope", 0.01),
    "activation": lambda net: setattr(net, "activation", nn.GELU()),
    "hook": hooked,
    "stride": lambda net: setattr(net.conv, "stride", (2, 2)),
    "padding": lambda net: setattr(net.conv, "padding", (1, 1)),
    "dilation": lambda net: setattr(net.conv, "dilation", (2, 1)),
}


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
@pytest.mark.parametrize("change", CHANGES)
def test_neurons_are_removed_after_a_change_of_settings(change: str, coupling: CouplingMode) -> None:
    net = Net().double().eval()
    neurons = Neurons(net, IMAGES)
    batches = [(IMAGES, torch.arange(4))]
    hgnp.sensitivity(net, neurons, batches, coupling=coupling)
    neurons.remove(neurons.least(random_scores(neurons), 2, coupling=coupling))
    CHANGES[change](net)
    whole, scores = copy.deepcopy(net), hgnp.sensitivity(net, neurons, batches, coupling=coupling)
    assert scores.keys() == {"conv", "hidden"}
    selection = neurons.least(scores, 6, coupling=coupling)
    assert selection.taken == 6
    assert_pruned_equals_masked(net, whole, neurons.remove(selection), ((IMAGES,), {}))
    assert neurons.remove({"hidden": [0]}).taken == 1
    after, new = hgnp.sensitivity(net, neurons, batches, coupling=coupling), Neurons(net, IMAGES)
    for layer, values in hgnp.sensitivity(net, new, batches, coupling=coupling).items():
        torch.testing.assert_close(after[layer], values, rtol=1e-12, atol=1e-12)


def test_a_selection_by_hand_is_removed_after_a_change_of_settings() -> None:
    net = Net().double().eval()
    neurons = Neurons(net, IMAGES)
    net.temperature, net.drop.p = 0.5, 0.4
    whole = copy.deepcopy(net)
    assert_pruned_equals_masked(net, whole, neurons.remove({"conv": [1, 5]}), ((IMAGES,), {}))


@pytest.mark.parametrize("inside", ["created", "selected"])
def test_autocast_around_one_of_two_calls_changes_nothing(inside: str) -> None:
    def context(name: str) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if inside == name else contextlib.nullcontext()

    net = Net()
    with context("created"):
        neurons = Neurons(net, IMAGES.float())
    with context("selected"):
        assert neurons.least(random_scores(neurons), 6).taken == 6


class Capturing(nn.Module):
    """Registers hooks in its first call, as Transformers' models do that return hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 12), nn.Linear(12, 10)
        self.out, self.other = nn.Linear(12, 4), nn.Linear(10, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            for module in (self.a, self.b):
                module.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
            self.installed = True
        self.seen.clear()
        self.b(F.relu(self.a(x)))
        first, second = self.seen
        self.seen.clear()
        return self.out(F.relu(first)) + self.other(F.relu(second))  # type: ignore[no-any-return]


@pytest.mark.parametrize("own_hook", [False, True])
def test_hooks_that_the_first_call_registers_are_not_doubled_in_traces(own_hook: bool) -> None:
    net, x = Capturing().double(), torch.randn(5, 3).double()
    neurons = Neurons(net, x)
    if own_hook:
        net.b.register_forward_hook(lambda module, inputs, output: output.tanh())
    net(x)
    selection = neurons.least(random_scores(neurons), 8)
    assert selection.taken == 8
    with torch.no_grad():
        for name, positions in selection.items():
            layer = net.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            for part in (layer.weight, layer.bias):
                part[positions] = 0
        masked = net(x)
    neurons.remove(selection)
    torch.testing.assert_close(net(x), masked, rtol=1e-12, atol=1e-12)


def test_code_that_no_longer_runs_with_fewer_neurons_is_named() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out, self.strict = nn.Linear(3, 6), nn.Linear(6, 2), False

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.out(h.view(-1, 6).relu() if self.strict else h.relu())  # type: ignore[no-any-return]

    net, x = Fixed(), torch.randn(4, 3)
    neurons = Neurons(net, x)
    net.strict = True
    selection = neurons.least(random_scores(neurons), 3)
    assert not selection
    assert "view" in str(selection.problem)
    assert repr(selection) == f"Selection(0 of 3 requested neurons; {selection.problem})"
    with pytest.raises(InputError, match="removable as a whole"):
        neurons.remove({"a": [0]})
    assert net.a.weight.shape == (6, 3)


class Branches(nn.Module):
    """Two hidden layers; settings decide who reads them and what is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out, self.other = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.add = self.swap = self.features = False
        self.norm, self.pad = nn.GroupNorm(6, 6), (1, 1)

    def forward(self, x: Tensor) -> Any:
        a, b = self.a(x).relu(), self.b(x).relu()
        first, second = (self.other, self.out) if self.swap else (self.out, self.other)
        y = first(a + b if self.add else a) + second(b)
        return (y, a) if self.features else y


@pytest.mark.parametrize("change", ["add", "features"])
@pytest.mark.parametrize("when", ["before least", "after least"])
def test_a_change_that_couples_or_freezes_more_neurons_is_refused(change: str, when: str) -> None:
    net, x = Branches(), torch.randn(4, 3)
    neurons = Neurons(net, x)
    selection = neurons.least({"a": torch.rand(6)}, 2)
    assert selection["a"]
    setattr(net, change, True)
    with pytest.raises(InputError, match="net must couple and freeze no more neurons than when Neurons was created"):
        neurons.least({"a": torch.rand(6)}, 2) if when == "before least" else neurons.remove(selection)
    assert net.a.weight.shape == (6, 3)


def test_consumers_that_are_swapped_are_refused() -> None:
    """Both networks call the same operators on tensors of the same shapes: which weights they read tells them apart."""
    net, x = Branches(), torch.randn(4, 3)
    neurons = Neurons(net, x)
    net.swap = True
    with pytest.raises(InputError, match="net must couple and freeze no more neurons"):
        neurons.remove({"a": [0, 2], "b": [1, 3]})


def test_padding_of_channels_that_moves_is_refused() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out, self.pad = nn.Linear(4, 6), nn.Linear(4, 8), nn.Linear(8, 3), (1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.pad(self.a(x).relu(), self.pad) + self.b(x).relu())  # type: ignore[no-any-return]

    net, x = Padded().double(), torch.randn(5, 4).double()
    whole, neurons = copy.deepcopy(net), Neurons(net, x)
    removed = neurons.remove({"a": [5]})
    assert removed == {"a": [5], "b": [6]}
    assert_pruned_equals_masked(net, whole, removed, ((x,), {}))
    net.pad = (2, 0)
    with pytest.raises(InputError, match="moves its channels elsewhere"):
        neurons.remove({"a": [0]})


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_of_ones_own_like_one_of_the_network_is_seen(before: bool) -> None:
    """Removal equals masking with both, or is refused."""

    class Record:
        def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
            self.change = change

        def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            return None if self.change is None else self.change(output)

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not getattr(self, "installed", False):
                self.a.register_forward_hook(Record())
                self.installed = True
            return self.out(self.a(x).relu())  # type: ignore[no-any-return]

    net, x = Lazy().double(), torch.randn(4, 3).double()
    if before:
        net.a.register_forward_hook(Record(torch.tanh))
    neurons = Neurons(net, x)
    net(x)
    if before:
        assert neurons.least({"a": torch.rand(6)}, 2).taken == 2
    else:
        net.a.register_forward_hook(Record(lambda output: output.flip(1)))
        with pytest.raises(InputError, match="net must couple and freeze no more neurons"):
            neurons.remove({"a": [0]})


class Rotary(nn.Module):
    """A table of positions in a buffer: created by the first call, extended by longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 12), nn.Linear(12, 3)
        self.table: Tensor | None
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.table is None or len(self.table) < length:
            self.register_buffer("table", torch.arange(4 * length).view(length, 4).to(x).cos(), persistent=False)
        assert self.table is not None
        return self.out(self.second(self.first(x) * self.table[:length]).relu().mean(1))  # type: ignore[no-any-return]


def test_a_buffer_that_the_code_creates_and_extends() -> None:
    net, neurons = Rotary().double(), None
    neurons = Neurons(net, torch.randn(2, 5, 4).double())
    frozen = {frozen.name for frozen in neurons.frozen}
    for length in (5, 9, 7, 12):
        x = torch.randn(2, length, 4).double()
        net(x)
        whole = copy.deepcopy(net)
        scores = hgnp.sensitivity(net, neurons, [(x, torch.arange(2))])
        removed = neurons.remove(neurons.least(scores, 2))
        assert removed.taken == 2
        assert_pruned_equals_masked(net, whole, removed, ((x,), {}))
    assert {each.name for each in neurons.frozen} == frozen


@pytest.mark.parametrize("width", [8, 12])
def test_a_buffer_that_gets_channels_is_refused(width: int) -> None:
    """It had one entry for all channels, which no removal cuts."""
    net = two_layers(lambda n, x: n.out(n.a(x).relu() * n.scale))
    net.register_buffer("scale", torch.ones(1, dtype=torch.double))
    x = torch.randn(4, 5, dtype=torch.double)
    neurons = Neurons(net, x)
    verified = neurons.least({"a": torch.rand(12)}, 12 - width)
    if width < 12:
        neurons.remove(verified)
    net.scale = torch.linspace(1, 2, width, dtype=torch.double)
    for refused in (lambda: neurons.least({"a": torch.rand(width)}, 2), lambda: neurons.remove({"a": [0]})):
        with pytest.raises(InputError, match="scale must have no channels of neurons"):
            refused()
    assert net.a.weight.shape == (width, 5)
    again = Neurons(net, x)
    whole = copy.deepcopy(net)
    assert_pruned_equals_masked(net, whole, again.remove({"a": [0, 2]}), ((x,), {}))
    assert net.scale.shape == (width - 2,)


def test_a_buffer_without_channels_can_change_its_shape_and_back() -> None:
    net = two_layers(lambda n, x: n.out(n.a(x).relu() * n.scale))
    net.register_buffer("scale", torch.full((1, 1), 2.0, dtype=torch.double))
    x = torch.randn(4, 5, dtype=torch.double)
    neurons = Neurons(net, x)
    for shape in ((), (4, 1), (1, 1)):
        net.scale = torch.rand(shape, dtype=torch.double)
        whole = copy.deepcopy(net)
        removed = neurons.remove(neurons.least({"a": torch.rand(neurons.count)}, 1))
        assert removed.taken == 1
        assert_pruned_equals_masked(net, whole, removed, ((x,), {}))


def test_a_number_of_groups_that_changed_is_refused() -> None:
    """A removal would set it back without a word."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.out = nn.Linear(4, 8), nn.GroupNorm(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.a(x)).relu())  # type: ignore[no-any-return]

    net, x = Grouped(), torch.randn(5, 4)
    neurons = Neurons(net, x)
    neurons.remove({"a": [0]})
    assert net.norm.num_groups == 7
    net.norm.num_groups = 1
    with pytest.raises(InputError, match=r"norm\.num_groups must be 7, got 1"):
        neurons.remove({"a": [0]})


def test_a_parameter_that_was_added_is_refused() -> None:
    net, x = Branches(), torch.randn(4, 3)
    neurons = Neurons(net, x)
    net.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match="scale must not exist, got a parameter that was added"):
        neurons.least({"a": torch.rand(6)}, 2)


def test_a_run_continues_after_on_epoch_changes_settings() -> None:
    def anneal(state: CallbackState) -> None:
        assert isinstance(state.net, Net)
        state.net.drop.p, state.net.norm.momentum = 0.1 / (state.epoch + 2), 0.1 / (state.epoch + 2)

    data = [(IMAGES.float(), torch.arange(4))] * 2
    recipe = hgnp.Recipe(
        keep=0.5, warmup_epochs=1, neurons_per_round=4, finetune_epochs=1, measure="none", method="taylor"
    )
    result = hgnp.prune(Net(), data, recipe=recipe, on_epoch=anneal, verbose=False)
    assert result.reached

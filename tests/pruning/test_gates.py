"""A gate of 1 changes nothing and a gate of 0 equals removal, on every network of the zoo."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import CASES, Case
from hgnp import Neurons, sensitivity
from hgnp.experiments.models import ResNet18
from hgnp.pruning.gates import Gates, gated
from oracles import flat, run

TRAINING_ONLY = {"auxiliary_head_in_training": {"branch.0"}}


def through(net: nn.Module, inputs: object, gates: Gates, gamma: Tensor) -> Tensor:
    with gated(gates, gamma):
        return flat(run(net, inputs))


def example(case: Case) -> object:
    args, kwargs = case.inputs()
    return kwargs or (args if len(args) > 1 else args[0])


def units_of(gates: Gates, layer: str) -> list[int]:
    return gates.layer_units[layer].tolist()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.approximate])
def test_closing_gates_equals_removing_their_units(name: str) -> None:
    """One unit of every layer, all at once."""
    case = CASES[name]
    net, inputs = case.net().eval(), case.inputs()
    neurons = Neurons(net, example(case))
    gates = neurons.gates()
    whole = flat(run(net, inputs))
    ones = torch.ones(1, gates.count, dtype=torch.double)
    torch.testing.assert_close(through(net, inputs, gates, ones), whole, rtol=1e-12, atol=1e-12)
    missing = {layer.name for layer in neurons.layers} - gates.layer_units.keys()
    assert missing == TRAINING_ONLY.get(name, set())
    small, gamma, removed = copy.deepcopy(net), ones.clone(), {}
    for layer in gates.layer_units:
        units = [unit for unit in units_of(gates, layer) if unit < gates.count]
        unit = units[len(units) // 2]
        removed[layer] = [units_of(gates, layer).index(unit)]
        gamma[0, unit] = 0
    Neurons(small, example(case)).remove(removed)
    torch.testing.assert_close(through(net, inputs, gates, gamma), flat(run(small, inputs)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.approximate][::4])
def test_gates_after_removals_are_those_of_a_new_object(name: str) -> None:
    """Where channels are read is found once: it holds for the smaller network too."""
    case = CASES[name]
    net, inputs = case.net().eval(), case.inputs()
    neurons = Neurons(net, example(case))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        neurons.gates()
        scores = {each.name: torch.rand(each.alive, generator=generator) for each in neurons.layers}
        neurons.remove(neurons.least(scores, max(neurons.count // 5, 2), floor=2))
    old, new = neurons.gates(), Neurons(net, example(case)).gates()
    assert old.count == new.count
    assert old.layer_units.keys() == new.layer_units.keys()
    for layer, units in old.layer_units.items():
        for position in range(0, len(units), 3):
            with torch.no_grad():
                closed = []
                for gates in (old, new):
                    gamma = torch.ones(1, gates.count, dtype=torch.double)
                    gamma[:, gates.layer_units[layer][position : position + 1].clamp(max=gates.count - 1)] = 0
                    closed.append(through(net, inputs, gates, gamma))
                if int(units[position]) < old.count:
                    torch.testing.assert_close(*closed, rtol=1e-12, atol=1e-12)


def test_gates_follow_a_coupling_that_has_changed() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    neurons = Neurons(net, torch.randn(3, 4))

    def gated_entries(gates: Gates) -> list[int]:
        calls = [call for path in gates.paths for calls in path.calls.values() for call in calls]
        return sorted(unit for call in calls for each in call.gated_arguments for unit in each.units.flatten().tolist())

    gates = neurons.gates()
    assert gated_entries(gates) == list(range(12))
    slots = gates.structure.coupling.slots
    gates.structure.coupling.union(slots["0.weight", 0], slots["2.weight", 0], "they are coupled for this test")
    gates.structure.update_roots()
    gates = neurons.gates()
    assert gates.count == 6
    assert units_of(gates, "0") == units_of(gates, "2")
    assert gated_entries(gates) == sorted([*range(6), *range(6)])


def test_paper_gates_reuse_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons = Neurons(ResNet18(num_classes=3), torch.randn(2, 3, 16, 16))

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was traced again")

    monkeypatch.setattr("hgnp.pruning.structure.trace_forward", again)
    assert neurons.gates("paper").count > neurons.gates("coupled").count


class Added(nn.Module):
    """Two layers that are added, in three spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.a, self.c, self.out, self.spelling = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), spelling

    def forward(self, x: Tensor) -> Tensor:
        a, c = torch.tanh(self.a(x)).clone(), torch.tanh(self.c(x))
        if self.spelling == "a + c":
            a = a + c
        elif self.spelling == "a += c":
            a += c
        else:
            a.add_(c)
        return self.out(a)


@pytest.mark.parametrize("spelling", ["a + c", "a += c", "a.add_(c)"])
def test_branches_that_are_added_in_place_have_separate_gates(spelling: str) -> None:
    torch.manual_seed(0)
    net, (x, y) = Added(spelling).double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    found = sensitivity(net, Neurons(net, x), [(x, y)], coupling="paper")
    gates = [torch.ones(6, 5, dtype=torch.double, requires_grad=True) for _ in range(2)]
    z = net.out(torch.tanh(net.a(x)) * gates[0] + torch.tanh(net.c(x)) * gates[1])
    slopes = torch.autograd.grad(F.cross_entropy(z, y), gates)
    for layer, slope in zip("ac", slopes, strict=True):
        torch.testing.assert_close(found[layer], slope.abs().sum(0) / slope.abs().sum(0).norm())


def test_a_layer_with_one_neuron_left_is_scored() -> None:
    """Against the derivative of the loss by a factor on each channel, taken by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2),
    ).double()  # fmt: skip
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.double), torch.tensor([0, 1, 1, 0])
    neurons = Neurons(net, x)
    neurons.remove({"0": [0, 1, 2]})
    scores = sensitivity(net, neurons, [(x, y)])
    net.eval()
    first, second = (torch.ones(4, n, 1, 1, dtype=torch.double, requires_grad=True) for n in (1, 5))
    loss = F.cross_entropy(net[5:](net[3:5](net[:3](x) * first) * second), y)
    for name, gate in (("0", first), ("3", second)):
        (slope,) = torch.autograd.grad(loss, gate, retain_graph=True)
        wanted = (4 * slope).abs().mean(0).flatten()
        torch.testing.assert_close(scores[name], wanted / wanted.norm(), rtol=1e-9, atol=0)

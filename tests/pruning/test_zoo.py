"""Removing neurons equals masking them, and training goes on as if nothing had happened, for every network of the zoo."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case
from hgnp import Neurons, Removal, Selection
from hgnp.pruning.graph import tensors_of
from oracles import flat, masked, run, worst_error

EXACT = [case for case in CASES.values() if not case.approximate]


def names(case: Case) -> str:
    return case.name


def neurons_of(case: Case, net: nn.Module) -> Neurons:
    args, kwargs = case.inputs()
    return Neurons(net, args or kwargs, approximate=case.approximate)


def random_scores(neurons: Neurons, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}


@pytest.mark.parametrize("case", CASES.values(), ids=names)
def test_freezes_what_it_must_and_nothing_else(case: Case) -> None:
    neurons = neurons_of(case, case.net())
    assert {entry.name for entry in neurons.frozen} == case.frozen
    layers = {
        name for name, module in neurons.net.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    }
    assert {layer.name for layer in neurons.layers} >= layers - case.frozen
    assert all(entry.reason and entry.count > 0 for entry in neurons.frozen)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", EXACT, ids=names)
def test_each_group_removed_equals_masked(case: Case, training: bool) -> None:
    """Group after group goes, in random order, until none can; the whole network with all of them masked must agree."""
    whole, inputs = case.net().train(training), case.inputs()
    small = copy.deepcopy(whole)
    neurons = neurons_of(case, small)
    places = {layer.name: list(range(layer.total)) for layer in neurons.layers}
    gone: dict[str, list[int]] = defaultdict(list)
    removals = 0
    while True:
        # the smallest n that yields a group takes exactly one
        scores = random_scores(neurons, removals)
        sizes = range(1, neurons.count + 1)
        one = next((s for s in (neurons.least(scores, n) for n in sizes) if s), None)
        if one is None:
            break
        for layer, positions in neurons.remove(one).items():
            gone[layer] += [places[layer][position] for position in positions]
            places[layer] = [place for i, place in enumerate(places[layer]) if i not in positions]
        removals += 1
        with torch.no_grad(), masked(whole, gone, inputs):
            expected = run(whole, inputs)
        with torch.no_grad():
            assert worst_error(run(small, inputs), expected) < 1e-10
    assert removals > 0 or not neurons.layers


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", EXACT, ids=names)
def test_training_goes_on_as_if_masked(case: Case, optimizer: str) -> None:
    whole, inputs = case.net().train(), case.inputs()
    if not neurons_of(case, whole).layers:
        pytest.skip("nothing to prune")

    def make(net: nn.Module) -> torch.optim.Optimizer:
        if optimizer == "sgd":
            return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3)
        return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            output = flat(run(net, case.inputs(seed=10 + step)))
            target = torch.linspace(-1, 1, len(output), dtype=output.dtype)
            (output - target).pow(2).mean().backward()
            optimizer.step()

    whole_optimizer = make(whole)
    train(whole, whole_optimizer, 3)  # so that there is state to carry over
    small = copy.deepcopy(whole)
    small_optimizer = make(small)
    small_optimizer.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    neurons = neurons_of(case, small)
    told: list[Removal] = []
    neurons.listeners.append(lambda removal: told.append(removal) or (lambda: None))  # type: ignore[func-returns-value]
    removed = neurons.remove(neurons.least(random_scores(neurons), max(neurons.count // 2, 2)), small_optimizer)
    assert removed

    train(small, small_optimizer, 20)
    with masked(whole, removed, inputs):
        train(whole, whole_optimizer, 20)
    survivors = {name: told[0].cut(name, tensor) for name, tensor in tensors_of(whole).items()}
    for name, tensor in tensors_of(small).items():
        torch.testing.assert_close(
            tensor.detach(), survivors[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("case", CASES.values(), ids=names)
def test_half_the_neurons_go_and_everything_fits(case: Case) -> None:
    """Also for approximate removal: the network runs, counts agree with the tensors, and attributes with both."""
    net, inputs = case.net(), case.inputs()
    neurons = neurons_of(case, net)
    before = neurons.preview({})
    cut = neurons.least(random_scores(neurons), neurons.count // 2)
    expected = neurons.preview(cut)
    assert neurons.preview({}) == before
    removed = neurons.remove(cut)
    assert removed == cut
    assert removed.taken == cut.taken <= cut.requested
    assert neurons.preview({}) == expected
    assert expected.neurons == neurons.count == before.neurons - cut.taken
    assert expected.parameters == sum(p.numel() for p in net.parameters())
    assert neurons.kept == expected.parameters / before.parameters
    for mode in (True, False):
        flat(run(net.train(mode), inputs)).sum().backward()
    for module in net.modules():
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == module.weight.shape
        elif isinstance(module, nn.Conv2d):
            assert (module.out_channels, module.in_channels // module.groups) == module.weight.shape[:2]
        elif isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None:
            assert module.num_features == len(module.weight)


@pytest.mark.parametrize("case", EXACT, ids=names)
def test_macs_agree_with_torch(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net, inputs = case.net().eval(), case.inputs()
    neurons = neurons_of(case, net)
    for n in (0, neurons.count // 2):
        neurons.remove(neurons.least(random_scores(neurons), n))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run(net, inputs)
        counted: Any = counter.get_total_flops()
        if case.name in ("lstm", "attention", "transformer_encoder_layer", "attention_by_hand"):
            continue  # torch fuses these into operators that it counts in its own way
        assert neurons.macs == counted // 2


def test_a_selection_is_a_dictionary() -> None:
    neurons = neurons_of(CASES["mlp"], CASES["mlp"].net())
    cut = neurons.least(random_scores(neurons), 3)
    assert isinstance(cut, dict)
    assert isinstance(cut, Selection)
    assert cut.taken == cut.requested == 3

"""Removal equals masking, at once and while training continues, on every network of the zoo."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from cases import CASES, Case
from hgnp import Neurons, Removal, Selection
from hgnp.pruning.graph import tensors_of
from oracles import flat, masked, run, worst_error
from pruning_cases import random_scores

EXACT = [case for case in CASES.values() if not case.approximate]


def names(case: Case) -> str:
    return case.name


def neurons_of(case: Case, net: nn.Module) -> Neurons:
    args, kwargs = case.inputs()
    return Neurons(net, args or kwargs, approximate=case.approximate)


@pytest.mark.parametrize("case", CASES.values(), ids=names)
def test_exactly_the_expected_layers_are_frozen(case: Case) -> None:
    neurons = neurons_of(case, case.net())
    assert {entry.name for entry in neurons.frozen} == case.frozen
    layers = {
        name for name, module in neurons.net.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    }
    assert {layer.name for layer in neurons.layers} >= layers - case.frozen - case.in_heads
    assert all(entry.reason and entry.count > 0 for entry in neurons.frozen)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", EXACT, ids=names)
def test_removing_each_coupled_group_equals_masking_it(case: Case, training: bool) -> None:
    """Removes group after group, in random order, until none is left; the whole network with all of them masked must agree."""
    whole, inputs = case.net().train(training), case.inputs()
    small = copy.deepcopy(whole)
    neurons = neurons_of(case, small)
    original = {layer.name: list(range(layer.total)) for layer in neurons.layers}
    all_removed: dict[str, list[int]] = defaultdict(list)
    removals = 0
    while True:
        # the smallest n that yields a group takes exactly one
        scores = random_scores(neurons, removals)
        sizes = range(1, neurons.count + 1)
        one = next((s for s in (neurons.least(scores, n) for n in sizes) if s), None)
        if one is None:
            break
        for layer, positions in neurons.remove(one).items():
            all_removed[layer] += [original[layer][position] for position in positions]
            original[layer] = [index for i, index in enumerate(original[layer]) if i not in positions]
        removals += 1
        with torch.no_grad(), masked(whole, all_removed, inputs):
            expected = run(whole, inputs)
        with torch.no_grad():
            assert worst_error(run(small, inputs), expected) < 1e-10
    assert removals > 0 or not neurons.layers


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", EXACT, ids=names)
def test_training_after_removal_equals_training_while_masked(case: Case, optimizer: str) -> None:
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
    train(whole, whole_optimizer, 3)  # creates optimizer state
    small = copy.deepcopy(whole)
    small_optimizer = make(small)
    small_optimizer.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    neurons = neurons_of(case, small)
    events: list[Removal] = []
    neurons.listeners.append(lambda removal: events.append(removal) or (lambda: None))  # type: ignore[func-returns-value]
    removed = neurons.remove(neurons.least(random_scores(neurons), max(neurons.count // 2, 2)), small_optimizer)
    assert removed

    train(small, small_optimizer, 20)
    with masked(whole, removed, inputs):
        train(whole, whole_optimizer, 20)
    survivors = {name: events[0].cut(name, tensor) for name, tensor in tensors_of(whole).items()}
    for name, tensor in tensors_of(small).items():
        torch.testing.assert_close(
            tensor.detach(), survivors[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("case", CASES.values(), ids=names)
def test_removing_half_the_neurons_matches_the_preview(case: Case) -> None:
    """Also for approximate removal: the network runs, and counts and attributes agree with the tensors."""
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
def test_macs_equal_half_of_torch_flops(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net, inputs = case.net().eval(), case.inputs()
    neurons = neurons_of(case, net)
    for n in (0, neurons.count // 2):
        neurons.remove(neurons.least(random_scores(neurons), n))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run(net, inputs)
        counted: Any = counter.get_total_flops()
        if case.name in ("lstm", "attention", "transformer_encoder_layer", "attention_by_hand", "fused_heads"):
            continue  # PyTorch fuses these into operators that it counts differently
        assert neurons.macs == counted // 2


def test_a_selection_is_a_dictionary() -> None:
    neurons = neurons_of(CASES["mlp"], CASES["mlp"].net())
    cut = neurons.least(random_scores(neurons), 3)
    assert isinstance(cut, dict)
    assert isinstance(cut, Selection)
    assert cut.taken == cut.requested == 3

"""Removal equals masking, at once and while training continues, on every network of the zoo."""

import copy
from collections import defaultdict
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cases import CASES, Case
from hgnp import Neurons, Removal, Selection
from hgnp.pruning.graph import tensors_of
from oracles import Inputs, flat, masked, run, worst_error
from pruning_cases import random_scores

EXACT = [case for case in CASES.values() if not case.approximate]


def label(parameter: Case | str) -> str:
    return parameter.name if isinstance(parameter, Case) else parameter


def neurons_of(case: Case, net: nn.Module) -> Neurons:
    args, kwargs = case.inputs()
    return Neurons(net, args or kwargs, approximate=case.approximate)


@pytest.mark.parametrize("case", CASES.values(), ids=label)
def test_exactly_the_expected_layers_are_frozen(case: Case) -> None:
    neurons = neurons_of(case, case.net())
    assert {entry.name for entry in neurons.frozen} == case.frozen
    layers = {
        name for name, module in neurons.net.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    }
    assert {layer.name for layer in neurons.layers} >= layers - case.frozen - case.in_heads
    assert all(entry.reason and entry.count > 0 for entry in neurons.frozen)


@pytest.mark.parametrize("case", EXACT, ids=label)
def test_removing_each_coupled_group_equals_masking_it(case: Case) -> None:
    """Removes groups in random order until none is left, the first one by itself; the whole network with all of them masked
    must agree, in evaluation and in training mode."""
    whole, inputs = case.net(), case.inputs()
    small = copy.deepcopy(whole)
    neurons = neurons_of(case, small)
    original = {layer.name: list(range(layer.total)) for layer in neurons.layers}
    all_removed: dict[str, list[int]] = defaultdict(list)
    removals = 0
    while True:
        # the smallest n that yields a group takes exactly one; after it, half of the neurons at once
        scores = random_scores(neurons, removals)
        sizes = range(max(neurons.count // 2, 1) if removals else 1, neurons.count + 1)
        one = next((s for s in (neurons.least(scores, n) for n in sizes) if s), None)
        if one is None:
            break
        for layer, positions in neurons.remove(one).items():
            all_removed[layer] += [original[layer][position] for position in positions]
            original[layer] = [index for i, index in enumerate(original[layer]) if i not in positions]
        removals += 1
        for training in (False, True):
            # copies: in training mode a pass updates running statistics, and masking takes several
            masked_net, pruned_net = (copy.deepcopy(net).train(training) for net in (whole, small))
            with torch.no_grad(), masked(masked_net, all_removed, inputs):
                expected = run(masked_net, inputs)
            with torch.no_grad():
                assert worst_error(run(pruned_net, inputs), expected) < 1e-10
    assert removals > 0 or not neurons.layers


@pytest.mark.parametrize(("case", "optimizer"), list(zip(EXACT, cycle(["sgd", "adamw"]))), ids=label)
def test_training_after_removal_equals_training_while_masked(case: Case, optimizer: str) -> None:
    """Half of the networks with each optimizer, whose state is cut along."""
    whole, inputs = case.net().train(), case.inputs()

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
    train(whole, whole_optimizer, 2)  # creates optimizer state
    small = copy.deepcopy(whole)
    small_optimizer = make(small)
    small_optimizer.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    neurons = neurons_of(case, small)
    if not neurons.layers:
        pytest.skip("nothing to prune")
    events: list[Removal] = []
    neurons.listeners.append(lambda removal: events.append(removal) or (lambda: None))  # type: ignore[func-returns-value]
    removed = neurons.remove(neurons.least(random_scores(neurons), max(neurons.count // 2, 2)), small_optimizer)
    assert removed

    train(small, small_optimizer, 5)
    with masked(whole, removed, inputs):
        train(whole, whole_optimizer, 5)
    survivors = {name: events[0].cut(name, tensor) for name, tensor in tensors_of(whole).items()}
    for name, tensor in tensors_of(small).items():
        torch.testing.assert_close(
            tensor.detach(), survivors[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


COUNTED_OTHERWISE = (
    "lstm",
    "attention",
    "transformer_encoder_layer",
    "attention_by_hand",
    "fused_heads",
    "learned_queries",
)
"""PyTorch fuses these into operators that it counts differently."""


def counted_macs(net: nn.Module, inputs: Inputs) -> int:
    """Half of PyTorch's FLOPs."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(net, inputs)
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("case", CASES.values(), ids=label)
def test_removing_half_the_neurons_matches_the_preview(case: Case) -> None:
    """Also for approximate removal: the network runs, and counts, MACs and attributes agree with the tensors."""
    net, inputs = case.net().eval(), case.inputs()
    neurons = neurons_of(case, net)
    assert neurons.macs == counted_macs(net, inputs) or case.name in COUNTED_OTHERWISE
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
    assert neurons.macs == counted_macs(net, inputs) or case.name in COUNTED_OTHERWISE
    for mode in (True, False):
        flat(run(net.train(mode), inputs)).sum().backward()
    for module in net.modules():
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == module.weight.shape
        elif isinstance(module, nn.Conv2d):
            assert (module.out_channels, module.in_channels // module.groups) == module.weight.shape[:2]
        elif isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None:
            assert module.num_features == len(module.weight)


def test_a_selection_is_a_dictionary() -> None:
    neurons = neurons_of(CASES["mlp"], CASES["mlp"].net())
    cut = neurons.least(random_scores(neurons), 3)
    assert isinstance(cut, dict)
    assert isinstance(cut, Selection)
    assert cut.taken == cut.requested == 3

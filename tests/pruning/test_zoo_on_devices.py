"""The zoo on other devices, where PyTorch runs other operators."""

import pytest
import torch
from torch.utils._pytree import tree_map

from cases import CASES, Case
from hgnp import Neurons
from oracles import flat, masked, run, worst_error
from pruning_cases import random_scores


@pytest.mark.parametrize("case", [case for case in CASES.values() if not case.approximate], ids=lambda case: case.name)
def test_removal_equals_masking_and_training_continues_on_a_device(case: Case, device: torch.device) -> None:
    whole = case.net().to(device).eval()
    inputs = tree_map(lambda leaf: leaf.to(device), case.inputs())
    small = (
        case.net().to(device).eval()
    )  # a copy would leave a recurrent layer's weights in pieces, which PyTorch warns of
    small.load_state_dict(whole.state_dict())
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3, fused=device.type == "cuda")
    flat(run(small.train(), inputs)).pow(2).mean().backward()
    optimizer.step()
    whole.load_state_dict(small.state_dict())
    neurons = Neurons(small.eval(), inputs[0] or inputs[1])
    assert {entry.name for entry in neurons.frozen} == case.frozen
    scores = {name: values.to(device) for name, values in random_scores(neurons).items()}
    removed = neurons.remove(neurons.least(scores, neurons.count // 2), optimizer)
    with torch.no_grad(), masked(whole, removed, inputs):
        expected = run(whole, inputs)
    with torch.no_grad():
        assert worst_error(run(small, inputs), expected) < 1e-10
    assert {tensor.device for tensor in [*small.parameters(), *small.buffers()]} == {device}
    optimizer.zero_grad()
    flat(run(small.train(), inputs)).pow(2).mean().backward()
    optimizer.step()


def test_bfloat16_channels_last_weights_are_pruned_on_a_device(device: torch.device) -> None:
    case = CASES["residual"]
    net = case.net().to(device, torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = case.inputs()[0][0].to(device, torch.bfloat16).to(memory_format=torch.channels_last)
    neurons = Neurons(net, x)
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, neurons.count // 2))
    assert net.d2.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]
    assert net(x).dtype == torch.bfloat16

"""Modules with special parameters: parametrisations, masks, buffers, frozen weights."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import hgnp
from cases import Net
from hgnp import Neurons
from oracles import masked, run, worst_error
from pruning_cases import (
    VECTORS,
    three_layers,
)


def check_exact(net: nn.Module, neurons: Neurons, whole: nn.Module, inputs: Any = ((VECTORS,), {})) -> None:
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    removed = neurons.remove(neurons.least(scores, neurons.count // 2))
    assert removed
    with torch.no_grad(), masked(whole, removed, inputs):
        expected = run(whole, inputs)
    with torch.no_grad():
        assert worst_error(run(net, inputs), expected) < 1e-10


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


@pytest.mark.parametrize("norm", [old_weight_norm, parametrizations.weight_norm], ids=["hook", "parametrization"])
def test_weight_norm_freezes_the_layer_that_it_reads(norm: Callable[[nn.Module], nn.Module]) -> None:
    """A row's norm is over its columns: rows are prunable, columns are not."""
    net = three_layers(norm(nn.Linear(6, 7)))
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["2"]
    whole = three_layers(norm(nn.Linear(6, 7)))
    whole.load_state_dict(net.state_dict())
    check_exact(net, neurons, whole)
    assert net[2].out_features == 4
    net(VECTORS).sum().backward()


@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["hook", "parametrization"]
)
def test_spectral_norm_is_frozen(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The norm is over the whole matrix: neither rows nor columns are prunable."""
    net = three_layers(norm(nn.Linear(6, 7)))
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == []
    assert {entry.name for entry in neurons.frozen} == {"0", "2", "4"}
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
def test_an_orthogonal_weight_is_frozen(orthogonal_map: str) -> None:
    """Its rows are those of a buffer. Without them the layer's parameter would state another width, and no file could be
    loaded."""
    net = three_layers(parametrizations.orthogonal(nn.Linear(6, 7), orthogonal_map=orthogonal_map))
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == []
    assert {entry.name for entry in neurons.frozen} >= {"0", "2", "4"}


def test_parameters_without_gradients_are_pruned() -> None:
    net = three_layers(nn.Linear(6, 7))
    net[0].requires_grad_(False)
    whole = copy.deepcopy(net)
    check_exact(net, Neurons(net, VECTORS), whole)
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True, True, True]


def test_masks_of_torch_prune_are_cut_with_the_weights() -> None:
    net = three_layers(nn.Linear(6, 7))
    prune.l1_unstructured(net[2], "weight", amount=0.3)
    whole = three_layers(nn.Linear(6, 7))
    prune.identity(whole[2], "weight")
    whole.load_state_dict(net.state_dict())
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["0", "2"]
    check_exact(net, neurons, whole)
    assert net[2].weight_mask.shape == net[2].weight_orig.shape == (net[2].out_features, net[2].in_features)


def test_scores_under_masks_of_torch_prune_are_those_of_the_masked_weights() -> None:
    net = three_layers(nn.Linear(6, 7))
    batch = VECTORS, torch.arange(len(VECTORS)) % 2
    with torch.no_grad():
        for layer in (net[0], net[2]):
            prune.random_unstructured(layer, "weight", amount=0.3)
    plain = three_layers(nn.Linear(6, 7))
    for layer, masked_layer in zip(plain[::2], net[::2], strict=True):
        layer.weight.data, layer.bias.data = masked_layer.weight.detach().clone(), masked_layer.bias.data.clone()
    neurons, expected = Neurons(net, VECTORS), Neurons(plain, VECTORS)
    for selection in ({}, {"0": [1], "2": [0, 4]}):
        neurons.remove(selection)
        expected.remove(selection)
        found = hgnp.sensitivity(net, neurons, [batch])
        torch.testing.assert_close(dict(found), dict(hgnp.sensitivity(plain, expected, [batch])))
    result = hgnp.prune(
        net,
        [batch],
        recipe=hgnp.Recipe(keep=0.8, method="taylor", warmup_epochs=0, finetune_epochs=0, measure="none"),
        verbose=False,
    )
    assert result.kept <= 0.8


def test_a_custom_buffer_is_cut_with_the_neurons() -> None:
    net = Net(lambda n, x: n.out(n.a(x).tanh() * n.scale), a=nn.Linear(5, 6), out=nn.Linear(6, 2))
    net.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)
    net.double()
    whole = copy.deepcopy(net)
    check_exact(net, Neurons(net, VECTORS), whole)
    assert net.scale.shape == (3,)  # type: ignore[union-attr]


class Scaled(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.alpha = nn.Parameter(torch.ones(1))
        self.in_scale = nn.Parameter(torch.rand(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.in_scale) * self.alpha


SPECIAL = {
    "spectral norm by hook": lambda: nn.utils.spectral_norm(nn.Linear(8, 7)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 7)),
    "own vectors": lambda: Scaled(8, 7),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_a_network_with_a_special_layer_is_pruned_saved_and_loaded(make: Any, tmp_path: Any) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return (
            nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), make(), nn.Tanh(), nn.Linear(7, 2))
            .double()
            .eval()
        )

    net = build()
    Neurons(net, VECTORS).remove({"0": [1, 2]})
    hgnp.save(net, tmp_path)
    with torch.no_grad():
        assert torch.equal(hgnp.load(tmp_path, build())(VECTORS), net(VECTORS))

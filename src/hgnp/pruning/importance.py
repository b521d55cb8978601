"""Importance scores that look at weights alone: what HGNP is compared with.

    l1, l2            size of a neuron's weights (Li et al. 2017, *Pruning Filters for Efficient ConvNets*)
    bn_scale          |γ| of the norm that reads its output (Liu et al. 2017, *Network Slimming*)
    geometric_median  distance to the other neurons of its layer (He et al. 2019, *Filter Pruning via Geometric Median*)
    random            what every other score has to beat

The Taylor baseline is `hgnp.sensitivity` of the loss without its flatness term.
"""

import hashlib
from collections.abc import Callable

import torch

from hgnp.errors import InputError
from hgnp.pruning.neurons import Neurons
from hgnp.pruning.selection import Scores


def l1(neurons: Neurons) -> Scores:
    return {layer.name: neurons.weights(layer.name).flatten(1).abs().sum(1) for layer in neurons.layers}


def l2(neurons: Neurons) -> Scores:
    return {layer.name: neurons.weights(layer.name).flatten(1).norm(dim=1) for layer in neurons.layers}


def bn_scale(neurons: Neurons) -> Scores:
    """Layers without a norm have no scores."""
    scales = {layer.name: neurons.norm_scale(layer.name) for layer in neurons.layers}
    scores = {name: scale.abs() for name, scale in scales.items() if scale is not None}
    if not scores:
        raise InputError(
            "criterion 'bn_scale' needs a layer with neurons that is followed by a norm with a scale, got none"
        )
    return scores


def geometric_median(neurons: Neurons) -> Scores:
    """The sum of the distances to all others is smallest near the layer's geometric median: such a neuron is the easiest to
    replace by the others."""
    scores = {}
    for layer in neurons.layers:
        weights = neurons.weights(layer.name).flatten(1)
        scores[layer.name] = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores


def random(neurons: Neurons) -> Scores:
    """Seeded by the state of PyTorch's generator, which is left as it is, and by the number of removals: the same after the
    same seed, and others in every round."""
    state = torch.get_rng_state().numpy().tobytes() + str(neurons.version).encode()
    draw = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1)
    return {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}


WEIGHT_SCORES: dict[str, Callable[[Neurons], Scores]] = {
    "l1": l1,
    "l2": l2,
    "bn_scale": bn_scale,
    "geometric_median": geometric_median,
    "random": random,
}

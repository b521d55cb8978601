"""Importance scores computed from weights alone: baselines for HGNP.

    l1, l2            size of a neuron's weights (Li et al. 2017, *Pruning Filters for Efficient ConvNets*)
    bn_scale          |γ| of the norm that reads its output (Liu et al. 2017, *Network Slimming*)
    geometric_median  distance to the other neurons of its layer (He et al. 2019, *Filter Pruning via Geometric Median*)
    random            the baseline of every other score

The Taylor baseline is `hgnp.sensitivity` without a flatness penalty.
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
    """Layers without a norm get no scores."""
    scales = {layer.name: neurons.norm_scale(layer.name) for layer in neurons.layers}
    scores = {name: scale.abs() for name, scale in scales.items() if scale is not None}
    if not scores:
        raise InputError(
            "net must have a layer with neurons followed by a norm with a scale for criterion 'bn_scale', got none"
        )
    return scores


def geometric_median(neurons: Neurons) -> Scores:
    """The sum of the distances to all other neurons is smallest near the layer's geometric median: the others replace such a
    neuron most easily."""
    scores = {}
    for layer in neurons.layers:
        weights = neurons.weights(layer.name).flatten(1)
        scores[layer.name] = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores


def random(neurons: Neurons) -> Scores:
    """Seeded by the state of PyTorch's generator, which does not change, and by the number of removals: reproducible with one
    seed, and different in every round."""
    state = torch.get_rng_state().numpy().tobytes() + str(neurons.version).encode()
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1
    )
    return {layer.name: torch.rand(layer.alive, generator=generator) for layer in neurons.layers}


WEIGHT_SCORES: dict[str, Callable[[Neurons], Scores]] = {
    "l1": l1,
    "l2": l2,
    "bn_scale": bn_scale,
    "geometric_median": geometric_median,
    "random": random,
}

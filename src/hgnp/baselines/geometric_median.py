"""How far a neuron's weights are from those of its layer (He et al. 2019, *Filter Pruning via Geometric Median*).

The sum of the distances to all others is smallest near the layer's geometric median: such a neuron is the easiest for the
others to replace.
"""

import torch

from hgnp.neurons import Neurons, Scores


def geometric_median(neurons: Neurons) -> Scores:
    scores = {}
    for layer in neurons.layers:
        weights = neurons.weights(layer.name).flatten(1)
        scores[layer.name] = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores

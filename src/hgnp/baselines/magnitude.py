"""The size of a neuron's weights (Li et al. 2017, *Pruning Filters for Efficient ConvNets*)."""

from hgnp.neurons import Neurons, Scores


def l1(neurons: Neurons) -> Scores:
    return {layer.name: neurons.weights(layer.name).flatten(1).abs().sum(1) for layer in neurons.layers}


def l2(neurons: Neurons) -> Scores:
    return {layer.name: neurons.weights(layer.name).flatten(1).norm(dim=1) for layer in neurons.layers}

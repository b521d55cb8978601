"""Neurons drawn by lot: what every other score has to beat."""

import torch

from hgnp.neurons import Neurons, Scores


def random(neurons: Neurons) -> Scores:
    return {layer.name: torch.rand(layer.alive) for layer in neurons.layers}

"""Neurons drawn by lot: what every other score has to beat."""

import hashlib

import torch

from hgnp.neurons import Neurons, Scores


def random(neurons: Neurons) -> Scores:
    """Drawn by where PyTorch's random stream stands, which does not move, and by how many removals there were: the same after
    the same seed, and others in every round."""
    state = torch.get_rng_state().numpy().tobytes() + str(neurons.version).encode()
    draw = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1)
    return {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}

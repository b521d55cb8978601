"""The scale that a neuron's norm gives it (Liu et al. 2017, *Network Slimming*)."""

from hgnp.neurons import Neurons, Scores


def bn_scale(neurons: Neurons) -> Scores:
    """|γ| of the norm that reads the layer's output; layers without one are left alone."""
    scales = {layer.name: neurons.norm_scale(layer.name) for layer in neurons.layers}
    scores = {name: scale.abs() for name, scale in scales.items() if scale is not None}
    if not scores:
        raise ValueError(
            "criterion: 'bn_scale' was given, but no layer with neurons is followed by a norm with a scale"
        )
    return scores

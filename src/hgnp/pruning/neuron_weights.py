"""Weights by neuron, as scores want them."""

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from hgnp.pruning.rules import name_of
from hgnp.pruning.structure import Structure


def weights_of(structure: Structure, layer: str, rows: Tensor, alive: Tensor) -> Tensor:
    """The weights that lead into a layer's living neurons, whose slots are `rows`, neurons first."""
    module = structure.net.get_submodule(layer)
    if (
        isinstance(module, _ConvNd) and module.transposed
    ):  # (inputs, outputs of a group, *kernel), whatever is left of them
        grouped = module.weight.detach().unflatten(0, (module.groups, -1))
        return grouped.transpose(1, 2).flatten(0, 1)
    name, dim, slots = next(
        (name, dim, slots) for (name, dim), slots in structure.ties.slots.items() if slots[0] <= rows[0] <= slots[-1]
    )
    weight = dict(structure.net.named_parameters())[name].detach().movedim(dim, 0)
    place = torch.cumsum(alive[slots], 0) - 1  # where each slot is now
    return weight[place[rows[alive[rows]] - slots[0]].to(weight.device)]


def norm_scale_of(structure: Structure, layer: str) -> Tensor | None:
    """The scale γ of the norm that reads the layer's output, or None."""
    follower = structure.followers[False]
    made = {
        index
        for followed in follower.trail
        if followed.step.module == layer
        for index, labelled in zip(followed.step.writes, followed.writes, strict=True)
        if not labelled.weight
    }
    for followed in follower.trail:
        step = followed.step
        if "norm" in name_of(step.op) and step.reads[0] in made and step.module != layer:
            for index in step.reads[1:]:
                name = follower.graph.values[index].name
                if name is not None and name.endswith("weight"):
                    return dict(structure.net.named_parameters())[name].detach()
    return None

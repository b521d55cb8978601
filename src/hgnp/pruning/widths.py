"""Module attributes that state a width, and their values for given tensor shapes."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

Shape = tuple[int, ...]


WEIGHT_NAMES = (
    "weight",
    "parametrizations.weight.original1",  # weight norm's direction; original0 is its magnitude
    "parametrizations.weight.original",
    "weight_orig",
    "weight_v",
)
"""Names, inside a module, of the tensor with its weight's shape, under any parametrisation."""


def stated_widths(
    module: nn.Module, shape: Callable[[str], Shape | None], input_shape: Callable[[], Shape], groups: int | None
) -> dict[str, Any]:
    """Attribute → value, for the attributes of `module` that depend on widths.

    `shape` gives the shape of one of its tensors, `input_shape` that of its first input (() if it has none) and `groups` the
    number of its remaining groups, where whole groups are removed.
    """
    weight = next((found for name in WEIGHT_NAMES if (found := shape(name)) is not None), None)
    if isinstance(module, nn.Linear) and weight:
        return {"in_features": weight[1], "out_features": weight[0]}
    if isinstance(module, _ConvTransposeNd) and weight:
        groups = groups or module.groups
        return {"in_channels": weight[0], "out_channels": weight[1] * groups, "groups": groups}
    if isinstance(module, _ConvNd) and weight:
        groups = groups or module.groups
        return {"in_channels": weight[1] * groups, "out_channels": weight[0], "groups": groups}
    if isinstance(module, _NormBase):
        width = weight or shape("running_mean") or input_shape()[1:2]
        return {"num_features": width[0]} if width else {}
    if isinstance(module, nn.GroupNorm):
        width = weight or input_shape()[1:2]
        return {"num_channels": width[0], "num_groups": groups or module.num_groups} if width else {}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        width = weight or input_shape()[-len(module.normalized_shape) :]
        return {"normalized_shape": tuple(width)} if width else {}
    if isinstance(module, nn.PReLU) and weight:
        return {"num_parameters": weight[0]}
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight:  # Hugging Face's transposed linear layer
        return {"nf": weight[1]} | ({"nx": weight[0]} if hasattr(module, "nx") else {})
    if isinstance(module, nn.Embedding) and weight:
        return {"num_embeddings": weight[0], "embedding_dim": weight[1]}
    return {}

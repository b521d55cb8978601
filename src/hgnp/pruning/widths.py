"""Module attributes that state a width, and their values for given tensor shapes."""

from collections.abc import Callable, Mapping
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


def integer_attributes(module: nn.Module) -> dict[str, int]:
    """The integers among the attributes of `module`, as "heads", or as "shape.2" in a tuple. PyTorch's own have none."""
    if type(module).__module__.startswith("torch.nn."):
        return {}
    found = {key: value for key, value in vars(module).items() if type(value) is int}
    for key, value in vars(module).items():
        if type(value) is tuple and all(type(entry) is int for entry in value):
            found |= {f"{key}.{position}": entry for position, entry in enumerate(value)}
    return found


def with_integers(module: nn.Module, integers: Mapping[str, int]) -> dict[str, Any]:
    """Attribute → value, with these integers in place of those that `integer_attributes` gives."""
    result: dict[str, Any] = {}
    for path, integer in integers.items():
        key, _, position = path.partition(".")
        value = result.get(key, getattr(module, key))
        index = int(position) if position else 0
        result[key] = (*value[:index], integer, *value[index + 1 :]) if position else integer
    return result


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

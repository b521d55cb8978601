"""Validation of a network, its example input and the names of protected modules."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hgnp.errors import InputError, InputTypeError, did_you_mean
from hgnp.pruning.graph import Inputs, Outputs
from hgnp.validation import check_net


def check_prunable(net: nn.Module) -> None:
    """InputTypeError or InputError unless `net` has plain modules with plain dense tensors, which can be cut in place."""
    check_net(net)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise InputTypeError(
                f"{name} must be a plain tensor, got {type(tensor).__name__}; pass the network before it is converted"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            form = "quantised" if tensor.is_quantized else "sparse"
            raise InputTypeError(f"{name} must be a dense tensor, got a {form} one")


def check_samples(inputs: Inputs) -> None:
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is not None and not first.numel():
        raise InputError(f"example_input must hold at least one sample, got a tensor of shape {tuple(first.shape)}")


def as_inputs(example: Any) -> Inputs:
    """Positional and keyword arguments from a tensor, a tuple or a dict."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise InputTypeError(
        f"example_input must be a tensor, a tuple or a dict of keyword arguments, got {type(example).__name__}"
    )


def as_outputs(net: nn.Module, function: Any) -> Outputs | None:
    """What `Neurons(outputs=…)` means. InputError unless it is a function whose arguments tell."""
    if function is None:
        return None
    owner = getattr(function, "__self__", None)
    if any(owner is module for module in net.modules()):
        return Outputs(function, replaces_forward=True, is_method=True)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    more = any(each.kind is each.VAR_POSITIONAL or (each.kind in kinds and each not in required) for each in parameters)
    if not required:
        raise InputError(
            "outputs must be a function of what the network returns, a function of the network and its inputs or a method of "
            f"one of its modules, got {function!r}"
        )
    return Outputs(function, replaces_forward=len(required) > 1 or more, is_method=False)


def protected_modules(net: nn.Module, protect: Iterable[str]) -> set[str]:
    """The names of the protected modules and of all modules inside them."""
    if isinstance(protect, str):
        raise InputTypeError(f"protect must be a list of module names, got {protect!r}; write protect=[{protect!r}]")
    if not isinstance(protect, Iterable):
        raise InputTypeError(
            f"protect must be a list of module names, got {type(protect).__name__}; [] protects nothing"
        )
    names = [name for name, _ in net.named_modules()]
    protected = set()
    for entry in protect:
        inside = {name for name in names if name == entry or name.startswith(f"{entry}.")}
        if not inside:
            raise InputError(
                f"protect must name modules of the network, got {entry!r}"
                f"{did_you_mean(entry, [name for name in names if name])}"
            )
        protected |= inside
    return protected

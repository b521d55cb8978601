"""What is refused before a wrong number can come of it: arguments, and layers by kind."""

import math
from numbers import Real
from typing import Any

import torch
from torch import nn

from hgnp.curvature.factors import find_blocks
from hgnp.errors import InputError


def check_functions(**given: Any) -> None:
    """That each can be called, or is None; the loss cannot be left out, nor be a class."""
    for name, value in given.items():
        if not callable(value) and (value is not None or name == "loss"):
            raise InputError(f"{name}: {value!r} was given; a function would do")
        if name == "loss" and isinstance(value, type):
            raise InputError(f"loss: the class {value.__name__} was given; {value.__name__}() would do")


def finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def refuse_unseen(net: nn.Module, *, flatten: bool) -> None:
    if not isinstance(net, nn.Module):
        raise InputError(f"net: a {type(net).__name__} was given; an nn.Module would do")
    if flatten and not find_blocks(net):
        raise InputError("net: it has no Linear or Conv1d/2d/3d layer with a trained weight, so no block to flatten")
    for name, layer in net.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
            raise InputError(f"layer {name!r}: it is scripted or compiled, so that its operations cannot be seen and "
                             "neither route would be right; give the plain module")  # fmt: skip


def hooked(net: nn.Module) -> bool:
    """Whether something waits for parameters' gradients: hooks, or what sends them to other processes. It is to see them once
    in a step, and whole."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in net.modules()):
        return True
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in net.parameters())


def tracked(net: nn.Module) -> list[nn.Module]:
    """The norms with running statistics."""
    norms = [layer for layer in net.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [layer for layer in norms if layer.running_mean is not None]

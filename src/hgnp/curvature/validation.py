"""Arguments and networks that are refused before they could give a wrong number, and hooks that need care."""

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import CheckpointFunction

from hgnp.curvature.factors import find_blocks
from hgnp.errors import InputError
from hgnp.validation import check_net, check_values

REENTRANT = f"{CheckpointFunction.__name__}Backward"
"""The node of a reentrant checkpoint in autograd's graph."""
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Of each module, and with the prefix `_global` those of all modules."""


def check_functions(**given: Any) -> None:
    """That each can be called, or is None; the loss cannot be left out, and neither it nor the metric is a class."""
    for name, value in given.items():
        if not callable(value) and (value is not None or name == "loss"):
            other = " or an object with update, compute and reset" if name == "metric" else ""
            raise InputError(f"{name} must be a function{other}, got {value!r}")
        if name in ("loss", "metric") and isinstance(value, type):
            raise InputError(
                f"{name} must be a function or an instance, got the class {value.__name__}; use {value.__name__}()"
            )


def check_takes_one(name: str, function: Any, argument: str) -> None:
    """That a function can be called with one argument, as far as its signature tells."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InputError(f"{name} must be callable with {argument} alone, got {function!r}: {error}") from None
    except ValueError:  # a built-in function without a signature
        return


def finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_mu(mu: Any) -> None:
    if not (finite(mu) and mu >= 0):
        raise InputError(f"mu must be a finite number ≥ 0, got {mu!r}")


def check_bound(bound: Any) -> None:
    if not finite(bound):
        raise InputError(f"bound must be a finite number, got {bound!r}")


def check_schedule(penalty_every: int, refresh_every: int, skip_inactive: bool, *, lagged: bool) -> None:
    for name, every in (("penalty_every", penalty_every), ("refresh_every", refresh_every)):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"{name} must be an integer ≥ 1, got {every!r}")
    if not isinstance(skip_inactive, bool):
        raise InputError(f"skip_inactive must be True or False, got {skip_inactive!r}")
    if refresh_every > 1 and not lagged:
        raise InputError(
            f"refresh_every must be 1 with direction_from='this_batch', which refreshes v in every step, got {refresh_every}"
        )
    if skip_inactive and not lagged:
        raise InputError(
            "skip_inactive must be False with direction_from='this_batch', which computes the penalty in every step, got True"
        )


def check_network(net: nn.Module, *, penalized: bool) -> None:
    """That PyTorch shows the network's operations and, with `penalized`, that there is a block to penalise."""
    check_net(net)
    check_values(net)
    if penalized and not find_blocks(net):
        raise InputError("net must have a Linear or Conv1d/2d/3d layer with a trained weight, got none")


def has_gradient_hooks(net: nn.Module) -> bool:
    """Whether parameters have gradient hooks. They must get each gradient once per step, and whole."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in net.parameters())


def has_module_hooks(net: nn.Module) -> bool:
    """Whether modules have forward or backward hooks, which the replay of a CUDA graph would not call."""
    if any(getattr(torch_module, f"_global{kind}") for kind in MODULE_HOOKS):
        return True
    return any(getattr(module, kind) for module in net.modules() for kind in MODULE_HOOKS)


@contextlib.contextmanager
def without_tensor_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """`Tensor.register_hook` is for gradients of a backward pass; `torch.autograd.grad` runs the hooks too. Inside, it does
    not.

    PyTorch reads the dictionary of a tensor's hooks when it runs them: inside, it is empty. There is no API for this."""
    hooks = [x._backward_hooks for x in tensors if x._backward_hooks]
    held = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, items in zip(hooks, held, strict=True):
            each.update(items)


def lacks_second_derivative(gradients: Iterable[Tensor | None]) -> bool:
    """Whether gradients, taken with create_graph=True, went through an autograd.Function that is marked @once_differentiable.

    PyTorch raises an error only if a backward pass reaches such a function's node. `torch.autograd.grad` with respect to
    parameters never reaches it, as nothing leads from there to them, and the derivative is silently zero. PyTorch identifies
    the node by its name alone."""
    waiting = [x.grad_fn for x in gradients if x is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            return True
        new = {before for before, _ in node.next_functions} - visited
        visited |= new
        waiting += new
    return False


def tracked(net: nn.Module) -> list[nn.Module]:
    """The norms with running statistics."""
    norms = [layer for layer in net.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [layer for layer in norms if layer.running_mean is not None]

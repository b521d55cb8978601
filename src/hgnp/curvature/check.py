"""What is refused before a wrong number can come of it: arguments and layers by kind, tangents by one comparison a block."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.blocks import Block, find_blocks
from hgnp.curvature.wide import wide


def check_tangent(block: Block, z: Tensor, u: Tensor, seeds: list[tuple[Tensor, Tensor]]) -> None:
    """⟨c, u⟩ = ⟨∂⟨c, z⟩/∂W, V⟩ for an arbitrary c, once for each block: an operation that PyTorch does not show (a
    custom autograd.Function, a scripted module) would otherwise lose its tangent in silence."""
    with torch.no_grad():
        c = torch.cos(torch.arange(z.numel(), device=z.device, dtype=torch.float32)).view(z.shape).to(z.dtype)
    parameters = [parameter for parameter, _ in seeds]
    grads = torch.autograd.grad(z, parameters, c, retain_graph=True, allow_unused=True)
    reverse = sum((wide(g) * wide(d.detach())).sum() for g, (_, d) in zip(grads, seeds, strict=True) if g is not None)
    forward = (wide(c) * wide(u.detach())).sum()
    size = torch.linalg.vector_norm(wide(c)) * torch.linalg.vector_norm(wide(u.detach()))
    size = size + sum(
        torch.linalg.vector_norm(wide(g)) * torch.linalg.vector_norm(wide(d.detach()))
        for g, (_, d) in zip(grads, seeds, strict=True)
        if g is not None
    )
    loose = {torch.float64: 1e-8, torch.float32: 1e-3}.get(z.dtype, 5e-2)
    if torch.isfinite(size) and (forward - reverse).abs() > loose * size:
        raise ValueError(
            f"layer {block.name!r}: its tangent does not reach the output unharmed ({forward:.3g} forward, "
            f"{reverse:.3g} in reverse): an operation after it cannot be followed, such as a custom autograd.Function "
            "or a scripted module; use curvature='hessian'"
        )


def check_functions(**given: Any) -> None:
    """That each can be called, or is None; the loss cannot be left out, nor be a class."""
    for name, value in given.items():
        if not callable(value) and (value is not None or name == "loss"):
            raise ValueError(f"{name}: {value!r} was given; a function would do")
        if name == "loss" and isinstance(value, type):
            raise ValueError(f"loss: the class {value.__name__} was given; {value.__name__}() would do")


def check_gradients() -> None:
    if not torch.is_grad_enabled():
        raise ValueError("gradients: they are off, as under torch.no_grad(); a call outside of it would do")


def finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def refuse_unseen(net: nn.Module, *, flatten: bool) -> None:
    if not isinstance(net, nn.Module):
        raise ValueError(f"net: a {type(net).__name__} was given; an nn.Module would do")
    if flatten and not find_blocks(net):
        raise ValueError("net: it has no Linear or Conv1d/2d/3d layer with a trained weight, so no block to flatten")
    for name, layer in net.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
            raise ValueError(f"layer {name!r}: it is scripted or compiled, so that its operations cannot be seen and "
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


def refuse_untracked(net: nn.Module) -> None:
    for name, layer in net.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise ValueError(f"layer {name!r}: it keeps no running statistics, so norm='frozen' has none to freeze; "
                             "use norm='batch'")  # fmt: skip

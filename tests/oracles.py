"""Masking by forward hooks alone: what a removal must equal. Independent of how hgnp propagates channels."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

# Modules that map zero to another value; a masked neuron must be zero after them.
NORMS = (_NormBase, nn.GroupNorm)
ACTIVATIONS = (nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def run(net: nn.Module, inputs: Inputs) -> Any:
    return net(*inputs[0], **inputs[1])


def flat(output: Any) -> Tensor:
    """Every tensor of an output in one vector."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return torch.cat([leaf.reshape(-1).double() for leaf in leaves if isinstance(leaf, Tensor)])


class _NoKinks(TorchFunctionMode):
    """Skips activations that can zero a whole channel by chance, so that a zero channel is a masked one. Gates stay above zero:
    without activations their inputs are large."""

    KINKS = frozenset(
        {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardtanh, F.hardtanh_}
        | {
            F.hardswish,
            F.threshold,
            F.hardshrink,
            F.softshrink,
            torch.clamp,
            Tensor.clamp,
            Tensor.clamp_,
            F.elu,
            F.silu,
            F.gelu,
        }
    )

    GATES = frozenset({torch.sigmoid, torch.sigmoid_, F.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, F.hardsigmoid})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.GATES:
            return args[0].clamp(-30, 30).sigmoid()
        return args[0] if function in self.KINKS else function(*args, **(kwargs or {}))


@contextmanager
def masked(net: nn.Module, selection: Mapping[str, Sequence[int]], inputs: Inputs) -> Iterator[None]:
    """Inside the block the selected neurons' outputs, after norm and activation, are zero."""
    norms = [module for module in net.modules() if isinstance(module, (*NORMS, *ACTIVATIONS)) or _scales(module)]
    count = _calls(net, norms, inputs)
    already = _zero_channels(net, norms, inputs, count, {})
    modules = dict(net.named_modules())
    handles = []
    for name, positions in selection.items():
        if hasattr(modules[name], "units"):  # heads, which are zero where the output projection reads them
            hook = _mask_heads(modules[name].units, positions, getattr(modules[name], "scales", 1))
            handles.append(modules[name].proj.register_forward_pre_hook(hook))
        else:
            handles.append(modules[name].register_forward_hook(_mask_layer(list(positions))))
    silenced: dict[tuple[nn.Module, int], dict[int, Tensor]] = {}
    try:
        _zero_channels(net, norms, inputs, count, silenced, already)
        calls: dict[nn.Module, int] = defaultdict(int)

        def silence(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            masks = silenced.get((module, calls[module] % counts[module]), {})
            calls[module] += 1
            return _apply(output, masks)

        counts: dict[nn.Module, int] = defaultdict(lambda: 1)
        for module, call in silenced:
            counts[module] = max(counts[module], call + 1)
        handles += [module.register_forward_hook(silence) for module in norms]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scales(module: nn.Module) -> bool:
    """Whether the module scales and shifts each channel in place of a norm, as in ResMLP."""
    return type(module).__name__ == "Affine"


def _mask_layer(positions: list[int]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        dim = 1 if isinstance(module, _ConvNd) else output.dim() - 1
        mask = torch.ones(output.shape[dim], dtype=output.dtype, device=output.device)
        mask[positions] = 0
        return output * mask.reshape([-1 if d == dim else 1 for d in range(output.dim())])

    return hook


def _mask_heads(heads: int, positions: Sequence[int], scales: int) -> Any:
    """Masks heads at the input of a layer; all of them are repeated for each of several scales."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        dim = 1 if isinstance(module, _ConvNd) else x.dim() - 1
        mask = torch.ones(scales, heads, x.shape[dim] // (scales * heads), dtype=x.dtype, device=x.device)
        mask[:, list(positions)] = 0
        return (x * mask.view([-1 if d == dim else 1 for d in range(x.dim())]), *args[1:])

    return hook


def _calls(net: nn.Module, norms: list[nn.Module], inputs: Inputs) -> int:
    """How often norms are called in one forward pass."""
    calls: list[nn.Module] = []
    handles = [module.register_forward_hook(lambda module, args, output: calls.append(module)) for module in norms]
    try:
        with _same_buffers(net), torch.no_grad():
            run(net, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return len(calls)


@contextmanager
def _same_buffers(net: nn.Module) -> Iterator[None]:
    values = {buffer: buffer.clone() for buffer in net.buffers()}
    try:
        yield
    finally:
        for buffer, value in values.items():
            buffer.copy_(value)


class _LastNormError(Exception):
    """Ends a forward pass: what follows, such as the clamping of boxes and indices, may need its kinks."""


def _zero_channels(
    net: nn.Module,
    norms: list[nn.Module],
    inputs: Inputs,
    count: int,
    silenced: dict[tuple[nn.Module, int], dict[int, Tensor]],
    already: dict[tuple[nn.Module, int], dict[int, Tensor]] | None = None,
) -> dict[tuple[nn.Module, int], dict[int, Tensor]]:
    """Which channels are zero throughout at the input of each norm, of `count` calls in all. With `already`, those not zero
    before are silenced."""
    zeros: dict[tuple[nn.Module, int], dict[int, Tensor]] = {}
    calls: dict[nn.Module, int] = defaultdict(int)

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        key = module, calls[module]
        calls[module] += 1
        dims = {1} if isinstance(module, NORMS) else {1 % args[0].dim(), args[0].dim() - 1}
        zeros[key] = {dim: _zero(args[0], dim) for dim in dims}
        if already is not None:
            silenced[key] = {dim: zero & ~already[key][dim] for dim, zero in zeros[key].items()}
            output = _apply(output, silenced[key])
        if len(zeros) == count:
            raise _LastNormError
        return output

    handles = [module.register_forward_hook(hook) for module in norms]
    try:
        with _same_buffers(net), suppress(_LastNormError), torch.no_grad(), _NoKinks():
            if norms:
                run(net, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return zeros


def _zero(x: Tensor, dim: int) -> Tensor:
    return (x == 0).transpose(0, dim).reshape(x.shape[dim], -1).all(1)


def _apply(output: Tensor, masks: Mapping[int, Tensor]) -> Tensor:
    for dim, zero in masks.items():
        if bool(zero.any()):
            keep = (~zero).to(output.dtype).reshape([-1 if d == dim else 1 for d in range(output.dim())])
            output = output * keep
    return output


def worst_error(pruned: Any, whole: Any) -> float:
    """The largest difference, relative to the largest output. Infinite where another number of boxes was found."""
    a, b = flat(pruned), flat(whole)
    if a.shape != b.shape:
        return math.inf
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-30))

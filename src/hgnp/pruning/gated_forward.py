"""Gated forward passes: runs the network's own code along a traced path and multiplies each neuron by its gate.

A path consists of the calls of torch functions that process channels with gates. Such a call is identified by the module call
that makes it, its index among the calls of that module call, its name, its parameters, the channels and the number of its
other tensor arguments, and the indices that select among them. Any other call (one that builds a mask, or processes the
output of the network's last layer) may differ. A call that processes gated channels and is not as traced raises PathError:
nothing is known about the channels after it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hgnp.errors import InputError
from hgnp.pruning.graph import (
    NonTensorArgument,
    function_name,
    leaves_of,
    non_tensor_arguments,
    produces_tensor,
    tensors_of,
)
from hgnp.pruning.module_calls import ModuleCall, ModuleCallTracker
from hgnp.pruning.structure import PathError
from hgnp.pruning.trace import visible_operators


class SampleDimensionError(Exception):
    """Samples are not the first dimension of an argument, so there cannot be a gate for each sample."""


@dataclass(frozen=True, eq=False)
class GatedChannels:
    """The channels of all tensors whose entries have the same gates: one object for all of them."""

    ndim: int
    sizes: Mapping[int, int]
    """The dimensions along which gates vary, and the number of remaining channels there."""

    def match(self, tensor: Tensor) -> bool:
        return tensor.dim() == self.ndim and all(tensor.shape[dim] == size for dim, size in self.sizes.items())


@dataclass(frozen=True)
class GatePlacement:
    """An argument or a result of a call, by its position among the leaves, and the unit of each of its remaining channels."""

    position: int
    units: Tensor
    """Broadcasts to the tensor; the number of units where there is no gate."""
    in_place: bool = False
    """Whether the call writes into the argument: its new content is read from the argument itself."""
    shared: bool = False
    """Whether all samples share the tensor, and so its gates."""


@dataclass(frozen=True)
class GatedCall:
    """One call of a torch function that processes gated channels."""

    name: str
    arguments: Mapping[int, GatedChannels | str | None]
    """Its tensor arguments: their channels, or the name of a parameter or buffer, or None."""
    non_tensors: tuple[NonTensorArgument, ...]
    """Other arguments that decide which channels it reads or where it moves them."""
    dims: frozenset[int]
    """Dimensions along which the first argument has gates."""
    broadcast_dims: tuple[tuple[int, int], ...]
    """(argument, dimension from the end): where the argument must be broadcast over the channels."""
    history: int | None
    """A hash of all calls up to this one, where an argument fits any width only because of how it was created."""
    gated_arguments: tuple[GatePlacement, ...]
    ungated_results: tuple[GatePlacement, ...]
    """Results with channels that the call also reads (`F.normalize`): they are divided by their gates, since they are gated
    where they end."""
    results: Mapping[int, GatedChannels]
    """The channels of its results."""
    changed_arguments: Mapping[int, GatedChannels | None]
    """Arguments with other channels afterwards."""


@dataclass(frozen=True)
class GatedPath:
    calls: Mapping[ModuleCall, tuple[GatedCall, ...]]
    """Module call → its calls of functions that process gated channels."""
    weights: frozenset[str]
    """Parameters and buffers with gated channels."""

    def to(self, device: torch.device) -> "GatedPath":
        """The same path with its units on a device, to avoid a transfer at every call."""

        def moved(placements: tuple[GatePlacement, ...]) -> tuple[GatePlacement, ...]:
            return tuple(replace(placement, units=placement.units.to(device)) for placement in placements)

        def on_device(call: GatedCall) -> GatedCall:
            return replace(
                call,
                gated_arguments=moved(call.gated_arguments),
                ungated_results=moved(call.ungated_results),
            )

        return replace(self, calls={key: tuple(map(on_device, calls)) for key, calls in self.calls.items()})


def extend_history(history: int, module: str, name: str) -> int:
    """The hash of all calls so far and one more."""
    return hash((history, module, name))


@contextmanager
def gated_forward(net: nn.Module, path: GatedPath, gate_values: Tensor) -> Iterator[None]:
    """Inside the block, one forward pass takes the path and multiplies every neuron by its gate. PathError if
    it takes another path.

    `gate_values` is (samples, units), or (1, units) for gates that all samples share."""
    with (
        ModuleCallTracker(net) as module_calls,
        visible_operators(),
        _GateMode(net, path, module_calls, gate_values) as mode,
    ):
        try:
            yield
            if mode.error is not None:  # the network's own code has caught it and continued without gates
                raise mode.error
        finally:
            mode.error = None  # breaks a reference cycle


class _GateMode(TorchFunctionMode):
    def __init__(self, net: nn.Module, path: GatedPath, module_calls: ModuleCallTracker, gate_values: Tensor) -> None:
        super().__init__()
        self._net, self._path, self._module_calls = net, path, module_calls
        self._gate_values = torch.cat([gate_values, gate_values.new_ones(gate_values.shape[0], 1)], 1)
        self._done: Counter[ModuleCall] = Counter()
        self._history = 0
        self._names: dict[int, str] | None = None
        self._channels: dict[int, tuple[weakref.ref[Tensor], GatedChannels]] = {}
        self.error: Exception | None = None
        """Why the forward pass must not continue."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except (PathError, SampleDimensionError) as error:
            self.error = self.error or error
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, module_call = function_name(func), self._module_calls.current
        leaves = leaves_of((args, kwargs))
        arguments = {position: self._known(leaf) for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        gated = any(isinstance(known, GatedChannels) or known in self._path.weights for known in arguments.values())
        call = self._expected(module_call, name, arguments, leaves, (args, kwargs)) if gated else None
        if call is None:
            result = func(*args, **kwargs)
            if produces_tensor(name, result):
                if gated:
                    raise PathError(module_call.module, f"{name} is called there")
                self._history = extend_history(self._history, module_call.module, name)
            return result
        self._done[module_call] += 1
        self._history = extend_history(self._history, module_call.module, name)
        if call.gated_arguments and self._gate_values.requires_grad and not torch.is_grad_enabled():
            raise InputError(
                f"{module_call.module or 'the forward pass'} must run with gradients while neurons are scored, got "
                "torch.no_grad or a reentrant checkpoint; enable gradients there, or protect the layers that it reads"
            )
        if call.gated_arguments:
            args, kwargs = self._with_gates(call, args, kwargs)
        result = self._without_gates(call, func(*args, **kwargs))
        self._update_channels(module_call, call, leaves, leaves_of(result))
        return result

    def _with_gates(self, call: GatedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        multiplied: dict[int, Tensor] = {}  # a tensor that is passed twice stays one tensor
        changed = list(leaves)
        for placement in call.gated_arguments:
            leaf = leaves[placement.position]
            if id(leaf) not in multiplied:
                gate = self._gate(leaf, placement)
                multiplied[id(leaf)] = leaf.mul_(gate) if placement.in_place else leaf * gate
            changed[placement.position] = multiplied[id(leaf)]
        return tree_unflatten(changed, spec)

    def _known(self, tensor: Tensor) -> GatedChannels | str | None:
        if self._names is None:  # only now, as a functional call may have replaced the parameters
            self._names = {id(weight): name for name, weight in tensors_of(self._net).items()}
        reference, channels = self._channels.get(id(tensor), (None, None))
        return channels if reference is not None and reference() is tensor else self._names.get(id(tensor))

    def _expected(
        self,
        module_call: ModuleCall,
        name: str,
        arguments: Mapping[int, Any],
        leaves: list[Any],
        given: tuple[Any, dict[str, Any]],
    ) -> GatedCall | None:
        """The next call of the path, if this is the one."""
        calls, done = self._path.calls.get(module_call, ()), self._done[module_call]
        call = calls[done] if done < len(calls) else None
        if call is None or call.name != name or arguments != call.arguments:
            return None
        sizes = all(
            known.match(leaves[position]) for position, known in arguments.items() if isinstance(known, GatedChannels)
        )
        broadcast = all(_is_broadcast(leaves[position], dim) for position, dim in call.broadcast_dims)
        non_tensors = (
            call.non_tensors == select_relevant(non_tensor_arguments(name, *given), call.dims)
            if call.non_tensors
            else True
        )
        history = call.history in (None, extend_history(self._history, module_call.module, name))
        return call if sizes and broadcast and non_tensors and history else None

    def _without_gates(self, call: GatedCall, result: Any) -> Any:
        if not call.ungated_results:
            return result
        leaves, spec = tree_flatten(result)
        for placement in call.ungated_results:
            leaf = leaves[placement.position]
            leaves[placement.position] = leaf / _or_one(self._gate(leaf, placement))
        return tree_unflatten(leaves, spec)

    def _update_channels(self, module_call: ModuleCall, call: GatedCall, leaves: list[Any], results: list[Any]) -> None:
        for tensors, changes in ((leaves, call.changed_arguments), (results, call.results)):
            for position, channels in changes.items():
                tensor = tensors[position] if position < len(tensors) else None
                if channels is None:
                    self._channels.pop(id(tensor), None)
                elif isinstance(tensor, Tensor) and channels.match(tensor):
                    self._channels[id(tensor)] = weakref.ref(tensor), channels
                else:
                    raise PathError(module_call.module, f"{call.name} returns a tensor of another shape there")

    def _gate(self, leaf: Tensor, placement: GatePlacement) -> Tensor:
        units = placement.units
        gate = self._gate_values.to(leaf.dtype)[:, units.flatten().to(leaf.device)]  # (samples, entries)
        if placement.shared:
            gate = gate.mean(0, keepdim=True)
        samples = gate.shape[0]
        if samples > 1:
            if leaf.shape[0] % samples or units.shape[0] > 1:
                raise SampleDimensionError
            gate = gate.repeat_interleave(leaf.shape[0] // samples, 0)
            return gate.view(leaf.shape[0], *units.shape[1:])
        return gate.view(units.shape)


def _is_broadcast(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() < -dim or tensor.shape[dim] == 1 or tensor.stride(dim) == 0


def select_relevant(arguments: tuple[NonTensorArgument, ...], dims: frozenset[int]) -> tuple[NonTensorArgument, ...]:
    """The arguments without those that index a dimension without gates."""
    return tuple(argument for argument in arguments if argument.dim is None or argument.dim in dims)


def _or_one(gate: Tensor) -> Tensor:
    """Avoids 0 / 0 at a closed gate."""
    return torch.where(gate == 0, torch.ones_like(gate), gate)

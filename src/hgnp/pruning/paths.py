"""A path through the network's code, to be followed again with gates on it.

What matters of a path are the calls of torch functions that handle channels with gates. Such a call is known by the module's
call that makes it, its place among those of that call, its name, the parameters it is given, the channels that its other
arguments carry, their number, and the indices it picks them by. Any other call (one that builds a mask, or works on what has
left the network's last layer) may differ. A call that handles gated channels and is not as recorded is refused: nothing is
known of the channels behind it.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hgnp.errors import InputError
from hgnp.pruning.graph import function_name, is_invocation, numbers_of, tensors_of
from hgnp.pruning.module_calls import Frame, ModuleCalls
from hgnp.pruning.structure import PathError
from hgnp.pruning.trace import plain_attention


class SamplesError(Exception):
    """Samples do not lead in an argument, so they cannot have gates of their own."""


@dataclass(frozen=True, eq=False)
class Channels:
    """What tensors carry whose entries have the same gates: one object for all of them."""

    ndim: int
    sizes: Mapping[int, int]
    """The dimensions along which gates vary, and how many channels live there."""

    def fit(self, tensor: Tensor) -> bool:
        return tensor.dim() == self.ndim and all(tensor.shape[dim] == size for dim, size in self.sizes.items())


@dataclass(frozen=True)
class Place:
    """An argument or a result of a call, by its place among the leaves, and the unit of each of its living channels."""

    position: int
    units: Tensor
    """Broadcasts to the tensor; the number of units where there is no gate."""
    written: bool = False
    """Whether the call writes into it: what it then holds is read from the argument itself."""


@dataclass(frozen=True)
class Call:
    name: str
    """Of the function."""
    given: Mapping[int, Channels | str | None]
    """The tensors it is given: their channels, or the name of a parameter or buffer, or None."""
    numbers: tuple[tuple[int | None, Any], ...]
    """What else decides where its channels go."""
    dims: frozenset[int]
    """Dimensions along which the first argument has gates."""
    thin: tuple[tuple[int, int], ...]
    """(argument, dimension from the end): where it must go on being broadcast."""
    history: int | None
    """All calls up to this one, where it is given a tensor that fits any width only because of how it was made."""
    reads: tuple[Place, ...]
    passes: tuple[Place, ...]
    """Results that carry on channels which the call has read as well (`F.normalize`): their gates come off again, for they
    are gated where they end."""
    makes: Mapping[int, Channels]
    """The channels of its results."""
    writes: Mapping[int, Channels | None]
    """Arguments that carry something else afterwards."""


@dataclass(frozen=True)
class Path:
    calls: Mapping[Frame, tuple[Call, ...]]
    """A module's call → the calls of functions in it that handle gated channels."""
    weights: frozenset[str]
    """Parameters and buffers with gated channels."""

    def to(self, device: torch.device) -> "Path":
        """The same with its units on a device, which would else be sent there at every call."""

        def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
            return tuple(replace(place, units=place.units.to(device)) for place in places)

        def call(old: Call) -> Call:
            return replace(old, reads=moved(old.reads), passes=moved(old.passes))

        return replace(self, calls={frame: tuple(map(call, calls)) for frame, calls in self.calls.items()})


def longer(history: int, module: str, name: str) -> int:
    """A number for all calls so far, with one more."""
    return hash((history, module, name))


@contextmanager
def along(net: nn.Module, path: Path, gamma: Tensor) -> Iterator[None]:
    """Inside the block, one forward in evaluation mode goes along the path and reads every neuron through its gate. PathError
    if it takes another.

    `gamma` is (samples, units), or (1, units) for gates that all samples share."""
    with ModuleCalls(net) as calls, plain_attention(), _Gated(net, path, calls, gamma) as mode:
        try:
            yield
            if mode.refused is not None:  # the network's own code has caught it, and gone on without gates
                raise mode.refused
        finally:
            mode.refused = None  # they would hold each other


class _Gated(TorchFunctionMode):
    def __init__(self, net: nn.Module, path: Path, calls: ModuleCalls, gamma: Tensor) -> None:
        super().__init__()
        self._net, self._path, self._calls = net, path, calls
        self._gamma = torch.cat([gamma, gamma.new_ones(gamma.shape[0], 1)], 1)
        self._done: Counter[Frame] = Counter()
        self._history = 0
        self._names: dict[int, str] | None = None
        self._carried: dict[int, tuple[weakref.ref[Tensor], Channels]] = {}
        self.refused: Exception | None = None
        """Why the forward is not to be gone on with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except (PathError, SamplesError) as error:
            self.refused = self.refused or error
            raise

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, frame = function_name(func), self._calls.frame
        leaves, spec = tree_flatten((args, kwargs))
        given = {place: self._known(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        gated = any(isinstance(known, Channels) or known in self._path.weights for known in given.values())
        call = self._expected(frame, name, given, leaves, (args, kwargs)) if gated else None
        if call is None:
            result = func(*args, **kwargs)
            if is_invocation(name, result):
                if gated:
                    raise PathError(frame.module, f"{name} is called there")
                self._history = longer(self._history, frame.module, name)
            return result
        self._done[frame] += 1
        self._history = longer(self._history, frame.module, name)
        if call.reads and self._gamma.requires_grad and not torch.is_grad_enabled():
            raise InputError(
                f"net: {frame.module or 'its own forward'} runs without gradients (torch.no_grad or a reentrant checkpoint), "
                "so that the neurons it reads cannot be scored; let it have them while scoring, or protect those layers"
            )
        closed: dict[int, Tensor] = {}  # one tensor given twice stays one tensor
        changed = list(leaves)
        for place in call.reads:
            leaf = leaves[place.position]
            if id(leaf) not in closed:
                gate = self._gate(leaf, place.units)
                closed[id(leaf)] = leaf.mul_(gate) if place.written else leaf * gate
            changed[place.position] = closed[id(leaf)]
        args, kwargs = tree_unflatten(changed, spec)
        result = self._opened(call, func(*args, **kwargs))
        self._note(frame, call, leaves, tree_leaves(result))
        return result

    def _known(self, tensor: Tensor) -> Channels | str | None:
        if self._names is None:  # now, as a functional call may have put others in their places
            self._names = {id(weight): name for name, weight in tensors_of(self._net).items()}
        reference, channels = self._carried.get(id(tensor), (None, None))
        return channels if reference is not None and reference() is tensor else self._names.get(id(tensor))

    def _expected(
        self,
        frame: Frame,
        name: str,
        given: Mapping[int, Any],
        leaves: list[Any],
        arguments: tuple[Any, dict[str, Any]],
    ) -> Call | None:
        """The call that is due, if this is the one."""
        calls, done = self._path.calls.get(frame, ()), self._done[frame]
        call = calls[done] if done < len(calls) else None
        if call is None or call.name != name or given != call.given:
            return None
        fits = all(known.fit(leaves[place]) for place, known in given.items() if isinstance(known, Channels))
        thin = all(_broadcast(leaves[place], dim) for place, dim in call.thin)
        numbers = call.numbers == deciding(numbers_of(name, *arguments), call.dims) if call.numbers else True
        history = call.history in (None, longer(self._history, frame.module, name))
        return call if fits and thin and numbers and history else None

    def _opened(self, call: Call, result: Any) -> Any:
        if not call.passes:
            return result
        leaves, spec = tree_flatten(result)
        for place in call.passes:
            leaf = leaves[place.position]
            leaves[place.position] = leaf / _or_one(self._gate(leaf, place.units))
        return tree_unflatten(leaves, spec)

    def _note(self, frame: Frame, call: Call, leaves: list[Any], results: list[Any]) -> None:
        for where, carried in ((leaves, call.writes), (results, call.makes)):
            for place, channels in carried.items():
                tensor = where[place] if place < len(where) else None
                if channels is None:
                    self._carried.pop(id(tensor), None)
                elif isinstance(tensor, Tensor) and channels.fit(tensor):
                    self._carried[id(tensor)] = weakref.ref(tensor), channels
                else:
                    raise PathError(frame.module, f"{call.name} makes a tensor of another shape there")

    def _gate(self, leaf: Tensor, units: Tensor) -> Tensor:
        gate = self._gamma.to(leaf.dtype)[:, units.flatten().to(leaf.device)]  # (N, entries)
        samples = gate.shape[0]
        if samples > 1:
            if leaf.shape[0] % samples or units.shape[0] > 1:
                raise SamplesError
            gate = gate.repeat_interleave(leaf.shape[0] // samples, 0)
            return gate.view(leaf.shape[0], *units.shape[1:])
        return gate.view(units.shape)


def _broadcast(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() < -dim or tensor.shape[dim] == 1 or tensor.stride(dim) == 0


def deciding(numbers: tuple[tuple[int | None, Any], ...], dims: frozenset[int]) -> tuple[tuple[int | None, Any], ...]:
    """The numbers without those that pick entries along a dimension without gates."""
    return tuple(number for number in numbers if number[0] is None or number[0] in dims)


def _or_one(gate: Tensor) -> Tensor:
    """Behind a closed gate there is nothing, whatever it is divided by."""
    return torch.where(gate == 0, torch.ones_like(gate), gate)

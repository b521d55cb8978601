"""Where a neuron's output is read: the places of its gate.

A gate γ_j multiplies what everything after neuron j sees of it, so that γ_j = 1 is the network as it stands and γ_j = 0 the
network without the neuron. Channels that live and die together share one gate. It sits on the inputs of the products (and
sums over channels) that read them, which is behind norm and activation.

Places are named by the calls of torch functions that the network's own code makes in evaluation mode, counted from 0;
`gated` multiplies there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hgnp.neurons.follow import Follower
from hgnp.neurons.graph import Invocation, Step, is_invocation
from hgnp.neurons.labels import Labelled, varies
from hgnp.neurons.record import plain_attention
from hgnp.neurons.rules import name_of
from hgnp.neurons.structure import Structure
from hgnp.neurons.ties import FIXED
from hgnp.neurons.trial import keep_masks


@dataclass(frozen=True)
class Place:
    """An argument or a result of one call, by its position among the tensors, and the unit of each of its living channels."""

    position: int
    units: Tensor
    """Broadcasts to the tensor; the number of units where there is no gate."""


@dataclass(frozen=True)
class Call:
    name: str
    """Of the function."""
    reads: tuple[Place, ...]
    passes: tuple[Place, ...]
    """Results that carry on channels which the call has read as well (`F.normalize`): their gates come off again, for they
    are gated where they end."""


@dataclass(frozen=True)
class Gates:
    count: int
    """Units: neurons that share a gate are one."""
    rows: Mapping[str, Tensor]
    """Layer → the unit of each living neuron, or `count` for those that stay. Layers that are read where no gate can sit
    are missing."""
    places: Mapping[int, Call]
    """Calls with gated arguments, by number."""

    def to(self, device: torch.device) -> "Gates":
        """The same for `gated` on a device, which would else be sent the units at every call."""

        def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
            return tuple(Place(place.position, place.units.to(device)) for place in places)

        calls = self.places.items()
        return replace(self, places={n: Call(call.name, moved(call.reads), moved(call.passes)) for n, call in calls})


def find_gates(structure: Structure, rows: Mapping[str, Tensor], alive: Tensor, *, lanes: bool) -> Gates:
    """The gates of the neurons in `rows`; with `lanes`, layers that are added together have gates of their own."""
    follower = structure.followers[False]
    roots = torch.where(structure.fixed, FIXED, structure.roots)
    living = {name: roots[slots[alive[slots]]] for name, slots in rows.items()}
    wanted = torch.unique(torch.cat([*living.values(), torch.tensor([FIXED])]))[1:]  # FIXED, the lowest, comes first
    unit = torch.full((len(roots),), len(wanted))
    unit[wanted] = torch.arange(len(wanted))

    read, lost = _gated_reads(follower, roots, lanes=lanes)
    places = {}
    for call, arguments in read.items():
        invocation = follower.graph.invocations[call]
        gated = [
            Place(position, _units(_as_read(follower, invocation, index), arguments[index], roots, unit, alive))
            for position, index in enumerate(invocation.tensors)
            if index in arguments
        ]
        everything = set().union(*arguments.values())
        passes = []
        for position, index in enumerate(invocation.results):
            made = _carried(follower, invocation, set(arguments), lanes=lanes).get(index)
            found = set() if made is None else everything & _roots(made, roots)
            if made is not None and found:
                passes.append(Place(position, _units(made, found, roots, unit, alive)))
        places[call] = Call(invocation.name, tuple(gated), tuple(passes))
    seen = {root for arguments in read.values() for found in arguments.values() for root in found}
    usable = {}
    for name, mine in living.items():
        own = set(mine.tolist()) - {FIXED}
        if own and own <= seen - lost:
            usable[name] = unit[mine]
    return Gates(len(wanted), usable, places)


def _gated_reads(follower: Follower, roots: Tensor, *, lanes: bool) -> tuple[dict[int, dict[int, set[int]]], set[int]]:
    """Call → argument → the roots that are to be gated there; and the roots that are read where no call can be gated."""
    read: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    lost: set[int] = set()
    for step, value, found in _reads(follower, roots, lanes=lanes):
        reached: set[int] = set()
        for call, invocation in enumerate(follower.graph.invocations):
            if step in invocation.steps:
                for argument in _given(follower, invocation, step, value):
                    carried = found & _roots(_as_read(follower, invocation, argument), roots)
                    if carried:
                        read[call][argument] |= carried
                        reached |= carried
                break
        lost |= found - reached
    return read, lost


def _reads(follower: Follower, roots: Tensor, *, lanes: bool) -> list[tuple[int, int, set[int]]]:
    """(step, value, roots) wherever channels end. With lanes, what enters a sum of several lanes ends there too, and what is
    read of the sum belongs to none of them."""
    ends: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for step, value, label in follower.consumed:
        ends[step].append((value, label))
    summed: dict[int, set[int]] = defaultdict(set)  # value → roots of which it holds a sum of lanes
    result = []
    for step, followed in enumerate(follower.trail):
        alone = {
            index: _roots(labelled, roots) - summed[index]
            for index, labelled in zip(followed.step.reads, followed.reads, strict=True)
            if not labelled.weight
        }
        lanes_in = {frozenset(found) for index in alone for found in (alone[index], summed[index]) if found}
        joins = lanes and _adds(followed.step) and len(lanes_in) > 1
        if joins:
            result += [(step, index, found) for index, found in alone.items() if found]
        for value, label in ends[step]:
            found = _slots(label, roots) - summed[value]
            if found:
                result.append((step, value, found))
        inherited = set().union(*(summed[index] for index in followed.step.reads))
        for index, labelled in zip(followed.step.writes, followed.writes, strict=True):
            own = _roots(labelled, roots)
            summed[index] = own if joins else own & inherited
    return result


def _adds(step: Step) -> bool:
    return len(step.reads) > 1 and name_of(step.op).removesuffix("_") in ("add", "sub")


def _slots(label: Tensor, roots: Tensor) -> set[int]:
    return set(roots[label].flatten().tolist()) - {FIXED}


def _roots(labelled: Labelled, roots: Tensor) -> set[int]:
    """Roots of the channels in a value; a weight has none that are read."""
    return set() if labelled.weight else {root for label in labelled.labels for root in _slots(label, roots)}


def _given(follower: Follower, invocation: Invocation, step: int, value: int) -> set[int]:
    """The arguments of the call that the value was made from."""
    made_from = {value}
    for before in reversed(range(invocation.steps.start, step)):
        recorded = follower.graph.steps[before]
        if made_from & set(recorded.writes):
            made_from |= set(recorded.reads)
    return made_from & {index for index in invocation.tensors if index is not None}


def _as_read(follower: Follower, invocation: Invocation, value: int) -> Labelled:
    """What was known of an argument when the call first read it."""
    reads = (follower.trail[step] for step in invocation.steps)
    return next(f.reads[f.step.reads.index(value)] for f in reads if value in f.step.reads)


def _carried(
    follower: Follower, invocation: Invocation, arguments: set[int], *, lanes: bool
) -> dict[int | None, Labelled]:
    """What the call makes of these arguments without reading them, as it returns it: their channels go on in it."""
    ends = {(step, value) for step, value, _ in follower.consumed}
    carried = set(arguments)
    made: dict[int | None, Labelled] = {}
    for step in invocation.steps:
        followed = follower.trail[step]
        if lanes and _adds(followed.step):  # where lanes end
            continue
        if any(value in carried and (step, value) not in ends for value in followed.step.reads):
            carried |= set(followed.step.writes)
            made.update(zip(followed.step.writes, followed.writes, strict=True))
    return made


def _units(labelled: Labelled, found: set[int], roots: Tensor, unit: Tensor, alive: Tensor) -> Tensor:
    """The unit of every living entry, as a tensor that broadcasts to the argument."""
    masks = keep_masks(labelled, alive)
    none = int(unit[FIXED])
    total: Tensor | None = None
    for label in labelled.labels:
        if not found & _slots(label, roots):
            continue
        for dim in varies(label):
            mask = masks[dim]
            if mask is not None:
                label = label.index_select(dim, mask.nonzero().squeeze(1))
        mine = roots[label]
        mine = torch.where(torch.isin(mine, torch.tensor(sorted(found))), unit[mine], none)
        total = mine if total is None else torch.where(total == none, mine, total)
    assert total is not None
    return total


@contextmanager
def gated(gates: Gates, gamma: Tensor) -> Iterator[None]:
    """Inside the block, one forward in evaluation mode reads every neuron through its gate.

    `gamma` is (samples, units), or (1, units) for gates that all samples share."""
    with plain_attention(), _Gated(gates, gamma):
        yield


class _Gated(TorchFunctionMode):
    def __init__(self, gates: Gates, gamma: Tensor) -> None:
        super().__init__()
        self._places = gates.places
        self._gamma = torch.cat([gamma, gamma.new_ones(gamma.shape[0], 1)], 1)
        self._call = -1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._call += is_invocation(func)
        if self._call not in self._places or not is_invocation(func):
            return func(*args, **(kwargs or {}))
        call = self._places[self._call]
        if getattr(func, "__name__", "") != call.name:
            raise _another_path(call)
        gated: dict[int, Tensor] = {}  # one tensor given twice stays one tensor

        def close(leaf: Tensor, units: Tensor) -> Tensor:
            if id(leaf) not in gated:
                gated[id(leaf)] = leaf * self._gate(leaf, units)
            return gated[id(leaf)]

        args, kwargs = _at(call, call.reads, (args, kwargs or {}), close)
        return _at(
            call, call.passes, func(*args, **kwargs), lambda leaf, units: leaf / _or_one(self._gate(leaf, units))
        )

    def _gate(self, leaf: Tensor, units: Tensor) -> Tensor:
        gate = self._gamma.to(leaf.dtype)[:, units.flatten().to(leaf.device)]  # (N, entries)
        samples = gate.shape[0]
        if samples > 1:
            if leaf.shape[0] % samples or units.shape[0] > 1:
                raise SamplesError
            gate = gate.repeat_interleave(leaf.shape[0] // samples, 0)
            return gate.view(leaf.shape[0], *units.shape[1:])
        return gate.view(units.shape)


def _at(call: Call, places: tuple[Place, ...], tree: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The same arguments or results with the tensors at `places` changed."""
    leaves, spec = tree_flatten(tree)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place in places:
        if len(tensors) <= place.position:
            raise _another_path(call)
        leaves[tensors[place.position]] = change(leaves[tensors[place.position]], place.units)
    return tree_unflatten(leaves, spec) if places else tree


def _or_one(gate: Tensor) -> Tensor:
    """Behind a closed gate there is nothing, whatever it is divided by."""
    return torch.where(gate == 0, torch.ones_like(gate), gate)


def _another_path(call: Call) -> ValueError:
    return ValueError(f"net: its forward took another path than when Neurons was made ({call.name} was expected)")


class SamplesError(Exception):
    """Samples do not lead in an argument, so they cannot have gates of their own."""

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
from dataclasses import dataclass
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


def find_gates(structure: Structure, rows: Mapping[str, Tensor], alive: Tensor, *, lanes: bool) -> Gates:
    follower = structure.followers[False]
    roots = torch.where(structure.fixed, 0, structure.roots)
    living = {name: roots[slots[alive[slots]]] for name, slots in rows.items()}
    wanted = torch.unique(torch.cat([*living.values(), torch.zeros(1, dtype=torch.long)]))[1:]
    unit = torch.full((len(roots),), len(wanted))
    unit[wanted] = torch.arange(len(wanted))

    read: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # call → value → roots
    lost: set[int] = set()  # roots that are read where no call can be gated
    for step, value, found in _reads(follower, roots, lanes=lanes):
        call = next((k for k, i in enumerate(follower.graph.invocations) if step in i.steps), None)
        given = set() if call is None else _given(follower, follower.graph.invocations[call], step, value)
        reached: set[int] = set()
        for argument in given:
            carried = found & _roots(_as_read(follower, argument, step, call), roots)
            if call is not None and carried:
                read[call][argument] |= carried
                reached |= carried
        lost |= found - reached
    places = {}
    for call, arguments in read.items():
        invocation = follower.graph.invocations[call]
        gated = []
        for position, index in enumerate(invocation.tensors):
            if index in arguments:
                labelled = _as_read(follower, index, None, call)
                gated.append(Place(position, _units(labelled, arguments[index], roots, unit, alive)))
        passes = []
        gone_on = _carried(follower, invocation, set(arguments), lanes=lanes)
        for position, index in enumerate(invocation.results):
            labelled = _as_made(follower, index, call) if index in gone_on else None
            found = set().union(*arguments.values()) & _roots(labelled, roots)
            if found:
                passes.append(Place(position, _units(labelled, found, roots, unit, alive)))
        places[call] = Call(invocation.name, tuple(gated), tuple(passes))
    seen = {root for arguments in read.values() for found in arguments.values() for root in found}
    usable = {
        name: unit[mine]
        for name, mine in living.items()
        if bool((mine > 0).any()) and all(root in seen and root not in lost for root in mine[mine > 0].tolist())
    }
    return Gates(len(wanted), usable, places)


def _reads(follower: Follower, roots: Tensor, *, lanes: bool) -> list[tuple[int, int, set[int]]]:
    """(step, value, roots) wherever channels end. With lanes, what enters a sum of several lanes ends there too, and what is
    read of the sum belongs to none of them."""
    joined: dict[int, set[int]] = defaultdict(set)
    result = []
    ends = defaultdict(list)
    for step, value, label in follower.consumed:
        ends[step].append((value, label))
    for step, followed in enumerate(follower.trail):
        sums = lanes and _is_sum(followed.step)
        mine = {
            index: _roots(labelled, roots) - joined[index]
            for index, labelled in zip(followed.step.reads, followed.reads, strict=True)
            if not labelled.weight
        }
        apart = sums and len({frozenset(found) for found in mine.values() if found} | {frozenset(joined[i]) for i in mine if joined[i]}) > 1  # fmt: skip # noqa: E501
        if apart:
            result += [(step, index, found) for index, found in mine.items() if found]
        for value, label in ends[step]:
            found = (set(roots[label].flatten().tolist()) - {0}) - joined[value]
            if found:
                result.append((step, value, found))
        inherited = set().union(*(joined[index] for index in followed.step.reads))
        for index, labelled in zip(followed.step.writes, followed.writes, strict=True):
            own = _roots(labelled, roots)
            joined[index] = own if apart else own & inherited
    return result


def _roots(labelled: Labelled | None, roots: Tensor) -> set[int]:
    if labelled is None or labelled.weight:
        return set()
    return {root for label in labelled.labels for root in roots[label].flatten().tolist()} - {0}


def _given(follower: Follower, invocation: Invocation, step: int, value: int) -> set[int]:
    """The arguments of the call that the value was made from."""
    made_from = {value}
    for before in reversed(range(invocation.steps.start, step)):
        recorded = follower.graph.steps[before]
        if made_from & set(recorded.writes):
            made_from |= set(recorded.reads)
    return made_from & {index for index in invocation.tensors if index is not None}


def _as_read(follower: Follower, value: int, until: int | None, call: int | None) -> Labelled | None:
    """What was known of an argument when the call first read it."""
    if call is None:
        return None
    for step in follower.graph.invocations[call].steps:
        followed = follower.trail[step]
        if value in followed.step.reads:
            return followed.reads[followed.step.reads.index(value)]
    return None


def _carried(follower: Follower, invocation: Invocation, arguments: set[int], *, lanes: bool) -> set[int]:
    """What the call makes of these arguments without reading them: their channels go on in it."""
    ends = {(step, value) for step, value, _ in follower.consumed}
    carried, made = set(arguments), set()
    for step in invocation.steps:
        recorded = follower.graph.steps[step]
        if lanes and _is_sum(recorded):  # where lanes end
            continue
        if any(value in carried and (step, value) not in ends for value in recorded.reads):
            carried |= set(recorded.writes)
            made |= set(recorded.writes)
    return made


def _is_sum(step: Step) -> bool:
    return len(step.reads) > 1 and name_of(step.op).removesuffix("_") in ("add", "sub")


def _as_made(follower: Follower, value: int | None, call: int) -> Labelled | None:
    """What was known of a result when the call returned it."""
    for step in reversed(follower.graph.invocations[call].steps):
        followed = follower.trail[step]
        if value in followed.step.writes:
            return followed.writes[followed.step.writes.index(value)]
    return None


def _units(labelled: Labelled | None, found: set[int], roots: Tensor, unit: Tensor, alive: Tensor) -> Tensor:
    """The unit of every living entry, as a tensor that broadcasts to the argument."""
    assert labelled is not None
    masks = keep_masks(labelled, alive)
    none = int(unit[0])
    total: Tensor | None = None
    for label in labelled.labels:
        if not found & set(roots[label].flatten().tolist()):
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

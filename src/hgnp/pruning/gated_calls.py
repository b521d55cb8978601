"""Which calls of a followed forward handle channels with gates, and what each of them does to those."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hgnp.pruning.coupling import FIXED
from hgnp.pruning.graph import Invocation
from hgnp.pruning.labels import Labelled, varies
from hgnp.pruning.paths import Call, Channels, Place, deciding
from hgnp.pruning.propagation import Follower
from hgnp.pruning.rules import RESHAPES, elementwise, filler, name_of, rule_for
from hgnp.pruning.verify import keep_masks


@dataclass(frozen=True)
class Units:
    """Which neurons share a gate."""

    roots: Tensor
    """Slot → what stands for all that live and die with it; FIXED for those that stay."""
    unit: Tensor
    """Root → its unit; `count` for those without a gate."""
    alive: Tensor
    lanes: bool

    @property
    def count(self) -> int:
        return int(self.unit[FIXED])


class Handled:
    """What is known of each value, in the order of the forward."""

    def __init__(self, follower: Follower, units: Units) -> None:
        self._follower, self._units = follower, units
        values = range(len(follower.graph.values))
        self._state: dict[int, Labelled] = {index: follower.initial(index) for index in values}
        self._step = 0
        self._channels: dict[Any, Channels] = {}
        self._found: dict[Any, tuple[Labelled, Channels | None]] = {}
        weights = [(value.name, self._state[index]) for index, value in enumerate(follower.graph.values) if value.name]
        self.weights = frozenset(name for name, labelled in weights if self.channels(labelled) is not None)

    def call(
        self, invocation: Invocation, places: tuple[tuple[Place, ...], tuple[Place, ...]], history: int
    ) -> Call | None:
        """The call, if it handles gated channels."""
        self._go_on(invocation.steps.start)
        given = {
            place: self._state[index] if index is not None else None for place, index in invocation.tensors.items()
        }
        for step in reversed(invocation.steps):
            followed = self._follower.trail[step]
            read = dict(zip(followed.step.reads, followed.reads, strict=True))
            given |= {place: read[index] for place, index in invocation.tensors.items() if index in read}
        self._go_on(invocation.steps.stop)
        before = {place: self.channels(labelled) for place, labelled in given.items()}
        if not any(before.values()):
            return None
        after = {place: self._now(index) for place, index in invocation.tensors.items()}
        makes = {place: self._now(index) for place, index in invocation.results.items()}
        values = self._follower.graph.values
        names = {place: None if index is None else values[index].name for place, index in invocation.tensors.items()}
        first = before.get(min(before))
        dims = frozenset() if first is None else frozenset(first.sizes)
        loose = any(
            labelled is not None and labelled.filler and math.prod(labelled.shape) > 1 for labelled in given.values()
        )
        moves = _moves(self._follower, invocation)
        return Call(
            invocation.name,
            {place: names[place] or channels for place, channels in before.items()},
            deciding(invocation.numbers, dims) if moves else (),
            dims,
            () if moves else tuple(_thin(given, before)),
            history if loose else None,
            *places,
            {place: channels for place, channels in makes.items() if channels is not None},
            {place: after[place] for place in after if after[place] is not before[place]},
        )

    def channels(self, labelled: Labelled | None) -> Channels | None:
        """The same object for all tensors whose entries have the same gates."""
        if labelled is None or not labelled.labels:
            return None
        same = len(labelled.shape), *(id(label) for label in labelled.labels)
        if same not in self._found:
            self._found[same] = labelled, self._channels_of(labelled)  # which keeps its labels alive, and so their ids
        return self._found[same][1]

    def _channels_of(self, labelled: Labelled) -> Channels | None:
        sizes: dict[int, int] = {}
        entries = []
        for label in labelled.labels:
            units = self._units.unit[self._units.roots[label]]
            if bool((units == self._units.count).all()):
                continue
            masks = keep_masks(labelled, self._units.alive)
            for dim in varies(label):
                mask = masks[dim]
                units = units if mask is None else units.index_select(dim, mask.nonzero().squeeze(1))
                sizes[dim] = units.shape[dim]
            entries.append((tuple(units.shape), units.numpy().tobytes()))
        if not entries:
            return None
        return self._channels.setdefault((len(labelled.shape), *entries), Channels(len(labelled.shape), sizes))

    def _now(self, index: int | None) -> Channels | None:
        return None if index is None else self.channels(self._state[index])

    def _go_on(self, step: int) -> None:
        """To what is known before this step."""
        for followed in self._follower.trail[self._step : step]:
            self._state |= zip(followed.step.writes, followed.writes, strict=True)
        self._step = max(step, self._step)


def _moves(follower: Follower, invocation: Invocation) -> bool:
    """Whether the numbers that the call is given can decide where channels go. Sizes do not: they show in the result."""
    ops = [follower.graph.steps[step].op for step in invocation.steps]
    return not all(rule_for(op) in (elementwise, filler) or name_of(op) in (*RESHAPES, "expand") for op in ops)


def _thin(given: Mapping[int, Labelled | None], channels: Mapping[int, Channels | None]) -> Iterator[tuple[int, int]]:
    """(argument, dimension from the end) where an argument without gates is one entry for all channels of another."""
    dims = {dim - found.ndim for found in channels.values() if found is not None for dim in found.sizes}
    for place, labelled in given.items():
        if labelled is None or channels[place] is not None or labelled.filler:
            continue
        ndim = len(labelled.shape)
        yield from ((place, dim) for dim in dims if ndim < -dim or not labelled.solid(ndim + dim))

"""Gates: where the output of each neuron is read.

A gate γ_j multiplies the output of neuron j wherever it is read, so that γ_j = 1 is the network as it is and γ_j = 0 the
network without the neuron. Channels that are removed together share one gate: they are one *unit*. Gates sit on the inputs of
the products (and sums over channels) that read a channel, after its norm and activation.

A gate is placed on arguments of the torch functions that the network's own code calls in evaluation mode; `gated` multiplies
there (`gated_forward.py`). For networks that return their losses in training mode only, the calls are those of training mode
with norms and dropout in evaluation mode.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hgnp.pruning.coupling import FROZEN
from hgnp.pruning.gated_forward import (
    GatedCall,
    GatedChannels,
    GatedPath,
    GatePlacement,
    extend_history,
    gated_forward,
    select_relevant,
)
from hgnp.pruning.graph import FunctionCall, Graph, Inputs, OpCall
from hgnp.pruning.labels import LabelledTensor, keep_masks, varying_dims
from hgnp.pruning.propagation import LabelPropagation
from hgnp.pruning.rules import RESHAPES, elementwise, filler, op_name, rule_for
from hgnp.pruning.structure import PathError, Structure

T = TypeVar("T")
MAX_PATHS = 8


class LabelRoots:
    """Which roots labels have.

    Args:
        roots: Slot → its root; FROZEN for slots that stay.
        per_branch: Whether layers that are added together have separate gates.
    """

    def __init__(self, roots: Tensor, *, per_branch: bool) -> None:
        self.roots, self.per_branch = roots, per_branch
        # by id(label), with the label itself, which keeps its id from being reused
        self._sets: dict[int, tuple[Tensor, set[int]]] = {}
        self._numbers: dict[int, tuple[Tensor, int]] = {}
        self._by_roots: dict[tuple[tuple[int, ...], bytes], int] = {}

    def roots_in(self, label: Tensor) -> set[int]:
        if id(label) not in self._sets:  # many tensors of a forward pass have the same label
            self._sets[id(label)] = label, set(self.roots[label].flatten().tolist()) - {FROZEN}
        return self._sets[id(label)][1]

    def roots_of(self, tensor: LabelledTensor) -> set[int]:
        """Roots of the channels of a tensor; a weight has none that are read."""
        return set() if tensor.is_weight else {root for label in tensor.labels for root in self.roots_in(label)}

    def forget_sets(self) -> None:
        """Frees what `roots_in` has found: as Python numbers, it takes much memory."""
        self._sets.clear()

    def number(self, label: Tensor) -> int:
        """The same number for all labels of one shape with the same roots."""
        if id(label) not in self._numbers:
            key = tuple(label.shape), self.roots[label].numpy().tobytes()
            self._numbers[id(label)] = label, self._by_roots.setdefault(key, len(self._by_roots))
        return self._numbers[id(label)][1]


@dataclass(frozen=True)
class GateUnits:
    """Which of the remaining neurons share a gate."""

    roots: Tensor
    """Slot → its root; FROZEN for slots that stay."""
    unit: Tensor
    """Root → its unit; `count` for those without a gate."""
    alive: Tensor
    per_branch: bool

    @cached_property
    def count(self) -> int:
        return int(self.unit[FROZEN])


@dataclass
class Gates:
    count: int
    """The number of units."""
    layer_units: Mapping[str, Tensor]
    """Layer → the unit of each remaining neuron, or `count` for those that stay. Layers whose output is read where no gate can
    be placed are missing."""
    paths: list[GatedPath]
    """Paths through the network's code, the last one taken first."""
    structure: Structure
    units: GateUnits
    loss_needs_training_mode: bool = False
    """Whether the paths are those of training mode with norms and dropout in evaluation mode."""
    ungated: frozenset[int] = frozenset()
    """Roots of channels that are read where no gate can be placed."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> "Gates":
        paths = [path.to(device) for path in self.paths]
        return replace(self, paths=paths, device=device)

    def shared_units(self) -> Tensor:
        """The units that are read in a tensor that all samples share."""
        calls = [call for path in self.paths for gated_calls in path.calls.values() for call in gated_calls]
        found = [each.units.flatten() for call in calls for each in call.gated_arguments if each.shared]
        units = torch.cat([torch.zeros(0, dtype=torch.long, device=self.device), *found]).unique()
        return units[units < self.count]

    def run(self, inputs: Inputs, forward: Callable[[], T]) -> T:
        """Calls `forward`, a `gated` forward pass of these inputs, with the path that it takes. An unknown path is traced, and
        PathError is raised unless the coupling holds on it too."""
        for path in tuple(self.paths):
            self.paths.remove(path)
            self.paths.insert(0, path)
            try:
                return forward()
            except PathError:
                continue
        propagation = self.structure.propagate(inputs, loss_needs_training_mode=self.loss_needs_training_mode)
        now = (
            None
            if bool(self.units.alive.all())
            else self.structure.trace_now(inputs, loss_needs_training_mode=self.loss_needs_training_mode)
        )
        path, _, ungated = _find_path(propagation, self.units, now)
        lost = {int(self.units.unit[root]) for root in ungated} - {self.count}
        for name, units in self.layer_units.items():
            if lost & set(units.tolist()):
                raise PathError(name, "its output is read where no gate can be placed")
        self.paths.insert(0, path.to(self.device))
        del self.paths[MAX_PATHS:]
        return forward()


def gated(gates: Gates, gate_values: Tensor) -> AbstractContextManager[None]:
    """Inside the block, one forward pass multiplies every neuron by its gate.

    `gate_values` is (samples, units), or (1, units) for gates that all samples share."""
    return gated_forward(gates.structure.net, gates.paths[0], gate_values)


def find_gates(
    structure: Structure,
    layer_slots: Mapping[str, Tensor],
    alive: Tensor,
    *,
    per_branch: bool,
    loss_needs_training_mode: bool = False,
    now: Graph | None = None,
) -> Gates:
    """The gates of the neurons in `layer_slots`; with `per_branch`, layers that are added together have separate gates.
    With `loss_needs_training_mode`, gates are for training mode with norms and dropout in evaluation mode. `now` is the traced
    forward pass of the network as it is, if neurons were removed from it."""
    roots = torch.where(structure.frozen, FROZEN, structure.roots)
    remaining = {name: roots[slots[alive[slots]]] for name, slots in layer_slots.items()}
    has_gate = torch.zeros(len(roots), dtype=torch.bool)
    has_gate[torch.cat([torch.tensor([FROZEN]), *remaining.values()])] = True
    has_gate[FROZEN] = False
    wanted = has_gate.nonzero().flatten()
    unit = torch.full((len(roots),), len(wanted))
    unit[wanted] = torch.arange(len(wanted))
    units = GateUnits(roots, unit, alive, per_branch)
    propagation = (
        structure.propagate(structure.inputs, loss_needs_training_mode=True)
        if loss_needs_training_mode
        else structure.propagations[False]
    )
    path, gated, ungated = _find_path(propagation, units, now)
    gated[FROZEN] = True  # they need no gate
    usable = {
        name: unit[layer_roots]
        for name, layer_roots in remaining.items()
        if bool(gated[layer_roots].all()) and bool((layer_roots != FROZEN).any())
    }
    return Gates(len(wanted), usable, [path], structure, units, loss_needs_training_mode, frozenset(ungated))


def _find_path(
    propagation: LabelPropagation, units: GateUnits, now: Graph | None
) -> tuple[GatedPath, Tensor, set[int]]:
    """The path of a forward pass; for every root, whether it is gated wherever it is read on it; and those that are read where
    no call can be gated."""
    function_calls = _as_now(propagation.graph.function_calls, now)
    reads = _channel_reads(propagation, units)
    calls: dict[Any, list[GatedCall]] = defaultdict(list)
    builder, history = _CallBuilder(propagation, reads, units), 0
    for function_call, places in zip(function_calls, reads.places, strict=True):
        history = extend_history(history, function_call.module_call.module, function_call.name)
        gated_arguments, ungated_results = (tuple(place.with_units(units) for place in each) for each in places)
        call = builder.build(function_call, (gated_arguments, ungated_results), history)
        if call is not None:
            calls[function_call.module_call].append(call)
    path = GatedPath({key: tuple(gated) for key, gated in calls.items()}, builder.weights)
    return path, reads.gated.clone(), reads.ungated


@dataclass(frozen=True)
class GatePlace:
    """An argument or a result of a call that has gates, whichever neurons remain."""

    position: int
    """Its position among the leaves."""
    tensor: LabelledTensor
    roots: tuple[Tensor, ...]
    """Of every entry, by label; FROZEN for those without a gate."""
    in_place: bool = False

    def with_units(self, units: GateUnits) -> GatePlacement:
        """The unit of every remaining entry, as a tensor that broadcasts to the argument."""
        masks = keep_masks(self.tensor, units.alive)
        total: Tensor | None = None
        for roots in self.roots:
            for dim in varying_dims(roots):
                mask = masks[dim]
                if mask is not None:
                    roots = roots.index_select(dim, mask.nonzero().squeeze(1))
            mine = units.unit[roots]
            total = mine if total is None else torch.where(total == units.count, mine, total)
        assert total is not None
        return GatePlacement(self.position, total, self.in_place, self.tensor.shared)


@dataclass(frozen=True)
class ChannelReads:
    """Where the channels of neurons are read on a path: what does not depend on which of them remain."""

    labels: LabelRoots
    initial: list[LabelledTensor]
    """The labels of each value before the first operator call."""
    places: list[tuple[list[GatePlace], list[GatePlace]]]
    """For each function call, the arguments that are multiplied by gates, and the results that are divided by them."""
    gated: Tensor
    """For every root, whether it is gated wherever it is read."""
    ungated: set[int]
    """The roots that are read where no call can be gated."""


_READS: WeakKeyDictionary[LabelPropagation, ChannelReads] = WeakKeyDictionary()
"""The channel reads of each path, which a removal leaves as they are."""


def _channel_reads(propagation: LabelPropagation, units: GateUnits) -> ChannelReads:
    known = _READS.get(propagation)
    if known is None or known.labels.per_branch != units.per_branch or not torch.equal(known.labels.roots, units.roots):
        labels = LabelRoots(units.roots, per_branch=units.per_branch)
        reads, ungated = _gated_reads(propagation, labels)
        gated = torch.zeros(len(units.roots), dtype=torch.bool)
        gated[[root for arguments in reads.values() for roots in arguments.values() for root in roots]] = True
        gated[list(ungated)] = False
        known = _READS[propagation] = ChannelReads(
            labels,
            [propagation.initial(index) for index in range(len(propagation.graph.values))],
            [
                _places(propagation, function_call, reads.get(number, {}), labels)
                for number, function_call in enumerate(propagation.graph.function_calls)
            ],
            gated,
            ungated,
        )
        labels.forget_sets()
    return known


def _as_now(function_calls: list[FunctionCall], now: Graph | None) -> list[FunctionCall]:
    """The function calls with the sizes, split points and the like that the network passes as it is."""
    calls = [] if now is None else now.function_calls
    if [(call.name, call.module_call) for call in calls] != [(call.name, call.module_call) for call in function_calls]:
        return function_calls
    return [replace(was, non_tensors=call.non_tensors) for was, call in zip(function_calls, calls, strict=True)]


# Where channels end


def _gated_reads(propagation: LabelPropagation, labels: LabelRoots) -> tuple[dict[int, dict[int, set[int]]], set[int]]:
    """Function call → argument → the roots to gate there; and the roots that are read where no call can be gated."""
    reads: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    ungated: set[int] = set()
    function_calls = propagation.graph.function_calls
    caller = {op: number for number, function_call in enumerate(function_calls) for op in function_call.op_calls}
    for op, value, ending in _channel_ends(propagation, labels):
        reached: set[int] = set()
        if op in caller:
            function_call = function_calls[caller[op]]
            for argument in _source_arguments(propagation, function_call, op, value):
                roots = ending & labels.roots_of(_at_first_read(propagation, function_call, argument))
                if roots:
                    reads[caller[op]][argument] |= roots
                    reached |= roots
        ungated |= ending - reached
    return reads, ungated


def _channel_ends(propagation: LabelPropagation, labels: LabelRoots) -> list[tuple[int, int, set[int]]]:
    """(operator call, value, roots) wherever channels end. With `per_branch`, the operands of a sum of several branches end
    there too, and channels of the sum belong to none of them."""
    ends: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for op, value, label in propagation.consumed:
        ends[op].append((value, label))
    summed: dict[int, set[int]] = defaultdict(set)  # value → roots of which it holds a sum of branches
    result = []
    for op, labelled in enumerate(propagation.calls):
        own = {
            index: labels.roots_of(tensor) - summed[index]
            for index, tensor in zip(labelled.call.reads, labelled.reads, strict=True)
            if not tensor.is_weight
        }
        branches = {frozenset(roots) for index in own for roots in (own[index], summed[index]) if roots}
        joins = labels.per_branch and _adds(labelled.call) and len(branches) > 1
        if joins:
            result += [(op, index, roots) for index, roots in own.items() if roots]
        for value, label in ends[op]:
            roots = labels.roots_in(label) - summed[value]
            if roots:
                result.append((op, value, roots))
        inherited = set().union(*(summed[index] for index in labelled.call.reads))
        for index, tensor in zip(labelled.call.writes, labelled.writes, strict=True):
            roots = labels.roots_of(tensor)
            summed[index] = roots if joins else roots & inherited
    return result


def _adds(call: OpCall) -> bool:
    return len(call.reads) > 1 and op_name(call.op).removesuffix("_") in ("add", "sub")


def _source_arguments(propagation: LabelPropagation, function_call: FunctionCall, op: int, value: int) -> set[int]:
    """The arguments of the function call from which the value was computed."""
    sources = {value}
    for before in reversed(range(function_call.op_calls.start, op)):
        call = propagation.graph.op_calls[before]
        if sources & set(call.writes):
            sources |= set(call.reads)
    return sources & {index for index in function_call.arguments.values() if index is not None}


def _at_first_read(propagation: LabelPropagation, function_call: FunctionCall, value: int) -> LabelledTensor:
    """The labels of an argument when the function call first reads it."""
    calls = (propagation.calls[op] for op in function_call.op_calls)
    return next(labelled.reads[labelled.call.reads.index(value)] for labelled in calls if value in labelled.call.reads)


# Where gates are placed


def _places(
    propagation: LabelPropagation, function_call: FunctionCall, arguments: Mapping[int, set[int]], labels: LabelRoots
) -> tuple[list[GatePlace], list[GatePlace]]:
    """The arguments of a call that are multiplied by gates, and the results that are divided by them."""
    if not arguments:
        return [], []
    calls = [propagation.graph.op_calls[op] for op in function_call.op_calls]
    written = {index for call in calls for index in call.writes if index in call.reads}
    gated_arguments = [
        GatePlace(position, tensor, _roots_with_gates(tensor, arguments[index], labels), index in written)
        for position, index in function_call.arguments.items()
        if index is not None and index in arguments
        for tensor in [_at_first_read(propagation, function_call, index)]
    ]
    everything = set().union(*arguments.values())
    continued, ungated_results = _continued(propagation, function_call, set(arguments), labels), []
    for position, index in function_call.results.items():
        tensor = continued.get(index)
        shared = set() if tensor is None else everything & labels.roots_of(tensor)
        if tensor is not None and shared:
            ungated_results.append(GatePlace(position, tensor, _roots_with_gates(tensor, shared, labels)))
    return gated_arguments, ungated_results


def _continued(
    propagation: LabelPropagation, function_call: FunctionCall, arguments: set[int], labels: LabelRoots
) -> dict[int | None, LabelledTensor]:
    """Values computed from these arguments in which their channels continue rather than end."""
    ends = {(op, value) for op, value, _ in propagation.consumed}
    sources = set(arguments)
    result: dict[int | None, LabelledTensor] = {}
    for op in function_call.op_calls:
        labelled = propagation.calls[op]
        if labels.per_branch and _adds(labelled.call):  # where branches end
            continue
        if any(value in sources and (op, value) not in ends for value in labelled.call.reads):
            sources |= set(labelled.call.writes)
            result.update(zip(labelled.call.writes, labelled.writes, strict=True))
    return result


def _roots_with_gates(tensor: LabelledTensor, gated: set[int], labels: LabelRoots) -> tuple[Tensor, ...]:
    """The root of every entry, for each label that has some of these; FROZEN for others."""
    wanted = torch.tensor(sorted(gated))
    found = [labels.roots[label] for label in tensor.labels if gated & labels.roots_in(label)]
    return tuple(torch.where(torch.isin(roots, wanted), roots, FROZEN) for roots in found)


# What each call does to gated channels


class _CallBuilder:
    """Builds the gated calls of a path, in the order of the forward pass."""

    def __init__(self, propagation: LabelPropagation, reads: ChannelReads, units: GateUnits) -> None:
        self._propagation, self._labels, self._units = propagation, reads.labels, units
        self._tensors: dict[int, LabelledTensor] = dict(enumerate(reads.initial))
        self._next_op = 0
        self._channels: dict[Any, GatedChannels] = {}
        self._cache: dict[Any, GatedChannels | None] = {}
        weights = [(value.name, self._tensors[i]) for i, value in enumerate(propagation.graph.values) if value.name]
        self.weights = frozenset(name for name, tensor in weights if self._channels_of(tensor) is not None)

    def build(
        self,
        function_call: FunctionCall,
        placements: tuple[tuple[GatePlacement, ...], tuple[GatePlacement, ...]],
        history: int,
    ) -> GatedCall | None:
        """The gated call, if the function call processes gated channels."""
        self._advance(function_call.op_calls.start)
        given = {
            position: self._tensors[index] if index is not None else None
            for position, index in function_call.arguments.items()
        }
        for op in reversed(function_call.op_calls):
            labelled = self._propagation.calls[op]
            read = dict(zip(labelled.call.reads, labelled.reads, strict=True))
            given |= {position: read[index] for position, index in function_call.arguments.items() if index in read}
        self._advance(function_call.op_calls.stop)
        before = {position: self._channels_of(tensor) for position, tensor in given.items()}
        if not any(before.values()):
            return None
        after = {position: self._current(index) for position, index in function_call.arguments.items()}
        values = self._propagation.graph.values
        names = {
            position: None if index is None else values[index].name
            for position, index in function_call.arguments.items()
        }
        # a weight that the call returns as it is (`w.to(w.dtype)`) is still known by its name
        unchanged = {
            index
            for position, index in function_call.arguments.items()
            if names[position] and after[position] is before[position]
        }
        results = {
            position: self._current(index)
            for position, index in function_call.results.items()
            if index not in unchanged
        }
        first = before.get(min(before))
        dims = frozenset() if first is None else frozenset(first.sizes)
        has_filler = any(
            tensor is not None and tensor.filler and math.prod(tensor.shape) > 1 for tensor in given.values()
        )
        moves = _moves_channels(self._propagation, function_call)
        return GatedCall(
            function_call.name,
            {position: names[position] or channels for position, channels in before.items()},
            select_relevant(function_call.non_tensors, dims) if moves else (),
            dims,
            () if moves else tuple(_broadcast_dims(given, before)),
            history if has_filler else None,
            *placements,
            {position: channels for position, channels in results.items() if channels is not None},
            {position: after[position] for position in after if after[position] is not before[position]},
        )

    def _channels_of(self, tensor: LabelledTensor | None) -> GatedChannels | None:
        """One object for all tensors whose entries have the same gates; None without gates."""
        if tensor is None or not tensor.labels:
            return None
        key = len(tensor.shape), *map(self._labels.number, tensor.labels)
        if key not in self._cache:
            self._cache[key] = self._build_channels(tensor)
        return self._cache[key]

    def _build_channels(self, tensor: LabelledTensor) -> GatedChannels | None:
        sizes: dict[int, int] = {}
        entries = []
        for label in tensor.labels:
            units = self._units.unit[self._units.roots[label]]
            if bool((units == self._units.count).all()):
                continue
            masks = keep_masks(tensor, self._units.alive)
            for dim in varying_dims(label):
                mask = masks[dim]
                units = units if mask is None else units.index_select(dim, mask.nonzero().squeeze(1))
                sizes[dim] = units.shape[dim]
            entries.append((tuple(units.shape), units.numpy().tobytes()))
        if not entries:
            return None
        # the dimensions too: with one neuron left, a row of a weight and a channel of a feature have the same entries
        key = len(tensor.shape), *sizes.items(), *entries
        return self._channels.setdefault(key, GatedChannels(len(tensor.shape), sizes))

    def _current(self, index: int | None) -> GatedChannels | None:
        return None if index is None else self._channels_of(self._tensors[index])

    def _advance(self, op: int) -> None:
        """To the labels before this operator call."""
        for labelled in self._propagation.calls[self._next_op : op]:
            self._tensors |= zip(labelled.call.writes, labelled.writes, strict=True)
        self._next_op = max(op, self._next_op)


def _moves_channels(propagation: LabelPropagation, function_call: FunctionCall) -> bool:
    """Whether the non-tensor arguments can decide where channels move. Sizes cannot: they show in the result's shape."""
    ops = [propagation.graph.op_calls[op].op for op in function_call.op_calls]
    return not all(rule_for(op) in (elementwise, filler) or op_name(op) in (*RESHAPES, "expand") for op in ops)


def _broadcast_dims(
    given: Mapping[int, LabelledTensor | None], channels: Mapping[int, GatedChannels | None]
) -> Iterator[tuple[int, int]]:
    """(argument, dimension from the end) where an argument without gates is broadcast over the channels of another."""
    dims = {dim - gated.ndim for gated in channels.values() if gated is not None for dim in gated.sizes}
    for position, tensor in given.items():
        if tensor is None or channels[position] is not None or tensor.filler:
            continue
        ndim = len(tensor.shape)
        yield from ((position, dim) for dim in dims if ndim < -dim or not tensor.distinct(ndim + dim))

"""Where a neuron's output is read: the places of its gate.

A gate γ_j multiplies what everything after neuron j sees of it, so that γ_j = 1 is the network as it stands and γ_j = 0 the
network without the neuron. Channels that live and die together share one gate. It sits on the inputs of the products (and
sums over channels) that read them, which is behind norm and activation.

Places are arguments of the calls of torch functions that the network's own code makes in evaluation mode (`paths.py`); `gated`
multiplies there.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hgnp.pruning.coupling import FIXED
from hgnp.pruning.gated_calls import Handled, Units
from hgnp.pruning.graph import Inputs, Invocation, Step
from hgnp.pruning.labels import Labelled, varies
from hgnp.pruning.paths import Call, Path, Place, along, longer
from hgnp.pruning.propagation import Follower
from hgnp.pruning.rules import name_of
from hgnp.pruning.structure import PathError, Structure
from hgnp.pruning.verify import keep_masks

T = TypeVar("T")
MOST_PATHS = 8


@dataclass
class Gates:
    count: int
    """Units: neurons that share a gate are one."""
    rows: Mapping[str, Tensor]
    """Layer → the unit of each living neuron, or `count` for those that stay. Layers that are read where no gate can sit
    are missing."""
    paths: list[Path]
    """Through the network's code, the last one that was taken first."""
    structure: Structure
    units: Units
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> "Gates":
        paths = [path.to(device) for path in self.paths]
        return Gates(self.count, self.rows, paths, self.structure, self.units, device)

    def follow(self, inputs: Inputs, work: Callable[[], T]) -> T:
        """`work`, a `gated` forward of these inputs, along whichever path it takes. One that is not known is recorded, and
        refused unless all that is known of the neurons holds on it too."""
        for path in tuple(self.paths):
            self.paths.remove(path)
            self.paths.insert(0, path)
            try:
                return work()
            except PathError:
                continue
        path, _, lost = _path(self.structure.path(inputs), self.units)
        ungated = {int(self.units.unit[root]) for root in lost} - {self.count}
        for name, mine in self.rows.items():
            if ungated & set(mine.tolist()):
                raise PathError(name, "its output is read where no gate can sit")
        self.paths.insert(0, path.to(self.device))
        del self.paths[MOST_PATHS:]
        return work()


def gated(gates: Gates, gamma: Tensor) -> AbstractContextManager[None]:
    """Inside the block, one forward in evaluation mode reads every neuron through its gate.

    `gamma` is (samples, units), or (1, units) for gates that all samples share."""
    return along(gates.structure.net, gates.paths[0], gamma)


def find_gates(structure: Structure, rows: Mapping[str, Tensor], alive: Tensor, *, lanes: bool) -> Gates:
    """The gates of the neurons in `rows`; with `lanes`, layers that are added together have gates of their own."""
    roots = torch.where(structure.fixed, FIXED, structure.roots)
    living = {name: roots[slots[alive[slots]]] for name, slots in rows.items()}
    wanted = torch.unique(torch.cat([*living.values(), torch.tensor([FIXED])]))[1:]  # FIXED, the lowest, comes first
    unit = torch.full((len(roots),), len(wanted))
    unit[wanted] = torch.arange(len(wanted))
    units = Units(roots, unit, alive, lanes)
    path, seen, lost = _path(structure.followers[False], units)
    usable = {}
    for name, mine in living.items():
        own = set(mine.tolist()) - {FIXED}
        if own and own <= seen - lost:
            usable[name] = unit[mine]
    return Gates(len(wanted), usable, [path], structure, units)


def _path(follower: Follower, units: Units) -> tuple[Path, set[int], set[int]]:
    """The path that was followed; the roots that are gated on it, and those that are read where no call can be gated."""
    read, lost = _gated_reads(follower, units.roots, lanes=units.lanes)
    calls: dict[Any, list[Call]] = defaultdict(list)
    known, history = Handled(follower, units), 0
    for number, invocation in enumerate(follower.graph.invocations):
        history = longer(history, invocation.frame.module, invocation.name)
        found = known.call(invocation, _places(follower, invocation, read.get(number, {}), units), history)
        if found is not None:
            calls[invocation.frame].append(found)
    seen = {root for arguments in read.values() for found in arguments.values() for root in found}
    return Path({frame: tuple(made) for frame, made in calls.items()}, known.weights), seen, lost


def _places(
    follower: Follower, invocation: Invocation, arguments: Mapping[int, set[int]], units: Units
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where a call's arguments are gated, and where its results are no longer."""
    if not arguments:
        return (), ()
    steps = [follower.graph.steps[step] for step in invocation.steps]
    written = {index for step in steps for index in step.writes if index in step.reads}
    reads = [
        Place(position, _units(_as_read(follower, invocation, index), arguments[index], units), index in written)
        for position, index in invocation.tensors.items()
        if index is not None and index in arguments
    ]
    everything = set().union(*arguments.values())
    carried, passes = _carried(follower, invocation, set(arguments), lanes=units.lanes), []
    for position, index in invocation.results.items():
        made = carried.get(index)
        found = set() if made is None else everything & _roots(made, units.roots)
        if made is not None and found:
            passes.append(Place(position, _units(made, found, units)))
    return tuple(reads), tuple(passes)


def _gated_reads(follower: Follower, roots: Tensor, *, lanes: bool) -> tuple[dict[int, dict[int, set[int]]], set[int]]:
    """Call → argument → the roots that are to be gated there; and the roots that are read where no call can be gated."""
    read: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    lost: set[int] = set()
    invocations = follower.graph.invocations
    caller = {step: call for call, invocation in enumerate(invocations) for step in invocation.steps}
    for step, value, found in _reads(follower, roots, lanes=lanes):
        reached: set[int] = set()
        if step in caller:
            invocation = invocations[caller[step]]
            for argument in _given(follower, invocation, step, value):
                carried = found & _roots(_as_read(follower, invocation, argument), roots)
                if carried:
                    read[caller[step]][argument] |= carried
                    reached |= carried
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
    return made_from & {index for index in invocation.tensors.values() if index is not None}


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


def _units(labelled: Labelled, found: set[int], units: Units) -> Tensor:
    """The unit of every living entry, as a tensor that broadcasts to the argument."""
    masks = keep_masks(labelled, units.alive)
    total: Tensor | None = None
    for label in labelled.labels:
        if not found & _slots(label, units.roots):
            continue
        for dim in varies(label):
            mask = masks[dim]
            if mask is not None:
                label = label.index_select(dim, mask.nonzero().squeeze(1))
        mine = units.roots[label]
        mine = torch.where(torch.isin(mine, torch.tensor(sorted(found))), units.unit[mine], units.count)
        total = mine if total is None else torch.where(total == units.count, mine, total)
    assert total is not None
    return total

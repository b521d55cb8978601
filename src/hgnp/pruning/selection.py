"""Selection: the least important neurons, within the limits that a user sets.

With `round_to` every layer L that loses neurons ends at a width that is a multiple of its m_L. Units are then removed in
*rounded groups*. The units that take the same number of neurons from the same layers have one *footprint*: x of them take x·k_L
neurons from layer L. With widths w_L the first rounded group makes every w_L − Σ x·k_L ≡ 0 (mod m_L); each later one takes the
least number s of units of one footprint with s·k_L ≡ 0 (mod m_L), and so leaves multiples again. Footprints that share a layer
have their first rounded group together.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hgnp.errors import InputError, InputTypeError
from hgnp.pruning.limits import limit_by_layer
from hgnp.state_guards import garbage_collection_off

Scores = Mapping[str, Tensor]
"""Layer → one number per remaining neuron."""
Values = Mapping[str, list[float]]
"""Validated scores as Python numbers."""
CouplingMode = Literal["coupled", "paper"]
Footprint = tuple[tuple[str, int], ...]
"""(layer, how many of its neurons a unit has)"""


class Selection(dict[str, list[int]]):
    """Layer → positions of neurons, counted among the remaining ones; valid until the next removal.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> neurons = hgnp.Neurons(net, torch.zeros(1, 4))
    >>> selection = neurons.least({"0": torch.tensor([0.3, 0.1, 0.2])}, 5)
    >>> selection["0"], selection.taken, selection.requested
    ([1, 2], 2, 5)
    >>> selection
    Selection(2 of 5 requested neurons; 0: 2)

    Attributes:
        requested: How many neurons were requested; `taken` may be fewer.
        version: The version of the `Neurons` that the positions refer to.
        coupling: "coupled" or "paper", as in `Neurons.least`.
        problem: If nothing is selected although neurons remain, why: what the network's code does with fewer of them, or that
            no layer has scores; else None.
    """

    def __init__(
        self,
        positions: Mapping[str, Sequence[int]],
        *,
        requested: int,
        version: int,
        coupling: CouplingMode,
        problem: str | None = None,
    ) -> None:
        super().__init__({layer: sorted(chosen) for layer, chosen in positions.items() if len(chosen)})
        self.requested = requested
        self.version = version
        self.coupling = coupling
        self.problem = problem

    @property
    def taken(self) -> int:
        """How many neurons are selected, over all layers; each member of a coupled group counts."""
        return sum(len(positions) for positions in self.values())

    def __repr__(self) -> str:
        requested = f" of {self.requested} requested" if self.taken < self.requested else ""
        layers = ", ".join(f"{layer}: {len(positions)}" for layer, positions in self.items())
        return f"Selection({self.taken}{requested} neurons{''.join(f'; {more}' for more in (layers, self.problem) if more)})"


class Unit(NamedTuple):  # a dataclass would take several times as long to create, and there are thousands
    """Neurons that are removed together."""

    members: tuple[tuple[str, int], ...]
    """(layer, position)"""
    after: "Unit | None" = None
    """The unit that must be removed before this one."""

    def importance(self, scores: Values) -> float:
        """The mean over the members: the cost per neuron removed."""
        if len(self.members) == 1:
            layer, position = self.members[0]
            return scores[layer][position]
        return sum(scores[layer][position] for layer, position in self.members) / len(self.members)


class Units:
    """All units of a network, as one entry per neuron; a `Unit` is built where it is asked for. Their order is that of their
    first neurons, by layer and position.

    Args:
        layers: The names of the layers.
        layer, position, root: Of each neuron, in the order of layers and positions: the number of its layer, its position there
            and the root that it shares with the neurons of its unit, each of shape (neurons,).
    """

    def __init__(self, layers: Sequence[str], layer: Tensor, position: Tensor, root: Tensor) -> None:
        self._layers, self._layer, self._position = layers, layer, position
        roots, of_neuron, sizes = root.unique(return_inverse=True, return_counts=True)
        first = torch.full_like(roots, len(root)).scatter_reduce_(0, of_neuron, torch.arange(len(root)), "amin")
        order = first.argsort()
        self._roots, self._sizes = roots[order], sizes[order]
        self._of_neuron = order.argsort()[of_neuron]
        by_unit = self._of_neuron.argsort(stable=True)
        self._members = layer[by_unit].tolist(), position[by_unit].tolist()
        self._ends = [0, *self._sizes.cumsum(0).tolist()]

    @cached_property
    def _number(self) -> dict[int, int]:
        """Root → the number of its unit."""
        return {root: number for number, root in enumerate(self._roots.tolist())}

    def __contains__(self, root: int) -> bool:
        return root in self._number

    def unit(self, root: int) -> Unit:
        return self._build(self._number[root])

    def listed(self, scores: Values, left_out: Collection[int] = ()) -> list[Unit]:
        """The units whose layers all have scores, without those of some roots."""
        with garbage_collection_off():  # of thousands of objects, all of which stay: it would take most of the time
            return [self._build(number) for number in self._selectable(scores, left_out).nonzero().flatten().tolist()]

    def ranked(self, scores: Values, left_out: Collection[int] = ()) -> Iterator[Unit]:
        """The same units, the least important first."""
        selectable = self._selectable(scores, left_out).nonzero().flatten()
        columns = [torch.tensor(scores.get(name, ()), dtype=torch.float64) for name in self._layers]
        starts = torch.tensor([0, *map(len, columns)]).cumsum(0)[:-1]
        scored = self._scored(scores)[self._layer]
        own = torch.cat([torch.zeros(0, dtype=torch.float64), *columns])[(starts[self._layer] + self._position)[scored]]
        total = torch.zeros(len(self._roots), dtype=torch.float64).index_add_(0, self._of_neuron[scored], own)
        importance = (total / self._sizes)[selectable]
        return map(self._build, selectable[importance.argsort(stable=True)].tolist())

    def _scored(self, scores: Values) -> Tensor:
        return torch.tensor([name in scores for name in self._layers], dtype=torch.bool)

    def _selectable(self, scores: Values, left_out: Collection[int]) -> Tensor:
        found = torch.ones(len(self._roots), dtype=torch.bool)
        found[self._of_neuron[~self._scored(scores)[self._layer]]] = False
        found[[self._number[root] for root in left_out]] = False
        return found

    def _build(self, number: int) -> Unit:
        mine = slice(self._ends[number], self._ends[number + 1])
        layers, positions = (column[mine] for column in self._members)
        return Unit(tuple((self._layers[layer], position) for layer, position in zip(layers, positions, strict=True)))


def ranked(units: Iterable[Unit], scores: Values) -> list[Unit]:
    """The least important first."""
    return sorted(units, key=lambda unit: unit.importance(scores))


def least_coupled(ranking: Iterable[Unit], n: int, room: Mapping[str, int]) -> list[Unit]:
    """Units in the order given, while they fit into n neurons and into `room` (layer → how many neurons may be removed)."""
    left, chosen, removed = dict(room), [], {id(None)}
    for unit in ranking if n else ():
        if len(unit.members) > n or id(unit.after) not in removed:
            continue
        sizes = Counter(layer for layer, _ in unit.members)
        if all(size <= left[layer] for layer, size in sizes.items()):
            chosen.append(unit)
            removed.add(id(unit))
            n -= len(unit.members)
            for layer, size in sizes.items():
                left[layer] -= size
            if n == 0:
                break
    return chosen


def room_of(alive: Mapping[str, int], floors: Mapping[str, int]) -> dict[str, int]:
    """How many neurons of each layer may be removed."""
    return {name: max(count - floors[name], 0) for name, count in alive.items()}


def coupling_of(selection: Mapping[str, Sequence[int]]) -> CouplingMode:
    """A selection's coupling; a plain dict is coupled."""
    return getattr(selection, "coupling", "coupled")


# Widths in multiples


def is_rounded(multiples: Mapping[str, int]) -> bool:
    """Whether a width must be a multiple of more than 1."""
    return any(multiple > 1 for multiple in multiples.values())


def rounded_groups(
    units: Iterable[Unit], scores: Values, widths: Mapping[str, int], multiples: Mapping[str, int]
) -> list[Unit]:
    """Rounded groups, the least important first; those of one footprint in its own order. With multiples of 1, the units.
    `multiples`: layer → the number that its width must be a multiple of."""
    ranking = ranked(units, scores)
    if not is_rounded(multiples):
        return ranking
    by_footprint: dict[Footprint, list[Unit]] = defaultdict(list)
    for unit in ranking:
        by_footprint[tuple(sorted(Counter(layer for layer, _ in unit.members).items()))].append(unit)
    groups: list[tuple[float, Unit]] = []

    def add(members: Sequence[Unit], after: tuple[float, Unit | None]) -> tuple[float, Unit]:
        group = Unit(tuple(member for unit in members for member in unit.members), after[1])
        groups.append((max(group.importance(scores), after[0]), group))
        return groups[-1]

    for sharing in _sharing_layers(by_footprint):
        counts = _counts_to_multiples(sharing, widths, multiples)
        if counts is None or any(len(by_footprint[footprint]) < count for footprint, count in counts.items()):
            continue
        first = [unit for footprint, count in counts.items() for unit in by_footprint[footprint][:count]]
        start = add(first, (-math.inf, None)) if first else (-math.inf, None)
        for footprint, count in counts.items():
            step = math.lcm(*(multiples[layer] // math.gcd(multiples[layer], size) for layer, size in footprint))
            last, mine = start, by_footprint[footprint]
            for index in range(count, len(mine) - step + 1, step):
                last = add(mine[index : index + step], last)
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def _sharing_layers(footprints: Iterable[Footprint]) -> list[list[Footprint]]:
    """Footprints in lists that have no layer in common; in each, those with most layers first."""
    lists: list[list[Footprint]] = []
    for footprint in footprints:
        layers = {layer for layer, _ in footprint}
        mine = [other for other in lists if any(layer in layers for each in other for layer, _ in each)]
        lists = [other for other in lists if other not in mine]
        lists.append([*(each for other in mine for each in other), footprint])
    return [sorted(each, key=len, reverse=True) for each in lists]


def _counts_to_multiples(
    sharing: Sequence[Footprint], widths: Mapping[str, int], multiples: Mapping[str, int]
) -> dict[Footprint, int] | None:
    """How many units of each footprint the first rounded group has. The last footprint with a layer rounds that layer."""
    left = {layer: widths[layer] for footprint in sharing for layer, _ in footprint}
    last = {layer: footprint for footprint in sharing for layer, _ in footprint}
    counts = {}
    for footprint in sharing:
        rounds = [(layer, size) for layer, size in footprint if last[layer] == footprint]
        period = math.lcm(*(multiples[layer] for layer, _ in rounds))
        fits = (
            x for x in range(period) if all((left[layer] - x * size) % multiples[layer] == 0 for layer, size in rounds)
        )
        if (count := next(fits, None)) is None:
            return None
        counts[footprint] = count
        for layer, size in footprint:
            left[layer] -= count * size
    return counts


# Validation


def check_coupling(coupling: object) -> None:
    if coupling not in get_args(CouplingMode):
        raise InputError(f"coupling must be 'coupled' or 'paper', got {coupling!r}")


def as_values(scores: Scores, alive: Mapping[str, int]) -> dict[str, list[float]]:
    """Validated scores, as Python numbers."""
    if not isinstance(scores, Mapping):
        raise InputTypeError(f"scores must map layer names to one number per neuron, got {type(scores).__name__}")
    result = {}
    for layer, values in scores.items():
        _check_prunable("scores", layer, alive)
        values = torch.as_tensor(values).detach()
        if values.shape != (alive[layer],):
            raise InputError(
                f"scores[{layer!r}] must have shape ({alive[layer]},), one per remaining neuron, got {tuple(values.shape)}"
            )
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"scores[{layer!r}] must be finite, got NaN or infinite values")
        result[layer] = values.tolist()
    return result


def as_count(n: int) -> int:
    """The number of neurons to select, validated."""
    if isinstance(n, bool) or not hasattr(n, "__index__") or operator.index(n) < 0:
        raise InputError(f"n must be an integer ≥ 0, got {n!r}")
    return operator.index(n)


def as_positions(layer: str, positions: Sequence[int] | Tensor, alive: int) -> Tensor:
    """Positions in a layer with `alive` remaining neurons, validated."""
    given = f"{positions.dtype} of shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else repr(positions)
    try:
        chosen = torch.as_tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"selection[{layer!r}] must be a list of integers, got {given}") from None
    if chosen.dim() != 1 or (len(chosen) and (chosen.is_floating_point() or chosen.dtype == torch.bool)):
        raise InputError(f"selection[{layer!r}] must be a list of integers, got {given}")
    chosen = chosen.long().cpu()
    wrong = chosen[(chosen < 0) | (chosen >= alive)]
    if len(wrong):
        raise InputError(f"selection[{layer!r}] must hold positions from 0 to {alive - 1}, got {int(wrong[0])}")
    return chosen


def floors_of(
    floor: int | Mapping[str, int], max_removed: float | Mapping[str, float], totals: Mapping[str, int]
) -> dict[str, int]:
    """How many neurons each layer keeps, validated: `floor`, and all but the fraction `max_removed` of its original number."""
    floors, shares = limit_by_layer("floor", floor, totals), limit_by_layer("max_removed", max_removed, totals)
    return {name: max(floors[name], total - int(shares[name] * total + 1e-9)) for name, total in totals.items()}


def _check_prunable(argument: str, layer: str, alive: Mapping[str, int]) -> None:
    if layer not in alive:
        raise InputError(
            f"{argument} must name layers with prunable neurons, got {layer!r}; those layers are {', '.join(alive) or 'none'}"
        )

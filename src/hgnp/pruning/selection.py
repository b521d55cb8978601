"""Which neurons are the least important, and what a user may say about that."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hgnp.errors import InputError, InputTypeError

Scores = Mapping[str, Tensor]
"""Layer → one number a living neuron."""
Values = Mapping[str, list[float]]
"""The same, checked, as Python numbers."""
Coupling = Literal["coupled", "paper"]


class Selection(dict[str, list[int]]):
    """Layer → positions of neurons, as they are now; valid until the next removal."""

    def __init__(
        self, positions: Mapping[str, Sequence[int]], *, requested: int, version: int, coupling: Coupling
    ) -> None:
        super().__init__({layer: sorted(chosen) for layer, chosen in positions.items() if len(chosen)})
        self.requested = requested
        """How many neurons were asked for."""
        self.version = version
        self.coupling = coupling

    @property
    def taken(self) -> int:
        """How many neurons these are: those of single layers, coupled ones each for itself."""
        return sum(len(positions) for positions in self.values())

    def __repr__(self) -> str:
        short = f" of {self.requested} asked for" if self.taken < self.requested else ""
        layers = ", ".join(f"{layer}: {len(positions)}" for layer, positions in self.items())
        return f"Selection({self.taken} neurons{short}{'; ' + layers if layers else ''})"


@dataclass(frozen=True)
class Unit:
    """Neurons that live and die together."""

    members: tuple[tuple[str, int], ...]
    """(layer, position now)"""
    after: "Unit | None" = None
    """What must have gone before it may go."""

    def importance(self, scores: Values) -> float:
        """The mean over the members: what a unit costs for each neuron it frees."""
        return sum(scores[layer][position] for layer, position in self.members) / len(self.members)


def ranked(units: Iterable[Unit], scores: Values) -> list[Unit]:
    """The least important first."""
    return sorted(units, key=lambda unit: unit.importance(scores))


def least_coupled(ranking: Sequence[Unit], n: int, room: Mapping[str, int]) -> list[Unit]:
    """Units in the order given, as long as no more than n neurons go and `room` (layer → how many may go) is left."""
    left, chosen, gone = dict(room), [], {id(None)}
    for unit in ranking:
        if len(unit.members) > n or id(unit.after) not in gone:
            continue
        sizes = Counter(layer for layer, _ in unit.members)
        if all(size <= left[layer] for layer, size in sizes.items()):
            chosen.append(unit)
            gone.add(id(unit))
            n -= len(unit.members)
            for layer, size in sizes.items():
                left[layer] -= size
            if n == 0:
                break
    return chosen


def scored(units: Iterable[Unit], scores: Values) -> list[Unit]:
    """The units whose layers all have scores."""
    return [unit for unit in units if all(layer in scores for layer, _ in unit.members)]


def room_of(alive: Mapping[str, int], floors: Mapping[str, int]) -> dict[str, int]:
    """How many neurons of each layer may go."""
    return {name: max(count - floors[name], 0) for name, count in alive.items()}


def coupling_of(selection: Mapping[str, Sequence[int]]) -> Coupling:
    """A selection's coupling; a plain dict is coupled."""
    return getattr(selection, "coupling", "coupled")


def as_lists(scores: Scores, alive: Mapping[str, int]) -> dict[str, list[float]]:
    """Checked scores, as Python numbers."""
    if not isinstance(scores, Mapping):
        raise InputTypeError(f"scores must map layer names to one number a neuron, not {type(scores).__name__}")
    result = {}
    for layer, values in scores.items():
        if layer not in alive:
            raise InputError(f"scores: {layer!r} has no prunable neurons; those that do: {', '.join(alive) or 'none'}")
        values = torch.as_tensor(values).detach()
        if values.shape != (alive[layer],):
            raise InputError(
                f"scores[{layer!r}] has shape {tuple(values.shape)}; {alive[layer]} living neurons want ({alive[layer]},)"
            )
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"scores[{layer!r}] has values that are not finite")
        result[layer] = values.tolist()
    return result


def as_count(n: int) -> int:
    """How many neurons to take, checked."""
    if isinstance(n, bool) or not hasattr(n, "__index__") or operator.index(n) < 0:
        raise InputError(f"n must be a whole number of neurons, 0 or more, not {n!r}")
    return operator.index(n)


def as_round_to(round_to: int) -> int:
    """What widths are to be multiples of, checked."""
    if isinstance(round_to, bool) or not hasattr(round_to, "__index__") or operator.index(round_to) < 1:
        raise InputError(f"round_to must be a whole number ≥ 1, such as 8, got {round_to!r}")
    return operator.index(round_to)


def as_positions(layer: str, positions: Sequence[int], alive: int) -> Tensor:
    """Checked positions of a layer with so many living neurons."""
    try:
        chosen = torch.as_tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{layer}: positions must be a list of whole numbers, not {positions!r}") from None
    if chosen.dim() != 1 or (len(chosen) and (chosen.is_floating_point() or chosen.dtype == torch.bool)):
        raise InputError(f"{layer}: positions must be a list of whole numbers, not {positions!r}")
    chosen = chosen.long().cpu()
    wrong = chosen[(chosen < 0) | (chosen >= alive)]
    if len(wrong):
        raise InputError(f"{layer}: no neuron {int(wrong[0])}; it has {alive} living ones, 0 to {alive - 1}")
    return chosen


def floors_of(
    floor: int | Mapping[str, int], max_removed: float, alive: Mapping[str, int], totals: Mapping[str, int]
) -> dict[str, int]:
    """How many neurons each layer keeps, checked: `floor`, and all but the share `max_removed` of its total at the start."""
    if isinstance(max_removed, bool) or not isinstance(max_removed, int | float) or not 0 <= max_removed <= 1:
        raise InputError(f"max_removed must be a share between 0 and 1, got {max_removed!r}")
    for name in floor if isinstance(floor, Mapping) else ():
        if name not in alive:
            raise InputError(f"floor: {name!r} has no prunable neurons; those that do: {', '.join(alive) or 'none'}")
    floors = {name: floor.get(name, 1) if isinstance(floor, Mapping) else floor for name in alive}
    for name, least in floors.items():
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise InputError(f"floor must be at least 1, a whole number: no layer is emptied; got {least!r} for {name}")
    return {name: max(least, totals[name] - int(max_removed * totals[name] + 1e-9)) for name, least in floors.items()}

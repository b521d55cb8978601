"""The neurons that are alive: which of them may go, where each stands now, and who is left after a removal."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hgnp.errors import InputError, meant
from hgnp.pruning.selection import Unit, as_positions
from hgnp.pruning.structure import Structure
from hgnp.pruning.widths import Shape


@dataclass(frozen=True)
class Living:
    structure: Structure
    rows: Mapping[str, Tensor]
    """Layer → the slots of its neurons."""
    alive: Tensor
    """For every slot, whether it is."""

    def of(self, layer: str) -> Tensor:
        """The slots of a layer's living neurons: a neuron's position is its place in here."""
        return self.rows[layer][self.alive[self.rows[layer]]]

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor."""
        return self.structure.shapes | self.structure.shapes_after(self.alive)

    @cached_property
    def count(self) -> int:
        """Neurons that may go."""
        return sum(int((~self.structure.fixed[self.of(layer)]).sum()) for layer in self.rows)

    @cached_property
    def units(self) -> dict[int, Unit]:
        """Neurons that may go, by what they hang on."""
        members: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for layer in self.rows:
            living = self.of(layer)
            free = ~self.structure.fixed[living]
            positions, roots = free.nonzero().squeeze(1).tolist(), self.structure.roots[living[free]].tolist()
            for position, root in zip(positions, roots, strict=True):
                members[root].append((layer, position))
        return {root: Unit(tuple(unit)) for root, unit in members.items()}

    def without(self, selection: Mapping[str, Sequence[int]], roots: Tensor) -> "Living":
        """Who is left once the selection, and what hangs on it by `roots`, is gone. Names what is wrong with it."""
        if not isinstance(selection, Mapping):
            raise InputError(f"selection: {selection!r} was given; a dict such as {{'layer': [0, 1]}} would do")
        structure = self.structure
        dead = torch.zeros(len(roots), dtype=torch.bool)
        for layer, positions in selection.items():
            if layer not in self.rows:
                raise InputError(f"selection: no layer {layer!r} with neurons{meant(layer, self.rows)}")
            living = self.of(layer)
            slots = living[as_positions(layer, positions, len(living))]
            frozen = slots[structure.fixed[slots]]
            if len(frozen):
                raise InputError(f"{layer}: neurons cannot be removed: {structure.ties.reason(int(frozen[0]))}")
            dead[roots[slots]] = True
        left = Living(structure, self.rows, self.alive & ~dead[roots])
        for layer in selection:
            if not len(left.of(layer)):
                raise InputError(f"{layer}: the selection would leave it without neurons")
        for (name, _), slots in structure.ties.slots.items():
            if not bool(left.alive[slots].any()):
                raise InputError(f"{name}: the selection, with what hangs on it, would leave nothing of it")
        return left

    def gone(self, left: "Living") -> dict[str, list[int]]:
        """Layer → the positions, as they are now, of those that are not left."""
        return {layer: (~left.alive[self.of(layer)]).nonzero().squeeze(1).tolist() for layer in self.rows}

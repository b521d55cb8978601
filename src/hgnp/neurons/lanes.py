"""The paper's treatment of layers that are added together.

The paper takes the same *number* of neurons from each layer of such a group, at places of each layer's own choosing, so
that after the removal other channels are added than before. Here a *lane* is one such layer with what belongs to it alone
(its norm), and the columns of a consumer go with the lane that enters the sum first. Layers coupled in any other way stay
coupled neuron by neuron.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from hgnp.neurons.selection import Unit
from hgnp.neurons.structure import Structure


class Lanes:
    def __init__(self, seen: Structure, *, approximate: bool) -> None:
        self.structure = Structure(seen.net, seen.inputs, approximate=approximate, lanes=True, seen=seen.recorded)

    def families(self, units: Sequence[Unit], rows: Mapping[str, Tensor], alive: Tensor) -> list[list[list[Unit]]]:
        """Families of lanes of units, made by splitting coupled units where they are only added together."""
        living = {name: self.structure.roots[slots[alive[slots]]].tolist() for name, slots in rows.items()}
        families: dict[tuple[tuple[str, ...], ...], list[list[Unit]]] = {}
        for unit in units:
            parts: dict[int, list[tuple[str, int]]] = defaultdict(list)
            for layer, position in unit.members:
                parts[living[layer][position]].append((layer, position))
            lanes = sorted(parts.values())
            names = [tuple(layer for layer, _ in lane) for lane in lanes]
            if len(set(names)) < len(names):  # one layer in several places of the sum
                lanes, names = [list(unit.members)], [tuple(layer for layer, _ in unit.members)]
            family = families.setdefault(tuple(names), [[] for _ in names])
            for lane, members in zip(family, lanes, strict=True):
                lane.append(Unit(tuple(members)))
        return list(families.values())

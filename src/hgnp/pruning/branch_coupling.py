"""Per-branch coupling: the paper's treatment of layers that are added together.

The paper removes the same *number* of neurons from each of these layers, at positions chosen layer by layer, so that
different channels are added after the removal. A *branch* is one such layer with everything that belongs to it alone (its
norm); the columns of a consumer follow the branch that enters the sum first. Layers coupled in any other way stay coupled
neuron by neuron.

A *branch group* holds the branches of layers that are added together; a layer that is added to nothing is a group of one
branch. *Tier* r of a group is the r-th least important unit of each of its branches: a group loses whole tiers.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from hgnp.pruning.selection import Unit, Values, least_coupled, ranked
from hgnp.pruning.structure import Structure
from hgnp.pruning.verify import CutVerifier

BranchGroup = Sequence[Sequence[Unit]]
"""The units of each branch."""


class BranchCoupling:
    """The structure of a network with additions left uncoupled."""

    def __init__(self, coupled: Structure, *, approximate: bool) -> None:
        self.structure = Structure(
            coupled.net,
            coupled.inputs,
            coupled.specs,
            approximate=approximate,
            per_branch=True,
            without_heads=coupled.without_heads,
            outputs=coupled.outputs,
            traced=coupled.traced,
            caches=coupled.caches,
        )
        self.structure.unite(coupled.equal_widths)
        self.structure.attributes = coupled.attributes
        self.verifier = CutVerifier(self.structure, aligned=False)

    def branch_groups(
        self, units: Sequence[Unit], layer_slots: Mapping[str, Tensor], alive: Tensor
    ) -> list[list[list[Unit]]]:
        """The branch groups of coupled units, which are split where their layers are only added together."""
        roots = {name: self.structure.roots[slots[alive[slots]]].tolist() for name, slots in layer_slots.items()}
        groups: dict[tuple[tuple[str, ...], ...], list[list[Unit]]] = {}
        for unit in units:
            parts: dict[int, list[tuple[str, int]]] = defaultdict(list)
            for layer, position in unit.members:
                parts[roots[layer][position]].append((layer, position))
            branches = sorted(parts.values())
            names = [tuple(layer for layer, _ in branch) for branch in branches]
            if len(set(names)) < len(names):  # one layer at several positions of the sum
                branches, names = [list(unit.members)], [tuple(layer for layer, _ in unit.members)]
            group = groups.setdefault(tuple(names), [[] for _ in names])
            for branch, members in zip(group, branches, strict=True):
                branch.append(Unit(tuple(members)))
        return list(groups.values())


def tiers_of(branches: BranchGroup, scores: Values) -> list[Unit]:
    """The tiers of a branch group, the least important first."""
    return [
        Unit(tuple(member for unit in tier for member in unit.members))
        for tier in zip(*(ranked(branch, scores) for branch in branches), strict=True)
    ]


@dataclass(frozen=True)
class _Allocation:
    """How many of its tiers a branch group loses."""

    tiers: Sequence[Unit]
    quota: Fraction
    """The mean over the branches of their units among the n least important ones."""
    count: int = 0

    @property
    def size(self) -> int:
        """Neurons of one tier: the same in all of them."""
        return len(self.tiers[0].members)

    @property
    def layers(self) -> Counter[str]:
        return Counter(layer for layer, _ in self.tiers[0].members)


def least_paper(groups: Sequence[BranchGroup], scores: Values, n: int, room: Mapping[str, int]) -> list[Unit]:
    """The units to remove under the paper's coupling: each branch of a group loses the same number of units.

    A group's quota is the mean over its branches of their units among the n least important ones of the network. Quotas are
    rounded by largest remainders, so that n neurons are removed: first the tiers that are whole in the quotas, then by
    remainder, then those of single layers, then the others, while they fit into n and into `room` (layer → how many neurons
    may be removed). If fewer than n are chosen, tiers are exchanged between groups. No allocation comes closer to n without
    exceeding it, provided that groups share no layer.
    """
    everything = ranked([unit for branches in groups for branch in branches for unit in branch], scores)
    least = {id(unit) for unit in least_coupled(everything, n, room)}
    allocations, order = [], []
    for number, branches in enumerate(groups):
        quota = Fraction(sum(id(unit) in least for branch in branches for unit in branch), len(branches))
        allocations.append(_Allocation(tiers_of(branches, scores), quota))
        for index, tier in enumerate(allocations[-1].tiers):
            covered = min(max(quota - index, Fraction(0)), Fraction(1))
            order.append(((-covered, len(branches) > 1, tier.importance(scores)), number, tier))
    order.sort(key=lambda entry: entry[0])
    group_of = {id(tier): number for _, number, tier in order}
    taken = Counter(group_of[id(tier)] for tier in least_coupled([tier for *_, tier in order], n, room))
    allocations = [replace(allocation, count=taken[number]) for number, allocation in enumerate(allocations)]
    rest = n - sum(allocation.count * allocation.size for allocation in allocations)
    return [tier for final in _reallocate(allocations, rest, room) for tier in final.tiers[: final.count]]


def _reallocate(allocations: Sequence[_Allocation], rest: int, room: Mapping[str, int]) -> list[_Allocation]:
    """Counts that take as many of the `rest` more neurons as possible, with the least deviation from the quotas.

    Groups that share a layer with another keep their counts. Every group with room has tiers larger than the rest, so the
    rest is below the largest size W, and 2W changes by one tier are enough: ordered so that partial sums stay within
    (−W, W], more of them would repeat a partial sum, and the changes between the two could be left out.
    """
    users = Counter(layer for allocation in allocations for layer in allocation.layers)
    free = [
        number for number, allocation in enumerate(allocations) if all(users[layer] == 1 for layer in allocation.layers)
    ]
    most = {
        number: min(
            len(allocations[number].tiers), *(room[layer] // k for layer, k in allocations[number].layers.items())
        )
        for number in free
    }
    if not rest or all(allocations[number].count == most[number] for number in free):
        return list(allocations)
    reach = 2 * max(allocations[number].size for number in free)
    best: dict[int, tuple[Fraction, dict[int, int]]] = {0: (Fraction(0), {})}  # more neurons → deviation, counts
    for number in free:
        allocation = allocations[number]
        found: dict[int, tuple[Fraction, dict[int, int]]] = {}
        for count in range(max(allocation.count - reach, 0), min(allocation.count + reach, most[number]) + 1):
            away = allocation.size * abs(count - allocation.quota)
            more = allocation.size * (count - allocation.count)
            for before, (deviation, counts) in best.items():
                total, worse = before + more, deviation + away
                if abs(total) <= reach * reach and (total not in found or worse < found[total][0]):
                    found[total] = worse, counts | {number: count}
        best = found
    counts = best[max(total for total in best if total <= rest)][1]
    return [
        replace(allocation, count=counts.get(number, allocation.count)) for number, allocation in enumerate(allocations)
    ]

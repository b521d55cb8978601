"""The paper's treatment of layers that are added together.

The paper takes the same *number* of neurons from each layer of such a group, at places of each layer's own choosing, so
that after the removal other channels are added than before. Here a *lane* is one such layer with what belongs to it alone
(its norm), and the columns of a consumer go with the lane that enters the sum first. Layers coupled in any other way stay
coupled neuron by neuron.

A *family* is the lanes of layers that are added together; a layer that is added to nothing is a family of one lane. The
r-th *row* of a family is the r-th least important unit of each of its lanes: rows are what a family loses.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from hgnp.pruning.selection import Unit, Values, least_coupled, ranked
from hgnp.pruning.structure import Structure


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


def side_by_side(lanes: Sequence[Sequence[Unit]], scores: Values) -> list[Unit]:
    """The rows of a family, the least important first: each lane loses the same number."""
    return [
        Unit(tuple(member for unit in row for member in unit.members))
        for row in zip(*(ranked(lane, scores) for lane in lanes), strict=True)
    ]


@dataclass(frozen=True)
class _Share:
    """How many of its rows a family loses."""

    rows: Sequence[Unit]
    due: Fraction
    """The average over the lanes of the units that were due."""
    count: int = 0

    @property
    def size(self) -> int:
        """Neurons in a row: the same in all of them."""
        return len(self.rows[0].members)

    @property
    def layers(self) -> Counter[str]:
        return Counter(layer for layer, _ in self.rows[0].members)


def least_paper(
    families: Sequence[Sequence[Sequence[Unit]]], scores: Values, n: int, room: Mapping[str, int]
) -> list[Unit]:
    """The paper's treatment of added layers: each loses the same number, the average of what each was due.

    What was due is read off the n least important units over the whole network. Averages are rounded by largest remainders,
    so that n neurons go: first the rows that are whole in the averages, then by remainder, then those of single layers, then
    the others, as long as they fit into n and into `room` (layer → how many may go). If that leaves a rest, rows are
    exchanged between families. No allocation comes closer to n without exceeding it, as long as families have no layer in
    common.
    """
    everyone = ranked([unit for lanes in families for lane in lanes for unit in lane], scores)
    due = {id(unit) for unit in least_coupled(everyone, n, room)}
    shares, order = [], []
    for number, lanes in enumerate(families):
        average = Fraction(sum(id(unit) in due for lane in lanes for unit in lane), len(lanes))
        shares.append(_Share(side_by_side(lanes, scores), average))
        for place, row in enumerate(shares[-1].rows):
            whole = min(max(average - place, Fraction(0)), Fraction(1))
            order.append(((-whole, len(lanes) > 1, row.importance(scores)), number, row))
    order.sort(key=lambda entry: entry[0])
    family_of = {id(row): number for _, number, row in order}
    taken = Counter(family_of[id(row)] for row in least_coupled([row for *_, row in order], n, room))
    shares = [replace(share, count=taken[number]) for number, share in enumerate(shares)]
    rest = n - sum(share.count * share.size for share in shares)
    return [row for share in _exchanged(shares, rest, room) for row in share.rows[: share.count]]


def _exchanged(shares: Sequence[_Share], rest: int, room: Mapping[str, int]) -> list[_Share]:
    """Counts that take as many of the `rest` neurons more as can be, with the least deviation from what was due.

    Families that share a layer with another keep their counts. Every family with room has rows larger than the rest, so the
    rest is below the largest size W, and 2W changes by one row are enough: ordered so that partial sums stay within
    (−W, W], more of them would repeat a partial sum, and what lies between the two could be left out.
    """
    users = Counter(layer for share in shares for layer in share.layers)
    free = [number for number, share in enumerate(shares) if all(users[layer] == 1 for layer in share.layers)]
    most = {
        number: min(len(shares[number].rows), *(room[layer] // k for layer, k in shares[number].layers.items()))
        for number in free
    }
    if not rest or all(shares[number].count == most[number] for number in free):
        return list(shares)
    reach = 2 * max(shares[number].size for number in free)
    best: dict[int, tuple[Fraction, dict[int, int]]] = {0: (Fraction(0), {})}  # neurons more → deviation, counts
    for number in free:
        share = shares[number]
        found: dict[int, tuple[Fraction, dict[int, int]]] = {}
        for count in range(max(share.count - reach, 0), min(share.count + reach, most[number]) + 1):
            away, more = share.size * abs(count - share.due), share.size * (count - share.count)
            for before, (deviation, counts) in best.items():
                total, worse = before + more, deviation + away
                if abs(total) <= reach * reach and (total not in found or worse < found[total][0]):
                    found[total] = worse, counts | {number: count}
        best = found
    counts = best[max(total for total in best if total <= rest)][1]
    return [replace(share, count=counts.get(number, share.count)) for number, share in enumerate(shares)]

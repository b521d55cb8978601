"""Units in bundles that take layers from one multiple of a width to the next.

A *family* is the units that take the same from the same layers: x of them take x·k_L neurons from layer L. With widths w_L the
first bundle makes every w_L − Σ x·k_L ≡ 0 (mod m); each later one takes the least number s of units of one family with
s·k_L ≡ 0, and so leaves multiples again. Families that share a layer have their first bundle together.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hgnp.pruning.selection import Unit, Values, ranked

Takes = tuple[tuple[str, int], ...]
"""(layer, how many of its neurons a unit has)"""


def bundled(units: Iterable[Unit], scores: Values, widths: Mapping[str, int], multiple: int) -> list[Unit]:
    """Bundles, the least important first; those of one family in its own order. With a multiple of 1, the units."""
    ranking = ranked(units, scores)
    if multiple == 1:
        return ranking
    families: dict[Takes, list[Unit]] = defaultdict(list)
    for unit in ranking:
        families[tuple(sorted(Counter(layer for layer, _ in unit.members).items()))].append(unit)
    bundles: list[tuple[float, Unit]] = []

    def put(members: Sequence[Unit], after: tuple[float, Unit | None]) -> tuple[float, Unit]:
        bundle = Unit(tuple(member for unit in members for member in unit.members), after[1])
        bundles.append((max(bundle.importance(scores), after[0]), bundle))
        return bundles[-1]

    for sharing in _sharing_layers(families):
        counts = _to_multiples(sharing, widths, multiple)
        if counts is None or any(len(families[takes]) < count for takes, count in counts.items()):
            continue
        first = [unit for takes, count in counts.items() for unit in families[takes][:count]]
        start = put(first, (-math.inf, None)) if first else (-math.inf, None)
        for takes, count in counts.items():
            step = math.lcm(*(multiple // math.gcd(multiple, size) for _, size in takes))
            last, mine = start, families[takes]
            for place in range(count, len(mine) - step + 1, step):
                last = put(mine[place : place + step], last)
    return [bundle for _, bundle in sorted(bundles, key=lambda pair: pair[0])]


def _sharing_layers(families: Iterable[Takes]) -> list[list[Takes]]:
    """Families in lists that have no layer in common; in each, those that take from most layers first."""
    lists: list[list[Takes]] = []
    for takes in families:
        layers = {layer for layer, _ in takes}
        mine = [other for other in lists if any(layer in layers for found in other for layer, _ in found)]
        lists = [other for other in lists if other not in mine]
        lists.append([*(found for other in mine for found in other), takes])
    return [sorted(found, key=len, reverse=True) for found in lists]


def _to_multiples(sharing: Sequence[Takes], widths: Mapping[str, int], multiple: int) -> dict[Takes, int] | None:
    """How many units of each family the first bundle has. A layer is the business of the last family that takes from it."""
    left = {layer: widths[layer] for takes in sharing for layer, _ in takes}
    last = {layer: takes for takes in sharing for layer, _ in takes}
    counts = {}
    for takes in sharing:
        due = [(layer, size) for layer, size in takes if last[layer] == takes]
        fits = (x for x in range(multiple) if all((left[layer] - x * size) % multiple == 0 for layer, size in due))
        if (count := next(fits, None)) is None:
            return None
        counts[takes] = count
        for layer, size in takes:
            left[layer] -= count * size
    return counts

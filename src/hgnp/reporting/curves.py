"""Accuracy-against-κ curves as piecewise linear functions: mean and spread, area, difference, crossings.

A curve is interpolated linearly between its points and undefined beyond them, so everything is computed over a range that all
curves cover. On the union of their points, means, areas (trapezoidal rule) and crossings are exact.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hgnp.errors import InputError

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A mean curve over `count` runs, κ ascending; `spread` is the standard deviation over runs (n − 1), None for one run;
    `each` has the values of every run."""

    kept: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...] | None
    count: int
    each: tuple[tuple[float, ...], ...] = ()

    def at(self, kept: float) -> float:
        """The mean at κ, which must be on the curve."""
        if not self.kept[0] <= kept <= self.kept[-1]:
            raise InputError(f"kept must be on the curve, from {self.kept[0]:g} to {self.kept[-1]:g}, got {kept:g}")
        return float(np.interp(kept, self.kept, self.mean))

    def spread_at(self, kept: float) -> float | None:
        """The spread at κ. Between points it is that of the interpolated runs, which may cross there."""
        if self.spread is None:
            return None
        return float(np.std([np.interp(kept, self.kept, values) for values in self.each], ddof=1))


@dataclass(frozen=True)
class Crossing:
    """A κ at which one curve overtakes the other; `ahead_below`: whether the first is the higher one just below it."""

    kept: float
    ahead_below: bool


def common_grid(curves: Sequence[Points]) -> tuple[float, ...] | None:
    """The κ of all points, ascending, within the range that all curves cover; None if the curves share no interval."""
    if not curves or any(len(points) < 2 for points in curves):
        return None
    low = max(min(kept for kept, _ in points) for points in curves)
    high = min(max(kept for kept, _ in points) for points in curves)
    inner = {kept for points in curves for kept, _ in points if low < kept < high}
    return (low, *sorted(inner), high) if low < high else None


def mean_curve(curves: Sequence[Points], grid: Sequence[float]) -> Curve:
    """The mean of `curves` at every κ of `grid`, which must lie within the range of each."""
    values = np.array([_values(points, grid) for points in curves])
    spread = tuple(values.std(axis=0, ddof=1).tolist()) if len(curves) > 1 else None
    return Curve(
        tuple(grid), tuple(values.mean(axis=0).tolist()), spread, len(curves), tuple(map(tuple, values.tolist()))
    )


def _values(points: Points, grid: Sequence[float]) -> np.ndarray:
    kept, values = zip(*sorted(points), strict=True)
    return np.interp(grid, kept, values)


def area(curve: Curve) -> float:
    """∫ metric dκ by the trapezoidal rule, κ as a fraction: 1 for accuracy 1 over [0, 1]."""
    mean = np.array(curve.mean)
    return float(np.sum(np.diff(curve.kept) * (mean[1:] + mean[:-1]) / 2))


def gain(first: float, second: float) -> float | None:
    """How much larger `first` is, in percent of `second`; None where the second is not positive."""
    return 100.0 * (first / second - 1.0) if second > 0 else None


def crossings(first: Curve, second: Curve) -> tuple[Crossing, ...]:
    """Every κ at which `first` overtakes `second` or is overtaken, from large κ to small. Both curves must share their κ.

    Curves that touch without changing order do not cross. If they coincide over an interval, the crossing is its midpoint.
    """
    result: list[Crossing] = []
    last: tuple[float, float] | None = None
    previous = zero_from = zero_to = 0.0
    for kept, a, b in reversed(list(zip(first.kept, first.mean, second.mean, strict=True))):
        difference = a - b
        if difference == 0.0:
            if previous != 0.0:
                zero_from = kept
            zero_to = kept
        else:
            if last is not None and last[1] * difference < 0:
                if previous == 0.0:
                    where = (zero_from + zero_to) / 2
                else:
                    where = last[0] + (kept - last[0]) * last[1] / (last[1] - difference)
                result.append(Crossing(where, difference > 0))
            last = (kept, difference)
        previous = difference
    return tuple(result)


def summarise_crossings(places: Sequence[str]) -> str:
    """All of up to three crossings; of more, their number and the lowest."""
    if len(places) > 3:
        return f"{len(places)}, the lowest at {places[-1]}"
    return ", ".join(places) or "none"


def composed_area(below: Curve, above: Curve, threshold: float) -> float:
    """The area of the curve that equals `below` for κ ≤ threshold and `above` for larger κ; it may jump at the threshold."""
    cut = min(max(threshold, below.kept[0]), below.kept[-1])
    lower = [kept for kept in below.kept if kept < cut]
    upper = [kept for kept in above.kept if kept > cut]
    parts = (below, [*lower, cut]), (above, [cut, *upper])
    return sum(
        area(Curve(tuple(grid), tuple(curve.at(kept) for kept in grid), None, curve.count)) for curve, grid in parts
    )


def share_ahead(first: Curve, second: Curve, below: float) -> float | None:
    """The fraction of κ up to `below` at which `first` is higher; None if no κ is that low. Both curves must share their κ."""
    low, high = first.kept[0], min(below, first.kept[-1])
    if low >= high:
        return None
    places = (low, *(kept for kept in first.kept if low < kept < high), high)
    differences = [first.at(kept) - second.at(kept) for kept in places]
    ahead = 0.0
    for (left, right), (a, b) in zip(itertools.pairwise(places), itertools.pairwise(differences), strict=True):
        if a * b < 0:
            ahead += (right - left) * max(a, b) / abs(a - b)
        elif a > 0 or b > 0:
            ahead += right - left
    return ahead / (high - low)


def smallest_reaching(points: Points, level: float) -> tuple[float, bool] | None:
    """The smallest κ at which the curve through `points` reaches `level`, and whether that is its lowest point, so that the
    true value may be smaller still; None if the curve never reaches it."""
    ordered = sorted(points)
    if ordered and ordered[0][1] >= level:
        return ordered[0][0], True
    for (left, a), (right, b) in itertools.pairwise(ordered):
        if a < level <= b:
            return left + (right - left) * (level - a) / (b - a), False
    return None

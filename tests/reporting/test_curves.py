"""Means, areas, crossings of piecewise linear curves against closed forms."""

import math
import statistics

import pytest

from hgnp.reporting.curves import (
    Curve,
    area,
    common_grid,
    composed_area,
    crossings,
    gain,
    mean_curve,
    share_ahead,
    smallest_reaching,
)


def curve(*points: tuple[float, float]) -> Curve:
    kept, values = zip(*sorted(points), strict=True)
    return Curve(kept, values, None, 1)


def test_grid_is_the_union_of_points_where_all_have_values() -> None:
    first, second = [(1.0, 0.9), (0.5, 0.8), (0.1, 0.2)], [(0.9, 0.7), (0.3, 0.6), (0.2, 0.5)]
    assert common_grid([first, second]) == (0.2, 0.3, 0.5, 0.9)
    assert common_grid([first, [(0.05, 0.3), (0.01, 0.2)]]) is None
    assert common_grid([first, [(0.5, 0.3)]]) is None
    assert common_grid([]) is None


def test_mean_and_spread_of_lines() -> None:
    runs = [[(1.0, 0.9 + d), (0.0, 0.1 + d)] for d in (-0.02, 0.0, 0.05)]
    made = mean_curve(runs, (0.0, 0.25, 1.0))
    assert made.mean == pytest.approx((0.11, 0.31, 0.91))
    assert made.spread == pytest.approx((math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2),) * 3)
    assert made.count == 3
    assert made.at(0.5) == pytest.approx(0.51)
    assert made.spread_at(0.6) == pytest.approx(made.spread[0] if made.spread else None)
    with pytest.raises(ValueError, match=r"kept must be on the curve, from 0 to 1, got 1\.1"):
        made.at(1.1)
    assert mean_curve(runs[:1], (0.0, 1.0)).spread is None


def test_area_of_lines_and_of_a_parabola() -> None:
    assert area(curve((0.2, 0.5), (1.0, 0.9))) == pytest.approx(0.8 * 0.7)
    fine = curve(*((k / 1000, 1 - (k / 1000) ** 2) for k in range(1001)))
    assert area(fine) == pytest.approx(2 / 3, abs=1e-6)
    assert gain(1.1, 1.0) == pytest.approx(10.0)
    assert gain(1.0, 0.0) is None
    assert gain(1.0, -1.0) is None


def test_crossings_are_interpolated_and_say_who_is_ahead_below() -> None:
    rising, flat = curve((0.0, 0.0), (1.0, 1.0)), curve((0.0, 0.3), (1.0, 0.3))
    (only,) = crossings(rising, flat)
    assert only.kept == pytest.approx(0.3)
    assert not only.ahead_below
    assert crossings(flat, rising)[0].ahead_below
    zigzag = curve((0.0, 1.0), (0.25, 0.0), (0.5, 1.0), (1.0, 0.0))
    level = Curve(zigzag.kept, (0.5,) * 4, None, 1)
    assert [c.kept for c in crossings(zigzag, level)] == pytest.approx([0.75, 0.375, 0.125])
    assert [c.ahead_below for c in crossings(zigzag, level)] == [True, False, True]


def test_touching_is_no_crossing_and_a_shared_stretch_counts_once() -> None:
    zero = Curve((0.0, 0.2, 0.4, 0.6, 1.0), (0.0,) * 5, None, 1)
    assert crossings(Curve(zero.kept, (1.0, 1.0, 0.0, 1.0, 1.0), None, 1), zero) == ()
    assert crossings(Curve(zero.kept, (1.0, 1.0, 1.0, 1.0, 0.0), None, 1), zero) == ()
    (stretch,) = crossings(Curve(zero.kept, (1.0, 0.0, 0.0, 0.0, -1.0), None, 1), zero)
    assert stretch.kept == pytest.approx(0.4)
    (node,) = crossings(Curve(zero.kept, (1.0, 1.0, 0.0, -1.0, -1.0), None, 1), zero)
    assert node.kept == pytest.approx(0.4)
    assert crossings(zero, zero) == ()


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.37, 0.5, 1.0])
def test_the_composed_area_is_the_sum_of_its_parts(threshold: float) -> None:
    below, above = curve((0.0, 0.2), (0.5, 0.7), (1.0, 1.2)), curve((0.0, 0.6), (0.5, 0.6), (1.0, 0.6))
    exact = 0.2 * threshold + threshold**2 / 2 + 0.6 * (1 - threshold)
    assert composed_area(below, above, threshold) == pytest.approx(exact)


def test_thresholds_beyond_the_range_give_one_curves_area() -> None:
    below, above = curve((0.2, 0.2), (0.8, 0.8)), curve((0.2, 0.5), (0.8, 0.5))
    assert composed_area(below, above, 0.1) == pytest.approx(area(above))
    assert composed_area(below, above, 0.95) == pytest.approx(area(below))


def test_share_ahead_is_exact_between_points() -> None:
    first = Curve((0.0, 0.5, 1.0), (1.0, 0.0, 0.0), None, 1)
    second = Curve((0.0, 0.5, 1.0), (0.0, 0.5, 0.0), None, 1)
    assert share_ahead(first, second, 1.0) == pytest.approx(
        1 / 3
    )  # 1 − 2κ > κ below a third; then behind, and at last equal
    assert share_ahead(first, second, 0.4) == pytest.approx(1 / 3 / 0.4)
    assert share_ahead(second, first, 1.0) == pytest.approx(1 - 1 / 3)
    assert share_ahead(first, second, 0.2) == 1.0
    assert share_ahead(first, first, 1.0) == 0.0
    assert share_ahead(first, second, 0.0) is None


def test_the_smallest_kept_that_reaches_a_level() -> None:
    points = [(1.0, 0.95), (0.5, 0.93), (0.2, 0.90), (0.1, 0.80)]
    assert smallest_reaching(points, 0.92) == (pytest.approx(0.4), False)
    assert smallest_reaching(points, 0.90) == (pytest.approx(0.2), False)
    assert smallest_reaching(points, 0.80) == (0.1, True)
    assert smallest_reaching(points, 0.96) is None
    assert smallest_reaching([], 0.5) is None


def test_the_spread_between_points_is_that_of_the_interpolated_runs() -> None:
    """Two runs that cross half-way agree there, although they differ at both points."""
    made = mean_curve([[(0.0, 0.7), (1.0, 0.9)], [(0.0, 0.9), (1.0, 0.7)]], [0.0, 1.0])
    assert made.spread_at(0.5) == pytest.approx(0.0, abs=1e-12)
    assert made.spread_at(0.25) == pytest.approx(statistics.stdev([0.75, 0.85]))

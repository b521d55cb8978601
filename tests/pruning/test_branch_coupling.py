"""Per-branch (the paper's) coupling: added layers lose the same number each, and n neurons are selected where possible."""

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import Net, block, conv, head
from hgnp import Neurons
from hgnp.experiments.models import ResNet18
from hgnp.pruning.branch_coupling import least_paper
from hgnp.pruning.selection import Unit

Shape = tuple[int, int, int, int]
"""Branches of a group, neurons of a unit, units of a branch, how many neurons of each layer may be removed."""
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 8), st.integers(0, 8))


def branch_groups(
    shapes: list[Shape], draw: torch.Generator
) -> tuple[list[list[list[Unit]]], dict[str, list[float]], dict[str, int]]:
    groups, scores, room = [], {}, {}
    for number, (branches, size, units, most) in enumerate(shapes):
        layers = [[f"{number}.{branch}.{part}" for part in range(size)] for branch in range(branches)]
        groups.append([[Unit(tuple((name, u) for name in names)) for u in range(units)] for names in layers])
        for name in (name for names in layers for name in names):
            scores[name], room[name] = torch.rand(units, generator=draw).tolist(), most
    return groups, scores, room


def possible(shapes: list[Shape], n: int) -> int:
    """The largest total up to n, by trying everything."""
    totals = {0}
    for branches, size, units, most in shapes:
        totals = {total + branches * size * count for total in totals for count in range(min(units, most) + 1)}
    return max(total for total in totals if total <= n)


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(0, 80), st.integers(0, 10**6))
def test_least_paper_selects_as_many_as_any_allocation_up_to_n(shapes: list[Shape], n: int, seed: int) -> None:
    groups, scores, room = branch_groups(shapes, torch.Generator().manual_seed(seed))
    chosen = least_paper(groups, scores, n, room)
    taken = Counter(layer for unit in chosen for layer, _ in unit.members)
    assert sum(taken.values()) == possible(shapes, n)
    for number, (branches, size, _, most) in enumerate(shapes):
        counts = {taken[f"{number}.{branch}.{part}"] for branch in range(branches) for part in range(size)}
        assert len(counts) == 1  # the same number from each layer of a group
        assert counts.pop() <= most
    members = [member for unit in chosen for member in unit.members]
    assert len(set(members)) == len(members)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.integers(0, 60), st.integers(0, 10**6))
def test_least_paper_rounds_quotas_down_or_up(branches: list[int], n: int, seed: int) -> None:
    """With a single layer to take the remainder, added layers lose the mean rounded down or up."""
    groups, scores, room = branch_groups(
        [(count, 1, 8, 8) for count in branches] + [(1, 1, 60, 60)], torch.Generator().manual_seed(seed)
    )
    ranking = sorted((value, name) for name, values in scores.items() for value in values)
    least = Counter(name for _, name in ranking[:n])
    taken = Counter(layer for unit in least_paper(groups, scores, n, room) for layer, _ in unit.members)
    assert sum(taken.values()) == min(n, sum(map(len, scores.values())))
    for number, count in enumerate(branches):
        average = sum(least[f"{number}.{branch}.0"] for branch in range(count)) / count
        assert abs(taken[f"{number}.0.0"] - average) < 1


def test_least_paper_rounds_the_largest_remainder_up() -> None:
    scores = {
        "a": [0.0, 9, 9], "b": [0.1, 9, 9], "c": [9.0, 9, 9],  # quota 2/3
        "d": [0.2, 9, 9], "e": [9.0, 9, 9], "f": [9.0, 9, 9],  # quota 1/3
    }  # fmt: skip
    groups = [[[Unit(((name, u),)) for u in range(3)] for name in names] for names in ("abc", "def")]
    taken = Counter(
        layer for unit in least_paper(groups, scores, 3, dict.fromkeys(scores, 2)) for layer, _ in unit.members
    )
    assert taken == {"a": 1, "b": 1, "c": 1}


def test_paper_coupling_removes_exactly_100_neurons_from_resnet18() -> None:
    neurons = Neurons(ResNet18(10), torch.zeros(2, 3, 32, 32))
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        scores = {layer.name: torch.rand(layer.alive, generator=draw) / layer.alive**0.5 for layer in neurons.layers}
        cut = neurons.least(scores, 100, coupling="paper")
        assert cut.taken == neurons.remove(cut).taken == 100
        widths: Mapping[str, int] = {layer.name: layer.alive for layer in neurons.layers}
        assert widths["conv1"] == widths["layer1.0.conv2"] == widths["layer1.1.conv2"]


def test_paper_coupling_leaves_out_cuts_that_the_network_refuses() -> None:
    def forward(n: nn.Module, x: Tensor) -> Tensor:
        x = n.stem(x)  # type: ignore[operator]
        x = torch.relu(n.c2(n.c1(x)) + x)  # type: ignore[operator]
        if x.shape[1] < 2:
            raise ValueError("at least two channels")
        return n.head(x)  # type: ignore[operator]

    net = Net(forward, stem=block(3, 6), c1=block(6, 4), c2=conv(4, 6), head=head(6))
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    scores = {layer.name: torch.zeros(layer.alive) for layer in neurons.layers}
    with pytest.raises(ValueError, match=r"^selection must be removable as a whole, got neurons of stem.0, c1.0, c2: "):
        neurons.remove(neurons.least(scores, neurons.count, coupling="paper", confirm=False))
    removed = neurons.remove(neurons.least(scores, neurons.count, coupling="paper"))
    assert {layer: len(positions) for layer, positions in removed.items()} == {"stem.0": 4, "c1.0": 3, "c2": 4}

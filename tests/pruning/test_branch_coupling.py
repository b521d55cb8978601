"""The paper's coupling: added layers lose the same number each, and N neurons go wherever that is possible."""

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
"""Lanes of a family, neurons of a unit, units of a lane, how many of each layer may go."""
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 8), st.integers(0, 8))


def made(
    shapes: list[Shape], draw: torch.Generator
) -> tuple[list[list[list[Unit]]], dict[str, list[float]], dict[str, int]]:
    families, scores, room = [], {}, {}
    for number, (lanes, size, units, most) in enumerate(shapes):
        layers = [[f"{number}.{lane}.{part}" for part in range(size)] for lane in range(lanes)]
        families.append([[Unit(tuple((name, u) for name in names)) for u in range(units)] for names in layers])
        for name in (name for names in layers for name in names):
            scores[name], room[name] = torch.rand(units, generator=draw).tolist(), most
    return families, scores, room


def possible(shapes: list[Shape], n: int) -> int:
    """The largest total up to n, by trying everything."""
    totals = {0}
    for lanes, size, units, most in shapes:
        totals = {total + lanes * size * count for total in totals for count in range(min(units, most) + 1)}
    return max(total for total in totals if total <= n)


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(0, 80), st.integers(0, 10**6))
def test_least_paper_takes_as_many_as_any_allocation_up_to_n(shapes: list[Shape], n: int, seed: int) -> None:
    families, scores, room = made(shapes, torch.Generator().manual_seed(seed))
    chosen = least_paper(families, scores, n, room)
    taken = Counter(layer for unit in chosen for layer, _ in unit.members)
    assert sum(taken.values()) == possible(shapes, n)
    for number, (lanes, size, _, most) in enumerate(shapes):
        counts = {taken[f"{number}.{lane}.{part}"] for lane in range(lanes) for part in range(size)}
        assert len(counts) == 1  # the same from each layer of a family
        assert counts.pop() <= most
    members = [member for unit in chosen for member in unit.members]
    assert len(set(members)) == len(members)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.integers(0, 60), st.integers(0, 10**6))
def test_least_paper_rounds_averages_to_the_next_whole_number(lanes: list[int], n: int, seed: int) -> None:
    """With a layer of its own to take what is left over, added layers lose the average rounded down or up."""
    families, scores, room = made(
        [(count, 1, 8, 8) for count in lanes] + [(1, 1, 60, 60)], torch.Generator().manual_seed(seed)
    )
    ranking = sorted((value, name) for name, values in scores.items() for value in values)
    due = Counter(name for _, name in ranking[:n])
    taken = Counter(layer for unit in least_paper(families, scores, n, room) for layer, _ in unit.members)
    assert sum(taken.values()) == min(n, sum(map(len, scores.values())))
    for number, count in enumerate(lanes):
        average = sum(due[f"{number}.{lane}.0"] for lane in range(count)) / count
        assert abs(taken[f"{number}.0.0"] - average) < 1


def test_the_largest_remainder_is_rounded_up() -> None:
    scores = {
        "a": [0.0, 9, 9], "b": [0.1, 9, 9], "c": [9.0, 9, 9],  # two of three due: 2/3
        "d": [0.2, 9, 9], "e": [9.0, 9, 9], "f": [9.0, 9, 9],  # one of three: 1/3
    }  # fmt: skip
    families = [[[Unit(((name, u),)) for u in range(3)] for name in names] for names in ("abc", "def")]
    taken = Counter(
        layer for unit in least_paper(families, scores, 3, dict.fromkeys(scores, 2)) for layer, _ in unit.members
    )
    assert taken == {"a": 1, "b": 1, "c": 1}


def test_a_round_of_100_removes_100_from_resnet18() -> None:
    neurons = Neurons(ResNet18(10), torch.zeros(2, 3, 32, 32))
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        scores = {layer.name: torch.rand(layer.alive, generator=draw) / layer.alive**0.5 for layer in neurons.layers}
        cut = neurons.least(scores, 100, coupling="paper")
        assert cut.taken == neurons.remove(cut).taken == 100
        widths: Mapping[str, int] = {layer.name: layer.alive for layer in neurons.layers}
        assert widths["conv1"] == widths["layer1.0.conv2"] == widths["layer1.1.conv2"]


def test_a_cut_by_the_papers_coupling_that_the_networks_code_refuses_is_not_proposed() -> None:
    def forward(n: nn.Module, x: Tensor) -> Tensor:
        x = n.stem(x)  # type: ignore[operator]
        x = torch.relu(n.c2(n.c1(x)) + x)  # type: ignore[operator]
        if x.shape[1] < 2:
            raise ValueError("at least two channels")
        return n.head(x)  # type: ignore[operator]

    net = Net(forward, stem=block(3, 6), c1=block(6, 4), c2=conv(4, 6), head=head(6))
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    scores = {layer.name: torch.zeros(layer.alive) for layer in neurons.layers}
    with pytest.raises(ValueError, match="cannot be removed together"):
        neurons.remove(neurons.least(scores, neurons.count, coupling="paper", confirm=False))
    gone = neurons.remove(neurons.least(scores, neurons.count, coupling="paper"))
    assert {layer: len(positions) for layer, positions in gone.items()} == {"stem.0": 4, "c1.0": 3, "c2": 4}

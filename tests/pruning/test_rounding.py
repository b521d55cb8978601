"""`round_to`: every layer that loses neurons ends at a multiple, and rounded groups are removed by importance."""

import copy
import itertools

import pytest
import torch
from torch import nn

from cases import CASES, Net, block, conv, head
from hgnp import Neurons
from hgnp.pruning.selection import Unit, rounded_groups
from oracles import masked, run, worst_error
from pruning_cases import random_scores, widths

NETWORKS = [
    "residual", "dense", "inception", "unet", "squeeze_and_excite", "depthwise", "depthwise_with_multiplier", "grouped_inside",
    "grouped_whole", "channel_shuffle", "chunk_apart", "conv1d", "view_by_width", "zero_padded_shortcut", "siamese",
]  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


@pytest.mark.parametrize("round_to", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_rounded_layers_end_at_a_multiple_and_removal_equals_masking(name: str, round_to: int) -> None:
    case = CASES[name]
    whole, inputs = case.net().eval(), case.inputs()
    small = copy.deepcopy(whole)
    neurons = Neurons(small, inputs[0])
    scores, before = random_scores(neurons, round_to), widths(neurons)
    for n in (1, 2, 5, 9, 14, 1000):
        cut = neurons.least(scores, n, round_to=round_to, confirm=n == 1000)
        assert cut.taken <= n
        for layer, removed in cut.items():
            assert (before[layer] - len(removed)) % round_to == 0, (layer, n)
    assert neurons.remove(cut) == cut
    assert all(width % round_to == 0 for layer, width in widths(neurons).items() if width < before[layer])
    with masked(whole, cut, inputs):
        assert worst_error(run(small, inputs), run(whole, inputs)) < 1e-12
    assert not neurons.least(random_scores(neurons, 9), 1000, round_to=round_to)


@pytest.mark.parametrize("name", ["residual", "dense", "depthwise_with_multiplier", "grouped_inside", "conv1d"])
def test_round_to_applies_with_paper_coupling(name: str) -> None:
    case = CASES[name]
    net = case.net()
    neurons = Neurons(net, case.inputs()[0])
    before = widths(neurons)
    for seed, n in enumerate((9, 1000)):
        cut = neurons.least(random_scores(neurons, seed), n, coupling="paper", round_to=2)
        assert cut.taken <= n
        assert neurons.remove(cut) == cut
        assert all(width % 2 == 0 for layer, width in widths(neurons).items() if width < before[layer])
        run(net.train(), case.inputs())
    assert any(width < before[layer] for layer, width in widths(neurons).items())


def test_paper_coupling_rounds_each_branch_at_its_own_positions() -> None:
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    ones = {name: torch.ones(width) for name, width in widths(neurons).items()}
    ones["stem.0"][:2], ones["c2"][4:] = 0, 0
    assert neurons.least(ones, 4, coupling="paper", round_to=4) == {"stem.0": [0, 1], "c2": [4, 5]}
    assert neurons.least(ones, 4, round_to=4) != {"stem.0": [0, 1], "c2": [4, 5]}  # coupled: the same positions


def test_rounded_groups_are_selected_by_mean_importance_and_in_order_within_a_layer() -> None:
    neurons = Neurons(mlp(3, 10, 8, 2), torch.zeros(1, 3))
    scores = {
        "0": torch.tensor([9.0, 0, 5, 1, 1, 1, 9, 9, 3, 3]),  # 10 to 8: [1, 3] at 0.5; to 4: [4, 5, 8, 9] at 2
        "1": torch.tensor([0.0, 1, 1, 1, 9, 9, 9, 9]),  # 8 to 4: [0 … 3] at 0.75
    }
    taken = [neurons.least(scores, n, round_to=4) for n in range(12)]
    assert taken[:2] == [{}, {}]
    assert taken[2] == taken[5] == {"0": [1, 3]}
    assert taken[4] == {"0": [1, 3]}  # the less important group first, and four more do not fit into two
    assert taken[6] == taken[9] == {"0": [1, 3], "1": [0, 1, 2, 3]}
    assert taken[10] == {"0": [1, 3, 4, 5, 8, 9], "1": [0, 1, 2, 3]}
    assert neurons.least(scores, 1000, round_to=4) == taken[10]
    assert neurons.least(scores, 1000, round_to=4, floor=5) == {"0": [1, 3]}
    # a first rounded group that does not fit blocks the later ones
    scores["0"][[1, 3]] = 20
    assert "0" not in neurons.least({"0": scores["0"]}, 1, round_to=4)


def test_a_layer_narrower_than_round_to_keeps_its_width() -> None:
    neurons = Neurons(mlp(3, 7, 16, 2), torch.zeros(1, 3))
    cut = neurons.least({"0": torch.zeros(7), "1": torch.ones(16)}, 1000, round_to=8)
    assert {layer: len(removed) for layer, removed in cut.items()} == {"1": 8}


def test_units_that_share_a_layer_reach_the_first_multiple_together() -> None:
    """A depthwise convolution over a concatenation: 6 + 6 and 12. One branch alone would leave it at 10."""
    net = Net(
        lambda n, x: n.head(n.deep(torch.cat([n.a(x), n.b(x)], 1))),
        a=block(3, 6), b=block(3, 6), deep=conv(12, 12, groups=12), head=head(12),
    )  # fmt: skip
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    scores = {"a.0": torch.arange(6.0), "b.0": 10 + torch.arange(6.0), "deep": torch.zeros(12)}
    assert neurons.least(scores, 7, round_to=4) == {}
    assert neurons.least(scores, 8, round_to=4) == {"a.0": [0, 1], "b.0": [0, 1], "deep": [0, 1, 6, 7]}
    neurons.remove(neurons.least(scores, 1000, round_to=4))
    assert widths(neurons) == {"a.0": 4, "b.0": 4, "deep": 8}


def test_coupled_layers_that_cannot_all_be_multiples_keep_their_widths() -> None:
    """`deep` has as many channels as `a` and five inputs more: both are never even."""
    net = Net(
        lambda n, x: n.head(n.deep(torch.cat([n.a(x[:, :3]), x], 1))),
        a=block(3, 6), deep=conv(11, 11, groups=11), head=head(11),
    )  # fmt: skip
    neurons = Neurons(net, torch.zeros(2, 5, 8, 8))
    scores = {"a.0": torch.zeros(6), "deep": torch.zeros(11)}
    assert neurons.least(scores, 1000).taken == 10
    assert neurons.least(scores, 1000, round_to=2) == {}
    assert neurons.least(scores, 1000, round_to=5) == {"a.0": [0], "deep": [0]}


@pytest.mark.parametrize(("few", "left"), [(4, 8), (8, 16)])
def test_a_rounded_group_that_fails_verification_is_left_out(few: int, left: int) -> None:
    """With few channels the network's code takes another branch. Then one rounded group less is removed, or none."""
    net = Net(
        lambda n, x: n.head(n.b(n.a(x).relu() if n.a.out_channels <= few else n.a(x))), a=conv(3, 16), b=block(16, 12),
        head=head(12),
    )  # fmt: skip
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    scores = {name: torch.zeros(width) for name, width in widths(neurons).items()}
    bold = neurons.least(scores, 1000, round_to=4, confirm=False)
    assert {layer: len(removed) for layer, removed in bold.items()} == {"a": 12, "b.0": 8}
    with pytest.raises(ValueError, match="takes another path"):
        neurons.remove(bold)
    neurons.remove(neurons.least(scores, 1000, round_to=4))
    assert widths(neurons) == {"a": left, "b.0": 8}  # b reads a: it keeps one rounded group more as well


def test_round_to_1_selects_the_least_important_units_in_order() -> None:
    draw = torch.Generator().manual_seed(0)
    units = [Unit((("a", i), ("b", i)) if i % 3 else (("c", i),)) for i in range(30)]
    scores = {layer: (torch.rand(30, generator=draw) * 4).round().tolist() for layer in "abc"}  # many ties
    means = [sum(scores[layer][i] for layer, i in unit.members) / len(unit.members) for unit in units]
    expected = [units[i] for i in sorted(range(30), key=lambda i: (means[i], i))]
    assert rounded_groups(units, scores, dict.fromkeys("abc", 30), dict.fromkeys("abc", 1)) == expected


def test_each_layer_may_have_its_own_multiple() -> None:
    """`stem.0` and `c2` are coupled: with multiples of 2 and 3 their common width is a multiple of 6."""
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    before, own = widths(neurons), {"stem.0": 2, "c2": 3}
    for round_to, free in ((own, 1), (own | {"*": 5}, 5)):
        for n in range(neurons.count):
            cut = neurons.least(random_scores(neurons, n), n, round_to=round_to, confirm=False)
            assert cut.taken <= n
            assert all((before[layer] - len(gone)) % own.get(layer, free) == 0 for layer, gone in cut.items())
    wide = Neurons(mlp(3, 16, 9, 2), torch.zeros(1, 3))
    scores = {"0": 0.1 * torch.arange(16.0), "1": torch.arange(9.0)}
    assert wide.least(scores, 6, round_to={"0": 4}) == {"0": [0, 1, 2, 3], "1": [0, 1]}
    assert wide.least(scores, 1000, round_to={"?": 4}).taken == 12 + 5


@pytest.mark.parametrize("round_to", [2, 3, 8])
def test_every_n_leaves_multiples(round_to: int) -> None:
    """On a network with added and with single layers."""
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    scores = random_scores(neurons, 3)
    before = widths(neurons)
    for n in range(neurons.count):
        cut = neurons.least(scores, n, round_to=round_to, confirm=False)
        assert cut.taken <= n
        assert all((before[layer] - len(removed)) % round_to == 0 for layer, removed in cut.items())
        # requesting what it selects gives the same selection
        assert neurons.least(scores, cut.taken, round_to=round_to, confirm=False) == cut


@pytest.mark.parametrize("round_to", [0, -8, 1.5, True, "8"])
def test_an_invalid_round_to_is_refused(round_to: object) -> None:
    neurons = Neurons(mlp(3, 4, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="round_to must be an integer ≥ 1, such as 8, got"):
        neurons.least({}, 1, round_to=round_to)  # type: ignore[arg-type]

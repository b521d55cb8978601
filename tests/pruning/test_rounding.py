"""Widths that are multiples: which bundles go, and that every layer that loses neurons ends at one."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Net, block, conv, head
from hgnp import Neurons
from hgnp.pruning.rounding import bundled
from hgnp.pruning.selection import Unit
from oracles import masked, run, worst_error

KINDS = [
    "residual", "dense", "inception", "unet", "squeeze_and_excite", "depthwise", "depthwise_with_multiplier", "grouped_inside",
    "grouped_whole", "channel_shuffle", "chunk_apart", "conv1d", "view_that_follows", "zero_padded_shortcut", "siamese",
]  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


def widths(neurons: Neurons) -> dict[str, int]:
    return {layer.name: layer.alive for layer in neurons.layers}


def random_scores(neurons: Neurons, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(width, generator=draw) for name, width in widths(neurons).items()}


@pytest.mark.parametrize("multiple", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_lose_neurons_end_at_a_multiple_and_removing_is_masking(name: str, multiple: int) -> None:
    case = CASES[name]
    whole, inputs = case.net().eval(), case.inputs()
    small = copy.deepcopy(whole)
    neurons = Neurons(small, inputs[0])
    scores, before = random_scores(neurons, multiple), widths(neurons)
    for n in (1, 2, 5, 9, 14, 1000):
        cut = neurons.least(scores, n, round_to=multiple, confirm=n == 1000)
        assert cut.taken <= n
        for layer, gone in cut.items():
            assert (before[layer] - len(gone)) % multiple == 0, (layer, n)
    assert neurons.remove(cut) == cut
    assert all(width % multiple == 0 for layer, width in widths(neurons).items() if width < before[layer])
    with masked(whole, cut, inputs):
        assert worst_error(run(small, inputs), run(whole, inputs)) < 1e-12
    assert not neurons.least(random_scores(neurons, 9), 1000, round_to=multiple)


@pytest.mark.parametrize("name", ["residual", "dense", "depthwise_with_multiplier", "grouped_inside", "conv1d"])
def test_the_papers_coupling_too(name: str) -> None:
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


def test_lanes_that_are_added_lose_as_many_each_its_own_least() -> None:
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    ones = {name: torch.ones(width) for name, width in widths(neurons).items()}
    ones["stem.0"][:2], ones["c2"][4:] = 0, 0
    assert neurons.least(ones, 4, coupling="paper", round_to=4) == {"stem.0": [0, 1], "c2": [4, 5]}
    assert neurons.least(ones, 4, round_to=4) != {"stem.0": [0, 1], "c2": [4, 5]}  # coupled: the same places


def test_bundles_go_by_their_average_those_of_a_layer_in_order() -> None:
    neurons = Neurons(mlp(3, 10, 8, 2), torch.zeros(1, 3))
    scores = {
        "0": torch.tensor([9.0, 0, 5, 1, 1, 1, 9, 9, 3, 3]),  # 10 to 8: [1, 3] at 0.5; to 4: [4, 5, 8, 9] at 2
        "1": torch.tensor([0.0, 1, 1, 1, 9, 9, 9, 9]),  # 8 to 4: [0 … 3] at 0.75
    }
    taken = [neurons.least(scores, n, round_to=4) for n in range(12)]
    assert taken[:2] == [{}, {}]
    assert taken[2] == taken[5] == {"0": [1, 3]}
    assert taken[4] == {"0": [1, 3]}  # the better bundle first, and four more do not fit into two
    assert taken[6] == taken[9] == {"0": [1, 3], "1": [0, 1, 2, 3]}
    assert taken[10] == {"0": [1, 3, 4, 5, 8, 9], "1": [0, 1, 2, 3]}
    assert neurons.least(scores, 1000, round_to=4) == taken[10]
    assert neurons.least(scores, 1000, round_to=4, floor=5) == {"0": [1, 3]}
    # a first bundle that does not fit keeps those behind it
    scores["0"][[1, 3]] = 20
    assert "0" not in neurons.least({"0": scores["0"]}, 1, round_to=4)


def test_what_is_narrower_stays() -> None:
    neurons = Neurons(mlp(3, 7, 16, 2), torch.zeros(1, 3))
    cut = neurons.least({"0": torch.zeros(7), "1": torch.ones(16)}, 1000, round_to=8)
    assert {layer: len(gone) for layer, gone in cut.items()} == {"1": 8}


def test_families_that_share_a_layer_reach_their_first_multiple_together() -> None:
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


def test_what_cannot_all_be_multiples_stays() -> None:
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
def test_a_bundle_that_does_not_fit_is_left_out_as_a_whole(few: int, left: int) -> None:
    """With few channels the network's code does something else. Then one bundle less goes, or the layer stays."""
    net = Net(
        lambda n, x: n.head(n.b(n.a(x).relu() if n.a.out_channels <= few else n.a(x))), a=conv(3, 16), b=block(16, 12),
        head=head(12),
    )  # fmt: skip
    neurons = Neurons(net, torch.zeros(2, 3, 8, 8))
    scores = {name: torch.zeros(width) for name, width in widths(neurons).items()}
    bold = neurons.least(scores, 1000, round_to=4, confirm=False)
    assert {layer: len(gone) for layer, gone in bold.items()} == {"a": 12, "b.0": 8}
    with pytest.raises(ValueError, match="takes another path"):
        neurons.remove(bold)
    neurons.remove(neurons.least(scores, 1000, round_to=4))
    assert widths(neurons) == {"a": left, "b.0": 8}  # b reads what a gives: it is left a bundle more as well


def test_a_multiple_of_one_is_the_least_important_units_in_the_order_they_come() -> None:
    draw = torch.Generator().manual_seed(0)
    units = [Unit((("a", i), ("b", i)) if i % 3 else (("c", i),)) for i in range(30)]
    scores = {layer: (torch.rand(30, generator=draw) * 4).round().tolist() for layer in "abc"}  # many ties
    means = [sum(scores[layer][i] for layer, i in unit.members) / len(unit.members) for unit in units]
    expected = [units[i] for i in sorted(range(30), key=lambda i: (means[i], i))]
    assert bundled(units, scores, dict.fromkeys("abc", 30), 1) == expected


@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_any_start_of_the_order_leaves_multiples(multiple: int) -> None:
    """Every number that is asked for, on a network of layers that are added and layers of their own."""
    case = CASES["residual"]
    neurons = Neurons(case.net(), case.inputs()[0])
    scores = random_scores(neurons, 3)
    before = widths(neurons)
    for n in range(neurons.count):
        cut = neurons.least(scores, n, round_to=multiple, confirm=False)
        assert cut.taken <= n
        assert all((before[layer] - len(gone)) % multiple == 0 for layer, gone in cut.items())
        # asked for what it takes, it is the same cut
        assert neurons.least(scores, cut.taken, round_to=multiple, confirm=False) == cut


@pytest.mark.parametrize("multiple", [0, -8, 1.5, True, "8"])
def test_round_to_is_a_whole_number(multiple: object) -> None:
    neurons = Neurons(mlp(3, 4, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="round_to must be a whole number ≥ 1, such as 8, got"):
        neurons.least({}, 1, round_to=multiple)  # type: ignore[arg-type]

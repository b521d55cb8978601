"""`least` selects the least important neurons: whole coupled groups, at most n, never a whole layer."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Net, block, conv, head
from hgnp import Neurons
from oracles import run


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers)


def residual(width: int = 6) -> nn.Module:
    def forward(n: nn.Module, x: Tensor) -> Tensor:
        x = n.stem(x)  # type: ignore[operator]
        x = torch.relu(n.norm(n.c2(n.c1(x))) + x)  # type: ignore[operator]
        return n.head(x)  # type: ignore[operator]

    return Net(
        forward, stem=block(3, width), c1=block(width, 4), c2=conv(4, width), norm=nn.BatchNorm2d(width), head=head(width)
    )  # fmt: skip


PICTURE = torch.zeros(2, 3, 8, 8)


def test_least_compares_neurons_over_the_whole_network() -> None:
    neurons = Neurons(mlp(3, 4, 5, 2), torch.zeros(1, 3))
    scores = {"0": torch.tensor([0.5, 0.1, 0.9, 0.8]), "2": torch.tensor([0.2, 0.3, 0.05, 0.7, 0.6])}
    assert neurons.least(scores, 3) == {"0": [1], "2": [0, 2]}
    assert neurons.least(scores, 0) == {}


def test_a_coupled_group_has_the_mean_importance_and_counts_each_member() -> None:
    neurons = Neurons(residual(), PICTURE)
    one = torch.ones(6)
    scores = {"stem.0": one.clone(), "c2": one.clone(), "c1.0": torch.full((4,), 0.6)}
    scores["stem.0"][2], scores["c2"][2] = 0.0, 1.0  # mean 0.5: less than 0.6
    assert neurons.least(scores, 2) == {"stem.0": [2], "c2": [2]}
    assert neurons.least(scores, 1) == {"c1.0": [0]}  # the group does not fit into one
    assert neurons.least(scores, 3) == {"stem.0": [2], "c2": [2], "c1.0": [0]}


@pytest.mark.parametrize("without", [None, "stem.0", "c1.0"])
def test_units_are_selected_in_the_order_of_their_means_and_ties_in_the_order_of_layers(without: str | None) -> None:
    """Against a ranking in Python. Coupled groups have two neurons, and scores have many ties."""
    net, generator = residual(), torch.Generator().manual_seed(0)
    neurons = Neurons(net, PICTURE)
    neurons.remove({"stem.0": [4]})
    for _ in range(20):
        scores = {each.name: torch.randint(3, (each.alive,), generator=generator) / 3 for each in neurons.layers}
        units = [[("stem.0", i), ("c2", i)] for i in range(5)] + [[("c1.0", i)] for i in range(4)]
        scores = {name: values for name, values in scores.items() if name != without}
        units = [unit for unit in units if all(name in scores for name, _ in unit)]
        units.sort(key=lambda unit: sum(float(scores[name][i]) for name, i in unit) / len(unit))
        for n in range(14):
            expected: dict[str, list[int]] = {}
            room, left = {"stem.0": 4, "c2": 4, "c1.0": 3}, n
            for unit in units:
                if len(unit) <= left and all(room[name] for name, _ in unit):
                    left -= len(unit)
                    for name, i in unit:
                        room[name] -= 1
                        expected.setdefault(name, []).append(i)
            assert neurons.least(scores, n) == {name: sorted(chosen) for name, chosen in expected.items()}


def test_least_selects_at_most_n_and_reports_the_shortfall() -> None:
    neurons = Neurons(residual(), PICTURE)
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    for n in range(20):
        cut = neurons.least(scores, n)
        assert cut.requested == n
        assert cut.taken == sum(map(len, cut.values())) <= n
    everything = neurons.least(scores, 10_000)
    assert everything.taken == 5 + 5 + 3  # each layer keeps one
    assert "13 of 10000 requested neurons" in repr(everything)
    neurons.remove(everything)
    assert all(layer.alive == 1 for layer in neurons.layers)


def test_limits_apply_to_all_layers_or_by_name_or_pattern() -> None:
    net = nn.ModuleDict({"body": mlp(3, 6, 6, 6), "top": nn.Linear(6, 4), "out": nn.Linear(4, 2)})
    net.forward = lambda x: net["out"](net["top"](net["body"](x)))  # type: ignore[method-assign]
    neurons = Neurons(net, torch.zeros(1, 3))
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}

    def left(**limits: Any) -> list[int]:
        cut = neurons.least(scores, 100, **limits)
        return [layer.alive - len(cut.get(layer.name, [])) for layer in neurons.layers]

    assert left() == [1, 1, 1, 1]
    assert left(floor=4) == [4, 4, 4, 4]
    assert left(floor={"body.2": 5}) == [1, 5, 1, 1]
    assert left(floor={"body.2": 5, "body.*": 3}) == [3, 5, 3, 1]
    assert left(floor={"body.*": 3, "body.2": 5}) == [3, 3, 3, 1]  # the first match counts
    assert left(floor={"*.[02]": 2, "*": 4, "out": 2}) == [
        2,
        2,
        4,
        4,
    ]  # a layer whose neurons are all frozen may be named
    assert left(max_removed={"body.*": 0.5, "top": 0}) == [3, 3, 3, 4]
    assert left(max_removed={"body.*": 0.5}, floor={"body.4": 5}, round_to={"body.0": 4, "top": 3}) == [4, 3, 5, 3]
    neurons.remove({"body.0": [0, 1]})
    scores["body.0"] = scores["body.0"][2:]
    assert left(max_removed={"body.0": 0.5}) == [3, 1, 1, 1]  # of the original six


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"floor": 0}, r"^floor must be an integer ≥ 1, as no layer is emptied, got 0$"),
        ({"floor": {"0": 0}}, r"^floor\['0'\] must be an integer ≥ 1, as no layer is emptied, got 0$"),
        ({"floor": {0: 4}}, r"^floor must have layer names or patterns such as 'features.\*' as keys, got 0$"),
        ({"max_removed": {"*": 1.5}}, r"^max_removed\['\*'\] must be a fraction ≥ 0 and ≤ 1, got 1\.5$"),
        ({"round_to": {"*": True}}, r"^round_to\['\*'\] must be an integer ≥ 1, such as 8, got True$"),
        ({"round_to": {"4": 8}}, r"^round_to: pattern must match a layer, got '4'; there are 0, 2$"),
        ({"floor": {"*": 2, "1.*": 8}}, r"^floor: pattern must match a layer, got '1\.\*'; there are 0, 2$"),
    ],
)
def test_invalid_limits_are_refused(limits: dict[str, Any], message: str) -> None:
    neurons = Neurons(mlp(3, 4, 5), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=message):
        neurons.least({}, 1, **limits)


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_least_empties_no_part_of_a_layer(coupling: Any) -> None:
    """Queries, keys and values are rows of one layer: its last row may be a value, but some query must be left too."""
    case = CASES["attention_of_the_inputs_width"]
    net = case.net()
    neurons = Neurons(net, case.inputs()[0])
    scores = {layer.name: torch.arange(layer.alive).double() for layer in neurons.layers}
    everything = neurons.least(scores, neurons.count, coupling=coupling, confirm=False)
    assert neurons.preview(everything).neurons > 0
    attention = net.attend.attention  # type: ignore[union-attr]
    neurons.remove(neurons.least(scores, neurons.count, coupling=coupling))
    assert attention.key_dim == attention.head_dim == 1  # type: ignore[union-attr]
    run(net, case.inputs())


def test_least_empties_no_tensor_of_a_layer_with_several() -> None:
    """Heads of queries and keys are mixed into heads of values: one module has both, in tensors of their own."""

    def forward(n: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (n.q, n.k, n.v))
        attention = n.mix((q @ k.mT).movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return n.out((attention @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    layers = {name: nn.Linear(5, width) for name, width in {"q": 6, "k": 6, "v": 8}.items()}
    attention = Net(forward, mix=nn.Linear(3, 4), out=nn.Linear(8, 2), **layers)
    neurons = Neurons(nn.Sequential(attention), torch.zeros(2, 3, 5))
    assert [(layer.name, layer.alive) for layer in neurons.layers] == [("0", 7)]
    chosen = neurons.least({"0": torch.tensor([0.1, 0.3, 0.2, 0.9, 0.8, 0.7, 0.6])}, 6)
    assert chosen == {"0": [0, 2, 4, 5, 6]}
    neurons.remove(chosen)
    assert attention(torch.zeros(2, 3, 5)).shape == (2, 3, 2)


def test_least_skips_layers_without_scores() -> None:
    neurons = Neurons(mlp(3, 4, 5, 2), torch.zeros(1, 3))
    assert set(neurons.least({"2": torch.rand(5)}, 100)) == {"2"}


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"nope": [1.0]}, "^scores must name layers with prunable neurons, got 'nope'; those layers are 0, 2$"),
        ({"0": torch.zeros(3)}, r"^scores\['0'\] must have shape \(4,\), one per remaining neuron, got \(3,\)$"),
        (
            {"0": torch.tensor([0.0, float("nan"), 0.0, 0.0])},
            r"^scores\['0'\] must be finite, got NaN or infinite values$",
        ),
    ],
)
def test_invalid_scores_are_refused(scores: dict[str, Tensor], message: str) -> None:
    neurons = Neurons(mlp(3, 4, 5, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=message):
        neurons.least(scores, 1)


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_invalid_n_and_coupling_are_refused(n: object) -> None:
    neurons = Neurons(mlp(3, 4, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"^n must be an integer ≥ 0, got "):
        neurons.least({}, n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^coupling must be 'coupled' or 'paper', got 'loose'$"):
        neurons.least({}, 1, coupling="loose")  # type: ignore[arg-type]


def test_paper_coupling_removes_the_mean_number_from_each_added_layer() -> None:
    net = residual()
    neurons = Neurons(net, PICTURE)
    scores = {
        "stem.0": torch.tensor([0.0, 0.1, 0.2, 0.3, 5, 6]),
        "c2": torch.tensor([9, 8, 7, 6, 0.0, 0.1]),
        "c1.0": torch.ones(4),
    }
    # four of the six least important are in stem.0 and two in c2: three each
    cut = neurons.least(scores, 6, coupling="paper")
    assert cut == {"stem.0": [0, 1, 2], "c2": [3, 4, 5]}
    assert cut.taken == 6
    before = copy.deepcopy(net)
    assert neurons.remove(cut) == cut
    assert torch.equal(net.stem[0].weight, before.stem[0].weight[[3, 4, 5]])  # type: ignore[index, union-attr]
    assert torch.equal(net.stem[1].bias, before.stem[1].bias[[3, 4, 5]])  # type: ignore[index, union-attr]
    assert torch.equal(net.c2.weight, before.c2.weight[[0, 1, 2]])  # type: ignore[union-attr]
    assert torch.equal(net.norm.running_mean, before.norm.running_mean[[0, 1, 2]])  # type: ignore[union-attr]
    # columns that read the sum follow the operand that enters it first: norm(c2)
    assert torch.equal(net.head[2].weight, before.head[2].weight[:, [0, 1, 2]])  # type: ignore[index, union-attr]
    # columns that read the stem alone follow the stem
    assert torch.equal(net.c1[0].weight, before.c1[0].weight[:, [3, 4, 5]])  # type: ignore[index, union-attr]
    assert [(layer.name, layer.alive, layer.total) for layer in neurons.layers] == [
        ("stem.0", 3, 6),
        ("c1.0", 4, 4),
        ("c2", 3, 6),
    ]
    assert neurons.kept == sum(p.numel() for p in net.parameters()) / sum(p.numel() for p in before.parameters())
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    again = neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, 4))
    assert again.taken in (3, 4)


def test_paper_coupling_selects_at_most_n_and_empties_no_layer() -> None:
    neurons = Neurons(residual(), PICTURE)
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    for n in (0, 1, 3, 7, 100):
        cut = neurons.least(scores, n, coupling="paper")
        assert cut.taken <= n
        assert len(cut.get("stem.0", [])) == len(cut.get("c2", [])) <= 5
        assert len(cut.get("c1.0", [])) <= 3


@pytest.mark.parametrize("name", ["residual", "depthwise", "squeeze_and_excite", "dense", "unet", "grouped_inside"])
def test_paper_coupling_leaves_a_network_that_runs(name: str) -> None:
    case = CASES[name]
    net = case.net()
    neurons = Neurons(net, case.inputs()[0])
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        scores = {layer.name: torch.rand(layer.alive, generator=draw) for layer in neurons.layers}
        removed = neurons.remove(neurons.least(scores, neurons.count // 3, coupling="paper"))
        assert removed.taken
        run(net.train(), case.inputs())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_weights_of_a_transposed_convolution_are_grouped_by_output(groups: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 3, groups=groups), nn.Conv2d(12, 2, 1)).double()
    x = torch.randn(2, 3, 5, 5).double()
    neurons = Neurons(net, x)
    layer = net[1]
    neurons.remove(neurons.least({"1": torch.arange(12.0)}, 4))
    into = neurons.weights("1")
    inside, outside = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for output in range(layer.out_channels):
        group = output // outside
        expected = layer.weight.detach()[group * inside : (group + 1) * inside, output % outside]
        assert torch.equal(into[output], expected)


def test_max_removed_limits_the_fraction_of_a_layer_over_all_removals() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
    neurons = Neurons(net, torch.zeros(2, 4))
    scores = {"0": torch.arange(10.0), "2": torch.arange(7.0)}
    assert neurons.least(scores, 100, max_removed=0.3) == {"0": [0, 1, 2], "2": [0, 1]}  # 0.3 of 7 is 2.1
    neurons.remove({"0": [0, 1]})
    later = {"0": torch.arange(8.0), "2": torch.arange(7.0)}
    assert neurons.least(later, 100, max_removed=0.3) == {"0": [0], "2": [0, 1]}
    assert neurons.least(later, 100, max_removed=0.3, floor=8) == {}
    assert neurons.least(later, 100, max_removed=0.0) == {}
    assert neurons.least(later, 100, max_removed=0.3, round_to=7) == {"0": [0]}
    with pytest.raises(ValueError, match=r"^max_removed must be a fraction ≥ 0 and ≤ 1, got 1\.5$"):
        neurons.least(later, 1, max_removed=1.5)

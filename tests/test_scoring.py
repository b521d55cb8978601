"""Scores against brute force: gates written into the networks by hand, moved by finite differences, in float64."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.curvature.autodiff.tangent import load_jvp
from hgnp.scoring import normalised

H = 1e-5


def test_frozen_weights_have_the_same_scores() -> None:
    """No flatness is asked for, so there need not be a block to flatten."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    batch = torch.randn(8, 4).double(), torch.arange(8) % 3
    neurons = hgnp.Neurons(net, batch[0])
    expected = hgnp.sensitivity(net, neurons, [batch])
    net.requires_grad_(False)
    found = hgnp.sensitivity(net, neurons, [batch])
    assert found.keys() == expected.keys()
    torch.testing.assert_close(dict(found), dict(expected))


class Gated(nn.Module):
    """Networks with a gate behind each activation, for every sample: `gates[layer]` is (N, width), or absent."""

    gates: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.gates = {}

    def gate(self, layer: str, a: Tensor) -> Tensor:
        if layer not in self.gates:
            return a
        g = self.gates[layer]
        return a * g.reshape(*g.shape, *(1 for _ in range(a.dim() - 2)))


class MLP(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na, self.b, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate("a", torch.tanh(self.na(self.a(x))))
        return self.out(self.gate("b", F.softplus(self.b(x))))


class CNN(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na, self.b = (
            nn.Conv2d(2, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 4, 3, padding=1, stride=2),
        )
        self.c, self.out = nn.Linear(4 * 9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate("a", torch.tanh(self.na(self.a(x))))
        x = self.gate("b", F.avg_pool2d(torch.tanh(self.b(x)), 1))
        return self.out(self.gate("c", torch.sigmoid(self.c(x.flatten(1)))))


class Residual(Gated):
    """`a` and `c` are added: one gate for both, on what the sum is read by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((2, 4), (4, 3), (3, 4)))
        self.na, self.nc, self.out = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.na(self.a(x)))
        inside = self.gate("b", torch.tanh(self.b(self.gate("a", x))))
        x = torch.tanh(self.nc(self.c(inside)) + x)
        return self.out(self.gate("a", x.mean((2, 3))))


class Heads(nn.Module):
    heads = 3

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 18), nn.Linear(6, 4)

    def forward(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(gate((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Attention(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.out = Heads(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x + self.attn(x, lambda context: self.gate("attn", context))).mean(1))


def width_of(net: nn.Module, layer: str) -> int:
    module = net.get_submodule(layer)
    return module.heads if isinstance(module, Heads) else len(module.weight)


NETS: dict[str, tuple[Callable[[], Gated], tuple[int, ...], dict[str, str]]] = {
    "mlp": (MLP, (6,), {"a": "a", "b": "b"}),
    "cnn": (CNN, (2, 6, 6), {"a": "a", "b": "b", "c": "c"}),
    "residual": (Residual, (2, 5, 5), {"a": "a", "b": "b", "c": "a"}),
    "attention": (Attention, (3, 4), {"attn": "attn"}),
}


def make(name: str, samples: int = 4) -> tuple[Gated, Tensor, Tensor, dict[str, str]]:
    torch.manual_seed(3)
    build, shape, gate_of = NETS[name]
    net = build().double().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(samples, *shape, dtype=torch.double)
    return net, x, torch.randint(0, 3, (samples,)), gate_of


def quotient(net: nn.Module, x: Tensor, y: Tensor, v: dict[str, Tensor], curvature: str) -> Tensor:
    """vᵀHv or its Gauss–Newton part, from torch.func alone."""
    load_jvp()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    tangents = {name: v.get(name, torch.zeros_like(p)) for name, p in parameters.items()}

    def logits(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, p, (x,))

    if curvature == "ggn":
        z, u = torch.func.jvp(logits, (parameters,), (tangents,))
        p = z.softmax(1)
        return ((p * u * u).sum(1) - (p * u).sum(1) ** 2).mean()

    def slope(p: dict[str, Tensor]) -> Tensor:
        return torch.func.jvp(lambda w: F.cross_entropy(logits(w), y), (p,), (tangents,))[1]

    return torch.func.jvp(slope, (parameters,), (tangents,))[1]


def brute_force(
    net: Gated, objective: Callable[[], Tensor], gate_of: dict[str, str], samples: int
) -> dict[str, Tensor]:
    """mean_i |N·∂L/∂γ_i| by central differences, layer by layer."""
    scores = {}
    for layer, gate in gate_of.items():
        width = width_of(net, layer)
        delta = torch.zeros(samples, width, dtype=torch.double)
        for i in range(samples):
            for j in range(width):
                ends = []
                for sign in (1, -1):
                    net.gates = {gate: torch.ones(samples, width, dtype=torch.double)}
                    net.gates[gate][i, j] += sign * H
                    ends.append(objective().item())
                delta[i, j] = samples * (ends[0] - ends[1]) / (2 * H)
        net.gates = {}
        scores[layer] = delta.abs().mean(0)
    return scores


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("curvature", [None, "ggn", "hessian"])
def test_scores_are_the_derivative_by_the_gate(name: str, curvature: str | None) -> None:
    net, x, y, gate_of = make(name)
    neurons = hgnp.Neurons(net, x)
    flat: hgnp.Flatness | None = None
    v: dict[str, Tensor] = {}
    if curvature is not None:
        flat = hgnp.Flatness(net, mu=0.7, bound=0.0, curvature=curvature, direction_from="this_batch")
        for _ in range(30):  # until v has settled: it is held fixed in both
            flat.backward(x, y)
        v = flat.direction

    def objective() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        return loss if curvature is None else loss + 0.7 * quotient(net, x, y, v, curvature).clamp_min(0)

    expected = normalised(brute_force(net, objective, gate_of, len(x)))
    found = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat)
    assert found.keys() == expected.keys()
    for layer in expected:
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-6, atol=1e-6)
    if curvature is not None:  # the penalty matters: without it the scores are others
        plain = hgnp.sensitivity(net, neurons, [(x, y)])
        assert max((plain[layer] - found[layer]).abs().max() for layer in plain) > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_scores_rank_neurons_as_attenuating_them_does(name: str) -> None:
    net, x, y, gate_of = make(name, samples=1)
    scores = hgnp.sensitivity(net, hgnp.Neurons(net, x.repeat(2, *(1 for _ in x.shape[1:]))), [(x, y)])
    before = F.cross_entropy(net(x), y)
    changes = {}
    for layer, gate in gate_of.items():
        width = width_of(net, layer)
        changes[layer] = torch.zeros(width, dtype=torch.double)
        for j in range(width):
            net.gates = {gate: torch.ones(1, width, dtype=torch.double)}
            net.gates[gate][0, j] = 0.99
            changes[layer][j] = (F.cross_entropy(net(x), y) - before).abs().detach()
    net.gates = {}
    changes = normalised(changes)
    ranks = spearmanr(torch.cat([scores[k] for k in changes]), torch.cat(list(changes.values()))).statistic
    assert ranks >= 0.9


def test_signed_scores_and_several_batches_are_means_over_all_samples() -> None:
    net, x, y, _ = make("cnn", samples=6)
    neurons = hgnp.Neurons(net, x)
    whole = hgnp.sensitivity(net, neurons, [(x, y)])
    parts = hgnp.sensitivity(net, neurons, [(x[:2], y[:2]), (x[2:], y[2:])])
    signed = hgnp.sensitivity(net, neurons, [(x, y)], criterion="taylor_sum")
    for layer in whole:
        torch.testing.assert_close(whole[layer], parts[layer])
    gamma = torch.ones(1, 3, dtype=torch.double, requires_grad=True)
    net.gates = {"a": gamma}
    (slope,) = torch.autograd.grad(F.cross_entropy(net(x), y), gamma)
    torch.testing.assert_close(signed["a"], slope[0].abs() / slope.norm())


@pytest.mark.parametrize(
    "options",
    [{"ignore_index": 1}, {"weight": torch.tensor([0.1, 1.0, 5.0], dtype=torch.double)}],
    ids=["ignored", "weights"],
)
@pytest.mark.parametrize("criterion", ["taylor", "taylor_sum"])
def test_batches_are_weighted_by_the_normaliser_of_the_loss(
    options: dict[str, Any], criterion: Literal["taylor", "taylor_sum"]
) -> None:
    net, x, _, _ = make("mlp", samples=64)
    y = torch.cat([torch.randint(0, 3, (32,)), torch.ones(30, dtype=torch.long), torch.tensor([0, 2])])
    neurons, loss = hgnp.Neurons(net, x[:2]), nn.CrossEntropyLoss(**options)
    batches = [(x[:32], y[:32]), (x[32:62], y[32:62]), (x[62:], y[62:])]  # in the second every label is ignored
    whole = hgnp.sensitivity(net, neurons, [(x, y)], loss=loss, criterion=criterion)
    parts = hgnp.sensitivity(net, neurons, batches, loss=loss, criterion=criterion)
    torch.testing.assert_close(dict(parts), dict(whole))
    net.gates = {"a": (gamma := torch.ones(64, 5, dtype=torch.double, requires_grad=True))}
    (slopes,) = torch.autograd.grad(loss(net(x), y), gamma)
    by_hand = slopes.abs().mean(0) if criterion == "taylor" else slopes.mean(0).abs()
    torch.testing.assert_close(parts["a"], by_hand / by_hand.norm())


def test_penalty_and_weight_decide_about_the_penalty() -> None:
    net, x, y, _ = make("mlp")
    neurons = hgnp.Neurons(net, x)
    plain = hgnp.sensitivity(net, neurons, [(x, y)])
    closed = hgnp.sensitivity(net, neurons, [(x, y)], flatness=hgnp.Flatness(net, mu=0.7, bound=1e6))
    none = hgnp.sensitivity(net, neurons, [(x, y)], flatness=hgnp.Flatness(net, mu=0.7, bound=0.0), mu=0.0)
    train_free = hgnp.sensitivity(net, neurons, [(x, y)], flatness=hgnp.Flatness(net, mu=0.0, bound=0.0), mu=0.7)
    scored = hgnp.sensitivity(net, neurons, [(x, y)], flatness=hgnp.Flatness(net, mu=0.7, bound=0.0))
    for layer in plain:
        torch.testing.assert_close(closed[layer], plain[layer])
        torch.testing.assert_close(none[layer], plain[layer])
        torch.testing.assert_close(train_free[layer], scored[layer])
    assert not torch.allclose(scored["a"], plain["a"], rtol=1e-3)
    flat = hgnp.Flatness(net, mu=0.0, bound=0.0)
    torch.testing.assert_close(hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat, mu=np.float64(0.7)), scored)


def test_scoring_leaves_the_random_state_to_a_loader_as_it_was() -> None:
    net, x, y, _ = make("mlp")
    neurons, stream = hgnp.Neurons(net, x), torch.get_rng_state()
    hgnp.sensitivity(net, neurons, DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
    assert torch.equal(stream, torch.get_rng_state())


def test_scoring_has_no_side_effects() -> None:
    net, x, y, _ = make("residual", samples=8)
    net.train()
    flat = hgnp.Flatness(net, mu=0.1, bound=0.0, fisher_type="mc")
    flat.backward(x, y)
    before = copy.deepcopy({"net": net.state_dict(), "flat": flat.state_dict()})
    grads = [p.grad.clone() for p in net.parameters()]
    radius, stream = flat.radius, torch.get_rng_state()
    hgnp.sensitivity(net, hgnp.Neurons(net, x), [(x, y)], flatness=flat)
    after = {"net": net.state_dict(), "flat": flat.state_dict()}
    assert after["flat"].pop("block") == before["flat"].pop("block")
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(module.training for module in net.modules())
    assert flat.radius == radius
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))


def test_scores_follow_the_neurons_that_are_left() -> None:
    net, x, y, _ = make("residual")
    neurons = hgnp.Neurons(net, x)
    neurons.remove({"a": [1], "b": [0]})
    again = hgnp.sensitivity(net, hgnp.Neurons(net, x), [(x, y)])
    found = hgnp.sensitivity(net, neurons, [(x, y)])
    for layer, alive in (("a", 3), ("b", 2), ("c", 3)):
        assert found[layer].shape == (alive,)
        torch.testing.assert_close(found[layer], again[layer])


def test_with_paper_coupling_added_layers_have_separate_gates() -> None:
    net, x, y, _ = make("residual", samples=1)
    apart = hgnp.sensitivity(net, hgnp.Neurons(net, x.repeat(2, 1, 1, 1)), [(x, y)], coupling="paper")

    def slope(layer: str, hook: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        gamma = torch.ones(4, dtype=torch.double, requires_grad=True)
        handle = net.get_submodule(layer).register_forward_hook(lambda _, __, out: hook(out, gamma.view(-1, 1, 1)))
        (found,) = torch.autograd.grad(F.cross_entropy(net(x), y), gamma)
        handle.remove()
        return found.abs() / found.norm()

    # c's output ends in the sum; a's, which is behind a tanh, is scaled there by hand
    torch.testing.assert_close(apart["c"], slope("nc", lambda out, g: out * g))
    torch.testing.assert_close(apart["a"], slope("na", lambda out, g: torch.atanh(torch.tanh(out) * g)))


def test_a_channel_that_is_read_and_passed_on_by_one_call_has_one_gate() -> None:
    """F.normalize reads its input for the length and hands the same channels on."""

    class Unit(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.normalize(self.gate("a", torch.tanh(self.a(x))), dim=1)
            return self.out(torch.tanh(self.b(x)))

    torch.manual_seed(0)
    net, x, y = Unit().double(), torch.randn(4, 6, dtype=torch.double), torch.randint(0, 3, (4,))
    neurons = hgnp.Neurons(net, x)
    for coupling in ("coupled", "paper"):
        found = hgnp.sensitivity(net, neurons, [(x, y)], coupling=coupling)["a"]  # type: ignore[arg-type]
        net.gates = {"a": torch.ones(4, 5, dtype=torch.double, requires_grad=True)}
        (delta,) = torch.autograd.grad(F.cross_entropy(net(x), y), net.gates["a"])
        net.gates = {}
        torch.testing.assert_close(found, delta.abs().mean(0) / delta.abs().mean(0).norm())


def test_neurons_that_stay_do_not_enter_the_norm_of_their_layer() -> None:
    """Half of `second` is added to zeros that the code fixes; the other half has gates."""

    class Padded(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            inside = self.second(self.gate("first", x))
            return self.out(torch.tanh(inside + F.pad(self.gate("first", x), (2, 2))))

    torch.manual_seed(0)
    net, x, y = Padded().double(), torch.randn(4, 6, dtype=torch.double), torch.randint(0, 3, (4,))
    with torch.no_grad():
        net.out.weight.mul_(5)
    found = hgnp.sensitivity(net, hgnp.Neurons(net, x), [(x, y)])["second"]
    free = found[2:6]
    torch.testing.assert_close(free.norm(), torch.ones_like(free.norm()))
    assert bool((found[[0, 1, 6, 7]] == free.max()).all())


def test_lanes_of_a_network_that_has_lost_neurons_already() -> None:
    net, x, y, _ = make("residual")
    neurons = hgnp.Neurons(net, x)
    neurons.remove({"a": [1], "b": [0]})
    found = hgnp.sensitivity(net, neurons, [(x, y)], coupling="paper")
    again = hgnp.sensitivity(net, hgnp.Neurons(net, x), [(x, y)], coupling="paper")
    assert found.keys() == again.keys()
    for layer in again:
        torch.testing.assert_close(found[layer], again[layer])
    assert neurons.remove(neurons.least(found, 2, coupling="paper")).taken
    assert all(layer.total == 4 for layer in neurons.layers if layer.name in ("a", "c"))


def test_sequences_that_put_time_first_are_scored_by_the_batch() -> None:
    torch.manual_seed(0)
    time_first = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = time_first

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1).contiguous()).mean(0)

    net = TimeFirst()
    x, y = torch.randn(6, 6, 4, dtype=torch.double), torch.randint(0, 3, (6,))
    neurons = hgnp.Neurons(net, x)
    with pytest.warns(UserWarning, match="the first dimension of some tensor is not the sample"):
        found = hgnp.sensitivity(net, neurons, [(x, y)])["inner.0"]
    h = torch.tanh(time_first[0](x.transpose(0, 1)))
    gamma = torch.ones(5, dtype=torch.double, requires_grad=True)
    (slope,) = torch.autograd.grad(F.cross_entropy(time_first[2](h * gamma).mean(0), y), gamma)
    torch.testing.assert_close(found, slope.abs() / slope.norm())


@pytest.mark.parametrize("later", [False, True])
def test_samples_that_mix_are_scored_by_the_batch_whichever_shows_it(later: bool) -> None:
    """Each sample sees those after it (before it). The first batch has one sample and shows nothing."""
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, gamma: Tensor | float = 1.0) -> Tensor:
            z = self.last(torch.tanh(self.first(x)) * gamma)
            return z.flip(0).cumsum(0).flip(0) if later else z.cumsum(0)  # type: ignore[no-any-return]

    net = Causal().double()
    x, y = torch.randn(7, 4, dtype=torch.double), torch.randint(0, 3, (7,))
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    with pytest.warns(UserWarning, match="or samples mix"):
        found = hgnp.sensitivity(net, hgnp.Neurons(net, x), batches)["first"]
    want = torch.zeros(5, dtype=torch.double)
    for inputs, target in batches:
        gamma = torch.ones(5, dtype=torch.double, requires_grad=True)
        (slope,) = torch.autograd.grad(F.cross_entropy(net(inputs, gamma), target), gamma)
        want += len(inputs) * slope.abs()
    torch.testing.assert_close(found, want / want.norm())


def test_a_layer_of_parameters_alone_is_scored_by_the_batch_and_others_by_sample() -> None:
    """A position bias computed from coordinates: as many as there are samples, which are not samples."""
    torch.manual_seed(0)

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
            self.bias = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 1))
            self.register_buffer("coordinates", torch.randn(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh() * self.bias(self.coordinates)
            return self.out(hidden.mean(1))  # type: ignore[no-any-return]

    net = Positions().double()
    x, y = torch.randn(6, 6, 4, dtype=torch.double), torch.randint(0, 3, (6,))
    found = hgnp.sensitivity(net, hgnp.Neurons(net, x), [(x, y)])

    def slopes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gates = [torch.ones(n, dtype=torch.double, requires_grad=True) for n in (5, 7)]
        bias = net.bias[2](net.bias[1](net.bias[0](net.coordinates)) * gates[1])
        hidden = net.first(x).tanh() * bias
        return torch.autograd.grad(F.cross_entropy(net.out(hidden.mean(1) * gates[0]), y), gates)

    of_samples = sum(slopes(x[i : i + 1], y[i : i + 1])[0].abs() for i in range(6))
    of_batch = slopes(x, y)[1].abs()
    torch.testing.assert_close(found["first"], of_samples / of_samples.norm())
    torch.testing.assert_close(found["bias.0"], of_batch / of_batch.norm())


class Slope(nn.Module):
    """Returns the derivative of a network along its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.out(torch.tanh(self.a(x))).sum(), x, create_graph=True)
        return slope


def test_a_selection_without_scores_says_why_it_is_empty() -> None:
    net, x = Slope(), torch.randn(4, 2)
    neurons = hgnp.Neurons(net, x)
    scores = hgnp.sensitivity(net, neurons, [(x, x)], loss=F.mse_loss)
    assert not scores
    assert neurons.count == 6
    selection = neurons.least(scores, 2)
    assert not selection
    assert selection.problem is not None
    assert "no layer has scores" in selection.problem
    assert neurons.least(scores, 0).problem is None
    assert neurons.least({"a": torch.rand(6)}, 2).problem is None

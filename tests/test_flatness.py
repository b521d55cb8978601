"""A step with the flatness penalty from the outside: side effects, inputs, precision, what it says of itself."""

import copy
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import CHOICES, Attention, convnet, gradients, images, shaken
from hgnp import Flatness


def net_of(activation=nn.ReLU):
    return convnet("batch", activation, dropout=0.4)


def plain_step(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


# Side effects


def test_with_mu_zero_training_is_bit_equal_to_plain_pytorch():
    ours, plain = net_of(), net_of()
    flat = Flatness(ours, mu=0.0)
    optimizers = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (ours, plain)]
    states = []
    for net, optimizer, step in zip((ours, plain), optimizers, (flat.backward, None), strict=True):
        torch.manual_seed(7)
        for _ in range(5):
            x, y = torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))
            optimizer.zero_grad()
            _ = step(x, y) if step else plain_step(net, x, y)
            optimizer.step()
        states.append((net.state_dict(), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(states[0][0].values(), states[1][0].values(), strict=True))
    assert torch.equal(states[0][1], states[1][1])
    assert math.isnan(flat.radius)
    assert flat.block is None


@pytest.mark.parametrize("choices", CHOICES)
def test_side_effects_are_those_of_a_plain_step(choices):
    x, y = images(6)
    ours, plain = net_of(), net_of()
    ours[4].eval(), plain[4].eval()
    flat = Flatness(ours, bound=-1.0, **CHOICES[choices])
    for _ in range(3):
        torch.manual_seed(2)
        want = plain_step(plain, x, y)
        stream = torch.get_rng_state()
        torch.manual_seed(2)
        assert flat.backward(x, y).item() == pytest.approx(want.item(), rel=1e-12)  # the same dropout masks
        assert torch.equal(torch.get_rng_state(), stream)
        for (name, a), b in zip(ours.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15, msg=name)
    assert [m.training for m in ours.modules()] == [m.training for m in plain.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in ours.modules())
    assert flat.curvature > 0
    assert 0 <= flat.residual < 0.5


def test_the_tangent_pass_leaves_batch_norm_buffers_bit_equal():
    x, y = images(6)
    ours, plain = net_of(), net_of()
    flat = Flatness(ours)
    for _ in range(2):
        torch.manual_seed(2)
        plain_step(plain, x, y)
        torch.manual_seed(2)
        flat.backward(x, y)
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_gradients_accumulate_and_scale():
    x, y = images(6)
    net = convnet("batch")
    flat = Flatness(net, mu=0.3, bound=-1.0)
    flat.backward(x, y)
    state = flat.state_dict()
    net.zero_grad()
    flat.load_state_dict(state)
    flat.backward(x, y)
    once = gradients(net)
    for scale in (0.5, torch.tensor(0.5)):
        net.zero_grad()
        for _ in range(2):
            flat.load_state_dict(state)
            loss = flat.backward(x, y, scale=scale)
        assert loss.item() == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-12)  # C itself is not scaled
        for name, g in gradients(net).items():
            torch.testing.assert_close(g, once[name], rtol=1e-11, atol=1e-13)


def test_the_penalty_is_active_above_the_bound():
    """Inactive, the gradient is C's; active, ∇C + μ∇q whatever the bound."""
    x, y = images(6)
    net, plain = convnet("batch"), convnet("batch")
    plain_step(plain, x, y)
    found = {}
    for bound in (1e6, -5.0, -1.0):
        flat = Flatness(net, mu=0.5, bound=bound)
        net.zero_grad()
        flat.backward(x, y)
        found[bound] = gradients(net)
    for name, g in gradients(plain).items():
        torch.testing.assert_close(found[1e6][name], g, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(found[-5.0][name], found[-1.0][name], rtol=1e-11, atol=1e-14)
    assert (found[-1.0]["0.weight"] - found[1e6]["0.weight"]).norm() > 1e-3 * found[1e6]["0.weight"].norm()


def test_gamma_is_of_the_loss_alone():
    """With the penalty fed back, λ would depend on μ."""
    x, y = images(6)
    pairs = []
    for mu in (1e-6, 10.0):
        net = convnet("batch")
        flat = Flatness(net, mu=mu, bound=-1.0)
        flat.backward(x, y)
        pairs.append(flat.state_dict()["pairs"]["0"])
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-12, atol=1e-14)


def test_the_host_reads_q_and_nothing_else_in_a_step(monkeypatch):
    """The index of the block, a number of the batch before, is an integer; q decides whether the penalty is active."""
    x, y = images(6)
    flat = Flatness(convnet("batch"), bound=-1.0)
    for _ in range(3):
        flat.backward(x, y)
    reads = []

    def noted(name):
        original = getattr(torch.Tensor, name)
        return lambda *args: (reads.append(name), original(*args))[1]

    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    flat.backward(x, y)
    assert reads == ["__float__"]


@pytest.mark.parametrize("choices", [{}, {"fisher_type": "mc"}, {"flatness": "paper"}, {"refresh_every": 2}])
def test_an_inactive_penalty_leaves_the_gradient_of_the_loss(choices):
    net, plain = convnet("batch"), convnet("batch")
    flat = Flatness(net, bound=1e3, **choices)
    for step in range(3):
        x, y = images(6 + step)
        net.zero_grad()
        plain.zero_grad()
        flat.backward(x, y)
        F.cross_entropy(plain(x), y).backward()
    assert 0 < flat.curvature < 1e3
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_dropout_inside_attention_is_drawn_once(curvature):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(12, 4), nn.Linear(4, 3)
            self.attend = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)

        def forward(self, x):
            y = self.embed(x.transpose(1, 2).flatten(2))
            y = y + self.attend(y, y, y, need_weights=False)[0]
            return self.head(F.scaled_dot_product_attention(y, y, y, dropout_p=0.3).mean(1))

    torch.manual_seed(0)
    net = Net().double()
    x, y = images()
    flat = Flatness(net, curvature=curvature)
    for _ in range(2):
        torch.manual_seed(2)
        want = F.cross_entropy(net(x), y).item()
        stream = torch.get_rng_state()
        torch.manual_seed(2)
        assert flat.backward(x, y).item() == pytest.approx(want, rel=1e-12)
        assert torch.equal(torch.get_rng_state(), stream)


# What goes in


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, a, b=None):
        return types.SimpleNamespace(logits=self.head(torch.tanh(self.left(a) + self.right(b))))


def test_tuples_dictionaries_and_outputs():
    torch.manual_seed(0)
    net = TwoInputs().double()
    a, b, y = torch.randn(6, 4).double(), torch.randn(6, 3).double(), torch.randint(0, 3, (6,))
    results = []
    for inputs in ((a, b), [a, b], {"a": a, "b": b}):
        net.zero_grad()
        flat = Flatness(net, bound=-1.0, output=lambda o: o.logits)
        flat.backward(inputs, y)
        results.append((flat.curvature, net.left.weight.grad.clone()))
    for q, g in results[1:]:
        assert q == results[0][0]
        assert torch.equal(g, results[0][1])


def test_frozen_parameters_get_no_gradient_and_are_no_block():
    x, y = images(6)
    net = convnet("batch")
    net[0].weight.requires_grad_(False)
    net[9].bias.requires_grad_(False)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    assert net[0].weight.grad is None
    assert net[9].bias.grad is None
    assert net[9].weight.grad is not None
    pairs = flat.state_dict()["pairs"]
    assert set(pairs) == {"4", "9"}
    assert pairs["9"]["psi.vector"].shape == (1, 36)  # no coordinate for the frozen bias


def test_tied_weights_are_one_block():
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, t):
            return self.head(torch.tanh(self.mid(self.embed(t).mean(1))))

    net = shaken(Tied().double())
    t, y = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6,))
    flat = Flatness(net, mu=1.0, bound=-1.0)
    flat.backward(t, y)
    state = flat.state_dict() | {"block": "head"}
    assert set(state["pairs"]) == {"mid", "head"}
    flat.load_state_dict(state)
    flat.backward(t, y)
    direction = flat.direction["embed.weight"]
    w = net.embed.weight.detach()

    def logits(e):
        return torch.func.functional_call(net, {"embed.weight": w + e * direction}, (t,))

    u = torch.autograd.functional.jvp(
        logits, torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    )[1]
    p = logits(0.0).softmax(1)
    want = ((p * u**2).sum(1) - (p * u).sum(1) ** 2).mean().item()
    assert flat.curvature == pytest.approx(want, rel=1e-10)
    assert flat.routes["head"].startswith("ggn, differs")


def test_channels_last_gives_the_same_gradient():
    x, y = images(6)
    results = []
    for memory in (torch.contiguous_format, torch.channels_last):
        net = convnet("batch", dropout=0.0).to(memory_format=memory)
        flat = Flatness(net, mu=1.0, bound=-1.0)
        for _ in range(2):
            net.zero_grad()
            flat.backward(x.to(memory_format=memory), y)
        results.append((flat.curvature, flat.radius, gradients(net)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-10)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-10)
    for name, g in results[0][2].items():
        torch.testing.assert_close(g, results[1][2][name], rtol=1e-9, atol=1e-12)
    assert net[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: convnet("batch"), lambda: shaken(Attention())])
def test_autocast_with_a_gradient_scaler(make, dtype):
    """Half precision is the float32 gradient up to its rounding, unscaled by the scaler; parameters stay float32."""
    x, y = images(8)
    x = x.float()
    torch.manual_seed(0)
    net = make().float()
    reference = copy.deepcopy(net)
    exact = Flatness(reference, mu=0.5, bound=-1.0)
    exact.backward(x, y)
    state = exact.state_dict()
    reference.zero_grad()
    exact.load_state_dict(state)
    exact.backward(x, y)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    flat = Flatness(net, mu=0.5, bound=-1.0)
    with torch.autocast("cpu", dtype=dtype):
        flat.backward(x, y, scale=scaler.scale(torch.ones(())))
    optimizer.zero_grad()
    flat.load_state_dict(state)
    with torch.autocast("cpu", dtype=dtype):
        flat.backward(x, y, scale=scaler.scale(torch.ones(())))
    scaler.unscale_(optimizer)
    assert flat.curvature == pytest.approx(exact.curvature, rel=0.05)
    ours = torch.cat([g.flatten() for g in gradients(net).values()])
    want = torch.cat([g.flatten() for g in gradients(reference).values()])
    assert (ours - want).norm() < 0.06 * want.norm()
    scaler.step(optimizer)
    scaler.update()


def test_an_overflow_of_half_precision_does_not_spoil_the_eigenpairs():
    x, y = images(6)
    net = convnet("batch")
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    flat.backward(x, y, scale=torch.tensor(torch.inf))
    for pair in flat.state_dict()["pairs"].values():
        assert all(torch.isfinite(pair[key]).all() for key in ("psi.vector", "gamma.vector"))
    net.zero_grad()
    flat.backward(x, y)
    flat.backward(x, y)
    assert flat.radius > 0


# What it says of itself


def test_the_paper_is_a_bundle_whose_parts_can_be_replaced():
    flat = Flatness(convnet(), flatness="paper", ranking="empirical")
    c = flat.choices
    assert (c.curvature, c.direction_from, c.kfac_approx, c.fisher_type, c.ranking, c.scaling) == (
        "hessian", "this_batch", "expand", "empirical", "empirical", "plain",
    )  # fmt: skip
    assert "kfac_approx='expand'" in repr(flat)
    assert "_every" not in repr(flat)
    assert "penalty_every=3, skip_inactive=True)" in repr(Flatness(flat.net, penalty_every=3, skip_inactive=True))


def test_repr_says_which_route_each_block_takes():
    net = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    flat = Flatness(net)
    flat.backward(torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))
    assert "0: ggn, differs from the Hessian by: gelu" in repr(flat)
    assert "2: exact" in repr(flat)


def test_loading_a_state_forgets_the_statistics_of_earlier_steps() -> None:
    flat = Flatness(convnet("none"), mu=0.1, bound=0.0)
    empty = flat.state_dict()
    flat.backward(*images(5))
    assert flat.block is not None
    flat.load_state_dict(empty)
    assert (flat.block, flat.direction) == (None, {})
    assert all(math.isnan(number) for number in (flat.radius, flat.curvature, flat.residual))

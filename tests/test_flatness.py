"""A step with the flatness term from the outside: side effects, inputs, precision, state, refusals."""

import copy
import io
import math
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import Attention, convnet, gradients, images, shaken
from hgnp import Flatness, Neurons
from hgnp.curvature.blocks import find_blocks
from hgnp.curvature.eigen import top_dense
from hgnp.curvature.forward import Forward

CHOICES = {
    "default": {},
    "frozen": {"norm": "frozen"},
    "this batch": {"v_from": "this_batch"},
    "frozen, this batch": {"norm": "frozen", "v_from": "this_batch"},
    "hessian": {"curvature": "hessian"},
    "hessian, frozen": {"curvature": "hessian", "norm": "frozen"},
    "sampled": {"labels": "sampled"},
    "empirical": {"ranking": "empirical"},
    "expand, scale invariant": {"convention": "expand", "scaling": "scale_invariant"},
    "paper": {"flatness": "paper"},
}


def net_of(activation=nn.ReLU):
    return convnet("batch", activation, dropout=0.4)


def plain_step(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


# --- side effects --------------------------------------------------------------------------------------------------


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


def test_the_hinge():
    """Closed, the gradient is C's; open, ∇C + μ∇q whatever the bound."""
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


def test_nothing_is_read_back_in_a_step(monkeypatch):
    """Only the index of the block, a number of the batch before, is looked at by the host."""
    x, y = images(6)
    flat = Flatness(convnet("batch"), bound=-1.0)
    for _ in range(3):
        flat.backward(x, y)

    def refuse(*_):
        raise AssertionError("a step waits for the device")

    for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    flat.backward(x, y)
    monkeypatch.undo()
    assert flat.curvature > 0


# --- what goes in --------------------------------------------------------------------------------------------------


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
    direction = flat.direction["head.weight"]
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


# --- directions ----------------------------------------------------------------------------------------------------


def test_the_block_and_its_direction_belong_to_the_batch_that_was_asked_for():
    """this_batch: the v of this batch; last_batch: of the one before."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))) for _ in range(3)]
    own = []
    for batch in batches:
        net = convnet("group")
        flat = Flatness(net, v_from="this_batch")
        flat.backward(*batch)
        own.append((flat.block, flat.radius))
    for v_from, expected in (("this_batch", own), ("last_batch", [own[0], *own[:-1]])):
        flat = Flatness(convnet("group"), v_from=v_from)
        for batch, (block, radius) in zip(batches, expected, strict=True):
            flat.backward(*batch)
            assert flat.block == block
            assert flat.radius == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize("convention", ["reduce", "expand"])
def test_the_block_is_the_one_with_the_largest_score(convention):
    """By dense eigenvalues, and by per-sample gradients along each v; over some nets the two rankings must part."""
    parted = 0
    for seed in range(6):
        net = convnet("none")
        with torch.no_grad():
            net[0].weight.mul_(0.5)
            net[9].weight.mul_(2.0)
        torch.manual_seed(seed)
        x, y = torch.randn(6, 2, 6, 6).double() + 1, torch.randint(0, 3, (6,))
        flat = Flatness(net, convention=convention, ranking="empirical", v_from="this_batch")
        flat.backward(x, y)
        empirical = flat.block
        observer = flat._observer(x)
        with Forward(watch=observer):
            z = net(x)
        observer.pull(F.cross_entropy(z, y), None, 1.0)
        scores, quotients = {}, {}
        for block in find_blocks(net):
            psi, gamma = (top_dense(m[block.name].factor()) for m in (observer.psi, observer.gamma))
            scores[block.name] = (psi.value * gamma.value).max().item()
            quotients[block.name] = observer.empirical(block, psi.vector, gamma.vector).max().item()
        assert empirical == max(quotients, key=quotients.get)
        kfac = Flatness(net, convention=convention, v_from="this_batch")
        kfac.backward(x, y)
        assert kfac.block == max(scores, key=scores.get)
        assert kfac.radius == pytest.approx(max(scores.values()), rel=1e-3)
        parted += kfac.block != empirical
    assert parted


def test_sampled_labels_come_from_the_networks_own_output():
    x, y = images(6)
    net = convnet("batch")
    flat = Flatness(net, labels="sampled", v_from="this_batch")
    flat.backward(x, y)
    observer = flat._observer(x)
    net.train()
    with Forward(watch=observer):
        z = net(x)
    label = torch.multinomial(z.softmax(1), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    observer.pull(F.cross_entropy(z, label), None, 1.0)
    name = flat.block
    psi, gamma = (top_dense(m[name].factor()) for m in (observer.psi, observer.gamma))
    assert flat.radius == pytest.approx((psi.value * gamma.value).max().item(), rel=1e-3)


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


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(data.target)


@pytest.mark.parametrize("convention", ["reduce", "expand"])
def test_the_warm_started_eigenvalue_follows_the_dense_one_in_training(convention):
    x, y = digits()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    flat = Flatness(net, convention=convention)
    dense = Flatness(net, convention=convention)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    errors = []
    for step in range(120):
        index = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        loss = flat.backward(x[index], y[index])
        if step >= 10:
            observer = dense._observer(x[index])
            before = {k: b.clone() for k, b in net.named_buffers()}
            with Forward(watch=observer):
                out = net(x[index])
            observer.pull(F.cross_entropy(out, y[index]), None, 1.0)
            for k, b in net.named_buffers():
                b.copy_(before[k])
            for name, pair in flat.state_dict()["pairs"].items():
                want = top_dense(observer.psi[name].factor()).value * top_dense(observer.gamma[name].factor()).value
                have = pair["psi.value"] * pair["gamma.value"]
                errors.append((have / want - 1).abs().max().item())
        optimizer.step()
    assert loss < 0.5  # it did train
    errors = torch.tensor(errors)
    assert errors.median() < 0.05
    assert errors.quantile(0.9) < 0.2


# --- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", ["default", "sampled", "paper"])
def test_state_goes_on_as_if_nothing_had_happened(choices):
    x, y = images(6)
    nets = [convnet("batch"), convnet("batch")]
    flats = [Flatness(net, bound=-1.0, **CHOICES[choices]) for net in nets]
    for flat in flats:
        flat.backward(x, y)
        flat.backward(x, y)
    buffer = io.BytesIO()
    torch.save(flats[0].state_dict(), buffer)
    buffer.seek(0)
    resumed = Flatness(nets[0], bound=-1.0, **CHOICES[choices])
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for net in nets:
        net.zero_grad()
    resumed.backward(x, y)
    flats[1].backward(x, y)
    assert (resumed.radius, resumed.curvature, resumed.block) == (flats[1].radius, flats[1].curvature, flats[1].block)
    for name, g in gradients(nets[0]).items():
        assert torch.equal(g, gradients(nets[1])[name])


def test_a_state_of_another_net_is_refused_by_layer():
    flat = Flatness(convnet("batch"))
    flat.backward(*images(6))
    other = convnet("batch")
    other[0] = nn.Conv2d(2, 8, 3, padding=1).double()
    with pytest.raises(ValueError, match="layer '0' has factors of shapes"):
        Flatness(other).load_state_dict(flat.state_dict())
    with pytest.raises(ValueError, match="no block of this network"):
        Flatness(nn.Linear(2, 2)).load_state_dict(flat.state_dict())


def test_eigenvectors_are_sliced_with_the_neurons():
    """Outputs of a layer, its depthwise follower, the columns of a convolution and of a Linear after a flatten."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Tanh(),
        nn.Conv2d(6, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3),
    ).double()  # fmt: skip
    x, y = images(6)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    before = flat.state_dict()["pairs"]
    keep, keep2 = torch.tensor([0, 2, 5]), torch.tensor([0, 2])
    columns = torch.arange(108).view(3, 36)[keep2].flatten()
    slices = {
        "0.weight": {0: keep}, "0.bias": {0: keep}, "2.weight": {0: keep}, "2.bias": {0: keep},
        "4.weight": {0: keep2, 1: keep}, "4.bias": {0: keep2}, "7.weight": {1: columns},
    }  # fmt: skip
    commit = flat.neurons_removed(types.SimpleNamespace(slices=slices))
    assert flat.state_dict()["pairs"]["0"]["gamma.vector"].shape == (1, 6)  # nothing yet
    for name, cuts in slices.items():
        index, kind = name.split(".")
        p = getattr(net[int(index)], kind)
        for dim, kept in cuts.items():
            p = p.index_select(dim, kept)
        setattr(net[int(index)], kind, nn.Parameter(p.detach()))
    net[2].groups = 3
    commit()
    after = flat.state_dict()["pairs"]

    def unit(v):
        return v / v.norm(dim=-1, keepdim=True)

    torch.testing.assert_close(after["0"]["gamma.vector"], unit(before["0"]["gamma.vector"][:, keep]))
    torch.testing.assert_close(after["0"]["psi.vector"], before["0"]["psi.vector"])
    torch.testing.assert_close(after["2"]["psi.vector"], before["2"]["psi.vector"][keep])
    assert after["2"]["gamma.vector"].shape == (3, 1)
    want = before["4"]["psi.vector"][:, torch.cat([keep, torch.tensor([6])])]
    torch.testing.assert_close(after["4"]["psi.vector"], unit(want))
    torch.testing.assert_close(after["4"]["gamma.vector"], unit(before["4"]["gamma.vector"][:, keep2]))
    want = before["7"]["psi.vector"][:, torch.cat([columns, torch.tensor([108])])]
    torch.testing.assert_close(after["7"]["psi.vector"], unit(want))
    for block in find_blocks(net):
        assert after[block.name]["psi.vector"].shape == block.psi_shape
        assert after[block.name]["gamma.vector"].shape == block.gamma_shape
    flat.backward(x, y)  # and it goes on
    assert flat.curvature > 0


def test_a_net_changed_without_a_word_is_met_with_a_fresh_start():
    """A layer replaced by a smaller one, and the penalised layer frozen."""
    net = convnet("batch")
    x, y = images(6)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "9"})
    net[9] = nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    flat.backward(x, y)
    assert flat.curvature > 0
    net[int(flat.block.split(".")[0])].requires_grad_(False)
    frozen = flat.block
    flat.backward(x, y)
    assert flat.block != frozen


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head, self.which = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), "left"

    def forward(self, x):
        return self.head(torch.tanh(getattr(self, self.which)(x)))


@pytest.mark.parametrize("norm", ["batch", "frozen"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_block_that_this_batch_does_not_use_has_no_curvature(curvature, norm):
    torch.manual_seed(0)
    net = Branches().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    flat = Flatness(net, bound=-1.0, curvature=curvature, norm=norm)
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "left"})
    net.which = "right"
    net.zero_grad()
    flat.backward(x, y)
    assert flat.block == "left"
    assert flat.curvature == 0
    assert net.left.weight.grad is None
    want = torch.autograd.grad(F.cross_entropy(net(x), y), net.right.weight)[0]
    torch.testing.assert_close(net.right.weight.grad, want, rtol=1e-12, atol=1e-15)
    flat.backward(x, y)
    assert flat.block != "left"


# --- refusals ------------------------------------------------------------------------------------------------------


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Opaque(nn.Module):
    def forward(self, x):
        return Hidden.apply(x)


class WritesIntoView(nn.Module):
    def forward(self, x):
        parts = x[:, :2]
        x.mul_(2.0)
        return x + F.pad(parts, (0, 3))


def net_with(module):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), module, nn.Linear(5, 3)).double()


@pytest.mark.parametrize(("module", "words"), [(Opaque(), "layer '0'"), (WritesIntoView(), "layer '1'")])
def test_what_gauss_newton_cannot_follow_is_refused_by_layer_and_the_hessian_route_takes_it(module, words):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    net = net_with(module)
    other = Flatness(net, curvature="hessian")
    other.backward(x, y)
    flat = Flatness(net, bound=-1.0)
    flat.load_state_dict(other.state_dict() | {"block": "0"})
    with pytest.raises(ValueError, match=words) as refused:
        flat.backward(x, y)
    assert "curvature='hessian'" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mu": -1.0}, "mu: -1.0"),
        ({"mu": math.nan}, "mu: nan"),
        ({"bound": math.inf}, "bound: inf"),
        ({"norm": "fixed"}, "norm: 'fixed' was given; one of 'batch', 'frozen'"),
        ({"flatness": "mine"}, "flatness: 'mine'"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='sum'"),
        ({"loss": F.l1_loss, "curvature": "ggn"}, "curvature='hessian'"),
        ({"loss": F.l1_loss, "labels": "sampled"}, "labels='batch'"),
    ],
)
def test_wrong_options_fail_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        Flatness(convnet(), **options)


def test_nets_without_a_block_and_norms_without_statistics_are_refused():
    with pytest.raises(ValueError, match="no Linear"):
        Flatness(nn.Sequential(nn.ReLU()))
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="layer '1'"):
        Flatness(net, norm="frozen")


class Direct(nn.Module):
    def forward(self, x):
        return torch.layer_norm(x, (5,))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_where_neither_route_would_be_right_the_layer_is_named(curvature):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    with pytest.raises(ValueError, match=r"layer '1': torch.layer_norm is called directly"):
        Flatness(net_with(Direct()), curvature=curvature).backward(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(ValueError, match="layer '1': it is scripted"):
        Flatness(net_with(scripted), curvature=curvature)


def test_a_failed_step_leaves_the_random_stream_and_buffers_alone():
    net = convnet("batch", dropout=0.4)
    net.append(Direct())
    x, y = images()
    state, buffers = torch.get_rng_state(), [b.clone() for b in net.buffers()]
    with pytest.raises(ValueError, match="layer '10'"):
        Flatness(net).backward(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), buffers, strict=True))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_batch_too_small_for_its_norm_is_pytorchs_to_refuse(curvature):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    flat = Flatness(net, curvature=curvature)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "0"})
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        flat.backward(x[:1], y[:1])


def test_the_paper_is_a_bundle_whose_parts_can_be_replaced():
    flat = Flatness(convnet(), flatness="paper", norm="frozen")
    c = flat.choices
    assert (c.curvature, c.v_from, c.convention, c.labels, c.ranking, c.scaling, c.norm) == (
        "hessian", "this_batch", "expand", "batch", "kfac", "plain", "frozen",
    )  # fmt: skip
    assert "convention='expand'" in repr(flat)


def test_repr_says_which_route_each_block_takes():
    net = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    flat = Flatness(net)
    flat.backward(torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))
    assert "0: ggn, differs from the Hessian by: gelu" in repr(flat)
    assert "2: exact" in repr(flat)


def test_eigenvectors_follow_a_removal_by_themselves() -> None:
    """The loop of the README: nobody tells Flatness, and its vectors are cut with the neurons."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = torch.randn(16, 6, dtype=torch.double), torch.randint(3, (16,))
    neurons, flat = Neurons(net, x), Flatness(net, bound=-1.0)
    for _ in range(3):
        flat.backward(x, y)
    before = flat.state_dict()["pairs"]
    neurons.remove({"0": [1, 5], "2": [0]})
    after = flat.state_dict()["pairs"]
    rows, columns = [0, 2, 3, 4, 6, 7], [0, 2, 3, 4, 6, 7, 8]  # the last column is the bias
    for key, kept in (("gamma", [1, 2, 3, 4, 5, 6]), ("psi", columns)):
        vectors = [
            (before["2"][k], after["2"][k]) for k in before["2"] if k.startswith(key) and before["2"][k].dim() == 2
        ]
        old, new = vectors[0]
        expected = old[:, kept]
        torch.testing.assert_close(new, expected / expected.norm(dim=1, keepdim=True))
    old, new = next(
        (before["0"][k], after["0"][k]) for k in before["0"] if k.startswith("gamma") and before["0"][k].dim() == 2
    )
    torch.testing.assert_close(new, old[:, rows] / old[:, rows].norm(dim=1, keepdim=True))
    flat.backward(x, y)
    del flat
    neurons.remove({"0": [0]})  # nobody listens any more

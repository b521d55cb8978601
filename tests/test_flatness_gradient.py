"""q and ∇q for every combination of route, scaling, norm and mode, against dense algebra and differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import (
    LOSSES,
    NORMS,
    Attention,
    Gated,
    Residual,
    Series,
    Siamese,
    central,
    convnet,
    ggn_quotient,
    gradients,
    hessian_quotient,
    images,
    loss_of_block,
    shaken,
)
from hgnp import Flatness
from hgnp.curvature.autodiff.tangent import load_jvp
from hgnp.curvature.factors import find_blocks

load_jvp()
ACTIVE, INACTIVE = -1e3, 1e9  # bounds that keep the penalty so


def start(net, inputs, y, block, **choices):
    """A Flatness whose next step penalises `block` along a v that is settled, and a way to put it back there."""
    flat = Flatness(net, mu=1.0, bound=ACTIVE, **choices)
    buffers = {k: b.clone() for k, b in net.named_buffers()}
    torch.manual_seed(3)
    flat.backward(inputs, y)
    net.zero_grad()
    state = flat.state_dict() | {"block": block}

    def step():
        net.zero_grad()
        for k, b in net.named_buffers():
            b.copy_(buffers[k])
        flat.load_state_dict(state)
        torch.manual_seed(3)  # the same dropout masks
        flat.backward(inputs, y)
        return flat.curvature

    return flat, step, buffers


def penalty_gradient(flat, net, step, inputs, y):
    step()
    total = gradients(net)
    flat.mu, mu = 0.0, flat.mu
    step()
    flat.mu = mu
    return {k: g - gradients(net)[k] for k, g in total.items()}


def check_against_differences(flat, net, step, inputs, y, tolerance=1e-6, h=2e-4):
    """A random direction for every parameter tensor by itself, so that no part of ∇q can hide behind another."""
    found = penalty_gradient(flat, net, step, inputs, y)
    size = max(g.norm() for g in found.values())
    flat.bound = INACTIVE  # q alone is wanted from here on, not its gradient
    for name, p in net.named_parameters():
        d = torch.randn_like(p)
        kept = p.detach().clone()

        def q(t, p=p, d=d, kept=kept):
            with torch.no_grad():
                p.copy_(kept + t * d)
            return step()

        want = central(q, h)
        with torch.no_grad():
            p.copy_(kept)
        have = (found[name] * d).sum().item()
        assert abs(have - want) <= tolerance * size * d.norm(), (name, have, want)


NORMS_AND_MODES = [*((norm, "train") for norm in NORMS), ("batch", "eval"), ("none", "eval")]
"""Norms other than BatchNorm compute the same in both modes."""


@pytest.mark.parametrize(("norm", "mode"), NORMS_AND_MODES)
@pytest.mark.parametrize("scaling", ["plain", "scale_invariant"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_gradient_of_the_penalty_equals_central_differences(curvature, scaling, norm, mode):
    net = convnet(norm, nn.Tanh, dropout=0.2).train(mode == "train")
    x, y = images()
    flat, step, _ = start(net, x, y, "0", curvature=curvature, scaling=scaling)
    check_against_differences(flat, net, step, x, y)


@pytest.mark.parametrize("block", ["4", "9"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_gradient_for_a_grouped_and_the_last_block(curvature, block):
    net = convnet("batch")
    x, y = images()
    flat, step, _ = start(net, x, y, block, curvature=curvature, scaling="scale_invariant")
    check_against_differences(flat, net, step, x, y)


@pytest.mark.parametrize(("norm", "mode"), NORMS_AND_MODES)
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_curvature_equals_dense_algebra(curvature, norm, mode):
    """vᵀHv from the dense Hessian, or from the dense Jacobian and the loss's Hessian."""
    net = convnet(norm).train(mode == "train")
    x, y = images()
    for block in ("0", "4", "9"):
        flat, step, buffers = start(net, x, y, block, curvature=curvature)
        q = step()
        assert flat.block == block
        direction = flat.direction
        assert abs(torch.cat([d.flatten() for d in direction.values()]).norm() - 1) < 1e-12
        for k, b in net.named_buffers():
            b.copy_(buffers[k])
        oracle = ggn_quotient if curvature == "ggn" else hessian_quotient
        want = oracle(net, direction, x, y).item()
        assert q == pytest.approx(want, rel=1e-10, abs=1e-13)


def test_hessian_quotient_equals_torch_func_hessian():
    """Without norms, whose forward-mode derivatives PyTorch gets wrong, torch.func can be the oracle."""
    net = convnet("none")
    x, y = images()
    flat, step, _ = start(net, x, y, "0", curvature="hessian")
    q = step()
    names = list(flat.direction)
    point, _, loss = loss_of_block(net, names, x, y)
    v = torch.cat([flat.direction[name].flatten() for name in names])
    assert q == pytest.approx((v @ torch.func.hessian(loss)(point) @ v).item(), rel=1e-10)


def transformer():
    torch.manual_seed(0)
    return shaken(Attention().double())


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("block", ["embed", "qkv", "up", "head"])
def test_the_gradient_of_a_transformer_equals_differences(curvature, block):
    """LayerNorm, GELU, attention by scaled_dot_product_attention."""
    net = transformer()
    x, y = images()
    flat, step, _ = start(net, x, y, block, curvature=curvature)
    oracle = ggn_quotient if curvature == "ggn" else hessian_quotient
    assert step() == pytest.approx(oracle(net, flat.direction, x, y).item(), rel=1e-9)
    check_against_differences(flat, net, step, x, y)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_multihead_attention_module(curvature):
    """nn.MultiheadAttention's own projections are no blocks, but everything around it is right."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attend, self.head = (
                nn.Linear(12, 4),
                nn.MultiheadAttention(4, 2, batch_first=True),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            y = self.embed(x.transpose(1, 2).flatten(2))
            return self.head((y + self.attend(y, y, y, need_weights=False)[0]).mean(1))

    torch.manual_seed(0)
    net = shaken(Net().double())
    x, y = images()
    flat, step, _ = start(net, x, y, "embed", curvature=curvature)
    assert set(flat.state_dict()["pairs"]) == {"embed", "head"}
    check_against_differences(flat, net, step, x, y)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Softplus, nn.Mish])
def test_the_gradient_through_smooth_activations_equals_differences(activation):
    net = convnet("batch", activation)
    x, y = images()
    for curvature in ("ggn", "hessian"):
        flat, step, _ = start(net, x, y, "0", curvature=curvature)
        check_against_differences(flat, net, step, x, y)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_cross_entropy_with_its_options(loss, curvature):
    net = convnet("batch")
    x, y = images(8)
    flat, step, buffers = start(net, x, y, "0", loss=LOSSES[loss], curvature=curvature)
    q = step()
    for k, b in net.named_buffers():
        b.copy_(buffers[k])
    oracle = ggn_quotient if curvature == "ggn" else hessian_quotient
    assert q == pytest.approx(oracle(net, flat.direction, x, y, LOSSES[loss]).item(), rel=1e-10)
    check_against_differences(flat, net, step, x, y)


def test_a_custom_loss_takes_the_hessian_route():
    net = convnet("layer")
    x, y = images()
    loss = lambda z, y: (z.softmax(1)[torch.arange(len(y)), y] - 1).square().mean()  # noqa: E731
    flat, step, _ = start(net, x, y, "4", loss=loss)
    assert flat.choices.curvature == "hessian"
    assert step() == pytest.approx(hessian_quotient(net, flat.direction, x, y, loss).item(), rel=1e-10)
    check_against_differences(flat, net, step, x, y)


# --- where the two routes agree ------------------------------------------------------------------------------------


def both_routes(net, inputs, y, block):
    results = []
    state = start(net, inputs, y, block)[0].state_dict() | {"block": block}
    for curvature in ("ggn", "hessian"):
        flat = Flatness(net, mu=1.0, bound=ACTIVE, curvature=curvature)
        flat.load_state_dict(state)
        net.zero_grad()
        flat.backward(inputs, y)
        results.append((flat.curvature, gradients(net), flat.routes))
    return results


def apart(results):
    (q1, g1, _), (q2, g2, _) = results
    size = torch.stack([g.norm() for g in g2.values()]).norm()
    difference = torch.stack([(g1[k] - g2[k]).norm() for k in g2]).norm() / size
    return abs(q1 - q2) / abs(q2), difference.item()


@pytest.mark.parametrize("block", ["stem", "deep", "side", "head"])
def test_gauss_newton_equals_hessian_on_piecewise_linear_nets(block):
    torch.manual_seed(0)
    net = shaken(Residual().double()).eval()
    x, y = images()
    results = both_routes(net, x, y, block)
    assert max(apart(results)) < 1e-10
    assert set(results[0][2].values()) == {"exact"}


def test_siamese_sharing_is_exact():
    torch.manual_seed(0)
    net = shaken(Siamese().double())
    inputs = tuple(torch.randn(2, 5, 4, dtype=torch.float64))
    results = both_routes(net, inputs, torch.randint(0, 3, (5,)), "tower")
    assert max(apart(results)) < 1e-10
    assert results[0][2] == {"head": "exact", "tower": "exact"}


class Blended(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.body(x)
        return self.head(torch.lerp(torch.zeros_like(h), h, h))


DIFFERENT = {
    "reused in series": (Series, (5, 4), "twice", "a layer reused in series"),
    "gated": (Gated, (5, 2, 6, 6), "body", "mul of two tensors"),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)), (5, 4), "0", "layer_norm"
    ),
    "blended by itself": (Blended, (5, 4), "body", "lerp"),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)), (5, 4), "0", "gelu"),
    "batch norm in train mode": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (5, 4), "0", "batch_norm"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_where_the_routes_differ_it_is_said(case):
    make, shape, block, reason = DIFFERENT[case]
    torch.manual_seed(0)
    net = shaken(make().double())
    results = both_routes(net, torch.randn(shape, dtype=torch.float64), torch.randint(0, 3, (5,)), block)
    assert min(apart(results)) > 1e-3
    for (_, _, routes), term in zip(results, ("ggn", "hessian"), strict=True):
        assert routes[block].startswith(term)
        assert reason in routes[block]
        last = list(dict(net.named_modules()))[-1]
        assert routes[last] == "exact"


# --- the trap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "layer", "instance"])
def test_pytorchs_own_third_derivative_through_this_norm_is_still_wrong(norm):
    """When this fails PyTorch has been mended, and the primitive norms can go."""
    net = convnet(norm)
    x, y = images()
    flat, step, buffers = start(net, x, y, "0", curvature="hessian")
    found = penalty_gradient(flat, net, step, x, y)
    step()
    tangents = [(p, flat.direction[name]) for name, p in net.named_parameters() if name in flat.direction]
    params = [p for p, _ in tangents]
    z = torch.func.functional_call(net, {k: b.clone() for k, b in buffers.items()}, (x,))
    g = torch.autograd.grad(F.cross_entropy(z, y), params, create_graph=True)
    Hv = torch.autograd.grad(g, params, [d for _, d in tangents], create_graph=True)
    q = sum((a * d).sum() for a, (_, d) in zip(Hv, tangents, strict=True))
    assert q.item() == pytest.approx(flat.curvature, rel=1e-10)  # the second derivative is right
    naive = torch.autograd.grad(q, list(net.parameters()))
    ours = torch.cat([found[name].flatten() for name, _ in net.named_parameters()])
    wrong = (torch.cat([a.flatten() for a in naive]) - ours).norm() / ours.norm()
    assert wrong > 0.05


# --- scale invariance ----------------------------------------------------------------------------------------------


def test_scale_invariant_radius_and_gradient_ignore_the_scale_of_filters_before_a_norm():
    x, y = images()
    torch.manual_seed(5)
    c = torch.rand(4, dtype=torch.float64) * 3 + 0.3
    results = []
    for rescaled in (False, True):
        for scaling in ("scale_invariant", "plain"):
            net = convnet("batch")
            net[1].eps = net[5].eps = 1e-30  # the invariance is exact without it
            if rescaled:
                with torch.no_grad():
                    net[0].weight.mul_(c.view(4, 1, 1, 1))
                    net[0].bias.mul_(c)
                    net[4].weight.mul_(c.flip(0).view(4, 1, 1, 1))
            for block in ("0", "4"):
                flat, step, _ = start(net, x, y, block, scaling=scaling)
                radius = flat.state_dict()["pairs"][block]
                value = (radius["psi.value"] * radius["gamma.value"]).max().item()
                q = step()
                gradient = penalty_gradient(flat, net, step, x, y)
                if rescaled:  # ∂/∂w of a function of w/‖w‖ scales as 1/c
                    gradient["0.weight"] *= c.view(4, 1, 1, 1)
                    gradient["0.bias"] *= c
                    gradient["4.weight"] *= c.flip(0).view(4, 1, 1, 1)
                results.append((rescaled, scaling, block, value, q, gradient))
    by = {r[:3]: r[3:] for r in results}
    for block in ("0", "4"):
        before, after = by[False, "scale_invariant", block], by[True, "scale_invariant", block]
        assert after[0] == pytest.approx(before[0], rel=1e-8)
        assert after[1] == pytest.approx(before[1], rel=1e-8)
        size = max(g.norm() for g in before[2].values())
        for name, g in before[2].items():
            assert (after[2][name] - g).norm() < 1e-8 * size, name
        plain_before, plain_after = by[False, "plain", block], by[True, "plain", block]
        assert abs(plain_after[0] / plain_before[0] - 1) > 0.1


def test_every_block_of_the_test_net_is_found():
    assert [b.name for b in find_blocks(convnet())] == ["0", "4", "9"]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"curvature": "hessian"},
        {"flatness": "paper"},
        {"direction_from": "this_batch"},
        {"direction_over": "network"},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_the_last_layer_alone_may_be_trained(loss, choices):
    """The output is linear in it: its derivative along v is constant, and with MSE so is q."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net[0].requires_grad_(False)
    x, y = torch.randn(4, 6).double(), torch.arange(4) % 3
    target = y if loss is F.cross_entropy else torch.randn(4, 3).double()
    flat = Flatness(net, loss=loss, mu=0.3, bound=-1.0, **choices)
    flat.backward(x, target)
    net.zero_grad()
    flat.backward(x, target)
    found, v = gradients(net), flat.direction
    features = net[1](net[0](x))
    z, u = net[2](features), F.linear(features, v["2.weight"], v["2.bias"])
    p = z.softmax(1)
    q = ((p * u**2).sum(1) - (p * u).sum(1) ** 2).mean() if loss is F.cross_entropy else 2 * u.square().mean()
    assert flat.curvature == pytest.approx(q.item(), rel=1e-10)
    wanted = torch.autograd.grad(loss(z, target) + 0.3 * (q + 1.0), list(net[2].parameters()))
    torch.testing.assert_close(found, {"2.weight": wanted[0], "2.bias": wanted[1]}, rtol=1e-10, atol=1e-14)

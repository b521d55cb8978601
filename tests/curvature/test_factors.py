"""Ψ and Γ against curvlinops, against explicit patches, and against what theory says they equal."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature_cases import Siamese, convnet, ggn_quotient, images, top_dense
from hgnp import Flatness
from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.eigen import kronecker_residual, top_of_each
from hgnp.curvature.factors import Rows, find_blocks, unit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # a dependency of curvlinops scripts a function on import
    from curvlinops import FisherType, KFACLinearOperator, KFACType

CONVENTIONS = ("expand", "reduce")


def observe(net, inputs, y, kfac_approx, *, loss=F.cross_entropy, scale_invariant=False, scale=1.0):
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    collector = FactorCollector(
        find_blocks(net), inputs[0].shape[0], kfac_approx=kfac_approx, scale_invariant=scale_invariant, keep_calls=True
    )
    with Forward(observer=collector):
        z = net(*inputs)
    collector.collect(loss(z, y), None, scale)
    return collector


def dense(collector, name):
    return collector.psi[name].factor().dense(), collector.gamma[name].factor().dense()


@pytest.mark.parametrize("kfac_approx", CONVENTIONS)
def test_factors_equal_curvlinops(kfac_approx):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, (2, 3), dilation=(1, 1)),
        nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3),
    ).double()  # fmt: skip
    x, y = images(6)
    kfac = KFACLinearOperator(
        net, nn.CrossEntropyLoss(), list(net.parameters()), [(x, y)], fisher_type=FisherType.EMPIRICAL,
        kfac_approx=getattr(KFACType, kfac_approx.upper()), separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    kfac.compute_kronecker_factors()
    collector = observe(net, x, y, kfac_approx)
    for block in find_blocks(net):
        psi, gamma = dense(collector, block.name)
        if kfac_approx == "expand":  # curvlinops divides Ψ by T, the bias entry of ours, and not Γ
            psi, gamma = psi / psi[0, -1, -1], gamma * psi[0, -1, -1]
        torch.testing.assert_close(psi[0], kfac._input_covariances[block.name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gamma[0], kfac._gradient_covariances[block.name], rtol=1e-10, atol=1e-12)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (3, 4)),
    "linear, positions": (lambda: nn.Linear(4, 6), (3, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 9)),
    "conv1d, groups": (lambda: nn.Conv1d(4, 6, 3, padding="same", groups=2), (3, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2), (3, 4, 7, 8)),
    "conv2d, no bias": (lambda: nn.Conv2d(4, 6, (1, 2), bias=False), (3, 4, 5, 6)),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, 4, dilation=2, padding="same"), (3, 4, 8, 7)),
    "conv2d, circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 6, 5)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (3, 4, 5, 6)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (3, 4, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, padding=1, groups=2), (3, 2, 3, 4, 3)),
}


def explicit(layer: nn.Module, x: Tensor, g: Tensor, kfac_approx: str) -> tuple[Tensor, Tensor]:
    """Both factors from patches found by applying the layer to every basis filter."""
    groups = getattr(layer, "groups", 1)
    side = layer.weight[0].numel()
    patches = []
    with torch.no_grad():
        kept = layer.weight.clone(), layer.bias
        layer.bias = None
        for k in range(side):
            layer.weight.copy_(
                torch.zeros_like(layer.weight).flatten(1).index_fill(1, torch.tensor([k]), 1.0).view_as(layer.weight)
            )
            patches.append(layer(x).detach())  # entry k of each patch, once for every output of the group
        layer.weight.copy_(kept[0])
        layer.bias = kept[1]
    if layer.weight.dim() == 2:
        a, g = torch.stack([p[..., 0] for p in patches], -1), g
        a = a.reshape(x.shape[0], -1, 1, side)
        g = g.reshape(x.shape[0], -1, 1, g.shape[-1])
    else:
        per = layer.weight.shape[0] // groups
        a = torch.stack([p.flatten(2)[:, ::per] for p in patches], -1).transpose(1, 2)  # (N, T, G, side)
        g = g.flatten(2).transpose(1, 2).unflatten(2, (groups, per))
    if layer.bias is not None:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    n, t = a.shape[:2]
    if kfac_approx == "expand":
        return torch.einsum("ntgi,ntgj->gij", a, a) / n, torch.einsum("ntgi,ntgj->gij", g, g) / (n * t)
    a, g = a.mean(1), g.sum(1)
    return torch.einsum("ngi,ngj->gij", a, a) / n, torch.einsum("ngi,ngj->gij", g, g) / n


@pytest.mark.parametrize("kfac_approx", CONVENTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_factors_and_eigenpairs_equal_dense_algebra(kind, kfac_approx):
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    weights = torch.randn_like(layer(x))
    net = nn.Sequential(layer)
    loss = lambda z, y: (weights * torch.tanh(z)).sum() / z.shape[0]  # noqa: E731
    collector = observe(net, x, None, kfac_approx, loss=loss)
    s = layer(x)
    g = torch.autograd.grad(loss(s, None), s)[0] * x.shape[0]
    expected = explicit(layer, x, g, kfac_approx)
    for moments, want in zip((collector.psi["0"], collector.gamma["0"]), expected, strict=True):
        factor = moments.factor()
        torch.testing.assert_close(factor.dense(), want, rtol=1e-10, atol=1e-12)
        vector = torch.randn(want.shape[:2], dtype=torch.float64)
        torch.testing.assert_close(
            factor.product(vector), (want @ vector.unsqueeze(2)).squeeze(2), rtol=1e-10, atol=1e-12
        )
        (pair,), oracle = top_of_each([factor], [unit(vector)], cold=True), top_dense(factor)
        torch.testing.assert_close(pair.value, torch.linalg.eigvalsh(want)[:, -1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(oracle.value, pair.value, rtol=1e-9, atol=1e-12)
        overlap = (pair.vector * oracle.vector).sum(1).abs()
        torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kfac_approx", CONVENTIONS)
def test_a_batch_given_twice_has_the_same_factors(kfac_approx):
    net = convnet("none", nn.Tanh)
    x, y = images(4)
    once, twice = observe(net, x, y, kfac_approx), observe(net, torch.cat([x, x]), torch.cat([y, y]), kfac_approx)
    for block in find_blocks(net):
        for a, b in zip(dense(once, block.name), dense(twice, block.name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_one_sample_one_position_has_the_squared_gradient_norm():
    """λ = ‖∂C/∂W‖² for N = T = 1, grouped convolutions included (one group at a time)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.randn(1, 4, 3, 3, dtype=torch.float64), torch.tensor([1])
    F.cross_entropy(net(x), y).backward()
    for kfac_approx in CONVENTIONS:
        collector = observe(net, x, y, kfac_approx)
        for block in find_blocks(net):
            psi, gamma = (torch.linalg.eigvalsh(f)[:, -1] for f in dense(collector, block.name))
            grads = block.weight.grad.flatten(1).square().sum(1) + block.bias.grad.square()
            torch.testing.assert_close(psi * gamma, grads.view(block.groups, -1).sum(1), rtol=1e-10, atol=0)


def test_kfac_is_the_gauss_newton_block_of_a_deep_linear_net():
    """MSE and a linear net: Γ of the true Fisher is constant, so Ψ ⊗ Γ is exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for index, block in enumerate(find_blocks(net)):
        # Γ by type-2 sampling: each output unit's root of the loss curvature, one backward each
        gamma = torch.zeros(block.weight.shape[0], block.weight.shape[0], dtype=torch.float64)
        for unit_ in range(2):
            collector = FactorCollector(
                find_blocks(net), 6, kfac_approx="expand", scale_invariant=False, keep_calls=False
            )
            with Forward(observer=collector):
                z = net(x)
            cotangent = torch.zeros_like(z)
            cotangent[:, unit_] = (2 / 2) ** 0.5 / 6
            collector.collect(z, cotangent, 1.0)
            gamma += collector.gamma[block.name].factor().dense()[0]
        psi = collector.psi[block.name].factor().dense()[0]

        def loss(flat, index=index, block=block):
            a = x
            for k, layer in enumerate(net):
                a = a @ (flat.view_as(block.weight) if k == index else layer.weight).T
            return F.mse_loss(a, y)

        H = torch.autograd.functional.hessian(loss, block.weight.detach().flatten())
        torch.testing.assert_close(torch.kron(gamma, psi), H, rtol=1e-9, atol=1e-11)


def test_a_shared_layer_has_the_positions_of_all_its_calls():
    torch.manual_seed(0)
    net = Siamese().double()
    left, right = torch.randn(2, 5, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (5,))
    for kfac_approx in CONVENTIONS:
        psi, gamma = dense(observe(net, (left, right), y, kfac_approx), "tower")
        both = torch.stack([left, right], 1)
        a = torch.cat([both, torch.ones_like(both[..., :1])], 2)
        want = torch.einsum("nti,ntj->ij", a, a) / 5 if kfac_approx == "expand" else a.mean(1).T @ a.mean(1) / 5
        torch.testing.assert_close(psi[0], want, rtol=1e-10, atol=1e-12)
        one, two = net.tower(left), net.tower(right)
        g = torch.stack(torch.autograd.grad(F.cross_entropy(net.head(F.relu(one) + F.relu(two)), y), (one, two)), 1) * 5
        want = torch.einsum("nti,ntj->ij", g, g) / 10 if kfac_approx == "expand" else g.sum(1).T @ g.sum(1) / 5
        torch.testing.assert_close(gamma[0], want, rtol=1e-10, atol=1e-12)


def test_in_place_activations_do_not_hide_the_derivative_at_the_layer():
    x, y = images()
    nets = [convnet("none", lambda inplace=inplace: nn.ReLU(inplace)) for inplace in (False, True)]
    plain, inplace = (observe(net, x, y, "expand") for net in nets)
    for block in find_blocks(nets[0]):
        torch.testing.assert_close(dense(plain, block.name), dense(inplace, block.name), rtol=1e-12, atol=0)


def test_the_residual_is_that_of_the_kronecker_product():
    torch.manual_seed(0)
    net = convnet("none")
    collector = observe(net, *images(), "expand")
    factors = collector.psi["0"].factor(), collector.gamma["0"].factor()
    vectors = [unit(torch.randn_like(f.dense()[..., 0])) for f in factors]
    products = [f.product(v) for f, v in zip(factors, vectors, strict=True)]
    values = [(v * Fv).sum(1) for v, Fv in zip(vectors, products, strict=True)]
    each = [(Fv - a * v).norm(dim=1) / a for v, Fv, a in zip(vectors, products, values, strict=True)]
    whole = torch.kron(factors[0].dense()[0], factors[1].dense()[0])
    v, value = torch.kron(vectors[0][0], vectors[1][0]), values[0] * values[1]
    residual = torch.linalg.vector_norm(whole @ v - value * v) / value
    assert residual.item() > 1e-4
    torch.testing.assert_close(kronecker_residual(*each), residual, rtol=1e-9, atol=0)


def test_the_scale_invariant_factor_is_scaled_on_both_sides():
    net = convnet("none")
    x, y = images()
    for kfac_approx in CONVENTIONS:
        plain = observe(net, x, y, kfac_approx)
        scaled = observe(net, x, y, kfac_approx, scale_invariant=True)
        for block in find_blocks(net):
            n = block.filter_norms().detach().view(block.gamma_shape)
            want = n.unsqueeze(2) * dense(plain, block.name)[1] * n.unsqueeze(1)
            torch.testing.assert_close(dense(scaled, block.name)[1], want, rtol=1e-12, atol=0)


def test_a_gradient_scale_is_divided_out():
    net = convnet("none")
    x, y = images()
    for kfac_approx in CONVENTIONS:
        plain = observe(net, x, y, kfac_approx)
        for scale in (1024.0, torch.tensor(2.0**15, dtype=torch.half)):
            scaled = observe(net, x, y, kfac_approx, scale=scale)
            torch.testing.assert_close(dense(plain, "0"), dense(scaled, "0"), rtol=1e-12, atol=0)


def test_the_empirical_quotient_is_that_of_the_block_of_per_sample_gradients():
    net = convnet("none")
    x, y = images()
    collector = observe(net, x, y, "reduce")
    for block in find_blocks(net):
        psi = unit(torch.randn(block.psi_shape, dtype=torch.float64))
        gamma = unit(torch.randn(block.gamma_shape, dtype=torch.float64))
        weight, bias = block.spread(psi, gamma)
        quotients = []
        for i in range(len(x)):
            params = [p for p in (block.weight, block.bias) if p is not None]
            grads = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), params)
            inner = (grads[0] * weight).flatten(1).sum(1)
            inner = inner if bias is None else inner + grads[1] * bias
            quotients.append(inner.view(block.gamma_shape).sum(1).square())
        want = torch.stack(quotients).mean(0)
        torch.testing.assert_close(collector.empirical(block, psi, gamma), want, rtol=1e-10, atol=0)


class RaggedProposals(nn.Module):
    """The second layer sees three proposals of two images."""

    def __init__(self, first):
        super().__init__()
        self.first, self.proposals = nn.Linear(4, 3) if first else nn.Identity(), nn.Linear(3 if first else 4, 2)

    def forward(self, x):
        return self.proposals(self.first(x)[:, :3].flatten(0, 1)[:3])


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_on_rows_that_do_not_fit_the_batch_has_no_part_in_v(first):
    torch.manual_seed(0)
    flat = Flatness(RaggedProposals(first).double(), bound=-1.0, refresh_every=1)
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 0])
    warned = pytest.warns(UserWarning, match="layer 'proposals' is called on a number of rows that is not a multiple")
    refused = pytest.raises(ValueError, match="a multiple of the batch's 2 samples, got 3 rows in 'proposals'")
    with warned, contextlib.nullcontext() if first else refused:
        flat.backward(x, y)
    assert flat.block == ("first" if first else None)


class FromVector(nn.Module):
    """A layer computes the weights of the next one from a learned vector, which has no dimension of samples."""

    def __init__(self):
        super().__init__()
        self.first, self.weights, self.code = nn.Linear(4, 5), nn.Linear(6, 15), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.linear(torch.tanh(self.first(x)), self.weights(self.code).view(3, 5))


@pytest.mark.parametrize("samples", [3, 4])  # 3 divides the width of the vector
def test_a_layer_on_a_vector_without_samples_has_no_part_in_v(samples):
    torch.manual_seed(0)
    net = FromVector().double()
    flat = Flatness(net, bound=-1.0, refresh_every=1)
    x, y = torch.randn(samples, 4, dtype=torch.float64), torch.arange(samples) % 3
    for _ in range(2):
        with pytest.warns(UserWarning, match="layer 'weights' is called on a number of rows that is not a multiple"):
            flat.backward(x, y)
    assert flat.block == "first"
    assert flat.curvature == pytest.approx(ggn_quotient(net, flat.direction, x, y).item(), rel=1e-10)


def test_a_start_in_the_null_space_comes_back():
    rows = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]], dtype=torch.float64)
    lost = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    factor = Rows(rows, 2.0)
    (new,) = top_of_each([factor], [lost], cold=False)
    (pair,) = top_of_each([factor], [new.vector], cold=False)
    assert pair.value.item() == pytest.approx(2.5)


@pytest.mark.parametrize("kfac_approx", CONVENTIONS)
def test_inputs_are_as_autocast_has_a_layer_read_them(kfac_approx):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 3))
    x, y = torch.randn(6, 2, 5, 5), torch.arange(6) % 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = observe(net, x, y, kfac_approx)
    rounded = observe(net, x.bfloat16().float(), y, kfac_approx)
    torch.testing.assert_close(dense(found, "0")[0], dense(rounded, "0")[0], rtol=1e-6, atol=1e-6)

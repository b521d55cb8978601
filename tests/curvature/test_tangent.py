"""Tangents of a zoo of operations, and their gradients, against reverse mode over reverse mode."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import begin_step, finish_step, ggn_quotient, images
from hgnp import Flatness
from hgnp.curvature.autodiff.forward import UnsupportedOperationError
from hgnp.curvature.autodiff.norms import BatchNormDual, batch_norm, logcumsumexp
from hgnp.curvature.autodiff.operations import LINEAR, SAME
from hgnp.curvature.autodiff.rules import RULES
from hgnp.curvature.autodiff.tangent import Tangent, load_jvp

load_jvp()


def views(x):
    y = x.view(x.shape[0], 2, 2, -1).transpose(1, 2).reshape(x.shape)
    a, b = y.chunk(2, 1)
    c, d = torch.split(b, 2, dim=2)[0], a[:, :, 1:3]
    return torch.stack([c, d], 1).flatten(1, 2).unsqueeze(-1).squeeze(-1).permute(0, 2, 1, 3).contiguous().movedim(1, 2)


def inplace(x):
    y = x * 1.0
    y += 0.5
    y.mul_(2.0)
    y.sub_(x)
    y.div_(3.0)
    y = F.relu(y, inplace=True) * x
    y = F.silu(y, True)
    z = y.view(y.shape[0], -1)
    z = F.leaky_relu(z, 0.1, inplace=True)
    return z.view(x.shape)


def shared_tangents(x):
    y = x + 1.0  # its tangent is that of x
    y.neg_()
    y.cumsum_(1)
    return 2 * x + y


def into_constants(x):
    y = torch.ones_like(x)
    y *= x
    return y * x


def hardsigmoid_in_place(x):
    y = x * 2.0
    F.hardsigmoid(y, inplace=True)
    return x * y


def arithmetic(x):
    return (1 - x) / 2 + 3 * x - x / (2 + x * x) + 2 / (x.exp() + 1) + (-x) ** 3 - x.abs().sqrt().mean() + x.mT.mT


def reductions(x):
    mean = x.mean((2, 3), keepdim=True)
    return x - mean + x.var(1, keepdim=True) + x.amax(1, keepdim=True) + x.max(1, keepdim=True)[0] * x.norm()


def products(x):
    y = x.flatten(2)
    scores = torch.bmm(y, y.transpose(1, 2)).softmax(-1)
    return torch.einsum("nij,njk->nik", scores, y).view_as(x) + (scores @ y).view_as(x) + torch.matmul(x, x.mT)


def choices(x):
    mask = x > 0.1
    y = x.masked_fill(mask, 0.3) + torch.where(mask, x, x * x) + x.clamp(-0.4, 0.6)
    return y + torch.cat([x[:, 2:], torch.zeros_like(x[:, 2:])], 1) + torch.gather(x, 1, torch.ones_like(x).long())


def constants(x):
    with torch.no_grad():
        scale = x.norm()
    return x * scale + x.detach() * x + x.data + torch.ones_like(x) * x.shape[0] * x.size(1) * x.dim()


ZOO = {
    "views": views,
    "in place": inplace,
    "in place, with a tangent that another tensor shares": shared_tangents,
    "in place, into a constant": into_constants,
    "differences from a constant": lambda x: torch.diff(x, prepend=torch.ones_like(x[..., :1])),
    "arithmetic": arithmetic,
    "reductions": reductions,
    "products": products,
    "choices": choices,
    "constants": constants,
    "pools": lambda x: (
        F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 2)
    ),
    "strided pools": lambda x: F.max_pool2d(F.pad(x, (1, 1, 0, 2), value=5.0), 3, stride=2, padding=1, ceil_mode=True),
    "pools, channels last": lambda x: (
        F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2, stride=1)
        + F.max_pool3d(x.unsqueeze(1).contiguous(memory_format=torch.channels_last_3d), (1, 2, 2), stride=1).squeeze(1)
    ),
    "pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "pools 1d 3d": lambda x: (F.max_pool1d(x.flatten(2), 3).sum(), F.max_pool3d(x.unsqueeze(1), 2).sum())[0] * x,
    "resize": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear") + F.interpolate(x, scale_factor=2.0),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "gates": lambda x: F.glu(x, 1) * F.hardswish(x[:, :2]) + F.softplus(x[:, 2:]),
    "hardsigmoid": lambda x: x * F.hardsigmoid(x),
    "hardsigmoid in place": hardsigmoid_in_place,
    "layer norm": lambda x: (
        F.layer_norm(x, x.shape[2:]) + F.group_norm(x, 2) + F.instance_norm(x) + F.rms_norm(x, (4,))
    ),
    "normalise": lambda x: F.normalize(x, dim=1) * F.cosine_similarity(x, x.flip(1)).unsqueeze(1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention that sees nothing": lambda x: (
        F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril(-1).bool())
        + F.scaled_dot_product_attention(
            x, x, x, torch.zeros(4, 4).masked_fill(torch.ones(4, 4).tril(-2) == 0, -torch.inf)
        )
    ),
    "determinants": lambda x: (
        x * torch.linalg.det(x)[..., None, None] + torch.slogdet(x)[1][..., None, None] * x.det().mean()
    ),
    "solve": lambda x: torch.linalg.solve(x + 3 * torch.eye(4, dtype=x.dtype), x.flip(1)),
    "products along a dimension": lambda x: (
        x.masked_fill(x > 0.4, 0.0).cumprod(1) + x.scatter_reduce(1, torch.zeros_like(x).long(), x.flip(1), "prod")
    ),
    "unfold": lambda x: F.unfold(x, 2).view(x.shape[0], 4, 4, 9),
    "topk": lambda x: x.topk(2, 1)[0] + x.sort(1)[0][:, 1:3],
    "transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 2, 2, dtype=x.dtype)),
    "batch norm, no affine": lambda x: F.batch_norm(x, None, None, training=True),
    "to and back": lambda x: x.float().to(torch.float64) + x.type_as(x),
    "parts of complex numbers": lambda x: torch.fft.fft(x).real + (1j * torch.fft.fft(x).mH).imag + x.real * x,
    "views of complex numbers": lambda x: (
        torch.view_as_real(torch.fft.fft2(x).transpose(2, 3)).sum(-1)
        + x.to(torch.complex128).flatten(1).view(x.shape).real
    ),
    "products of complex numbers": lambda x: (
        (torch.fft.fft(x) * torch.fft.fft(x, dim=1).conj() / (1 + 2j)).imag
        + (torch.fft.fft(x) @ torch.fft.fft(x)).abs()
    ),
    "logarithms of sums": lambda x: (
        x.masked_fill(x > 0.5, -torch.inf).flatten(1).logcumsumexp(1)[:, -20:].view(x.shape[0], 5, 4)
        + torch.logcumsumexp(torch.cat([x[:, :1], 60 * x], 1), dim=2).sum(2)
    ),
    "type and back": lambda x: x.type(torch.float32).type(x.type()) + x * x.type(torch.int64),
}


class Zoo(nn.Module):
    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Conv2d(2, 4, 3, padding=1).double(), middle

    def forward(self, x):
        return self.middle(torch.tanh(self.first(x))).flatten(1)


@pytest.mark.parametrize("case", ZOO)
def test_tangents_and_their_gradients(case):
    net = Zoo(ZOO[case])
    torch.manual_seed(1)
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    weight, bias = net.first.weight, net.first.bias
    vw, vb = torch.randn_like(weight), torch.randn_like(bias)
    with Tangent([(weight, vw), (bias, vb)]) as mode:
        z = net(x)
    u = mode.tangent(z)
    torch.testing.assert_close(z, net(x), rtol=1e-6, atol=1e-7)
    # reverse over reverse: u = ∂/∂c ⟨∂⟨c, z⟩/∂W, v⟩, with primitive norms for their sake
    from hgnp.curvature.autodiff.hessian import Primitive

    with Primitive():
        plain = net(x)
    c = torch.zeros_like(plain, requires_grad=True)
    g = torch.autograd.grad(plain, (weight, bias), c, create_graph=True)
    want = torch.autograd.grad((g[0] * vw).sum() + (g[1] * vb).sum(), c, create_graph=True)[0]
    rounded = case in (
        "to and back",
        "type and back",
        "hardsigmoid in place",
    )  # PyTorch's own hardsigmoid has 1/6 in float32
    loose = {"rtol": 1e-5, "atol": 1e-6} if rounded else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(u, want, **loose)
    probe = torch.randn_like(u)
    ours = torch.autograd.grad((probe * u).sum(), (weight, bias), allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad((probe * want).sum(), (weight, bias), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours, theirs, **loose)


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", ""])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (3, 3, 2, 4), (2, 3, 2, 2, 3)])
def test_batch_norm_with_its_tangent(shape, affine):
    """Value, tangent, buffers and every adjoint against the primitive norm."""
    torch.manual_seed(0)
    s, ds, Y, Z = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(4))
    weight, bias = (
        torch.randn(3, dtype=torch.float64, requires_grad=True) if part in affine else None
        for part in ("weight", "bias")
    )
    leaves = [x for x in (s, ds, weight, bias) if x is not None]
    stats = [(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    y, dy = BatchNormDual.apply(s, ds, weight, bias, *stats[0], 0.3, 1e-2, None)

    def norm(s):
        return batch_norm(s, None, None, weight, bias, True, 0.3, 1e-2)

    wy, wdy = torch.func.jvp(norm, (s,), (ds,))
    batch_norm(s, *stats[1], weight, bias, True, 0.3, 1e-2)
    torch.testing.assert_close((y, dy), (wy, wdy), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(stats[0], stats[1], rtol=1e-12, atol=1e-13)
    ours = torch.autograd.grad((Y.detach() * y + Z.detach() * dy).sum(), leaves, retain_graph=True)
    want = torch.autograd.grad((Y.detach() * wy + Z.detach() * wdy).sum(), leaves, retain_graph=True)
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-11)
    dims = [d for d in range(len(shape)) if d != 1]
    known = s.mean(dims).detach(), (s.var(dims, correction=0) + 1e-2).rsqrt().detach()
    nothing, again = BatchNormDual.apply(s, ds, weight, bias, None, None, 0.3, 1e-2, known)
    assert nothing is None
    # each by itself: the other's adjoint is then missing, not zero
    for part, other in ((y, wy), (dy, wdy), (again, wdy)):
        ours = torch.autograd.grad(part.square().sum(), leaves, retain_graph=True, materialize_grads=True)
        want = torch.autograd.grad(other.square().sum(), leaves, retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-11)


def test_a_channel_that_half_precision_cannot_tell_from_a_constant_has_no_tangent():
    """Its variation is rounding, which 1/√ε would blow up. The other channels are those of float64, and y is untouched."""
    torch.manual_seed(0)
    s = torch.randn(16, 3)
    s[:, 1] = 500 + s[:, 1] / 2  # numbers near 500 are 2 apart in bfloat16
    s, ds, Y, Z = (x.bfloat16() for x in (s, *torch.randn(3, 16, 3)))
    keep = torch.tensor([True, False, True])

    def adjoints(dtype, keep):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (s, ds)] + [torch.ones(3, requires_grad=True)]
        weight = leaves[2].to(torch.promote_types(dtype, torch.float32))
        y, dy = BatchNormDual.apply(*leaves[:2], weight, None, None, None, 0.1, 1e-5, None)
        return y, dy, torch.autograd.grad((Y.to(dtype) * y).sum() + (Z.to(dtype) * dy * keep).sum(), leaves)

    y, dy, ours = adjoints(torch.bfloat16, torch.ones(3, dtype=torch.bfloat16))
    exact_y, exact_dy, exact = adjoints(torch.float64, keep)
    close = {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(y.double(), exact_y, **close)
    torch.testing.assert_close(dy.double(), exact_dy * keep, **close)
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=0.03, atol=0.03 * float(want.abs().max()))


def stale_view(x):
    part = x[:, :1]
    x.mul_(2.0)
    return x + part


def base_after_view(x):
    y = torch.zeros_like(x)
    y[:, :2].add_(x[:, :2])
    return y * x


def view_before_base(x):
    y = torch.zeros_like(x)
    part = y[:, :2]
    y.add_(x)
    return x[:, :2] * part


def indexed(x):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 0]
    return y


def assigned_data(x):
    y = x * 1.0
    y.data = torch.ones_like(x)
    return x * y


def assigned_part(x):
    y = torch.fft.fft(x)
    y.imag = x
    return y.imag


def into_out(x):
    return torch.mul(x, 2.0, out=torch.empty_like(x, requires_grad=False))


@pytest.mark.parametrize(
    "middle", [stale_view, base_after_view, view_before_base, indexed, assigned_data, assigned_part, into_out]
)
def test_what_cannot_be_followed_is_refused(middle):
    net = Zoo(middle)
    with (
        pytest.raises((UnsupportedOperationError, RuntimeError)),
        Tangent([(net.first.weight, torch.ones_like(net.first.weight))]),
    ):
        net(torch.randn(3, 2, 4, 4, dtype=torch.float64))


def test_dropout_draws_one_mask_for_value_and_tangent():
    for module in (nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout2d(0.5)):
        net = Zoo(module)
        torch.manual_seed(1)
        x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
        v = torch.randn_like(net.first.weight)
        torch.manual_seed(2)
        plain, stream = net(x), torch.get_rng_state()
        torch.manual_seed(2)
        with Tangent([(net.first.weight, v)]) as mode:
            z = net(x)
        assert torch.equal(torch.get_rng_state(), stream)
        assert torch.equal(z, plain)
        mask = (plain != 0) * 2.0
        slope = (1 - torch.tanh(net.first(x)) ** 2).flatten(1)
        torch.testing.assert_close(mode.tangent(z), F.conv2d(x, v, padding=1).flatten(1) * slope * mask)


def test_every_rule_is_for_an_operation_that_is_known_to_bend_or_not():
    assert SAME <= LINEAR
    assert set(RULES) >= SAME


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_instance_norms_update_their_statistics_once(direction_from):
    torch.manual_seed(0)
    norms = [nn.InstanceNorm2d(4, affine=True, track_running_stats=True) for _ in range(2)]
    layers = [nn.Conv2d(2, 4, 3), norms[0], nn.Tanh(), nn.Conv2d(4, 4, 3), norms[1], nn.Flatten(), nn.Linear(16, 3)]
    net = nn.Sequential(*layers).double()
    plain = copy.deepcopy(net)
    flat = Flatness(net, bound=-1.0, direction_from=direction_from)
    x, y = images()
    begin_step(flat, x, y, "0")
    finish_step(flat, x, y)
    assert flat.curvature == pytest.approx(ggn_quotient(plain, flat.direction, x, y).item(), rel=1e-9)
    plain(x)
    torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()), rtol=1e-12, atol=0)


def test_logcumsumexp_of_infinite_numbers_is_pytorchs():
    x = torch.tensor([[torch.inf, torch.inf, 1.0], [-torch.inf, -torch.inf, 1.0], [0.0, torch.inf, -torch.inf]])
    torch.testing.assert_close(logcumsumexp(x, 1), torch.logcumsumexp(x, 1))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_logcumsumexp_has_the_derivatives_of_its_formula(curvature):
    """The third derivative of PyTorch's own is NaN."""
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    found = []
    for function in (lambda h: h.logcumsumexp(1), lambda h: h.exp().cumsum(1).log()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), Function(function), nn.Linear(6, 3)).double()
        flat = Flatness(net, mu=0.3, bound=-1.0, curvature=curvature)
        begin_step(flat, x, y, "0")
        finish_step(flat, x, y)
        found.append((flat.curvature, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_logcumsumexp_of_nothing_and_of_equal_numbers():
    x = torch.tensor([-torch.inf, -torch.inf, 1.0, 1.0, -torch.inf, 900.0, -900.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(logcumsumexp(x, 0), torch.logcumsumexp(x, 0))
    equal = torch.ones(3, dtype=torch.float64, requires_grad=True)
    H = torch.autograd.functional.hessian(lambda x: logcumsumexp(x, 0)[-1], equal)
    torch.testing.assert_close(H, torch.eye(3).double() / 3 - 1 / 9)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)

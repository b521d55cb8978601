"""Norms, and a few other operations, with derivatives that can be trusted.

PyTorch's fused BatchNorm (train mode), LayerNorm and InstanceNorm give silently wrong third derivatives: their saved
statistics carry no history. `PRIMITIVE` holds the same functions in primitive operations, right to any order.
`BatchNormDual` is the fast way for one direction: value and tangent of a train-mode BatchNorm with their exact first
derivatives. With n = (s − m)·inv, P(z) = z − mean z − n·mean(n z) and γ, β the affine map,

    y = γ n + β,    ẏ = γ·inv·P(ṡ).

Given adjoints Y of y and Z of ẏ, and a = mean(nZ), b = mean(nṡ), c = mean(Zṡ) − mean Z·mean ṡ,

    adjoint of ṡ = γ·inv·P(Z)
    adjoint of s = γ·inv·[P(Y − inv·b·Z − inv·a·ṡ) − inv·(c − ab)·n]
    adjoint of γ = Σ nY + inv·Σ(c − ab),    adjoint of β = Σ Y.

In half precision a channel may vary by less than the spacing of its numbers. Its n is rounding, and inv is large: ẏ and what
follows from it would be rounding too, times 1/√ε. There ẏ is 0: `varying` is 0 for such channels and 1 for the others.

`BatchNormSecond` adds the second derivative ÿ along a curve s(t) with s̈ = s″. With b = mean(nṡ), e = mean(P(ṡ)ṡ) and ′ = d/dt,

    inv′ = −inv²·b,    n′ = inv·P(ṡ),    n″ = inv·[P(s̈) − inv·(2b·P(ṡ) + e·n)],    ÿ = γ n″.

Its Jacobian J(t) = γ·inv·P is symmetric, and a change of the curve by δ(t) changes y by J(t)δ(t). Given adjoints Y, Z and X of
y, ẏ and ÿ,

    adjoint of s̈ = JX,    of ṡ = JZ + 2J′X,    of s = JY + J′Z + J″X,    of γ = Σ nY + n′Z + n″X.

ẏ is BatchNorm's own backward applied to ṡ, because its Jacobian is symmetric: the kernels that synchronised BatchNorm is
made of, one for sums and one that spreads them, serve all three P, and the last term is one more multiple of n in it.

Where a `Reducer` synchronises norms, `synchronised_batch_norm` is the train-mode BatchNorm, with statistics over the samples of
all ranks, and `Synchronised.tangent` its ẏ: primitive operations and sums over ranks, differentiable to any order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgnp.curvature.device import HALF, constant, upcast
from hgnp.curvature.kernels.support import kernels
from hgnp.errors import InputError
from hgnp.reducer import Reducer


def _shape(x: Tensor) -> tuple[int, ...]:
    return (1, -1) + (1,) * (x.dim() - 2)


def _normalise(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = upcast(x)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    var = (centred * centred).mean(dims, keepdim=True)
    return centred * torch.rsqrt(var + eps), mean, var


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    n = n if weight is None else n * weight.view(shape)
    return n if bias is None else n + bias.view(shape)


def _track(running: Tensor | None, observed: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            # .data: like PyTorch's own update, this must not raise the version, or a tape would refuse to run the call again
            running.data.lerp_(observed.to(running.dtype), momentum)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training and running_mean is not None:  # an affine map: PyTorch's is right
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    count = input.numel() // input.shape[1]
    if count == 1:
        raise InputError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    n, mean, var = _normalise(input, tuple(d for d in range(input.dim()) if d != 1), eps)
    _track(running_mean, mean.flatten(), momentum)
    _track(running_var, var.flatten() * (count / max(count - 1, 1)), momentum)
    return _affine(n, weight, bias, _shape(input)).to(input.dtype)


@dataclass(frozen=True)
class Synchronised:
    """x normalised over the samples of all ranks: n = (x − mean)·inv, inv = 1/√(var + ε)."""

    n: Tensor
    mean: Tensor
    var: Tensor
    inv: Tensor
    count: Tensor
    """Values in a channel, over all ranks."""
    reducer: Reducer

    @classmethod
    def of(cls, x: Tensor, eps: float, reducer: Reducer) -> "Synchronised":
        x = upcast(x)
        own = x.new_full((1,), x.numel() // x.shape[1])
        count, total = _sum_over_ranks(reducer, own, _channel_sum(x))
        count = count.detach()
        mean = total / count
        centred = x - mean.view(_shape(x))
        (squares,) = _sum_over_ranks(reducer, _channel_sum(centred * centred))
        var = squares / count
        inv = torch.rsqrt(var + eps)
        return cls(centred * inv.view(_shape(x)), mean, var, inv, count, reducer)

    def tangent(self, dx: Tensor | None, weight: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> Tensor:
        """γ·inv·P(ẋ) + γ̇n + β̇; a tangent that is None is zero."""
        n, shape = self.n, _shape(self.n)
        if dx is None:
            tangent = torch.zeros_like(n)
        else:
            dx = upcast(dx)
            sums = _sum_over_ranks(self.reducer, _channel_sum(dx), _channel_sum(n * dx))
            mean, slope = ((each / self.count).view(shape) for each in sums)
            tangent = _affine(dx - mean - n * slope, self.inv if weight is None else self.inv * weight, None, shape)
        if dweight is not None:
            tangent = tangent + n * dweight.view(shape)
        return tangent if dbias is None else tangent + dbias.view(shape)


def synchronised_batch_norm(options: dict[str, Any], reducer: Reducer) -> tuple[Tensor, Synchronised]:
    """y of F.batch_norm's arguments by name, with running statistics updated, and the normalised input."""
    x, momentum = options["input"], options["momentum"]
    norm = Synchronised.of(x, options["eps"], reducer)
    unbiased = norm.var * (norm.count / (norm.count - 1).clamp(min=1))
    _track(options["running_mean"], norm.mean, momentum)
    _track(options["running_var"], unbiased, momentum)
    return _affine(norm.n, options["weight"], options["bias"], _shape(x)).to(x.dtype), norm


def _channel_sum(x: Tensor) -> Tensor:
    return x.sum(tuple(d for d in range(x.dim()) if d != 1))


def _sum_over_ranks(reducer: Reducer, *parts: Tensor) -> tuple[Tensor, ...]:
    """Vectors, each summed over the ranks, all in one buffer."""
    return reducer.differentiable_sum(torch.cat(parts)).split([len(part) for part in parts])


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    n, mean, var = _normalise(input, tuple(range(2, input.dim())), eps)
    count = input[0, 0].numel()
    _track(running_mean, mean.mean(0).flatten(), momentum)
    _track(running_var, var.mean(0).flatten() * (count / max(count - 1, 1)), momentum)
    return _affine(n, weight, bias, _shape(input)).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...] | torch.Size,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    out = _affine(_normalise(input, dims, eps)[0], weight, bias, tuple(normalized_shape))
    return out if torch.is_autocast_enabled(input.device.type) else out.to(input.dtype)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    out = _affine(_normalise(grouped, (2,), eps)[0].reshape(input.shape), weight, bias, _shape(input))
    return out if torch.is_autocast_enabled(input.device.type) else out.to(input.dtype)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A query that sees no key, such as padding on the left, attends to all and is set to zero afterwards: PyTorch's value is
    zero too, but the gradient of its derivative is NaN."""
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, *args, **kwargs)
    blind = ~(attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf).any(-1, keepdim=True)
    mask = attn_mask | blind if attn_mask.dtype == torch.bool else attn_mask.masked_fill(blind, 0.0)
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs).masked_fill(blind, 0.0)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """PyTorch's has no second derivative formula at all."""
    out = F.relu6(input + 3) / 6
    return input.copy_(out) if inplace else out


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """PyTorch's forward derivative of it cannot be differentiated again."""
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """By doubling steps of log(eᵃ + eᵇ). PyTorch's derivative takes logarithms of zeros, whose own derivatives are NaN."""
    if not input.dim() or input.is_complex():
        return torch.logcumsumexp(input, dim)
    out, step, size = input, 1, input.shape[dim]
    while step < size:
        a, b = out.narrow(dim, step, size - step), out.narrow(dim, 0, size - step)
        larger = a >= b
        high, low = torch.where(larger, a, b), torch.where(larger, b, a)
        infinite = high.isinf()  # low − high would be inf − inf
        gap = torch.where(infinite, 0.0, low) - torch.where(infinite, 0.0, high)
        out = torch.cat([out.narrow(dim, 0, step), high + F.softplus(gap)], dim)
        step *= 2
    return out


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v/‖v‖. PyTorch's fused kernel leaves the length's derivative out of the second derivative."""
    # norm_except_dim over all dimensions has a forward derivative of another shape
    return v * (g / (torch.linalg.vector_norm(v) if dim == -1 else torch.norm_except_dim(v, 2, dim)))


# Modules call these functions too. `forward` refuses torch.batch_norm and the like, which take other arguments.
PRIMITIVE: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.hardsigmoid: hardsigmoid,
    F.glu: glu,
    torch._weight_norm: weight_norm,
    torch.logcumsumexp: logcumsumexp,
    torch.Tensor.logcumsumexp: logcumsumexp,
}


class BatchNormDual(torch.autograd.Function):
    """(s, ṡ, γ, β) → (y, ẏ) with batch statistics; running statistics are updated as BatchNorm would. With `known` statistics y
    has been computed already, and is not computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        ds: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor | None, Tensor]:
        y, mean, inv = _value_and_statistics(s, weight, bias, running_mean, running_var, momentum, eps, known)
        ds, ours = _laid_out_as(s, ds), _kernels(s)
        ctx.limits = _spacing(s), eps
        dy, sum_ds, sum_dsx = (batch_norm_tangent if ours is None else ours.tangent)(
            ds, s, weight, mean, inv, *ctx.limits
        )
        ctx.save_for_backward(s, ds, weight, mean, inv, sum_ds, sum_dsx)
        ctx.set_materialize_grads(False)
        return y, dy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, Y: Tensor | None, Z: Tensor | None) -> tuple[Tensor | None, ...]:
        s, ds, weight, mean, inv, sum_ds, sum_dsx = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[2:4]
        Y, Z = (None if x is None else _laid_out_as(s, x) for x in (Y, Z))
        grad_ds: Tensor | None = None
        if Z is not None:
            ours = _kernels(s)
            adjoints = batch_norm_adjoints if ours is None else ours.adjoints
            grad_s, grad_ds, grad_weight, sum_Y = adjoints(Y, Z, s, ds, weight, mean, inv, sum_ds, sum_dsx, *ctx.limits)
        elif Y is not None:
            grad_s, grad_weight, sum_Y = _value_adjoints(Y, s, weight, mean, inv)
        else:
            return (None,) * 4 + _REST
        # autograd takes the sums to the types of γ and β
        needs_bias &= Y is not None
        return grad_s, grad_ds, grad_weight if needs_weight else None, sum_Y if needs_bias else None, *_REST


class BatchNormSecond(torch.autograd.Function):
    """(s, ṡ, s̈, γ, β) → (y, ẏ, ÿ) with batch statistics; s̈ may be None, which is zero. Running statistics and `known` ones are
    as in `BatchNormDual`."""

    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        ds: Tensor,
        dds: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        y, mean, inv = _value_and_statistics(s, weight, bias, running_mean, running_var, momentum, eps, known)
        ctx.limits, ours = (_spacing(s), eps), _kernels(s, "batch_norm_second")
        moments = None
        if ours is None:
            dy, ddy = batch_norm_second(s, ds, dds, weight, mean, inv, *ctx.limits)
        else:
            ds, dds = _laid_out_as(s, ds), None if dds is None else _laid_out_as(s, dds)
            dy, ddy, moments = ours.second(s, ds, dds, weight, mean, inv, *ctx.limits)
        ctx.save_for_backward(s, ds, dds, weight, mean, inv, moments)
        ctx.set_materialize_grads(False)
        return y, dy, ddy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, Y: Tensor | None, Z: Tensor | None, X: Tensor | None) -> tuple[Tensor | None, ...]:
        s, ds, dds, weight, mean, inv, moments = ctx.saved_tensors
        grads: tuple[Tensor | None, ...]
        Y = None if Y is None else _laid_out_as(s, Y)
        if Z is None and X is None and Y is not None:
            grad_s, *of_affine = _value_adjoints(Y, s, weight, mean, inv)
            grads = grad_s, None, None, *of_affine
        elif moments is None:
            grads = batch_norm_second_adjoints(Y, Z, X, s, ds, dds, weight, mean, inv, *ctx.limits)
        else:
            Z, X = (torch.zeros_like(s) if each is None else _laid_out_as(s, each) for each in (Z, X))
            ours = _kernels(s, "batch_norm_second")
            grads = ours.adjoints(Y, Z, X, s, ds, dds, weight, mean, inv, moments, *ctx.limits)
        *of_curve, grad_weight, grad_bias = grads
        needs_weight, needs_bias = ctx.needs_input_grad[3], ctx.needs_input_grad[4] and Y is not None
        return *of_curve, grad_weight if needs_weight else None, grad_bias if needs_bias else None, *_REST


def _value_adjoints(
    Y: Tensor, s: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of s, γ and β, where y alone has an adjoint: no tangent is touched."""
    sum_Y, sum_Yx = _sums(Y, s, mean, inv)
    return _spread(Y, s, weight, mean, inv, sum_Y, sum_Yx), sum_Yx * inv, sum_Y


def _value_and_statistics(
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    known: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """y, mean and inv of a batch; None and the `known` statistics, where y has been computed already."""
    if known is not None:
        return None, *known
    # kernels on a GPU take them for contiguous
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    value: tuple[Tensor, Tensor, Tensor] = torch.native_batch_norm(
        s, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return value


def _spacing(s: Tensor) -> float:
    """The relative spacing of half-precision numbers; 0 for wider types, in which it does not matter."""
    return torch.finfo(s.dtype).eps if s.dtype in HALF else 0.0


@dataclass(frozen=True)
class _Curve:
    """n of a BatchNorm along a curve of its input, n(t), with the derivatives of n and of inv·P at t = 0."""

    n: Tensor
    n1: Tensor
    n2: Tensor
    inv: Tensor
    inv1: Tensor
    inv2: Tensor

    @classmethod
    def of(cls, s: Tensor, ds: Tensor, dds: Tensor | None, mean: Tensor, inv: Tensor) -> "_Curve":
        mean, inv = mean.view(_shape(s)), inv.view(_shape(s))
        ds = _centred(ds)
        n = _centred(upcast(s) - mean) * inv  # the mean is rounded, and n″ has up to inv³ times what that leaves
        b, p = _projected(n, ds)
        e = _channel_mean(p * ds)
        inv1 = -inv.square() * b
        n2 = -inv.square() * (2 * b * p + e * n)
        b1 = inv * e
        if dds is not None:
            of_dds, projected = _projected(n, _centred(dds))
            n2, b1 = n2 + inv * projected, b1 + of_dds
        return cls(n, inv * p, n2, inv, inv1, -2 * inv * inv1 * b - inv.square() * b1)

    def jacobian(self, w: Tensor) -> Tensor:
        """inv·P(w)."""
        return self.inv * _projected(self.n, w)[1]

    def jacobian1(self, w: Tensor) -> Tensor:
        """(inv·P(w))′"""
        a, p = _projected(self.n, w)
        return self.inv1 * p - self.inv * (self.n1 * a + self.n * _channel_mean(self.n1 * w))

    def jacobian2(self, w: Tensor) -> Tensor:
        """(inv·P(w))″"""
        a, p = _projected(self.n, w)
        a1, a2 = _channel_mean(self.n1 * w), _channel_mean(self.n2 * w)
        along_n = 2 * self.inv1 * a1 + self.inv * a2
        along_n1 = 2 * (self.inv1 * a + self.inv * a1)
        return self.inv2 * p - self.n * along_n - self.n1 * along_n1 - self.n2 * (self.inv * a)


def _channel_mean(x: Tensor) -> Tensor:
    return x.mean(tuple(d for d in range(x.dim()) if d != 1), keepdim=True)


def _projected(n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """mean(nw) and P(w) = w − mean w − n·mean(nw), of a w whose mean is zero: see `_centred`."""
    slope = _channel_mean(n * w)
    return slope, w - n * slope


def _centred(w: Tensor) -> Tensor:
    """w − mean w, in full precision. Products are taken of this alone: a mean that is large beside the deviation would leave
    its rounding in them."""
    w = upcast(w)
    return w - _channel_mean(w)


def batch_norm_second(
    s: Tensor, ds: Tensor, dds: Tensor | None, weight: Tensor | None, mean: Tensor, inv: Tensor, spacing: float, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ẏ and ÿ; no s̈ is zero."""
    curve, scale = _Curve.of(s, ds, dds, mean, inv), _times(weight, varying(mean, inv, spacing, eps))
    dy, ddy = (_affine(n, scale, None, _shape(s)).to(s.dtype) for n in (curve.n1, curve.n2))
    return dy, ddy


def batch_norm_second_adjoints(
    Y: Tensor | None, Z: Tensor | None, X: Tensor | None, s: Tensor, ds: Tensor, dds: Tensor | None, weight: Tensor | None,
    mean: Tensor, inv: Tensor, spacing: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Of s, ṡ, s̈, γ and β."""
    shape, on = _shape(s), varying(mean, inv, spacing, eps)
    grad_bias = None if Y is None else _channel_sum(upcast(Y))
    Y, Z, X = (None if each is None else _centred(each) for each in (Y, Z, X))
    if on is not None:
        Z, X = (None if each is None else _affine(each, on, None, shape) for each in (Z, X))
    curve = _Curve.of(s, ds, dds, mean, inv)

    def adjoint(*parts: tuple[Tensor | None, Callable[[Tensor], Tensor]]) -> Tensor | None:
        terms = [derivative(each) for each, derivative in parts if each is not None]
        # its mean is zero up to rounding, which the mean of a layer's input would multiply
        return _affine(_centred(sum(terms[1:], terms[0])), weight, None, shape).to(s.dtype) if terms else None

    grad_s = adjoint((Y, curve.jacobian), (Z, curve.jacobian1), (X, curve.jacobian2))
    grad_ds = adjoint((Z, curve.jacobian), (X, lambda each: 2 * curve.jacobian1(each)))
    grad_dds = None if dds is None else adjoint((X, curve.jacobian))
    pairs = [(Y, curve.n), (Z, curve.n1), (X, curve.n2)]
    grad_weight = sum((_channel_sum(each * n) for each, n in pairs if each is not None), torch.zeros_like(inv))
    return grad_s, grad_ds, grad_dds, grad_weight, grad_bias


def _kernels(s: Tensor, name: str = "batch_norm") -> Any:
    """Triton kernels that do the same in fewer passes over memory, where they work; else None."""
    return kernels(name, s.dtype, s.device) if s.is_cuda and _in_rows(s) else None


def varying(mean: Tensor, inv: Tensor, spacing: float, eps: float) -> Tensor | None:
    """1 for each channel whose deviation is at least `spacing` times its mean, else 0. None: with no spacing all are."""
    if not spacing:
        return None
    variance = inv.pow(-2) - (1 - MARGIN) * eps
    return ((spacing * mean).square() <= variance).to(inv.dtype)


MARGIN = 1e-3
"""Share of ε by which the variance may be off, as it is taken from inv."""


def _times(weight: Tensor | None, factor: Tensor | None) -> Tensor | None:
    return weight if factor is None else factor if weight is None else weight * factor


def batch_norm_tangent(
    ds: Tensor, s: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor, spacing: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """varying·γ·inv·P(ṡ), Σṡ and Σṡ(s − mean)."""
    sum_ds, sum_dsx = _sums(ds, s, mean, inv)
    weight = _times(weight, varying(mean, inv, spacing, eps))
    return _spread(ds, s, weight, mean, inv, sum_ds, sum_dsx), sum_ds, sum_dsx


Adjoints = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of s, ṡ, γ and β."""


def batch_norm_adjoints(
    Y: Tensor | None, Z: Tensor, s: Tensor, ds: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor, sum_ds: Tensor,
    sum_dsx: Tensor, spacing: float, eps: float,
) -> Adjoints:  # fmt: skip
    count = s.numel() // s.shape[1]
    zero, one = _constants(len(inv), inv.dtype, inv.device)
    sum_Y, sum_Yx = (zero, zero) if Y is None else _sums(Y, s, mean, inv)
    sum_Z, sum_Zx = _sums(Z, s, mean, inv)
    _, covariance = _sums(Z, ds, sum_ds / count, one)  # count·c
    on = varying(mean, inv, spacing, eps)
    grad_ds = _spread(Z, s, _times(weight, on), mean, inv, sum_Z, sum_Zx)
    if on is not None:
        sum_dsx, sum_Zx, covariance = sum_dsx * on, sum_Zx * on, covariance * on
    share = inv * inv / count
    of_Z, of_ds = share * sum_dsx, share * sum_Zx
    product = of_Z * sum_Zx  # count·ab
    W = _minus(_minus(Y, Z, of_Z), ds, of_ds)
    sum_W = sum_Y.addcmul(of_Z, sum_Z, value=-1).addcmul_(of_ds, sum_ds, value=-1)
    more = sum_Yx + covariance
    # ΣW(s − mean) = sum_Yx − 2·product, and the last term of the adjoint adds covariance − product to it
    grad_s = _spread(W, s, weight, mean, inv, sum_W, torch.sub(more, product, alpha=3))
    return grad_s, grad_ds, (more - product) * inv, sum_Y


_REST = (None,) * 5  # statistics, momentum and eps have no derivative


_LAST = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


def _in_rows(s: Tensor) -> bool:
    """Whether all channels of a position lie together."""
    return s.dim() in _LAST and s.is_contiguous(memory_format=_LAST[s.dim()])


def _laid_out_as(s: Tensor, x: Tensor) -> Tensor:
    return x.contiguous(
        memory_format=_LAST[s.dim()] if _in_rows(s) and not s.is_contiguous() else torch.contiguous_format
    )


def _sums(z: Tensor, s: Tensor, mean: Tensor, inv: Tensor) -> tuple[Tensor, Tensor]:
    """Σ z and Σ z·(s − mean) of each channel."""
    if z.is_cuda:
        both: tuple[Tensor, Tensor] = torch.batch_norm_backward_reduce(z, s, mean, inv, None, True, False, False)[:2]
        return both
    _, normalised, plain = torch.ops.aten.native_batch_norm_backward(
        z, s, None, None, None, mean, inv, True, 0.0, [False, True, True]
    )
    return plain, normalised / inv


def _spread(
    z: Tensor, s: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor, sum_z: Tensor, sum_zx: Tensor
) -> Tensor:
    """γ·inv·(z − Σz/count − (s − mean)·inv²·Σz(s − mean)/count)."""
    count = s.numel() // s.shape[1]
    if z.is_cuda:
        weight = None if weight is None else weight.contiguous()  # the kernel takes it for that
        return torch.batch_norm_backward_elemt(z, s, mean, inv, weight, sum_z, sum_zx, _counts(count, z.device))
    wide = upcast(z)  # as the kernels do: s may be far from zero
    scale = inv if weight is None else inv * weight
    slope = scale * inv * inv * sum_zx / count
    shift = slope * mean - scale * sum_z / count
    scale, slope, shift = (k.to(wide.dtype).view(_shape(s)) for k in (scale, slope, shift))
    return torch.addcmul(shift, wide, scale).addcmul_(upcast(s), slope, value=-1).to(z.dtype)


def _minus(x: Tensor | None, y: Tensor, k: Tensor) -> Tensor:
    """x − k·y, with a k for each channel; no x is zero."""
    if not y.is_cuda:
        k = k.to(y.dtype).view(_shape(y))
        return y * -k if x is None else torch.addcmul(x, y, k, value=-1)
    zero, one = _constants(len(k), k.dtype, k.device)  # the kernel that spreads sums does it in one go
    if x is None:
        return _spread(y, y, -k, zero, one, zero, zero)
    return _spread(x, y, None, zero, one, zero, k * (y.numel() // y.shape[1]))


@constant
def _constants(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=dtype, device=device), torch.ones(channels, dtype=dtype, device=device)


@constant
def _counts(count: int, device: torch.device) -> Tensor:
    return torch.full((1,), count, dtype=torch.int32, device=device)

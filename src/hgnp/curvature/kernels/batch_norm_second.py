"""`BatchNormSecond` on a GPU: ẏ and ÿ in three kernels and their adjoints in three, instead of some thirty and a hundred
operations, each a pass over memory.

Tensors are matrices with a row for each position and a column for each channel, as in `batch_norm`. Names are those of
`curvature.autodiff.norms`; x stands for s − mean, i for inv, ⟨v, w⟩ for the mean of v·w over a channel, both centred. With

    b = ⟨n, ṡ⟩,    d = ⟨n, s̈⟩,    e = ⟨ṡ, ṡ⟩ − b²

the curve n(t) of the normalised input has

    n′ = i·(ṡ − b·n),    n″ = i·s̈ − 2i²b·ṡ + k·n,    k = 2i²b² − i²e − i·d,

so that everything is a linear combination of Y, Z, X, ṡ, s̈ and x, whose factors come from sums over a channel.

Sums are taken of numbers from which the channel's first one is subtracted: a mean that is large beside the deviation would
leave its rounding in them. So it would in a mean that includes the first number, and centring would leave a mean of its own, by
which the sums of products with other numbers would be off: means are of what is left, and both are subtracted in turn.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hgnp.curvature.autodiff.norms import MARGIN
from hgnp.curvature.kernels.batch_norm import PARTS, tile_at, tiling, total, varying_channels
from hgnp.curvature.kernels.support import on_tensor_device

FORWARD_SUMS, MOMENTS, ADJOINT_SUMS, FACTORS = 6, 6, 9, 17
"""Numbers per channel that kernels pass on."""


@triton.jit
def _first(values, column, inside, ACC: tl.constexpr):
    """The first number of each channel."""
    return tl.load(values + column, inside, other=0.0).to(ACC)


@triton.jit
def _centred(values, at, here, first, mean, ACC: tl.constexpr):
    """Numbers less those of their channel: one near their mean, then the mean of what is left."""
    return (tl.load(values + at, here, other=0.0).to(ACC) - first[None, :]) - mean[None, :]


@triton.jit
def _curve_sums(
    ds, dds, s, mean, sums, rows, channels,
    has_dds: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σx, Σṡ, Σs̈, Σṡx, Σs̈x and Σṡ² of each channel over this part of the rows, ṡ and s̈ less their first numbers."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    m = tl.load(mean + column, inside, other=0.0).to(ACC)[None, :]
    first = _first(ds, column, inside, ACC)[None, :]
    of_x = tl.zeros((ROWS, COLUMNS), ACC)
    of_ds = tl.zeros((ROWS, COLUMNS), ACC)
    of_dds = tl.zeros((ROWS, COLUMNS), ACC)
    of_dsx = tl.zeros((ROWS, COLUMNS), ACC)
    of_ddsx = tl.zeros((ROWS, COLUMNS), ACC)
    squares = tl.zeros((ROWS, COLUMNS), ACC)
    if has_dds:
        first_dds = _first(dds, column, inside, ACC)[None, :]
    for start in range(part * ROWS, rows, parts * ROWS):
        at, here = tile_at(start, column, rows, channels, ROWS)
        x = tl.where(here, tl.load(s + at, here, other=0.0).to(ACC) - m, 0.0)
        z = tl.where(here, tl.load(ds + at, here, other=0.0).to(ACC) - first, 0.0)
        of_x += x
        of_ds += z
        of_dsx += z * x
        squares += z * z
        if has_dds:
            z = tl.where(here, tl.load(dds + at, here, other=0.0).to(ACC) - first_dds, 0.0)
            of_dds += z
            of_ddsx += z * x
    out, apart = sums + column * parts + part, channels * parts
    tl.store(out, tl.sum(of_x, 0), inside)
    tl.store(out + apart, tl.sum(of_ds, 0), inside)
    tl.store(out + 2 * apart, tl.sum(of_dds, 0), inside)
    tl.store(out + 3 * apart, tl.sum(of_dsx, 0), inside)
    tl.store(out + 4 * apart, tl.sum(of_ddsx, 0), inside)
    tl.store(out + 5 * apart, tl.sum(squares, 0), inside)


@triton.jit
def _moments(
    sums, inv, moments, rows, channels, parts, ACC: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """mean x, mean ṡ, mean s̈, b, d and e of each channel; ṡ and s̈ less their first numbers."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    i = tl.load(inv + column, inside, other=1.0).to(ACC)
    mean_x = total(sums, 0, column, channels, parts, inside, PARTS) / rows
    mean_ds = total(sums, 1, column, channels, parts, inside, PARTS) / rows
    mean_dds = total(sums, 2, column, channels, parts, inside, PARTS) / rows
    b = i * (total(sums, 3, column, channels, parts, inside, PARTS) / rows - mean_x * mean_ds)
    d = i * (total(sums, 4, column, channels, parts, inside, PARTS) / rows - mean_x * mean_dds)
    e = total(sums, 5, column, channels, parts, inside, PARTS) / rows - mean_ds * mean_ds - b * b
    out = moments + column
    tl.store(out, mean_x, inside)
    tl.store(out + channels, mean_ds, inside)
    tl.store(out + 2 * channels, mean_dds, inside)
    tl.store(out + 3 * channels, b, inside)
    tl.store(out + 4 * channels, d, inside)
    tl.store(out + 5 * channels, e, inside)


@triton.jit
def _curve(
    ds, dds, s, weight, mean, inv, moments, dy, ddy, rows, channels, spacing, eps,
    has_weight: tl.constexpr, has_dds: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ẏ = varying·γ·n′ and ÿ = varying·γ·n″."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    at, here = tile_at(tl.program_id(0) * ROWS, column, rows, channels, ROWS)
    i = tl.load(inv + column, inside, other=1.0).to(ACC)
    m = tl.load(mean + column, inside, other=0.0).to(ACC)
    scale = varying_channels(m, i, spacing, eps)
    if has_weight:
        scale *= tl.load(weight + column, inside, other=0.0).to(ACC)
    known = moments + column
    mean_x = tl.load(known, inside, other=0.0)
    mean_ds = tl.load(known + channels, inside, other=0.0)
    b = tl.load(known + 3 * channels, inside, other=0.0)
    d = tl.load(known + 4 * channels, inside, other=0.0)
    e = tl.load(known + 5 * channels, inside, other=0.0)
    n = _centred(s, at, here, m, mean_x, ACC) * i[None, :]
    z = _centred(ds, at, here, _first(ds, column, inside, ACC), mean_ds, ACC)
    k = i * (i * (2 * b * b - e) - d)
    first = i[None, :] * (z - b[None, :] * n)
    second = k[None, :] * n - (2 * i * i * b)[None, :] * z
    if has_dds:
        mean_dds = tl.load(known + 2 * channels, inside, other=0.0)
        second += i[None, :] * _centred(dds, at, here, _first(dds, column, inside, ACC), mean_dds, ACC)
    tl.store(dy + at, (scale[None, :] * first).to(dy.dtype.element_ty), here)
    tl.store(ddy + at, (scale[None, :] * second).to(ddy.dtype.element_ty), here)


@triton.jit
def _adjoint_sums(
    Y, Z, X, s, ds, dds, mean, moments, sums, rows, channels,
    has_Y: tl.constexpr, has_dds: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ΣY, ΣYx, ΣZ, ΣZx, ΣZṡ, ΣX, ΣXx, ΣXṡ and ΣXs̈ of each channel over this part of the rows: x, ṡ and s̈ centred, the others
    less their first numbers."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    known = moments + column
    m, mean_x = tl.load(mean + column, inside, other=0.0).to(ACC), tl.load(known, inside, other=0.0)
    first_ds, mean_ds = _first(ds, column, inside, ACC), tl.load(known + channels, inside, other=0.0)
    first_Z = _first(Z, column, inside, ACC)[None, :]
    first_X = _first(X, column, inside, ACC)[None, :]
    of_Y = tl.zeros((ROWS, COLUMNS), ACC)
    of_Yx = tl.zeros((ROWS, COLUMNS), ACC)
    of_Z = tl.zeros((ROWS, COLUMNS), ACC)
    of_Zx = tl.zeros((ROWS, COLUMNS), ACC)
    of_Zds = tl.zeros((ROWS, COLUMNS), ACC)
    of_X = tl.zeros((ROWS, COLUMNS), ACC)
    of_Xx = tl.zeros((ROWS, COLUMNS), ACC)
    of_Xds = tl.zeros((ROWS, COLUMNS), ACC)
    of_Xdds = tl.zeros((ROWS, COLUMNS), ACC)
    if has_Y:
        first_Y = _first(Y, column, inside, ACC)[None, :]
    if has_dds:
        first_dds, mean_dds = _first(dds, column, inside, ACC), tl.load(known + 2 * channels, inside, other=0.0)
    for start in range(part * ROWS, rows, parts * ROWS):
        at, here = tile_at(start, column, rows, channels, ROWS)
        x = _centred(s, at, here, m, mean_x, ACC)
        t = _centred(ds, at, here, first_ds, mean_ds, ACC)
        z = tl.where(here, tl.load(Z + at, here, other=0.0).to(ACC) - first_Z, 0.0)
        of_Z += z
        of_Zx += z * x
        of_Zds += z * t
        z = tl.where(here, tl.load(X + at, here, other=0.0).to(ACC) - first_X, 0.0)
        of_X += z
        of_Xx += z * x
        of_Xds += z * t
        if has_dds:
            of_Xdds += z * _centred(dds, at, here, first_dds, mean_dds, ACC)
        if has_Y:
            z = tl.where(here, tl.load(Y + at, here, other=0.0).to(ACC) - first_Y, 0.0)
            of_Y += z
            of_Yx += z * x
    out, apart = sums + column * parts + part, channels * parts
    tl.store(out, tl.sum(of_Y, 0), inside)
    tl.store(out + apart, tl.sum(of_Yx, 0), inside)
    tl.store(out + 2 * apart, tl.sum(of_Z, 0), inside)
    tl.store(out + 3 * apart, tl.sum(of_Zx, 0), inside)
    tl.store(out + 4 * apart, tl.sum(of_Zds, 0), inside)
    tl.store(out + 5 * apart, tl.sum(of_X, 0), inside)
    tl.store(out + 6 * apart, tl.sum(of_Xx, 0), inside)
    tl.store(out + 7 * apart, tl.sum(of_Xds, 0), inside)
    tl.store(out + 8 * apart, tl.sum(of_Xdds, 0), inside)


@triton.jit
def _factors(
    Y, sums, weight, mean, inv, moments, factors, rows, channels, parts, spacing, eps,
    has_Y: tl.constexpr, has_weight: tl.constexpr, ACC: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What Y, Z, X, x, ṡ and s̈, all centred, are multiplied by in the adjoints of s, ṡ and s̈; the means of Y, Z and X less
    their first numbers; the adjoints of γ and β."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    known = moments + column
    b = tl.load(known + 3 * channels, inside, other=0.0)
    d = tl.load(known + 4 * channels, inside, other=0.0)
    e = tl.load(known + 5 * channels, inside, other=0.0)
    i = tl.load(inv + column, inside, other=1.0).to(ACC)
    m = tl.load(mean + column, inside, other=0.0).to(ACC)
    on = varying_channels(m, i, spacing, eps)
    sum_Y = total(sums, 0, column, channels, parts, inside, PARTS)
    mean_Y = sum_Y / rows
    if has_Y:
        sum_Y += rows * _first(Y, column, inside, ACC)
    mean_Z = total(sums, 2, column, channels, parts, inside, PARTS) / rows
    mean_X = total(sums, 5, column, channels, parts, inside, PARTS) / rows
    # ⟨n, ·⟩, ⟨n′, ·⟩ and ⟨n″, ·⟩ of Y, Z and X
    k = i * (i * (2 * b * b - e) - d)
    nY = i * total(sums, 1, column, channels, parts, inside, PARTS) / rows
    nZ = on * i * total(sums, 3, column, channels, parts, inside, PARTS) / rows
    n1Z = i * (on * total(sums, 4, column, channels, parts, inside, PARTS) / rows - b * nZ)
    nX = on * i * total(sums, 6, column, channels, parts, inside, PARTS) / rows
    dsX = on * total(sums, 7, column, channels, parts, inside, PARTS) / rows
    n1X = i * (dsX - b * nX)
    n2X = i * on * total(sums, 8, column, channels, parts, inside, PARTS) / rows - 2 * i * i * b * dsX + k * nX
    inv1 = -i * i * b
    inv2 = -2 * i * inv1 * b - i * i * (i * e + d)
    scale = tl.full((COLUMNS,), 1.0, ACC)
    if has_weight:
        scale = tl.load(weight + column, inside, other=0.0).to(ACC)
    # adjoint of s = γ·(J Y + J′Z + J″X) in terms of n, n′ and n″
    by_n = -(i * nY + inv1 * nZ + i * n1Z + inv2 * nX + 2 * inv1 * n1X + i * n2X)
    by_n1 = -(i * nZ + 2 * (inv1 * nX + i * n1X))
    by_n2 = -i * nX
    by_x = scale * i * (by_n - by_n1 * i * b + by_n2 * k)
    by_ds = scale * (by_n1 * i - by_n2 * 2 * i * i * b)
    by_dds = scale * by_n2 * i
    out = factors + column
    tl.store(out, scale * i, inside)
    tl.store(out + channels, scale * on * inv1, inside)
    tl.store(out + 2 * channels, scale * on * inv2, inside)
    tl.store(out + 3 * channels, by_x, inside)
    tl.store(out + 4 * channels, by_ds, inside)
    tl.store(out + 5 * channels, by_dds, inside)
    # of ṡ = γ·(J Z + 2J′X)
    by_n = -(i * nZ + 2 * (inv1 * nX + i * n1X))
    by_n1 = -2 * i * nX
    tl.store(out + 6 * channels, scale * on * i, inside)
    tl.store(out + 7 * channels, 2 * scale * on * inv1, inside)
    tl.store(out + 8 * channels, scale * i * (by_n - by_n1 * i * b), inside)
    tl.store(out + 9 * channels, scale * by_n1 * i, inside)
    # of s̈ = γ·J X
    tl.store(out + 10 * channels, scale * on * i, inside)
    tl.store(out + 11 * channels, -scale * i * i * nX, inside)
    # means, and the adjoints of γ and β
    tl.store(out + 12 * channels, mean_Y, inside)
    tl.store(out + 13 * channels, mean_Z, inside)
    tl.store(out + 14 * channels, mean_X, inside)
    tl.store(out + 15 * channels, rows * (nY + n1Z + n2X), inside)
    tl.store(out + 16 * channels, sum_Y, inside)


@triton.jit
def _combine(
    Y, Z, X, s, ds, dds, mean, moments, factors, grad_s, grad_ds, grad_dds, rows, channels,
    has_Y: tl.constexpr, has_dds: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The adjoints of s, ṡ and s̈ from their factors."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    at, here = tile_at(tl.program_id(0) * ROWS, column, rows, channels, ROWS)
    known, moment = factors + column, moments + column
    m, mean_x = tl.load(mean + column, inside, other=0.0).to(ACC), tl.load(moment, inside, other=0.0)
    mean_ds, mean_Z = tl.load(moment + channels, inside, other=0.0), tl.load(known + 13 * channels, inside, other=0.0)
    mean_X = tl.load(known + 14 * channels, inside, other=0.0)
    x = _centred(s, at, here, m, mean_x, ACC)
    t = _centred(ds, at, here, _first(ds, column, inside, ACC), mean_ds, ACC)
    z = _centred(Z, at, here, _first(Z, column, inside, ACC), mean_Z, ACC)
    w = _centred(X, at, here, _first(X, column, inside, ACC), mean_X, ACC)
    out = tl.load(known + channels, inside, other=0.0)[None, :] * z
    out += tl.load(known + 2 * channels, inside, other=0.0)[None, :] * w
    out += tl.load(known + 3 * channels, inside, other=0.0)[None, :] * x
    out += tl.load(known + 4 * channels, inside, other=0.0)[None, :] * t
    if has_Y:
        mean_Y = tl.load(known + 12 * channels, inside, other=0.0)
        y = _centred(Y, at, here, _first(Y, column, inside, ACC), mean_Y, ACC)
        out += tl.load(known, inside, other=0.0)[None, :] * y
    if has_dds:
        mean_dds = tl.load(moment + 2 * channels, inside, other=0.0)
        y = _centred(dds, at, here, _first(dds, column, inside, ACC), mean_dds, ACC)
        out += tl.load(known + 5 * channels, inside, other=0.0)[None, :] * y
    tl.store(grad_s + at, out.to(grad_s.dtype.element_ty), here)
    out = tl.load(known + 6 * channels, inside, other=0.0)[None, :] * z
    out += tl.load(known + 7 * channels, inside, other=0.0)[None, :] * w
    out += tl.load(known + 8 * channels, inside, other=0.0)[None, :] * x
    out += tl.load(known + 9 * channels, inside, other=0.0)[None, :] * t
    tl.store(grad_ds + at, out.to(grad_ds.dtype.element_ty), here)
    if has_dds:
        out = tl.load(known + 10 * channels, inside, other=0.0)[None, :] * w
        out += tl.load(known + 11 * channels, inside, other=0.0)[None, :] * x
        tl.store(grad_dds + at, out.to(grad_dds.dtype.element_ty), here)


def _sizes(mean: Tensor, tile: int, columns: int) -> dict[str, Any]:
    wide = tl.float64 if mean.dtype == torch.float64 else tl.float32
    return {"ACC": wide, "ROWS": tile, "COLUMNS": columns, "num_warps": 8}


@on_tensor_device
def second(
    s: Tensor, ds: Tensor, dds: Tensor | None, weight: Tensor | None, mean: Tensor, inv: Tensor, spacing: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """ẏ, ÿ and moments for `adjoints`. All of s, ṡ and s̈ lie densely in memory, with the channels last."""
    channels = s.shape[1]
    rows, columns, tile, blocks, parts = tiling(s, channels)
    weight = None if weight is None else weight.contiguous()  # it may be an expanded scalar
    sizes, has_dds = _sizes(mean, tile, columns), dds is not None
    sums, moments = mean.new_empty(FORWARD_SUMS, channels, parts), mean.new_empty(MOMENTS, channels)
    dy, ddy = torch.empty_like(s), torch.empty_like(s)
    _curve_sums[parts, blocks](ds, dds, s, mean, sums, rows, channels, has_dds=has_dds, **sizes)
    _moments[(triton.cdiv(channels, 4),)](
        sums, inv, moments, rows, channels, parts, ACC=sizes["ACC"], COLUMNS=4, PARTS=PARTS
    )
    _curve[triton.cdiv(rows, tile), blocks](
        ds, dds, s, weight, mean, inv, moments, dy, ddy, rows, channels, spacing, (1 - MARGIN) * eps,
        has_weight=weight is not None, has_dds=has_dds, **sizes,
    )  # fmt: skip
    return dy, ddy, moments


@on_tensor_device
def adjoints(
    Y: Tensor | None, Z: Tensor, X: Tensor, s: Tensor, ds: Tensor, dds: Tensor | None, weight: Tensor | None, mean: Tensor,
    inv: Tensor, moments: Tensor, spacing: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Of s, ṡ, s̈, γ and β. All of them lie densely in memory, with the channels last."""
    channels = s.shape[1]
    rows, columns, tile, blocks, parts = tiling(s, channels)
    weight = None if weight is None else weight.contiguous()  # it may be an expanded scalar
    sizes, has = _sizes(mean, tile, columns), {"has_Y": Y is not None, "has_dds": dds is not None}
    sums, factors = mean.new_empty(ADJOINT_SUMS, channels, parts), mean.new_empty(FACTORS, channels)
    grad_s, grad_ds, grad_dds = torch.empty_like(s), torch.empty_like(s), None if dds is None else torch.empty_like(s)
    _adjoint_sums[parts, blocks](Y, Z, X, s, ds, dds, mean, moments, sums, rows, channels, **has, **sizes)
    _factors[(triton.cdiv(channels, 4),)](
        Y, sums, weight, mean, inv, moments, factors, rows, channels, parts, spacing, (1 - MARGIN) * eps,
        has_Y=Y is not None, has_weight=weight is not None, ACC=sizes["ACC"], COLUMNS=4, PARTS=PARTS,
    )  # fmt: skip
    _combine[triton.cdiv(rows, tile), blocks](
        Y, Z, X, s, ds, dds, mean, moments, factors, grad_s, grad_ds, grad_dds, rows, channels, **has, **sizes
    )
    return grad_s, grad_ds, grad_dds, factors[15], factors[16]


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raises what keeps the kernels from working here."""
    x = torch.arange(32, dtype=dtype, device=device).view(4, 8)
    wide = torch.ones(8, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    moments = second(x, x, x, wide, wide, wide, 0.0, 0.0)[2]
    adjoints(x, x, x, x, x, x, wide, wide, wide, moments, 0.0, 0.0)

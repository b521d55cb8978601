"""`BatchNormDual` on a GPU: the tangent in three kernels, and the adjoints in three instead of some twenty.

Tensors are matrices with a row for each position and a column for each channel, as channels last lies in memory. Names and
formulas are those of `curvature.norms`; x stands for s − mean.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hgnp.curvature.autodiff.norms import MARGIN
from hgnp.curvature.kernels.support import on_tensor_device

PARTS = 256  # the most programs that share the rows of a channel
TILE = 2048  # numbers that a program processes at a time


@triton.jit
def tile_at(first, column, rows, channels, ROWS: tl.constexpr):
    """Where these columns of the next rows lie, and whether they are inside."""
    row = first + tl.arange(0, ROWS)
    here = (row < rows)[:, None] & (column < channels)[None, :]
    return row.to(tl.int64)[:, None] * channels + column[None, :], here


@triton.jit
def total(sums, which, column, channels, parts, inside, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    at = (which * channels + column)[:, None] * parts + part[None, :]
    return tl.sum(tl.load(sums + at, inside[:, None] & (part < parts)[None, :], other=0.0), 1)


@triton.jit
def varying_channels(mean, inv, spacing, eps):
    """`norms.varying`; eps is what is taken from 1 / inv² there."""
    return tl.where(spacing * mean * spacing * mean <= 1 / (inv * inv) - eps, 1.0, 0.0)


@triton.jit
def _tangent_sums(
    ds, s, mean, sums, rows, channels, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Σṡ and Σṡx of each channel over this part of the rows."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    m = tl.load(mean + column, inside, other=0.0).to(ACC)[None, :]
    of_ds = tl.zeros((ROWS, COLUMNS), ACC)
    of_dsx = tl.zeros((ROWS, COLUMNS), ACC)
    for first in range(part * ROWS, rows, parts * ROWS):
        at, here = tile_at(first, column, rows, channels, ROWS)
        z = tl.load(ds + at, here, other=0.0).to(ACC)
        of_ds += z
        of_dsx += z * (tl.load(s + at, here, other=0.0).to(ACC) - m)
    out = sums + column * parts + part
    tl.store(out, tl.sum(of_ds, 0), inside)
    tl.store(out + channels * parts, tl.sum(of_dsx, 0), inside)


@triton.jit
def _totals(sums, totals, channels, parts, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Over all parts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    tl.store(totals + column, total(sums, 0, column, channels, parts, inside, PARTS), inside)
    tl.store(totals + channels + column, total(sums, 1, column, channels, parts, inside, PARTS), inside)


@triton.jit
def _tangent(
    ds, s, weight, mean, inv, totals, out, rows, channels, spacing, eps,
    has_weight: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """varying·γ·inv·P(ṡ)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    at, here = tile_at(tl.program_id(0) * ROWS, column, rows, channels, ROWS)
    i = tl.load(inv + column, inside, other=1.0).to(ACC)
    scale = i
    if has_weight:
        scale = i * tl.load(weight + column, inside, other=0.0).to(ACC)
    m = tl.load(mean + column, inside, other=0.0).to(ACC)
    scale *= varying_channels(m, i, spacing, eps)
    shift = tl.load(totals + column, inside, other=0.0) / rows
    slope = tl.load(totals + channels + column, inside, other=0.0) * i * i / rows
    x = tl.load(s + at, here, other=0.0).to(ACC) - m[None, :]
    z = tl.load(ds + at, here, other=0.0).to(ACC)
    tl.store(out + at, (scale[None, :] * (z - shift[None, :] - x * slope[None, :])).to(out.dtype.element_ty), here)


@triton.jit
def _sums(
    Y, Z, s, ds, mean, sum_ds, sums, rows, channels,
    has_Y: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ΣY, ΣYx, ΣZ, ΣZx and ΣZ(ṡ − mean ṡ) of each channel over this part of the rows."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    m = tl.load(mean + column, inside, other=0.0).to(ACC)[None, :]
    shift = (tl.load(sum_ds + column, inside, other=0.0).to(ACC) / rows)[None, :]
    of_Y = tl.zeros((ROWS, COLUMNS), ACC)
    of_Yx = tl.zeros((ROWS, COLUMNS), ACC)
    of_Z = tl.zeros((ROWS, COLUMNS), ACC)
    of_Zx = tl.zeros((ROWS, COLUMNS), ACC)
    of_Zds = tl.zeros((ROWS, COLUMNS), ACC)
    for first in range(part * ROWS, rows, parts * ROWS):
        at, here = tile_at(first, column, rows, channels, ROWS)
        x = tl.load(s + at, here, other=0.0).to(ACC) - m
        z = tl.load(Z + at, here, other=0.0).to(ACC)
        of_Z += z
        of_Zx += z * x
        of_Zds += z * (tl.load(ds + at, here, other=0.0).to(ACC) - shift)
        if has_Y:
            y = tl.load(Y + at, here, other=0.0).to(ACC)
            of_Y += y
            of_Yx += y * x
    out, apart = sums + column * parts + part, channels * parts
    tl.store(out, tl.sum(of_Y, 0), inside)
    tl.store(out + apart, tl.sum(of_Yx, 0), inside)
    tl.store(out + 2 * apart, tl.sum(of_Z, 0), inside)
    tl.store(out + 3 * apart, tl.sum(of_Zx, 0), inside)
    tl.store(out + 4 * apart, tl.sum(of_Zds, 0), inside)


@triton.jit
def _factors(
    sums, weight, mean, inv, sum_ds, sum_dsx, factors, rows, channels, parts, spacing, eps,
    has_weight: tl.constexpr, ACC: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What each channel's Y, Z, ṡ, x and 1 are to be multiplied by in the adjoints, and the adjoints of γ and β."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    of_Y = total(sums, 0, column, channels, parts, inside, PARTS)
    of_Yx = total(sums, 1, column, channels, parts, inside, PARTS)
    of_Z = total(sums, 2, column, channels, parts, inside, PARTS)
    of_Zx = total(sums, 3, column, channels, parts, inside, PARTS)
    covariance = total(sums, 4, column, channels, parts, inside, PARTS)  # rows·c
    i = tl.load(inv + column, inside, other=1.0).to(ACC)
    scale = i
    if has_weight:
        scale = i * tl.load(weight + column, inside, other=0.0).to(ACC)
    share = i * i / rows
    ds = tl.load(sum_ds + column, inside, other=0.0).to(ACC)
    by_Z = share * tl.load(sum_dsx + column, inside, other=0.0).to(ACC)  # inv·b
    varying = varying_channels(tl.load(mean + column, inside, other=0.0).to(ACC), i, spacing, eps)
    by_Z *= varying
    of_Zx *= varying
    covariance *= varying
    by_ds = share * of_Zx  # inv·a
    product = by_Z * of_Zx  # rows·ab
    of_W = of_Y - by_Z * of_Z - by_ds * ds
    more = of_Yx + covariance
    out = factors + column
    tl.store(out, scale, inside)
    tl.store(out + channels, by_Z, inside)
    tl.store(out + 2 * channels, by_ds, inside)
    tl.store(out + 3 * channels, share * (more - 3 * product), inside)
    tl.store(out + 4 * channels, of_W / rows, inside)
    tl.store(out + 5 * channels, of_Z / rows, inside)
    tl.store(out + 6 * channels, (more - product) * i, inside)
    tl.store(out + 7 * channels, of_Y, inside)
    tl.store(out + 8 * channels, scale * varying, inside)


@triton.jit
def _spread(
    Y, Z, s, ds, mean, factors, grad_s, grad_ds, rows, channels,
    has_Y: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    at, here = tile_at(tl.program_id(0) * ROWS, column, rows, channels, ROWS)
    x = tl.load(s + at, here, other=0.0).to(ACC) - tl.load(mean + column, inside, other=0.0).to(ACC)[None, :]
    z = tl.load(Z + at, here, other=0.0).to(ACC)
    known = factors + column
    scale = tl.load(known, inside, other=0.0)[None, :]
    by_Z = tl.load(known + channels, inside, other=0.0)[None, :]
    by_ds = tl.load(known + 2 * channels, inside, other=0.0)[None, :]
    w = -by_Z * z - by_ds * tl.load(ds + at, here, other=0.0).to(ACC)
    if has_Y:
        w += tl.load(Y + at, here, other=0.0).to(ACC)
    slope = tl.load(known + 3 * channels, inside, other=0.0)[None, :]
    shift = tl.load(known + 4 * channels, inside, other=0.0)[None, :]
    tl.store(grad_s + at, (scale * (w - shift - x * slope)).to(grad_s.dtype.element_ty), here)
    shift = tl.load(known + 5 * channels, inside, other=0.0)[None, :]
    scale = tl.load(known + 8 * channels, inside, other=0.0)[None, :]
    tl.store(grad_ds + at, (scale * (z - shift - x * by_ds)).to(grad_ds.dtype.element_ty), here)


def tiling(s: Tensor, channels: int) -> tuple[int, int, int, int, int]:
    """Rows of s; columns and rows that a program processes at a time; how many programs share the columns, and a channel."""
    rows = s.numel() // channels
    columns = min(64, max(16, triton.next_power_of_2(channels)))
    tile = TILE // columns
    return rows, columns, tile, triton.cdiv(channels, columns), min(PARTS, triton.cdiv(rows, tile))


@on_tensor_device
def tangent(
    ds: Tensor, s: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor, spacing: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """varying·γ·inv·P(ṡ), Σṡ and Σṡx. s and ṡ lie densely in memory, with the channels last."""
    channels = s.shape[1]
    rows, columns, tile, blocks, parts = tiling(s, channels)
    weight = None if weight is None else weight.contiguous()  # it may be an expanded scalar
    wide: Any = tl.float64 if mean.dtype == torch.float64 else tl.float32
    sums, totals = mean.new_empty(2, channels, parts), mean.new_empty(2, channels)
    out, sizes = torch.empty_like(ds), {"ACC": wide, "ROWS": tile, "COLUMNS": columns, "num_warps": 8}
    _tangent_sums[parts, blocks](ds, s, mean, sums, rows, channels, **sizes)
    _totals[(triton.cdiv(channels, 4),)](sums, totals, channels, parts, COLUMNS=4, PARTS=PARTS)
    _tangent[triton.cdiv(rows, tile), blocks](
        ds, s, weight, mean, inv, totals, out, rows, channels, spacing, (1 - MARGIN) * eps, has_weight=weight is not None,
        **sizes,
    )  # fmt: skip
    return out, totals[0], totals[1]


@on_tensor_device
def adjoints(
    Y: Tensor | None, Z: Tensor, s: Tensor, ds: Tensor, weight: Tensor | None, mean: Tensor, inv: Tensor, sum_ds: Tensor,
    sum_dsx: Tensor, spacing: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of s, ṡ, γ and β. All of s, ṡ, Y and Z lie densely in memory, with the channels last."""
    channels = s.shape[1]
    rows, columns, tile, blocks, parts = tiling(s, channels)
    weight = None if weight is None else weight.contiguous()  # it may be an expanded scalar
    wide: Any = tl.float64 if mean.dtype == torch.float64 else tl.float32
    sums = torch.empty(5, channels, parts, dtype=mean.dtype, device=s.device)
    factors = torch.empty(9, channels, dtype=mean.dtype, device=s.device)
    grad_s, grad_ds = torch.empty_like(s), torch.empty_like(ds)
    has = {"has_Y": Y is not None, "ACC": wide}
    _sums[parts, blocks](
        Y, Z, s, ds, mean, sum_ds, sums, rows, channels, **has, ROWS=tile, COLUMNS=columns, num_warps=8
    )  # fmt: skip
    _factors[(triton.cdiv(channels, 4),)](
        sums, weight, mean, inv, sum_ds, sum_dsx, factors, rows, channels, parts, spacing, (1 - MARGIN) * eps,
        has_weight=weight is not None, ACC=wide, COLUMNS=4, PARTS=PARTS,
    )  # fmt: skip
    _spread[triton.cdiv(rows, tile), blocks](
        Y, Z, s, ds, mean, factors, grad_s, grad_ds, rows, channels, **has, ROWS=tile, COLUMNS=columns, num_warps=8
    )  # fmt: skip
    return grad_s, grad_ds, factors[6], factors[7]


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raises what keeps the kernels from working here."""
    x = torch.arange(32, dtype=dtype, device=device).view(4, 8)
    wide = torch.ones(8, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    adjoints(x, x, x, x, wide, wide, wide, wide, wide, 0.0, 0.0)
    tangent(x, x, wide, wide, wide, 0.0, 0.0)

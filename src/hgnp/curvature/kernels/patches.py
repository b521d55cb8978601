"""Ψ of a convolution times a vector on a GPU: around two matrix products over all positions, three kernels instead of a dozen
operations.

`taps_out` has the output of every tap of the filter at every position of the input; r, a number for each position of the
output, is a sum along its diagonals, and `spread` is the transpose of that sum, applied to r. Sums are taken in an order that
does not change.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hgnp.curvature.device import upcast_bmm
from hgnp.curvature.kernels.support import on_tensor_device

BLOCK = 512
# one variant for all shapes
SHAPES = (
    "positions", "inputs", "height", "width", "out_height", "out_width", "taps", "taps_1", "stride_0", "stride_1",
    "padding_0", "padding_1", "dilation_0", "dilation_1",
)  # fmt: skip


@triton.jit(do_not_specialize=("side", *SHAPES))
def _forward(
    taps_out, x, r, sums, side, positions, inputs, height, width, out_height, out_width, taps, taps_1,
    stride_0, stride_1, padding_0, padding_1, dilation_0, dilation_1, has_shift: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """r of these positions, and its sum."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = position < positions
    rest = position // out_width
    first_row = rest % out_height * stride_0 - padding_0
    first_column = position % out_width * stride_1 - padding_1
    sample = rest // out_height
    total = tl.zeros((BLOCK,), taps_out.dtype.element_ty)
    if has_shift:
        total += tl.load(x + side)
    mine = taps_out
    for tap in range(taps):
        row = first_row + tap // taps_1 * dilation_0
        column = first_column + tap % taps_1 * dilation_1
        inside = known & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        total += tl.load(mine + (sample * height + row) * width + column, inside, other=0.0)
        mine += inputs
    tl.store(r + position, total, known)
    if has_shift:
        tl.store(sums + tl.program_id(0), tl.sum(tl.where(known, total, 0.0), 0))


@triton.jit(do_not_specialize=SHAPES)
def _transpose(
    r, spread, positions, inputs, height, width, out_height, out_width, taps, taps_1,
    stride_0, stride_1, padding_0, padding_1, dilation_0, dilation_1, strided: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The r that each of these positions of the input belongs to by this tap, or 0."""
    tap = tl.program_id(1)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = position < inputs
    rest = position // width
    row = rest % height + padding_0 - tap // taps_1 * dilation_0
    column = position % width + padding_1 - tap % taps_1 * dilation_1
    inside = known & (row >= 0) & (row < out_height * stride_0) & (column >= 0) & (column < out_width * stride_1)
    if strided:
        inside = inside & (row % stride_0 == 0) & (column % stride_1 == 0)
        row = row // stride_0
        column = column // stride_1
    at = (rest // height * out_height + row) * out_width + column
    value = tl.load(r + at, inside, other=0.0)
    tl.store(spread + tap.to(tl.int64) * inputs + position, value.to(spread.dtype.element_ty), known)


@triton.jit(do_not_specialize=("channels", "taps", "parts", "count"))
def _finish(back, sums, out, channels, taps, parts, count, has_shift: tl.constexpr, BLOCK: tl.constexpr):
    """(taps, channels) as (channels, taps) and then the sum of r, divided by the count."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = entry < channels * taps
    tl.store(out + entry, tl.load(back + entry % taps * channels + entry // taps, known, other=0.0) / count, known)
    if has_shift:  # every program writes the same
        total = tl.zeros((BLOCK,), sums.dtype.element_ty)
        for first in range(0, parts, BLOCK):
            part = first + tl.arange(0, BLOCK)
            total += tl.load(sums + part, part < parts, other=0.0)
        tl.store(out + channels * taps, tl.sum(total, 0) / count)


@on_tensor_device
def product(a: Tensor, x: Tensor, kernel: torch.Size, bias: bool, count: float, options: dict[str, Any]) -> Tensor:
    """Σ r·[patch; 1]/count over all positions for one group: x and the result are (1, side), `a` has its channels last."""
    samples, channels, *space = a.shape
    stride, padding, dilation = options["stride"], options["padding"], options["dilation"]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    outs = [(n + 2 * p - e) // s + 1 for n, p, e, s in zip(space, padding, reach, stride, strict=True)]
    inputs, positions, taps = samples * space[0] * space[1], samples * outs[0] * outs[1], kernel.numel()
    shape = positions, inputs, *space, *outs, taps, kernel[1], *stride, *padding, *dilation
    parts = triton.cdiv(positions, BLOCK)
    flat, side = a.movedim(1, -1).reshape(1, inputs, channels), channels * taps
    weights = x[:, :side].reshape(1, channels, taps).mT.to(a.dtype, memory_format=torch.contiguous_format)
    taps_out = upcast_bmm(weights, flat.mT)
    r, sums = taps_out.new_empty(positions), taps_out.new_empty(parts)
    _forward[(parts,)](taps_out, x.contiguous(), r, sums, side, *shape, has_shift=bias, BLOCK=BLOCK)
    spread = torch.empty_like(taps_out, dtype=a.dtype)
    _transpose[triton.cdiv(inputs, BLOCK), taps](r, spread, *shape, strided=tuple(stride) != (1, 1), BLOCK=BLOCK)
    back, out = upcast_bmm(spread, flat), x.new_empty(1, side + bias)
    _finish[(triton.cdiv(side, BLOCK),)](back, sums, out, channels, taps, parts, count, has_shift=bias, BLOCK=BLOCK)
    return out


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raises what keeps the kernels from working here."""
    a = torch.ones(1, 4, 2, 2, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    x = torch.ones(1, 37, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    product(a, x, torch.Size((3, 3)), True, 2.0, options)

"""The Kronecker factors Ψ and Γ of a block, as products; dense matrices are for checking only.

N samples, T output positions, g = N·∂(mean C)/∂s, ã = [input patch; 1] (the 1 where the block has a bias):

    convention   Ψ                                   Γ
    expand       (1/N) Σ_i Σ_t ã ãᵀ                  (1/NT) Σ_i Σ_t g gᵀ
    reduce       (1/N) Σ_i (mean_t ã)(mean_t ã)ᵀ     (1/N) Σ_i (Σ_t g)(Σ_t g)ᵀ

A layer that is called several times in a pass (weight sharing) has the positions of all calls. Layout: vectors are
(G, side), rows (G, R, side), with one factor for each of G groups. Every sum over a batch is taken in `product`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.blocks import Block

GRAM_LIMIT = 512  # at most so many rows have their Gram matrix formed


class Factor(Protocol):
    def product(self, x: Tensor) -> Tensor:
        """The factor of each group times x, (G, side) → (G, side)."""

    def advance(self, x: Tensor, steps: int) -> Tensor:
        """The direction of (factor)^steps·x, or of a higher power where that is as cheap; not normalised."""

    def dense(self) -> Tensor:
        """(G, side, side)."""


def unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def raised(K: Tensor, steps: int) -> Tensor:
    """A power of K of at least `steps`, by squaring: four small products stand for sixteen powers. Scaled."""
    for squaring in range(max(4, (steps - 1).bit_length())):
        if squaring % 4 == 0:  # K¹⁶ of a matrix of norm 1 is in range, K²⁵⁶ is not
            K = K / torch.linalg.matrix_norm(K, keepdim=True).clamp_min(torch.finfo(K.dtype).tiny)
        K = K @ K
    return K


class _Powers:
    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def advance(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = unit(self.product(x))
        return x

    def dense(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Rows(_Powers):
    """RᵀR/count with R the rows, each with a 1 appended where `bias`."""

    rows: Tensor  # (G, R, side without bias)
    count: float
    bias: bool = False

    def product(self, x: Tensor) -> Tensor:
        return self.adjoint(self.apply(x) / self.count)

    def apply(self, x: Tensor) -> Tensor:
        """R x."""
        side = self.rows.shape[2]
        r = torch.matmul(self.rows, x[:, :side, None]).squeeze(2)
        return r + x[:, side:] if self.bias else r

    def adjoint(self, r: Tensor) -> Tensor:
        """Rᵀ r."""
        y = torch.matmul(r[:, None, :], self.rows).squeeze(1)
        return torch.cat([y, r.sum(1, keepdim=True)], 1) if self.bias else y

    @property
    def is_flat(self) -> bool:
        """Whether RRᵀ is the smaller matrix to work with."""
        return self.rows.shape[1] <= min(GRAM_LIMIT, 4 * self.rows.shape[2])

    def gram(self) -> Tensor:
        """RRᵀ, (G, R, R)."""
        K = self.rows @ self.rows.mT
        return K + 1 if self.bias else K

    def advance(self, x: Tensor, steps: int) -> Tensor:
        if not self.is_flat:
            return super().advance(x, steps)
        return unit(self.adjoint((raised(self.gram(), steps) @ self.apply(x).unsqueeze(2)).squeeze(2)))

    def dense(self) -> Tensor:
        rows = F.pad(self.rows, (0, 1), value=1.0) if self.bias else self.rows
        return rows.mT @ rows / self.count


@dataclass(frozen=True)
class Dense(_Powers):
    """A factor small enough to be held: Γ of a layer with more positions than outputs."""

    matrix: Tensor  # (G, side, side)

    def product(self, x: Tensor) -> Tensor:
        return (self.matrix @ x.unsqueeze(2)).squeeze(2)

    def dense(self) -> Tensor:
        return self.matrix


@dataclass(frozen=True)
class Patches(_Powers):
    """Ψ of a convolution without its patches: r = conv(a, x) + b, Ψ[x; b] = (weight-gradient(a, r)/N, Σ r/N)."""

    inputs: list[Tensor]
    options: list[dict[str, Any]]
    kernel: torch.Size  # (C_out, C_in/G, *kernel)
    groups: int
    count: float
    bias: bool

    def product(self, x: Tensor) -> Tensor:
        side = self.kernel[1:].numel()
        filters = x[:, :side].reshape(self.groups, *self.kernel[1:])
        total = torch.zeros_like(x)
        for a, options in zip(self.inputs, self.options, strict=True):
            conv = (options["stride"], options["padding"], options["dilation"])
            r = torch.convolution(
                a, filters, x[:, side] if self.bias else None, *conv, False, [0] * len(conv[0]), self.groups
            )
            grad = torch.ops.aten.convolution_backward(
                r, a, filters, None, *conv, False, [0] * len(conv[0]), self.groups, [False, True, False]
            )[1].reshape(self.groups, side)
            total += torch.cat([grad, r.transpose(0, 1).flatten(1).sum(1, keepdim=True)], 1) if self.bias else grad
        return total / self.count

    def dense(self) -> Tensor:
        eye = torch.eye(self.kernel[1:].numel() + self.bias, dtype=self.inputs[0].dtype, device=self.inputs[0].device)
        return torch.stack([self.product(row.expand(self.groups, -1)) for row in eye], 2)


class PsiMoments:
    """Gathers Ψ of one block from the inputs of its calls."""

    def __init__(self, block: Block, samples: int, convention: str) -> None:
        self.block, self.samples, self.reduce = block, samples, convention == "reduce"
        self.inputs: list[Tensor] = []
        self.options: list[dict[str, Any]] = []
        self.sums: Tensor | None = None  # (N, G, side): Σ_t of the patches, all calls
        self.positions = 0

    @torch.no_grad()
    def add(self, options: dict[str, Any]) -> None:
        a = options["input"].detach()
        a = a if self.reduce else wide(a)  # sums of half precision need no copy of it all
        if "stride" not in options:
            a = a.reshape(_leading(a, self.samples, self.block), -1, a.shape[-1])  # (N, T, d)
            self.positions += a.shape[1]
            if self.reduce:
                self._sum(wide_sum(a, 1).unsqueeze(1))
            else:
                self.inputs.append(a)
            return
        a, conv = plain_convolution(a, options, self.block.weight.dim() - 2)
        _leading(a, self.samples, self.block)
        lengths = output_lengths(a, conv, self.block.weight)
        self.positions += lengths.numel() * (a.shape[0] // self.samples)
        if self.reduce:
            sums = patch_sums(a, conv, self.block.weight, lengths)  # (N·r, C_in, *kernel)
            self._sum(sums.reshape(self.samples, -1, self.block.groups, self.block.weight[0].numel()).sum(1))
        else:
            self.inputs.append(a)
            self.options.append(conv)

    def _sum(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums

    def factor(self) -> Factor:
        bias = self.block.bias is not None
        if self.sums is not None:
            return Rows((self.sums / self.positions).transpose(0, 1), self.samples, bias)
        if self.options:
            weight = self.block.weight
            return Patches(self.inputs, self.options, weight.shape, self.block.groups, self.samples, bias)
        rows = torch.cat([a.flatten(0, 1) for a in self.inputs]).unsqueeze(0)
        return Rows(rows, self.samples, bias)


class GammaMoments:
    """Gathers Γ of one block from the loss's derivatives at the outputs of its calls; each is let go at once."""

    def __init__(self, block: Block, samples: int, convention: str, scale: Tensor | None) -> None:
        self.block, self.samples, self.reduce = block, samples, convention == "reduce"
        self.scale = scale  # filter norms, in the scale-invariant metric
        self.rows: list[Tensor] = []
        self.matrix: Tensor | None = None
        self.positions = 0

    @torch.no_grad()
    def add(self, g: Tensor, factor: float | Tensor = 1.0) -> None:
        """factor·g = N·∂C/∂s of one call; the factor is applied to what is left of g."""
        g = per_position(g if self.reduce else wide(g), self.samples, self.block)  # (N, T, C)
        self.positions += g.shape[1]
        groups, side = self.block.gamma_shape
        factor = factor if self.scale is None else factor * self.scale
        if self.reduce:
            self.rows.append(wide_sum(g, 1) * factor)
            return
        flat = g.reshape(-1, groups, side).transpose(0, 1)  # (G, N·T, side)
        if flat.shape[1] <= side:
            self.rows.append(g.reshape(-1, groups * side) * factor)
        else:
            root = torch.ones_like(g[0, 0]).mul_(factor).view(groups, 1, side)
            outer = flat.mT @ flat * root * root.mT
            self.matrix = outer if self.matrix is None else self.matrix + outer

    def factor(self) -> Factor:
        groups, side = self.block.gamma_shape
        count = float(self.samples if self.reduce else self.samples * self.positions)
        if self.reduce:
            return Rows(torch.stack(self.rows).sum(0).view(-1, groups, side).transpose(0, 1), count)
        rows = Rows(torch.cat(self.rows).view(-1, groups, side).transpose(0, 1), count) if self.rows else None
        if self.matrix is None:
            assert rows is not None
            return rows
        return Dense(self.matrix / count if rows is None else self.matrix / count + rows.dense())


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, in a precision that can hold it."""
    return x.sum(dim, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


def _leading(x: Tensor, samples: int, block: Block) -> int:
    if x.shape[0] % samples:
        raise ValueError(
            f"layer {block.name!r} was called on {x.shape[0]} rows, no multiple of the batch's {samples} samples: "
            "its factors cannot be formed; freeze it (requires_grad_(False)) to leave it out"
        )
    return samples


def per_position(s: Tensor, samples: int, block: Block) -> Tensor:
    """A layer's output or its derivative as (N, T, C)."""
    s = s.flatten(2).transpose(1, 2) if block.weight.dim() > 2 else s
    return s.reshape(_leading(s, samples, block), -1, s.shape[-1])


def plain_convolution(a: Tensor, options: dict[str, Any], dims: int) -> tuple[Tensor, dict[str, Any]]:
    """The same convolution with tuple options and numeric padding."""

    def each(value: Any) -> tuple[int, ...]:
        value = (value,) if isinstance(value, int) else tuple(value)
        return value * dims if len(value) == 1 else value

    kernel, dilation = options["weight"].shape[2:], each(options["dilation"])
    padding = options["padding"]
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        a = F.pad(a, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    padding = (0,) * dims if isinstance(padding, str) else each(padding)
    return a, {"stride": each(options["stride"]), "padding": padding, "dilation": dilation}


def output_lengths(a: Tensor, conv: dict[str, Any], weight: Tensor) -> torch.Size:
    sizes = zip(a.shape[2:], weight.shape[2:], conv["stride"], conv["padding"], conv["dilation"], strict=True)
    return torch.Size((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)


def patch_sums(a: Tensor, conv: dict[str, Any], weight: Tensor, lengths: torch.Size) -> Tensor:
    """Σ_t of the patches, (N, C_in, *kernel), one spatial dimension after the other."""
    for dim in range(len(lengths)):
        options = (conv[key][dim] for key in ("stride", "padding", "dilation"))
        a = _tap_sums(a, 2 + dim, weight.shape[2 + dim], lengths[dim], *options)
    return a


def _tap_sums(a: Tensor, dim: int, taps: int, length: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Along one dimension, the sum of what each kernel tap meets. With stride 1 a tap meets all but an edge, so that
    the whole is summed once."""
    size = a.shape[dim]
    total = wide_sum(a, dim) if stride == 1 and taps > 1 else None
    sums = []
    for tap in range(taps):
        first = tap * dilation - padding
        start = first if first >= 0 else first + stride * -(first // stride)
        stop = min(first + stride * (length - 1) + 1, size)
        if total is not None and 2 * (stop - start) > size:
            met = total - wide_sum(a.narrow(dim, 0, start), dim) if start > 0 else total
            sums.append(met - wide_sum(a.narrow(dim, stop, size - stop), dim) if stop < size else met)
        else:
            sums.append(wide_sum(a[(slice(None),) * dim + (slice(start, max(stop, start), stride),)], dim))
    return torch.stack(sums, dim)

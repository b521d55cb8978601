"""Collects a step's Kronecker factors: Ψ from the inputs of each block's calls, Γ from the loss's derivatives at their outputs.

`FactorCollector` observes a forward pass: it sums Ψ during it and attaches a probe to the output of each call, whose backward
gets the derivative there. Sums are taken in float32 at least; activations of half precision are read as they are. With several
ranks each has its share of every sum, divided by the number of samples of all.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.autodiff.forward import autocast_off, derivatives_explained
from hgnp.curvature.choices import KfacApprox
from hgnp.curvature.device import HALF, SideStreams, constant, upcast, upcast_bmm
from hgnp.curvature.factors import Block, Dense, Factor, Patches, Rows


class _Probe(torch.autograd.Function):
    """The identity on a layer's output; its backward gets the derivative there. `anchor` makes autograd run it."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, anchor: Tensor, sink: Any) -> Tensor:
        ctx.sink = sink
        ctx.mark_dirty(s)  # s itself is returned: a copy of every layer's output would cost more than the probe
        return s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.sink(grads[0])
        return grads[0], None, None


class FactorCollector:
    """The factors of every block that a forward pass calls.

    samples     of the batch; `total_samples` of the batches of all ranks, by which every sum is divided
    keep_calls  holds inputs and derivatives, for `empirical`
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        samples: int,
        *,
        total_samples: float | None = None,
        kfac_approx: KfacApprox,
        scale_invariant: bool,
        keep_calls: bool,
    ) -> None:
        self._blocks = {id(block.weight): block for block in blocks}
        self.samples, self.kfac_approx, self.keep_calls = samples, kfac_approx, keep_calls
        self.total_samples = samples if total_samples is None else total_samples
        self.scale_invariant = scale_invariant
        self.psi: dict[str, PsiMoments] = {}
        self.gamma: dict[str, GammaMoments] = {}
        self.calls: dict[str, list[tuple[dict[str, Any], Tensor]]] = {}
        self.left_out: dict[str, int] = {}
        """Blocks that were called on a number of rows that is not a multiple of the samples, and these numbers."""
        self.when_complete: Callable[[], None] | None = None
        """Called once a backward pass has reached all calls."""
        self._anchor: Tensor | None = None
        self._factor: float | Tensor | None = None  # N / scale while Γ is being collected
        self._probes = self._missing = 0
        self._side = SideStreams(serial=True)
        self._read: Tensor | None = None  # held for as long as the side stream reads it

    def layer(self, options: dict[str, Any], out: Tensor) -> Tensor:
        """A call of a layer (`forward.LayerObserver`): adds its input to Ψ, and attaches a probe for Γ to its output."""
        block = self._blocks.get(id(options["weight"]))
        if block is None or not out.requires_grad:
            return out
        a = options["input"].detach()  # what is kept must not keep the graph, which keeps us
        rows = a.shape[0] if a.dim() >= block.weight.dim() else 1  # a learned vector, without a dimension of samples
        if rows % self.samples:
            self.left_out[block.name] = rows
            warnings.warn(
                f"layer {block.name!r} is called on a number of rows that is not a multiple of the batch's samples, as a layer "
                "on proposals may be; such batches leave it out of v",
                stacklevel=2,
            )
            return out
        with autocast_off(out):
            a = a.to(out.dtype) if out.dtype in HALF else a  # as autocast has the layer read it
            options = options | {"input": a}
            self.include(block)
            self.psi[block.name].add(options)
        if self._anchor is None:
            self._anchor = torch.zeros((), device=out.device, requires_grad=True)

        self._probes += 1

        def sink(g: Tensor) -> None:
            if self._factor is None:
                return
            self.join()  # the side stream of the previous derivative
            self._missing -= 1
            with self._side.fork():
                self.gamma[block.name].add(g, self._factor)
                if self.keep_calls:
                    self.calls.setdefault(block.name, []).append((options, upcast(g) * self._factor))
                if self._missing == 0 and self.when_complete is not None:
                    self.when_complete()
            self._read = g

        probed: Tensor = _Probe.apply(out, self._anchor, sink)
        return probed

    def include(self, block: Block) -> None:
        """Moments for a block, zero while the pass has not called it: it may be called on another rank alone."""
        if block.name not in self.psi:
            scale = upcast(block.filter_norms().detach()) if self.scale_invariant else None
            self.psi[block.name] = PsiMoments(block, self.samples, self.total_samples, self.kfac_approx)
            self.gamma[block.name] = GammaMoments(block, self.samples, self.total_samples, self.kfac_approx, scale)

    def release(self) -> None:
        """Drops all moments. The autograd graph holds the collector for as long as a caller holds the loss."""
        self.psi, self.gamma, self.calls = {}, {}, {}

    def forget(self) -> None:
        """Drops the calls so far: their pass was abandoned."""
        self.join()
        self.release()
        self.left_out, self._anchor, self._probes = {}, None, 0

    def restart(self) -> None:
        """Drops what another backward pass has collected."""
        for moments in self.gamma.values():
            moments.restart()
        self.calls = {}

    @contextlib.contextmanager
    def collecting(self, scale: float | Tensor) -> Iterator[None]:
        """Γ from the derivatives of scale·C in a backward pass inside the context: the scale is divided out again."""
        self._factor = self.total_samples / (upcast(scale) if isinstance(scale, Tensor) else scale)
        self._missing = self._probes
        try:
            yield
        finally:
            self._factor = None

    def join(self) -> None:
        """What follows runs after all that has been collected."""
        self._side.join()
        self._read = None

    def collect(self, output: Tensor, cotangent: Tensor | None, scale: float | Tensor) -> None:
        """Γ from the derivatives of `output` (C itself, or the logits with a drawn cotangent): a backward pass for
        activations alone. `scale` keeps them in a half-precision range."""
        if self._anchor is None:  # no block was called on this rank
            return
        cotangent = torch.ones_like(output) if cotangent is None else cotangent.to(output.dtype)
        with self.collecting(scale), derivatives_explained():
            torch.autograd.grad(output, self._anchor, cotangent * scale, retain_graph=True, allow_unused=True)

    def empirical(self, block: Block, psi: Tensor, gamma: Tensor) -> Tensor:
        """mean_i (Σ_t (v^Ψ·ã_it)(v^Γ·g_it))² of each group, (G,): the quotient of the block's own Fisher matrix."""
        groups, side = block.gamma_shape
        total = torch.zeros(self.samples, groups, dtype=psi.dtype, device=psi.device)
        d = block.weight[0].numel()
        shift = psi[:, d] if block.bias is not None else None
        for options, g in self.calls.get(block.name, []):
            a = upcast(options["input"].detach())
            if "stride" in options:
                a, conv = plain_convolution(a, options, block.weight.dim() - 2)
                filters = psi[:, :d].reshape(groups, *block.weight.shape[1:])
                zeros = [0] * len(conv["stride"])
                along = torch.convolution(a, filters, shift, conv["stride"], conv["padding"], conv["dilation"], False, zeros, groups)  # fmt: skip # noqa: E501
            else:
                along = torch.nn.functional.linear(a, psi[:, :d], shift)
            g = per_position(g, self.samples, block)
            scale = self.gamma[block.name].scale
            g = g if scale is None else g * scale
            along_g = (g.unflatten(2, (groups, side)) * gamma).sum(3)  # (N, T, G)
            total += (per_position(along, self.samples, block) * along_g).sum(1)
        return total.square().sum(0) / self.total_samples


class PsiMoments:
    """Ψ of one block from the inputs of its calls."""

    def __init__(self, block: Block, samples: int, total_samples: float, kfac_approx: KfacApprox) -> None:
        self.block, self.samples, self.total_samples = block, samples, total_samples
        self.reduce = kfac_approx == "reduce"
        self.inputs: list[Tensor] = []
        self.options: list[dict[str, Any]] = []
        self.sums: Tensor | None = None  # (N, G, side): Σ_t of the patches, all calls
        self.positions = 0

    @torch.no_grad()
    def add(self, options: dict[str, Any]) -> None:
        a = options["input"].detach()
        if "stride" not in options:
            a = a if self.reduce else upcast(a)  # sums of half precision need no copy of it all
            a = a.reshape(self.samples, -1, a.shape[-1])  # (N, T, d)
            self.positions += a.shape[1]
            if self.reduce:
                self._sum(upcast_sum(a, 1).unsqueeze(1))
            else:
                self.inputs.append(a)
            return
        a, conv = plain_convolution(a, options, self.block.weight.dim() - 2)
        lengths = output_lengths(a, conv, self.block.weight)
        self.positions += lengths.numel() * (a.shape[0] // self.samples)
        if self.reduce:
            sums = patch_sums(a, conv, self.block.weight, lengths)  # (N·r, C_in, taps)
            sums = sums.reshape(self.samples, -1, self.block.groups, self.block.weight[0].numel())
            self._sum(sums.squeeze(1) if sums.shape[1] == 1 else sums.sum(1))
        else:
            self.inputs.append(a if a.dtype == torch.bfloat16 and a.is_cuda else upcast(a))
            self.options.append(conv)

    def _sum(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums

    def factor(self) -> Factor:
        """Ψ, zero without a call."""
        bias, weight = self.block.bias is not None, self.block.weight
        if self.sums is not None:
            return Rows((self.sums / self.positions).transpose(0, 1), self.total_samples, bias)
        if weight.dim() > 2 and not self.reduce:
            return Patches(self.inputs, self.options, weight.shape, self.block.groups, self.total_samples, bias)
        if not self.inputs:
            return Rows(
                upcast(weight.detach()).new_zeros(self.block.groups, 0, weight[0].numel()), self.total_samples, bias
            )
        rows = torch.cat([a.flatten(0, 1) for a in self.inputs]).unsqueeze(0)
        return Rows(rows, self.total_samples, bias)


class GammaMoments:
    """Γ of one block from the loss's derivatives at the outputs of its calls; none of them is held."""

    def __init__(
        self, block: Block, samples: int, total_samples: float, kfac_approx: KfacApprox, scale: Tensor | None
    ) -> None:
        self.block, self.samples, self.total_samples = block, samples, total_samples
        self.reduce = kfac_approx == "reduce"
        self.scale = scale  # filter norms, in the scale-invariant metric
        self.restart()

    def restart(self) -> None:
        self.rows: list[Tensor] = []
        self.matrix: Tensor | None = None
        self.unit = 1.0  # what the matrix is still to be multiplied by
        self.positions = 0

    @torch.no_grad()
    def add(self, g: Tensor, factor: float | Tensor = 1.0) -> None:
        """factor·g = N·∂C/∂s of one call; the factor is applied to what is left of g."""
        g = per_position(g, self.samples, self.block)  # (N, T, C)
        self.positions += g.shape[1]
        groups, side = self.block.gamma_shape
        factor = factor if self.scale is None else factor * self.scale
        if self.reduce:
            self.rows.append(upcast_sum(g, 1) * factor)
            return
        flat = g.reshape(-1, groups, side).transpose(0, 1)  # (G, N·T, side)
        if flat.shape[1] <= side:
            self.rows.append(upcast(g.reshape(-1, groups * side)) * factor)
            return
        outer = upcast_bmm(flat.mT, flat)
        if not isinstance(factor, Tensor):
            self.unit = factor**2
        elif factor.dim():
            root = factor.view(groups, 1, side)
            outer = outer * root * root.mT
        else:
            outer = outer * factor**2
        self.matrix = outer if self.matrix is None else self.matrix + outer

    def factor(self) -> Factor:
        """Γ, zero without a call."""
        groups, side = self.block.gamma_shape
        if not self.positions:
            return Rows(upcast(self.block.weight.detach()).new_zeros(groups, 0, side), self.total_samples)
        count = float(self.total_samples if self.reduce else self.total_samples * self.positions)
        if self.reduce:
            rows = self.rows[0] if len(self.rows) == 1 else torch.stack(self.rows).sum(0)
            return Rows(rows.view(-1, groups, side).transpose(0, 1), count)
        kept = Rows(torch.cat(self.rows).view(-1, groups, side).transpose(0, 1), count) if self.rows else None
        if self.matrix is None:
            assert kept is not None
            return kept
        matrix = Dense(self.matrix, count / self.unit)
        return matrix if kept is None else Dense(matrix.dense() + kept.dense())


def upcast_sum(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, in a precision that can hold it."""
    return x.sum(dim, dtype=torch.float32 if x.dtype in HALF else None)


def per_position(s: Tensor, samples: int, block: Block) -> Tensor:
    """A layer's output or its derivative as (N, T, C)."""
    s = s.flatten(2).transpose(1, 2) if block.weight.dim() > 2 else s
    return s.reshape(samples, -1, s.shape[-1])


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
    """Σ_t of the patches, (N, C_in, taps): what each tap of the kernel meets is a sum over some of the positions."""
    dtype = a.dtype if a.dtype in HALF and a.is_cuda else upcast(a[:0]).dtype
    sizes = tuple(
        zip(a.shape[2:], weight.shape[2:], lengths, conv["stride"], conv["padding"], conv["dilation"], strict=True)
    )
    meets = _meets(sizes, dtype, a.device)
    return upcast_bmm(meets.expand(a.shape[0], -1, -1), a.flatten(2).transpose(1, 2)).transpose(1, 2)


@constant
def _meets(sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(taps, positions): 1 where a tap of the kernel meets a position of the input in some output."""
    both = torch.ones(1, 1, dtype=dtype, device=device)
    for size, taps, length, stride, padding, dilation in sizes:
        position = torch.arange(size, device=device)
        tap = torch.arange(taps, device=device).unsqueeze(1)
        offset = position + padding - tap * dilation
        meets = (offset % stride == 0) & (offset >= 0) & (offset < length * stride)
        both = torch.kron(both, meets.to(dtype))
    return both

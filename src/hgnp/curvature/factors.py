"""The blocks of the curvature and their Kronecker factors Ψ and Γ, as products; only small ones are formed as dense matrices.

A block is the weight of one Linear or Conv1d/2d/3d with its bias as homogeneous coordinate. Block l of a layer with G groups
has G pairs of factors: Ψ of side d (+1 with a bias), d = C_in/G·kernel, and Γ of side C_out/G. With N samples, T output
positions, g = N·∂(mean C)/∂s and ã = [input patch; 1] (the 1 where the block has a bias):

    kfac_approx   Ψ                                   Γ
    expand       (1/N) Σ_i Σ_t ã ãᵀ                  (1/NT) Σ_i Σ_t g gᵀ
    reduce       (1/N) Σ_i (mean_t ã)(mean_t ã)ᵀ     (1/N) Σ_i (Σ_t g)(Σ_t g)ᵀ

A layer that is called several times in a pass (weight sharing) has the positions of all calls. Layout: vectors are
(G, side), rows (G, R, side), with one factor for each of G groups. A factor is linear in its samples: of a batch that is spread
over ranks each rank holds its own samples and the count of all of them, and F is the sum of the ranks' factors.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.device import upcast, upcast_bmm
from hgnp.curvature.kernels.support import kernels

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MERGED_ROWS = 512  # the most rows of a factor that are copied into one tensor with those of others
FEW_PATCH_ENTRIES = 128  # entries of a patch, of all groups
WARM_PRODUCTS = 8  # products from a warm start, except for `Patches`


@dataclass(frozen=True, eq=False)
class Block:
    name: str
    layer: nn.Module

    @property
    def weight(self) -> Tensor:
        return self.layer._parameters["weight"]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The bias where it is trained: a frozen one is a constant, no coordinate of the curvature."""
        bias = self.layer._parameters.get("bias")
        return bias if bias is not None and bias.requires_grad else None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By their names in the network."""
        trained = {"weight": self.weight, "bias": self.bias}
        return {f"{self.name}.{kind}".lstrip("."): each for kind, each in trained.items() if each is not None}

    @property
    def groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    @property
    def psi_shape(self) -> tuple[int, int]:
        return self.groups, self.weight[0].numel() + (self.bias is not None)

    @property
    def gamma_shape(self) -> tuple[int, int]:
        return self.groups, self.weight.shape[0] // self.groups

    def filter_norms(self) -> Tensor:
        """n_j = ‖w_j‖, one per filter, differentiable in the weight."""
        return torch.linalg.vector_norm(self.weight.flatten(1), dim=1)

    def spread(self, psi: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor | None]:
        """v^Ψ ⊗ v^Γ of each group as tangents of the weight and of the bias."""
        outer = gamma.unsqueeze(2) * psi.unsqueeze(1)  # (G, C_out/G, d [+ 1])
        if self.bias is None:
            return outer.reshape(self.weight.shape), None
        return outer[..., :-1].reshape(self.weight.shape), outer[..., -1].reshape(-1)


@dataclass(frozen=True, eq=False)
class WholeNetwork:
    """All trained parameters of a network, as one block without Kronecker factors."""

    net: nn.Module
    name = "network"

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.net.named_parameters() if each.requires_grad}


def find_blocks(net: nn.Module) -> list[Block]:
    """The trained Linear and convolution layers, in the network's order; a weight shared by two layers is one block."""
    blocks: dict[int, Block] = {}
    for name, layer in net.named_modules():
        if isinstance(layer, LAYERS):
            weight = layer._parameters.get("weight")  # None where a parametrization computes it
            if weight is not None and weight.requires_grad:
                blocks.setdefault(id(weight), Block(name, layer))
    return list(blocks.values())


class Factor(Protocol):
    @property
    def warm_products(self) -> int:
        """Products from a warm start: by the layer alone, whatever the batch, the device and the ranks."""

    @property
    def groups(self) -> int:
        """G; a factor that is merged of several has the groups of all."""

    @property
    def side(self) -> int: ...

    def product(self, x: Tensor) -> Tensor:
        """The factor of each group times x, (G, side) → (G, side)."""

    def dense(self) -> Tensor:
        """(G, side, side)."""


def unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


@dataclass(frozen=True)
class Rows:
    """RᵀR/count with R the rows, each with a 1 appended where `bias`."""

    warm_products = WARM_PRODUCTS

    rows: Tensor  # (G, R, side without bias)
    count: float
    bias: bool = False

    @property
    def groups(self) -> int:
        return self.rows.shape[0]

    @property
    def side(self) -> int:
        return self.rows.shape[2] + self.bias

    def product(self, x: Tensor) -> Tensor:
        return self.adjoint(_divided(self.apply(x), self.count))

    def apply(self, x: Tensor) -> Tensor:
        """R x, as a row times a matrix: on a CPU a batch of matrices times columns is five times as slow."""
        side = self.rows.shape[2]
        r = torch.matmul(x[:, None, :side], self.rows.mT).squeeze(1)
        return r + x[:, side:] if self.bias else r

    def adjoint(self, r: Tensor) -> Tensor:
        """Rᵀ r."""
        y = torch.matmul(r[:, None, :], self.rows).squeeze(1)
        return torch.cat([y, r.sum(1, keepdim=True)], 1) if self.bias else y

    def dense(self) -> Tensor:
        rows = F.pad(self.rows, (0, 1), value=1.0) if self.bias else self.rows
        return _divided(rows.mT @ rows, self.count)


@dataclass(frozen=True)
class Dense:
    """A factor small enough to be held, matrix/count: Γ of a layer with more positions than outputs."""

    warm_products = WARM_PRODUCTS

    matrix: Tensor  # (G, side, side)
    count: float = 1.0

    @property
    def groups(self) -> int:
        return self.matrix.shape[0]

    @property
    def side(self) -> int:
        return self.matrix.shape[1]

    def product(self, x: Tensor) -> Tensor:
        return _divided((x.unsqueeze(1) @ self.matrix).squeeze(1), self.count)  # it is symmetric

    def dense(self) -> Tensor:
        return _divided(self.matrix, self.count)


@dataclass(frozen=True)
class Patches:
    """Ψ of a convolution without its patches: r = conv(a, x) + b, Ψ[x; b] = (weight-gradient(a, r)/N, Σ r/N).

    Inputs in bfloat16 on a GPU are taken as they are: r is rounded, its sums are not."""

    inputs: list[Tensor]
    options: list[dict[str, Any]]
    kernel: torch.Size  # (C_out, C_in/G, *kernel)
    groups: int
    count: float
    bias: bool

    @property
    def side(self) -> int:
        return self.kernel[1:].numel() + self.bias

    @property
    def warm_products(self) -> int:
        """A product reads all inputs twice, which is cheap only if they are few."""
        return 5 if self.groups * self.side <= FEW_PATCH_ENTRIES else 2

    def product(self, x: Tensor) -> Tensor:
        total: Tensor | None = None
        for a, options in zip(self.inputs, self.options, strict=True):
            part = self._part(a, x, options)
            total = part if total is None else total + part
        return torch.zeros_like(x) if total is None else total  # this rank has not called the layer

    def _part(self, a: Tensor, x: Tensor, options: dict[str, Any]) -> Tensor:
        last = a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last)
        ours = kernels("patches", a.dtype, a.device) if a.is_cuda and last and self.has_few_taps else None
        if ours is not None:
            made: Tensor = ours.product(a, x, self.kernel[2:], self.bias, self.count, options)
            return made
        side = self.kernel[1:].numel()
        filters = x[:, :side].reshape(self.groups, *self.kernel[1:])
        shift = x[:, side] if self.bias else None
        r, grad = (product_by_taps if self.has_few_taps else product_by_convolution)(a, filters, shift, options)
        grad = grad.reshape(self.groups, side).to(x.dtype)
        if self.bias:
            sums = r.sum([d for d in range(r.dim()) if d != 1], dtype=x.dtype).unsqueeze(1)
            grad = torch.cat([grad, sums], 1)
        return grad / self.count

    @property
    def has_few_taps(self) -> bool:
        return self.groups == 1 and self.kernel[2:].numel() <= max(16, self.kernel[1])

    def dense(self) -> Tensor:
        like = upcast(self.inputs[0][:0])
        eye = torch.eye(self.kernel[1:].numel() + self.bias, dtype=like.dtype, device=like.device)
        return torch.stack([self.product(row.expand(self.groups, -1)) for row in eye], 2)


def _divided(x: Tensor, count: float) -> Tensor:
    return x if count == 1.0 else x / count


def merged(factors: Sequence[Factor], side: int) -> Iterator[Factor]:
    """The same factors, one after the other, as few: neighbours of a kind become one factor with the groups of all, padded with
    zeros to `side`. One kernel then serves them all. Those with many rows, and those of convolutions, stay by themselves."""

    def kind(factor: Factor) -> tuple[Any, ...] | None:
        if isinstance(factor, Rows):
            return (Rows, factor.rows.shape[1]) if factor.rows.shape[1] <= MERGED_ROWS else None
        return (Dense,) if isinstance(factor, Dense) else None

    for key, run in itertools.groupby(factors, kind):
        alike = list(run)
        if key is None or len(alike) == 1:
            yield from alike
        else:
            yield Rows(_padded_rows(alike, side), 1.0) if key[0] is Rows else Dense(_padded_matrices(alike, side))


def _padded_rows(factors: Sequence[Any], side: int) -> Tensor:
    """R/√count of each, with the 1 of a bias in it."""
    like = factors[0].rows
    out = like.new_zeros(sum(factor.groups for factor in factors), like.shape[1], side)
    for mine, factor in zip(out.split([factor.groups for factor in factors]), factors, strict=True):
        root, width = math.sqrt(factor.count), factor.rows.shape[2]
        torch.div(factor.rows, root, out=mine[:, :, :width])
        if factor.bias:
            mine[:, :, width].fill_(1 / root)
    return out


def _padded_matrices(factors: Sequence[Any], side: int) -> Tensor:
    out = factors[0].matrix.new_zeros(sum(factor.groups for factor in factors), side, side)
    for mine, factor in zip(out.split([factor.groups for factor in factors]), factors, strict=True):
        torch.div(factor.matrix, factor.count, out=mine[:, : factor.side, : factor.side])
    return out


def product_by_convolution(
    a: Tensor, filters: Tensor, shift: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """r = conv(a, filters) + shift, a filter for each group, and Σ r·patch."""
    conv = (options["stride"], options["padding"], options["dilation"])
    rest = (*conv, False, [0] * len(conv[0]), len(filters))
    taps = filters.to(a.dtype)
    r = torch.convolution(a, taps, None if shift is None else shift.to(a.dtype), *rest)
    return r, torch.ops.aten.convolution_backward(r, a, taps, None, *rest, [False, True, False])[1]


def product_by_taps(a: Tensor, filters: Tensor, shift: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same for one group. Libraries compute one filter as slowly as many: here each tap of it meets the channels of all
    positions in a matrix product, and what belongs to an output lies on a diagonal of taps and positions."""
    kernel, space, padding = filters.shape[2:], a.shape[2:], options["padding"]
    n, last = len(kernel), a.movedim(1, -1).is_contiguous()
    # all samples at once where channels come last, else one by one: (1 or N, C, positions)
    flat = a.movedim(1, -1).reshape(1, -1, a.shape[1]).mT if last else a.flatten(2)
    weights = filters[0].flatten(1).mT.to(a.dtype, memory_format=torch.contiguous_format).expand(len(flat), -1, -1)
    taps_out = upcast_bmm(weights, flat).transpose(0, 1).reshape(kernel.numel(), len(a), *space)
    taps_out = F.pad(taps_out, [each for p in reversed(padding) for each in (p, p)])
    across, _, *along = taps_out.stride()
    steps = [across * kernel[d + 1 :].numel() + options["dilation"][d] * along[d] for d in range(n)]
    hops = [s * step for s, step in zip(options["stride"], along, strict=True)]
    reach = [options["dilation"][d] * (kernel[d] - 1) + 1 for d in range(n)]
    outs = [(taps_out.shape[2 + d] - reach[d]) // options["stride"][d] + 1 for d in range(n)]
    shape, strides = (*kernel, len(a), *outs), (*steps, taps_out.stride(1), *hops)
    r = taps_out.as_strided(shape, strides).sum(list(range(n)))
    r = r if shift is None else r + shift
    spread = torch.zeros_like(taps_out, dtype=a.dtype)
    spread.as_strided(shape, strides).copy_(r.expand(shape))
    for d in range(n):
        spread = spread.narrow(2 + d, padding[d], space[d])
    back = upcast_bmm(spread.reshape(len(spread), len(flat), -1).transpose(0, 1), flat.mT)  # (1 or N, taps, C)
    return r.unsqueeze(1), (back[0] if last else back.sum(0)).mT

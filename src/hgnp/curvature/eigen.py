"""Top eigenpair of a factor: warm-started powers with an honest residual.

One step turns the direction x into F^k x / ‖·‖ and measures λ = vᵀFv and ‖Fv − λv‖/λ at that very v: what is reported
is what is used. The error of λ is at most the residual squared over the relative gap, or the residual itself.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hgnp.curvature.branches import Branches
from hgnp.curvature.factors import Factor, Rows, raised, unit


@dataclass(frozen=True)
class Eigenpair:
    value: Tensor  # (G,)
    vector: Tensor  # (G, side), unit length
    residual: Tensor  # (G,), relative


def top(factor: Factor, start: Tensor, steps: int) -> Eigenpair:
    """The pair after `steps` products from `start`, each group by itself.

    An overflow keeps `start`; a product that vanishes (a dead layer, or a start in the factor's null space) gives way
    to an arbitrary direction, or the pair would never come back."""
    v = factor.advance(start, steps)
    size = v.abs().amax(1, keepdim=True)
    v = torch.where(torch.isfinite(size), v, start)
    v = unit(torch.where(size == 0, arbitrary(start.shape[1], start.dtype, start.device), v))
    y = factor.product(v)
    value = (v * y).sum(1)
    rest = torch.linalg.vector_norm(y - value.unsqueeze(1) * v, dim=1)
    return Eigenpair(value, v, rest / value.clamp_min(torch.finfo(v.dtype).tiny))


def top_of_each(factors: Sequence[Factor], starts: Sequence[Tensor], steps: int | None = None) -> list[Eigenpair]:
    """`top` of many factors, after `steps` or as many as are due from a warm start. Those of equally many rows R are worked
    on together: with K = RRᵀ and s = K^p R x,

        v = Rᵀs/√(sᵀKs),   λ = ‖Ks‖²/(c·sᵀKs),   ‖Fv‖² = (Ks)ᵀK(Ks)/(c²·sᵀKs),   ‖Fv − λv‖² = ‖Fv‖² − λ²,

    c being the count that R is divided by: all but the products with R itself is one operation for all factors."""
    together: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    found: dict[int, Eigenpair] = {}
    branches = Branches()
    for number, factor in enumerate(factors):
        if isinstance(factor, Rows) and factor.is_flat:
            together[factor.rows.shape[1], factor.rows.dtype].append(number)
        else:
            with branches.branch():
                found[number] = top(factor, starts[number], steps or factor.warm)
    for numbers in together.values():
        with branches.branch():
            rows = [factor for number in numbers if isinstance(factor := factors[number], Rows)]
            found |= zip(
                numbers, _together(rows, [starts[number] for number in numbers], steps or Rows.warm), strict=True
            )
    branches.join()
    return [found[number] for number in range(len(factors))]


def _together(factors: Sequence[Rows], starts: Sequence[Tensor], steps: int) -> list[Eigenpair]:
    """Entries are the groups of all factors, one after the other."""
    branches = Branches()
    grams, images = [], []
    for factor, start in zip(factors, starts, strict=True):
        with branches.branch():
            grams.append(factor.gram())
            images.append(factor.apply(start))
    branches.join()
    K, r = torch.cat(grams), torch.cat(images)  # (entries, R, R) and (entries, R)
    counts = [factor.rows.shape[0] for factor in factors]
    count = torch.cat([K.new_full((n,), factor.count) for n, factor in zip(counts, factors, strict=True)])
    s = (raised(K, steps) @ r.unsqueeze(2)).squeeze(2)
    s = s / torch.linalg.vector_norm(s, dim=1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)
    Ks = (K @ s.unsqueeze(2)).squeeze(2)
    size = (s * Ks).sum(1)  # ‖Rᵀs‖²
    good = torch.isfinite(size) & (size > 0)
    size = torch.where(good, size, 1.0)
    value = Ks.square().sum(1) / (count * size)
    image = (Ks * (K @ Ks.unsqueeze(2)).squeeze(2)).sum(1) / (count.square() * size)
    residual = (image / value.square() - 1).clamp_min(0).sqrt()
    value = torch.where(good, value, torch.where(torch.isfinite(size), 0.0, torch.nan))
    residual = torch.where(good, residual, torch.inf)
    s = torch.where(good.unsqueeze(1), s / size.sqrt().unsqueeze(1), 0.0)
    pairs = []
    rest = zip(
        factors, starts, s.split(counts), value.split(counts), residual.split(counts), good.split(counts), strict=True
    )
    for factor, start, its_s, its_value, its_residual, its_good in rest:
        with branches.branch():
            v = factor.adjoint(its_s)
            v = torch.where(its_good.unsqueeze(1), v, arbitrary(start.shape[1], start.dtype, start.device))
            pairs.append(Eigenpair(its_value, v, its_residual))
    branches.join()
    return pairs


@functools.cache
def arbitrary(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same unit vector for every run, (1, side), without zeros or symmetry."""
    generator = torch.Generator().manual_seed(0)
    return unit(torch.randn(1, side, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype))


def top_dense(factor: Factor) -> Eigenpair:
    """The same by a full decomposition of the dense factor: the oracle."""
    values, vectors = torch.linalg.eigh(factor.dense())
    return Eigenpair(values[:, -1], vectors[..., -1], torch.zeros_like(values[:, -1]))


def kronecker_residual(psi: Tensor, gamma: Tensor) -> Tensor:
    """‖(Ψ ⊗ Γ)v − λv‖/λ of v = v^Ψ ⊗ v^Γ from the residuals of the two: their errors are orthogonal to them."""
    return (psi**2 + gamma**2 + psi**2 * gamma**2).sqrt()

"""Top eigenpair of a factor: warm-started powers with an honest residual.

One step turns the direction x into F^k x / ‖·‖ and measures λ = vᵀFv and ‖Fv − λv‖/λ at that very v: what is reported
is what is used. The error of λ is at most the residual squared over the relative gap, or the residual itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.branches import Branches, constant
from hgnp.curvature.factors import Dense, Factor, Patches, Rows, unit
from hgnp.curvature.random import capturing

AT_A_TIME = 6  # products before a look at the residual
SPACE = AT_A_TIME + 1  # vectors that an eigenvector is sought among
POWER = 64  # of a matrix that is small enough to be squared, from a warm start
SMALL = 128  # side of such a one, if it is not a Gram matrix
RITZ_POWER = 1024  # of their matrix: two Ritz values that it leaves mixed differ by less than a thousandth
MIXED_IN = 0.1


@dataclass(frozen=True)
class Eigenpair:
    value: Tensor  # (G,)
    vector: Tensor  # (G, side), unit length
    residual: Tensor  # (G,), relative


def top(factor: Factor, start: Tensor, steps: int) -> Eigenpair:
    """The pair after `steps` products from `start` and one that measures it, each group by itself.

    An overflow keeps `start`; a product that vanishes (a dead layer, or a start in the factor's null space) gives way
    to an arbitrary direction, or the pair would never come back."""
    (pair,) = _apart([factor], *_guarded(*_ritz(factor.product, start, steps), [factor]))
    return pair


def _ritz(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v, the start, λ = vᵀFv and ‖Fv − λv‖/λ, by `steps` + 1 products: the Ritz vector of the largest Ritz value in the space
    of x, Fx, F²x, … (Lanczos with full reorthogonalisation), restarted from it once there are `SPACE` vectors.

    It costs the products of as many powers, and its λ is at least as large as theirs: F^k x is in the space. The products are
    with the basis itself, so that Fv is a sum of them and λ and residual are those of this v to rounding. Nothing is of a
    higher power in F than one: Γ may be as small as 1e-15, Ψ as large as 1e9."""
    v, left = unit(start), steps + 1
    while left:
        basis, images = v.unsqueeze(1), product(v).unsqueeze(1)  # (G, k, side)
        for _ in range(min(left, SPACE) - 1):
            q = unit(images[:, -1:] - images[:, -1:] @ basis.mT @ basis)
            q = q - q @ basis.mT @ basis  # again: rounding errors may be all that is left of it
            q = torch.where(
                torch.linalg.vector_norm(q, dim=2, keepdim=True) > 0.5, unit(q), 0.0
            )  # or all is in the basis
            basis = torch.cat([basis, q], 1)
            images = torch.cat([images, product(q.squeeze(1)).unsqueeze(1)], 1)
        left -= basis.shape[1]
        weights = raised(basis @ images.mT, RITZ_POWER)[
            :, :1
        ]  # no eigh: in a CUDA graph it could not be, elsewhere it waits
        v, image = (weights @ basis).squeeze(1), (weights @ images).squeeze(1)
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        v, image = v / size, image / size
    value = (v * image).sum(1)
    return v, start, value, torch.linalg.vector_norm(image / value.unsqueeze(1) - v, dim=1)


def settled(factor: Factor, start: Tensor, steps: int) -> Eigenpair:
    """`top` after at most `steps` products, fewer once λ is exact to rounding. Waits for the device, except in a graph, which
    cannot know and makes all of them.

    A little of everything is mixed into the start: an eigenvector that is no longer the top one would seem settled."""
    if steps > AT_A_TIME:
        start = unit(start + MIXED_IN * arbitrary(start.shape[1], start.dtype, start.device))
    tolerance = torch.finfo(start.dtype).eps ** 0.5
    while steps > AT_A_TIME:
        pair = top(factor, start, AT_A_TIME)
        if not capturing() and bool((pair.residual <= tolerance).all()):
            return pair
        start = pair.vector
        steps -= AT_A_TIME
    return top(factor, start, steps)


def top_of_each(factors: Sequence[Factor], starts: Sequence[Tensor], steps: int | None = None) -> list[Eigenpair]:
    """`top` of many factors, after at most `steps` or as many as are due from a warm start; those of a kind are worked on
    together."""
    found: dict[int, Eigenpair] = {}
    branches = Branches()
    factors = [
        Dense(factor.dense()) if isinstance(factor, Rows) and not factor.is_flat and factor.side <= SMALL else factor
        for factor in factors
    ]
    for number, factor in enumerate(factors):
        if _kind(factor, steps) is None:
            with branches.branch():
                start = starts[number]
                found[number] = top(factor, start, factor.warm) if steps is None else settled(factor, start, steps)
    for kind, solve in ((Rows, _by_gram), (Dense, _by_products), (Patches, _by_patches)):
        for numbers in _alike(factors, kind, steps):
            with branches.branch():
                mine, begin = [factors[n] for n in numbers], [starts[n] for n in numbers]
                found |= zip(numbers, solve(mine, begin, steps or mine[0].warm), strict=True)
    branches.join()
    return [found[number] for number in range(len(factors))]


def _kind(factor: Factor, steps: int | None) -> type | None:
    """How it is worked on together with others; None: by itself."""
    if isinstance(factor, Rows):
        return Rows if factor.is_flat else None
    if isinstance(factor, Patches):
        return Patches if steps is None else None
    return Dense if isinstance(factor, Dense) else None


def _alike(factors: Sequence[Factor], kind: type, steps: int | None) -> Iterator[list[int]]:
    """The factors of a kind in as few parts as can be padded to one size without taking four times the memory."""
    sides: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for number, factor in enumerate(factors):
        if _kind(factor, steps) is kind:
            rows = (factor.rows.shape[1], factor.rows.dtype) if isinstance(factor, Rows) else None
            sides[factor.warm, factor.side <= SMALL, rows].append((factor.side, factor.entries, number))
    for part in sides.values():
        part.sort(reverse=True)
        taken: list[tuple[int, int, int]] = []
        for each in part:
            entries = sum(n for _, n, _ in taken) + each[1]
            if taken and entries * taken[0][0] > 4 * (sum(side * n for side, n, _ in taken) + each[0] * each[1]):
                yield [number for _, _, number in taken]
                taken = []
            taken.append(each)
        yield [number for _, _, number in taken]


def _padded(vectors: Sequence[Tensor]) -> Tensor:
    """(entries of all, longest side), from (entries, side) each."""
    longest = max(v.shape[1] for v in vectors)
    out = vectors[0].new_zeros(sum(len(v) for v in vectors), longest)
    places, parts = [], []
    entry = 0
    for v in vectors:
        if len(v) == 1:  # rows of their own lie densely: all are copied at once
            places.append(out[entry, : v.shape[1]])
            parts.append(v[0])
        else:
            out[entry : entry + len(v), : v.shape[1]].copy_(v)
        entry += len(v)
    if places:
        torch._foreach_copy_(places, parts)
    return out


def _apart(factors: Sequence[Factor], v: Tensor, value: Tensor, residual: Tensor) -> Iterator[Eigenpair]:
    entry = 0
    for factor in factors:
        mine = slice(entry, entry := entry + factor.entries)
        yield Eigenpair(value[mine], v[mine, : factor.side].contiguous(), residual[mine])


def _guarded(
    v: Tensor, start: Tensor, value: Tensor, residual: Tensor, factors: Sequence[Factor]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `top` deals with an overflow and with a product that vanishes."""
    good = (value > 0) & (value < torch.inf)
    new = _arbitrary(tuple((factor.entries, factor.side) for factor in factors), v.dtype, v.device)
    v = torch.where(good.unsqueeze(1), v, torch.where((value <= 0).unsqueeze(1), new, start))
    return v, value, torch.where(good, residual, torch.inf)


def raised(K: Tensor, steps: int) -> Tensor:
    """A power of K of at least `steps`, by squaring: six small products stand for 64 powers. Scaled."""
    for squaring in range((steps - 1).bit_length()):
        if squaring % 4 == 0:  # K¹⁶ of a matrix of norm 1 is in range, K²⁵⁶ is not
            K = K / torch.linalg.matrix_norm(K, keepdim=True).clamp_min(torch.finfo(K.dtype).tiny)
        K = K @ K
    return K


def _by_gram(factors: Sequence[Factor], starts: Sequence[Tensor], steps: int) -> Iterator[Eigenpair]:
    """With K = RRᵀ and s = K^p R x,

        v = Rᵀs/√(sᵀKs),   λ = ‖Ks‖²/(c·sᵀKs),   Fv − λv = λ·Rᵀd/√(sᵀKs),   d = Ks/(cλ) − s,

    c being the count that R is divided by."""
    flat = [factor for factor in factors if isinstance(factor, Rows)]
    x = _padded(starts)
    R = x.new_zeros(len(x), flat[0].rows.shape[1], x.shape[1])
    entry = 0
    for factor in flat:
        mine = R[entry : entry + factor.entries]
        mine[:, :, : factor.rows.shape[2]].copy_(factor.rows)
        if factor.bias:
            mine[:, :, factor.rows.shape[2]].fill_(1.0)
        entry += factor.entries
    count = _counts(tuple((factor.entries, factor.count) for factor in flat), x.dtype, x.device)
    K = R @ R.mT
    s = raised(K, max(steps, POWER)) @ (R @ x.unsqueeze(2))
    s = s / torch.linalg.vector_norm(s, dim=1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)
    Ks = K @ s
    size = (s * Ks).sum((1, 2))  # ‖Rᵀs‖²
    value = Ks.square().sum((1, 2)) / (count * size)
    d = Ks / (count * value).view(-1, 1, 1) - s
    residual = ((d * (K @ d)).sum((1, 2)) / size).clamp_min(0).sqrt()
    v = (s.mT @ R).squeeze(1) / size.sqrt().unsqueeze(1)
    return _apart(flat, *_guarded(v, x, torch.where(size == 0, 0.0, value), residual, flat))


def _by_products(factors: Sequence[Factor], starts: Sequence[Tensor], steps: int) -> Iterator[Eigenpair]:
    """The matrices side by side, padded with zeros."""
    dense = [factor for factor in factors if isinstance(factor, Dense)]
    start = _padded(starts)
    F = start.new_zeros(*start.shape, start.shape[1])
    branches, entry = Branches(), 0
    for factor in dense:
        with branches.branch():
            F[entry : entry + factor.entries, : factor.side, : factor.side].copy_(factor.matrix)
        entry += factor.entries
    branches.join()
    begin = start
    if start.shape[1] <= SMALL:
        begin, steps = (raised(F, max(steps, POWER)) @ start.unsqueeze(2)).squeeze(2), 1
    v, _, value, residual = _ritz(lambda x: (F @ x.unsqueeze(2)).squeeze(2), begin, steps)
    value = value / _counts(tuple((factor.entries, factor.count) for factor in dense), v.dtype, v.device)
    return _apart(dense, *_guarded(v, start, value, residual, dense))


def _by_patches(factors: Sequence[Factor], starts: Sequence[Tensor], steps: int) -> Iterator[Eigenpair]:
    """Each product by itself, the rest together."""

    def product(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        branches, entry = Branches(), 0
        for factor in factors:
            mine = slice(entry, entry := entry + factor.entries), slice(factor.side)
            with branches.branch():  # a copy: other branches may get a product's own memory once it is let go
                y[mine] = factor.product(x[mine].contiguous())
        branches.join()
        return y

    return _apart(factors, *_guarded(*_ritz(product, _padded(starts), steps), factors))


@constant
def _counts(counts: tuple[tuple[int, float], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([torch.full((n,), count, dtype=dtype, device=device) for n, count in counts])


@constant
def arbitrary(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same unit vector for every run, (1, side), without zeros or symmetry."""
    generator = torch.Generator().manual_seed(0)
    return unit(torch.randn(1, side, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype))


@constant
def _arbitrary(sizes: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _padded([arbitrary(side, dtype, device).expand(entries, -1) for entries, side in sizes])


def top_dense(factor: Factor) -> Eigenpair:
    """The same by a full decomposition of the dense factor: the oracle."""
    values, vectors = torch.linalg.eigh(factor.dense())
    return Eigenpair(values[:, -1], vectors[..., -1], torch.zeros_like(values[:, -1]))


def kronecker_residual(psi: Tensor, gamma: Tensor) -> Tensor:
    """‖(Ψ ⊗ Γ)v − λv‖/λ of v = v^Ψ ⊗ v^Γ from the residuals of the two: their errors are orthogonal to them."""
    total = (psi**2 + gamma**2 + psi**2 * gamma**2).sqrt()
    return torch.where(torch.isinf(psi) | torch.isinf(gamma), torch.inf, total)  # not ∞·0

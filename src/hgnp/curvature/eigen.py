"""Top eigenpairs of Kronecker factors: Ritz pairs of a Krylov space, from a start.

Every solve ends in a Ritz pair with its own residual: v is the best vector of the space of x, Fx, F²x, …, and λ = vᵀFv and
‖Fv − λv‖/λ are measured at that same v: the reported residual is that of the v in use. The error of λ is at most the
residual squared over the relative gap, or the residual itself.

    factor                       before the Ritz pair                 warm                    cold
    side ≤ 128, Rows or Dense    formed once, F^p x by squaring       p = 64         p = 65536
    any other                    products with F alone                `factor.warm_products`  60, restarted every 20

Warm: the start is the eigenvector of the last refresh, which is close. Cold: it may be far off. Then there are many products,
and a tenth of an arbitrary vector is mixed in, or the solver would stay at an eigenvector that is no longer the top one.

The number of products is that of the table: by the layer's shape alone, never by the device, the rows of a batch or the ranks.
Over several ranks F is the sum of the ranks' factors. A solver is a generator that yields what this rank contributes to a sum,
the small matrices or the products with a batch of vectors, and is sent the sum over all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.device import SideStreams, constant
from hgnp.curvature.factors import Dense, Factor, Patches, merged, unit
from hgnp.reducer import LOCAL, Reducer

MAX_DENSE_SIDE = 128  # of a factor that is formed
POWER, COLD_POWER = 64, 2**16  # of a small factor
COLD_PRODUCTS = 60
KRYLOV_DIM = 20  # at most
RITZ_POWER = 1024  # of F in the space: two Ritz values that it leaves mixed differ by less than a thousandth
ARBITRARY_WEIGHT = 0.1


@dataclass(frozen=True)
class Eigenpair:
    value: Tensor  # (G,)
    vector: Tensor  # (G, side), unit length
    residual: Tensor  # (G,), relative


T = TypeVar("T")
Solver = Generator[Tensor, Tensor, T]
Ritz = tuple[Tensor, Tensor, Tensor]  # v (G, side), λ (G,), ‖Fv − λv‖/λ (G,)


def top_of_each(
    factors: Sequence[Factor], starts: Sequence[Tensor], *, cold: bool, reducer: Reducer = LOCAL
) -> list[Eigenpair]:
    """The top eigenpair of every group of every factor, from `starts`, (G, side) each.

    With several ranks, each passes its own share of every factor, and each round of products is one `reducer.sum`. An overflow
    keeps the start; a product that vanishes (a dead layer, or a start in the factor's null space) is replaced by an arbitrary
    direction, or the pair would stay zero."""
    return top_of_lists([(factors, starts)], cold=cold, reducer=reducer)[0]


def top_of_lists(
    problems: Sequence[tuple[Sequence[Factor], Sequence[Tensor]]], *, cold: bool, reducer: Reducer
) -> list[list[Eigenpair]]:
    """`top_of_each` of several lists of factors and starts. With several ranks their rounds share their sums."""
    groups = [(which, group) for which, each in enumerate(problems) for group in _groups(*each)]
    solvers = []
    for which, group in groups:
        factors, starts = problems[which]
        solvers.append(_solver([factors[n] for n in group], [starts[n] for n in group], cold))
    solved: list[dict[int, Eigenpair]] = [{} for _ in problems]
    for (which, group), pairs in zip(groups, _solved(solvers, reducer), strict=True):
        solved[which] |= zip(group, pairs, strict=True)
    return [[each[n] for n in range(len(factors))] for each, (factors, _) in zip(solved, problems, strict=True)]


def _solved(solvers: Sequence[Solver[T]], reducer: Reducer) -> list[T]:
    """In a single process each solver runs separately, on its own side stream; over several ranks all advance together."""
    if reducer.ranks == 1:
        streams, alone = SideStreams(), []
        for solver in solvers:
            with streams.fork():
                alone.append(_alone(solver))
        streams.join()
        return alone
    shares = {number: next(solver) for number, solver in enumerate(solvers)}
    results: dict[int, T] = {}
    while shares:
        for number, total in zip(list(shares), reducer.sum(list(shares.values())), strict=True):
            try:
                shares[number] = solvers[number].send(total)
            except StopIteration as end:
                results[number] = end.value
                del shares[number]
    return [results[number] for number in range(len(solvers))]


def _alone(solver: Solver[T]) -> T:
    """One rank: its share is the sum."""
    share = next(solver)
    while True:
        try:
            share = solver.send(share)
        except StopIteration as end:
            result: T = end.value
            return result


def _groups(factors: Sequence[Factor], starts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Factors that are solved for together: as few groups as can be padded to one side without four times the memory. By the
    layers alone: ranks with other rows, which may hold as Dense what others hold as Rows, form the same groups."""
    alike: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for number, (factor, start) in enumerate(zip(factors, starts, strict=True)):
        key = isinstance(factor, Patches), factor.side <= MAX_DENSE_SIDE, factor.warm_products, start.dtype
        alike[key].append((factor.side, factor.groups, number))
    for part in alike.values():
        part.sort(reverse=True)
        taken: list[tuple[int, int, int]] = []
        for each in part:
            groups = sum(n for _, n, _ in taken) + each[1]
            if taken and groups * taken[0][0] > 4 * (sum(side * n for side, n, _ in taken) + each[0] * each[1]):
                yield sorted(number for _, _, number in taken)
                taken = []
            taken.append(each)
        yield sorted(number for _, _, number in taken)


def _solver(factors: Sequence[Factor], starts: Sequence[Tensor], cold: bool) -> Solver[list[Eigenpair]]:
    """The top eigenpairs of one group of factors."""
    start = _padded(starts)
    parts = list(merged(factors, start.shape[1]))
    fallback = _arbitrary(tuple((factor.groups, factor.side) for factor in factors), start.dtype, start.device)
    begin = unit(start + ARBITRARY_WEIGHT * fallback) if cold else start
    if isinstance(factors[0], Patches) or factors[0].side > MAX_DENSE_SIDE:
        ritz = yield from _ritz(
            partial(_product, parts), begin, COLD_PRODUCTS if cold else factors[0].warm_products, cold
        )
    else:
        matrix = yield _dense(parts, start)
        begin = Dense(_matrix_power(matrix, COLD_POWER if cold else POWER)).product(begin)
        ritz = _alone(_ritz(Dense(matrix).product, begin, 2, cold))
    v, value, residual = ritz
    good = (value > 0) & (value < torch.inf)
    v = torch.where(good.unsqueeze(1), v, torch.where((value <= 0).unsqueeze(1), fallback, start))
    # here, not by the caller: memory of a side stream must not be read on another stream and then released
    return list(_split(factors, v, value, torch.where(good, residual, torch.inf)))


def _product(parts: Sequence[Factor], x: Tensor) -> Tensor:
    """Each part times its groups of x, (groups of all, longest side)."""
    if len(parts) == 1:
        return parts[0].product(x)
    y = torch.zeros_like(x)
    streams, entry = SideStreams(), 0
    for part in parts:
        mine = slice(entry, entry := entry + part.groups), slice(part.side)
        with streams.fork():  # a copy: other side streams may get a product's own memory once it is released
            y[mine] = part.product(x[mine].contiguous())
    streams.join()
    return y


def _dense(parts: Sequence[Factor], like: Tensor) -> Tensor:
    """(groups of all, longest side, longest side)."""
    if len(parts) == 1:
        return parts[0].dense()
    out = like.new_zeros(*like.shape, like.shape[1])
    streams, entry = SideStreams(), 0
    for part in parts:
        with streams.fork():
            out[entry : entry + part.groups, : part.side, : part.side] = part.dense()
        entry += part.groups
    streams.join()
    return out


def _ritz(product: Callable[[Tensor], Tensor], start: Tensor, products: int, cold: bool) -> Solver[Ritz]:
    """The Ritz pair of the largest Ritz value in the Krylov space of x, Fx, F²x, … (Lanczos with full reorthogonalisation),
    restarted from it once there are `KRYLOV_DIM` vectors.

    It costs the products of as many powers, and its λ is at least as large as theirs: F^k x is in the space. The products are
    with the basis itself, so that Fv is a sum of them and λ and residual are those of this v to rounding. Nothing is of a
    higher power in F than one: Γ may be as small as 1e-15, Ψ as large as 1e9."""
    v = unit(start)
    while products:
        size = min(products, KRYLOV_DIM)
        products -= size
        basis = v.new_empty(len(v), size, v.shape[1])
        basis[:, 0] = v
        images = [(yield product(v))]
        for k in range(1, size):
            known, q = basis[:, :k], images[-1].unsqueeze(1)
            q = unit(torch.baddbmm(q, q @ known.mT, known, alpha=-1))
            q = torch.baddbmm(q, q @ known.mT, known, alpha=-1)  # again: rounding errors may be all that is left of it
            length = torch.linalg.vector_norm(q, dim=2, keepdim=True)
            # zero where all is in the basis already
            torch.div(q, F.threshold(length, 0.5, torch.inf), out=basis[:, k : k + 1])
            images.append((yield product(basis[:, k])))
        image = torch.stack(images, 1)
        # a high power of F, as a matrix of the space, times the start, which is the first vector of the basis;
        # no eigh: it waits for the device, and cannot be captured
        weights = _matrix_power(basis @ image.mT, COLD_POWER if cold else RITZ_POWER)[:, :1]
        v, image = (weights @ basis).squeeze(1), (weights @ image).squeeze(1)
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        v, image = v / length, image / length
    value = (v * image).sum(1)
    return v, value, torch.linalg.vector_norm(image / value.unsqueeze(1) - v, dim=1)


def _matrix_power(K: Tensor, power: int) -> Tensor:
    """K to a power of two, by squaring: six small products for 64 powers. Scaled."""
    for squaring in range(power.bit_length() - 1):
        if squaring % 4 == 0:  # K¹⁶ of a matrix of norm 1 is in range, K²⁵⁶ is not
            K = K / torch.linalg.matrix_norm(K, keepdim=True).clamp_min(torch.finfo(K.dtype).tiny)
        K = K @ K
    return K


def _padded(vectors: Sequence[Tensor]) -> Tensor:
    """(groups of all, longest side), from (groups, side) each."""
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


def _split(factors: Sequence[Factor], v: Tensor, value: Tensor, residual: Tensor) -> Iterator[Eigenpair]:
    entry = 0
    for factor in factors:
        mine = slice(entry, entry := entry + factor.groups)
        yield Eigenpair(value[mine], v[mine, : factor.side].contiguous(), residual[mine])


@constant
def arbitrary(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same unit vector for every run, (1, side), without zeros or symmetry."""
    generator = torch.Generator().manual_seed(0)
    return unit(torch.randn(1, side, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype))


@constant
def _arbitrary(sizes: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _padded([arbitrary(side, dtype, device).expand(groups, -1) for groups, side in sizes])


def kronecker_residual(psi: Tensor, gamma: Tensor) -> Tensor:
    """‖(Ψ ⊗ Γ)v − λv‖/λ of v = v^Ψ ⊗ v^Γ from the residuals of the two: their errors are orthogonal to them."""
    total = (psi**2 + gamma**2 + psi**2 * gamma**2).sqrt()
    return torch.where(torch.isinf(psi) | torch.isinf(gamma), torch.inf, total)  # not ∞·0

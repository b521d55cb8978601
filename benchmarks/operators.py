"""Every operator of PyTorch's own test database as the middle of a network: its tangent and the gradient of that tangent.

    pip install expecttest && python benchmarks/operators.py [NAME …] > benchmarks/operators.md

float64. Tangents are compared with central differences where two step sizes agree, gradients of tangents with reverse mode
applied three times, and with central differences of the tangent where the two differ. Each sample is run with a tangent on
its first tensor, on all, and on all but the first; in-place variants are included. About two minutes on one core.
"""

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from hgnp.curvature.autodiff.forward import UnsupportedOperationError
from hgnp.curvature.autodiff.hessian import Primitive
from hgnp.curvature.autodiff.operations import differentiable, map_tensors, tensors_in
from hgnp.curvature.autodiff.tangent import Tangent

EXCLUDED = frozenset(
    """cholesky_inverse cholesky_solve triangular_solve linalg.cholesky linalg.cholesky_ex linalg.eig linalg.eigh
    linalg.eigvalsh linalg.lstsq linalg.pinv bfloat16 half float cfloat empty_like new_empty new_empty_strided normal
    sparse.mm nn.functional.cosine_embedding_loss nn.functional.hinge_embedding_loss""".split()  # noqa: SIM905
)
"""Differences do not apply: the arguments must stay symmetric, triangular or whole numbers, or the result is rounded, random or
uninitialised."""
SAMPLES = 12
LARGEST = 20_000
SEED = 7
Function = Callable[[Sequence[Tensor]], Any]


def outputs(function: Function, values: Sequence[Tensor]) -> list[Tensor]:
    """On copies, which may be written to, with the same random numbers in each call."""
    torch.manual_seed(SEED)
    return [x for x in tensors_in(function([value * 1.0 for value in values])) if differentiable(x)]


def along(
    function: Function, parameters: list[Tensor], directions: dict[int, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and tangents by hgnp."""
    with Tangent([(parameters[i], v) for i, v in directions.items()]) as mode:
        found = outputs(function, parameters)
    return found, [torch.zeros_like(x) if (u := mode.tangent(x)) is None else u for x in found]


def difference(work: Callable[[float], list[Tensor]], step: float) -> list[Tensor]:
    return [(up - down) / (2 * step) for up, down in zip(work(step), work(-step), strict=True)]


def judged(function: Function, given: list[Tensor], tracked: Sequence[int]) -> str:
    """What hgnp makes of one sample: ok, refused, or what is wrong."""
    parameters = [x.detach().clone().requires_grad_() for x in given]
    v = {i: torch.randn_like(parameters[i]) for i in tracked}

    def moved(step: float) -> list[Tensor]:
        with torch.no_grad():
            return outputs(function, [x + step * v[i] if i in v else x for i, x in enumerate(parameters)])

    try:
        value, wanted, coarser = outputs(function, parameters), difference(moved, 1e-6), difference(moved, 2e-6)
        for x in value:
            torch.autograd.grad(x.abs().sum(), parameters, retain_graph=True, allow_unused=True)
    except Exception:
        return "not run"  # by PyTorch itself, or without a derivative there
    try:
        found, tangents = along(function, parameters, v)
    except UnsupportedOperationError:
        return "refused"
    for x, y in zip(found, value, strict=True):
        if not torch.allclose(x, y, rtol=1e-9, atol=1e-10, equal_nan=True):
            return "wrong value"
    for u, w, c in zip(tangents, wanted, coarser, strict=True):
        smooth = w.isfinite() & c.isfinite() & ((w - c).abs() <= 1e-4 * (1 + w.abs()))
        if not torch.allclose(u[smooth], w[smooth], rtol=1e-3, atol=1e-4):
            return "wrong tangent"
    return gradient_judged(function, parameters, v, tangents)


def gradient_judged(function: Function, parameters: list[Tensor], v: dict[int, Tensor], tangents: list[Tensor]) -> str:
    probes = [torch.randn_like(u) for u in tangents]

    def probed(us: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * u).sum() for p, u in zip(probes, us, strict=True)]).sum()

    def gradient(total: Tensor) -> list[Tensor]:
        if not total.requires_grad:
            return [torch.zeros_like(x) for x in parameters]
        return list(torch.autograd.grad(total, parameters, materialize_grads=True))

    if not tangents or any(u.is_complex() for u in tangents):
        return "ok"
    ours = gradient(probed(tangents))
    try:
        with Primitive():
            z = outputs(function, parameters)
        c = [torch.zeros_like(x, requires_grad=True) for x in z]
        grads = torch.autograd.grad(z, [parameters[i] for i in v], c, create_graph=True, materialize_grads=True)
        product = torch.stack([(g * d).sum() for g, d in zip(grads, v.values(), strict=True)]).sum()
        theirs = gradient(probed(torch.autograd.grad(product, c, create_graph=True, materialize_grads=True)))
    except RuntimeError:
        return "ok"  # PyTorch has no such derivative, or it is zero
    if all(torch.allclose(a, b, rtol=1e-6, atol=1e-7, equal_nan=True) for a, b in zip(ours, theirs, strict=True)):
        return "ok"
    way = [torch.randn_like(x) for x in parameters]

    def moved(step: float) -> list[Tensor]:
        at = [(x + step * d).detach().requires_grad_() for x, d in zip(parameters, way, strict=True)]
        return [probed(along(function, at, v)[1]).detach()]

    (number,) = difference(moved, 1e-5)
    (coarser,) = difference(moved, 2e-5)
    found = torch.stack([(a * d).sum() for a, d in zip(ours, way, strict=True)]).sum()
    rough = (number - coarser).abs() > 1e-3 * (1 + number.abs())
    return "ok" if rough or torch.allclose(found, number, rtol=1e-3, atol=1e-4) else "wrong gradient of the tangent"


def cases(op: Any) -> Iterator[tuple[Function, list[Tensor], Sequence[int]]]:
    for call in filter(None, (op.op, op.inplace_variant)):
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), SAMPLES):
            arguments, options = (sample.input, *sample.args), sample.kwargs
            tensors = {id(x): x for x in tensors_in((arguments, options)) if x.is_floating_point()}
            if not tensors or sum(x.numel() for x in tensors.values()) > LARGEST:
                continue

            count, function = len(tensors), partial(called, call, arguments, options, tuple(tensors))
            for tracked in {(0,), tuple(range(count)), tuple(range(1, count))} - {()}:
                yield function, list(tensors.values()), tracked


def called(call: Any, args: Any, kwargs: Any, keys: Sequence[int], values: Sequence[Tensor]) -> Any:
    """The call with other tensors in the place of its own, which `keys` identify."""
    now = dict(zip(keys, values, strict=True))
    args, kwargs = map_tensors((args, kwargs), lambda x: now.get(id(x), x))
    return call(*args, **kwargs)


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    wrong: dict[str, Counter[str]] = {}
    for op in op_db:
        if torch.float64 not in op.dtypes or op.name in EXCLUDED or (names and op.name not in names):
            continue
        for case in cases(op):
            try:
                verdict = judged(*case)
            except Exception as error:
                verdict = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            plain = verdict if verdict in ("ok", "refused", "not run") else "other"
            counts[plain] += 1
            if plain == "other":
                wrong.setdefault(f"{op.name} {op.variant_test_name}".strip(), Counter())[verdict] += 1
    print("# Tangents of PyTorch's operators\n")
    print(f"`python benchmarks/operators.py`, {date.today()}, torch {torch.__version__}, float64, CPU.")
    print(
        f"{counts['ok']:,} samples are right, {counts['refused']:,} are refused, {counts['not run']:,} do not run or have no"
    )
    print(f"derivative in PyTorch itself, {counts['other']} differ:\n")
    print("| operator | what | samples |\n|---|---|--:|")
    for name, verdicts in wrong.items():
        for verdict, count in verdicts.items():
            print(f"| `{name}` | {verdict} | {count} |")


if __name__ == "__main__":
    main(sys.argv[1:])

"""How flat a solution is: the top eigenvalues of the true Hessian over a dataset.

Lanczos with full reorthogonalisation on v ↦ Hv, H the Hessian of the mean loss over the batches as one, in evaluation mode.
From one start it finds one eigenvector of each eigenvalue. For k eigenvalues it has k starts, and with them up to k
eigenvectors of each: the products H·v_1, H·v_2, … of the basis in its order, orthogonalised, continue the basis (band Lanczos).
After n products HV = VT + UB, with T = VᵀHV banded, V the first n vectors and U those whose product is still to come. A Ritz
pair (θ, y = Vs) has the exact residual ‖Hy − θy‖ = ‖Bs‖; it is converged once that is below `tolerance`·|θ_max|.

The scale-invariant variant is the Hessian of the same loss in the metric D = diag(n), n_j = ‖w_j‖ for the filter j that a
weight or bias of a Linear or convolution belongs to. With weight_norm, w = g·u/‖u‖, it is |g| for g and ‖u‖ for u.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from hgnp.curvature.autodiff.forward import Output, check_gradients, is_missing_derivative, run, samples_in
from hgnp.curvature.autodiff.norms import weight_norm
from hgnp.curvature.batch_checks import failure_explained
from hgnp.curvature.factors import LAYERS, find_blocks
from hgnp.curvature.losses import Loss, loss_curvature, mean_and_normaliser, weighted
from hgnp.curvature.validation import check_functions, lacks_second_derivative, without_tensor_hooks
from hgnp.errors import InputError, InputTypeError, one_line
from hgnp.state_guards import compiled_functions_run_eagerly, evaluating
from hgnp.validation import check_flags, check_module, check_values

TOLERANCE = 1e-4
MAX_STEPS = 200
STEPS_EACH = 20  # for more eigenvalues than fit in that
MAX_BYTES = 8 << 30  # of the basis, which large networks fill before that


@dataclass(frozen=True)
class Sharpness:
    """The top of the Hessian's spectrum.

    >>> import torch, hgnp
    >>> x, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 1)
    >>> net = torch.nn.Linear(2, 1, bias=False)  # with MSE the Hessian is 2·mean(x xᵀ) = diag(4, 1)
    >>> top = hgnp.sharpness(net, [(x, y)], loss=torch.nn.functional.mse_loss)
    >>> round(top.eigenvalues[0], 3), top.converged
    (4.0, True)

    Attributes:
        eigenvalues: The k algebraically largest eigenvalues, in descending order; a repeated one is listed as often.
        residuals: ‖Hy − θy‖ of each; some eigenvalue of H lies at most that far from θ.
        steps: Number of products with the Hessian, each one pass over the data.
        converged: Whether every residual is below `tolerance` times the largest eigenvalue's magnitude.
    """

    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    steps: int
    converged: bool


def sharpness(
    net: nn.Module,
    data: Iterable[tuple[Any, Any]],
    *,
    loss: Loss = F.cross_entropy,
    k: int = 1,
    scale_invariant: bool = False,
    output: Output | None = None,
    tolerance: float = TOLERANCE,
    max_seconds: float = math.inf,
) -> Sharpness:
    """The k largest eigenvalues of the Hessian of the mean loss over `data`, in evaluation mode, by Lanczos.

    >>> import torch, hgnp
    >>> x, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 1)
    >>> net = torch.nn.Linear(2, 1, bias=False)  # with MSE the Hessian is 2·mean(x xᵀ) = diag(4, 1)
    >>> top = hgnp.sharpness(net, [(x, y)], loss=torch.nn.functional.mse_loss, k=2)
    >>> [round(value, 3) for value in top.eigenvalues]
    [4.0, 1.0]

    Args:
        net: The network, on the device of the batches.
        data: Batches (inputs, target). Iterated once per Hessian-vector product: a list or a loader, not a generator.
        loss: Any loss(output, target) that is a mean. Batches are weighted by its normaliser (the number of samples, of labels
            that are not ignored, or the sum of their class weights), so that it does not matter how the data is batched.
        k: Number of eigenvalues; one that is repeated counts as often.
        scale_invariant: Use the metric in which each filter's weights are measured relative to the filter's norm. Of computed
            weights it knows those of weight_norm.
        output: Picks the logits from what the network returns, e.g. ``lambda o: o.logits``.
        tolerance: An eigenvalue has converged once its residual is below this times the largest eigenvalue's magnitude.
        max_seconds: Stop at the end of the first Hessian-vector product after this time. There may then be fewer than k
            eigenvalues, and `converged` is False.

    Returns:
        A `Sharpness`: the eigenvalues in descending order, their residuals, and whether they have converged.

    The network's mode, buffers and gradients are restored.
    """
    start = time.perf_counter()
    check_module(net)
    check_values(net)
    check_functions(loss=loss, output=output)
    check_flags(scale_invariant=scale_invariant)
    for name, value in (("tolerance", tolerance), ("max_seconds", max_seconds)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{name} must be a number > 0, got {value!r}")
    check_gradients()
    loss_curvature(loss)  # refuses one that is not a mean
    if not isinstance(data, Iterable) or isinstance(data, Tensor | Mapping):
        raise InputTypeError(
            f"data must be a list of (inputs, target) pairs or a loader, got {type(data).__name__}; use [(x, y)]"
        )
    if iter(data) is data:
        raise InputError(
            "data must be an iterable that can be read several times, got a generator; use a list or a DataLoader"
        )
    parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    if not size:
        raise InputError("net must have a trained parameter, got none")
    vectors = max(MAX_BYTES // (size * parameters[0].element_size()), 1)  # that fit
    most_eigenvalues = min(size, MAX_STEPS, (vectors + 1) // 2)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most_eigenvalues:
        raise InputError(f"k must be an integer from 1 to {most_eigenvalues} with {size} parameters, got {k!r}")
    most = min(size, max(MAX_STEPS, STEPS_EACH * k), vectors - k + 1)
    metric = _metric(net, parameters) if scale_invariant else None
    with evaluating(net), sdpa_kernel(SDPBackend.MATH):
        product = partial(_product, net, data, loss, output, parameters, metric)
        return _lanczos(product, parameters, most, k, tolerance, start + max_seconds)


def _metric(net: nn.Module, parameters: list[Tensor]) -> list[Tensor]:
    """n_j for every entry that belongs to filter j of a block, 1 elsewhere."""
    scales = {}
    for block in find_blocks(net):
        n = block.filter_norms().detach()
        scales[id(block.weight)] = n.view(-1, *[1] * (block.weight.dim() - 1))
        if block.bias is not None:
            scales[id(block.bias)] = n
    for name, layer in net.named_modules():
        if not isinstance(layer, LAYERS) or layer._parameters.get("weight") is not None:
            continue
        bias = layer._parameters.get("bias")
        if all(p is bias for p in layer.parameters() if p.requires_grad):
            continue
        g, u, dim = _weight_norm(name, layer)
        length = torch.norm_except_dim(u.detach(), 2, dim)
        scales[id(g)], scales[id(u)] = g.detach().abs(), length
        if bias is not None:
            weight = g.detach() * u.detach() / length
            scales[id(bias)] = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return [scales.get(id(p), torch.ones((), dtype=p.dtype, device=p.device)) for p in parameters]


def _weight_norm(name: str, layer: nn.Module) -> tuple[Tensor, Tensor, int]:
    """g, u and the dimension of the filters (−1: one length for all), by either of PyTorch's interfaces."""
    hooks = [
        each for each in layer._forward_pre_hooks.values() if isinstance(each, WeightNorm) and each.name == "weight"
    ]
    if hooks:
        return layer.weight_g, layer.weight_v, hooks[0].dim  # type: ignore[return-value]
    if is_parametrized(layer, "weight"):
        parametrization: Any = layer.parametrizations.weight  # type: ignore[union-attr]
        if len(parametrization) == 1 and isinstance(parametrization[0], _WeightNorm):
            return parametrization.original0, parametrization.original1, parametrization[0].dim
    raise InputError(
        f"scale_invariant must be False for this network, got True: the weight of layer {name!r} is computed, and of computed "
        "weights only those of weight_norm have a known scale"
    )


def _product(
    net: nn.Module,
    data: Iterable[tuple[Any, Any]],
    loss: Loss,
    output: Output | None,
    parameters: list[Tensor],
    metric: list[Tensor] | None,
    v: Tensor,
) -> Tensor:
    """Hv, or DHDv: two reverse passes per batch, weighted by the normaliser of its mean loss."""
    parts = [x.view_as(p) for x, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True)]
    if metric is not None:
        parts = [x * d for x, d in zip(parts, metric, strict=True)]
    total = torch.zeros_like(v)
    normalisers: list[Tensor] = []
    for number, batch in enumerate(data):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(f"data must be (inputs, target) pairs, got a {type(batch).__name__}; use [(x, y)]")
        inputs, target = batch
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}  # a forward may count its calls in one
        fits = failure_explained(net, loss, output, (inputs, target), "data", where=f"batch {number} of data")
        with fits, compiled_functions_run_eagerly, _PrimitiveWeightNorm():  # compiled ones have no second derivative
            out = run(net, inputs, output=output, buffers=buffers)
            value, weight = mean_and_normaliser(loss, out, target, samples_in(inputs))
        with _twice_differentiable(), without_tensor_hooks(parameters):
            grads = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
            if not normalisers and lacks_second_derivative(grads):  # the first batch shows it
                raise InputError(
                    "net and loss must be twice differentiable, got an autograd.Function marked @once_differentiable; "
                    "write its backward in differentiable operations"
                )
            products = torch.autograd.grad(grads, parameters, parts, materialize_grads=True)
        total += weighted(torch.cat([p.flatten() for p in products]), weight)
        normalisers.append(weight)
    if not normalisers:
        raise InputError("data must have at least one batch, got none")
    if metric is not None:
        scale = torch.cat([d.expand_as(p).flatten() for d, p in zip(metric, parameters, strict=True)])
        total = total * scale
    return total / torch.stack(normalisers).sum()


@contextlib.contextmanager
def _twice_differentiable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if is_missing_derivative(error):
            reason = one_line(error).rstrip(".")
            raise InputError(f"net and loss must be twice differentiable, got: {reason}") from error
        raise


class _PrimitiveWeightNorm(TorchFunctionMode):
    """Takes weight_norm by primitive operations, as PyTorch's own second derivative is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (weight_norm if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def _lanczos(
    product: Callable[[Tensor], Tensor], parameters: list[Tensor], most: int, k: int, tolerance: float, deadline: float
) -> Sharpness:
    size = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(0)
    basis: list[Tensor] = []
    for _ in range(k):
        v = torch.randn(size, generator=generator, dtype=torch.float64).to(parameters[0])
        _orthogonalise(v, basis)
        basis.append(v / v.norm())
    T = torch.zeros(most + k, most + k, dtype=torch.float64)
    n = 0  # products
    while True:
        n += 1
        w = product(basis[n - 1])
        for i in range(n - 1, len(basis)):  # by symmetry the entries before are there
            T[i, n - 1] = T[n - 1, i] = (w @ basis[i]).item()
        _orthogonalise(w, basis)
        beta = w.norm().item()
        if not math.isfinite(beta):
            raise InputError(
                "the Hessian of the loss over data must be finite, got one that is not; check inputs, targets and weights"
            )
        if len(basis) < size and beta > 1e-12 * T[:n, :n].abs().max().item():
            T[len(basis), n - 1] = T[n - 1, len(basis)] = beta
            basis.append(w / beta)
        over = n == len(basis) or n == most or time.perf_counter() > deadline
        if n % k and not over:  # to look after every product would take longer than the products
            continue
        values, vectors = torch.linalg.eigh(T[:n, :n])
        scale = values.abs().max().item()
        residuals = (T[n : len(basis), :n] @ vectors).norm(dim=0)
        done = n >= k and bool((residuals[-k:] <= tolerance * scale).all())
        exhausted = n == len(basis)
        if done or exhausted or n == most or time.perf_counter() > deadline:
            top, left = values.flip(0)[:k].tolist(), residuals.flip(0)[:k].tolist()
            return Sharpness(tuple(top), tuple(left), n, done or exhausted)


def _orthogonalise(w: Tensor, basis: list[Tensor]) -> None:
    """Takes the basis out of w."""
    for _ in range(2):  # once leaves what the first subtraction rounds away
        for v in basis:
            w.sub_(v * (v @ w))

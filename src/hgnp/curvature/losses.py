"""The loss at the network's output z: its curvature along u and draws from its Fisher information.

A `LossCurvature` knows, for the mean loss C(z), the Gauss–Newton quotient uᵀ(∂²C/∂z²)u and cotangents ξ at z with
E[ξ_i ξ_iᵀ] = (1/N)·∂²C/∂z_i² for each sample: the gradient of C at labels drawn from the network itself. With g_i = N·ξ_i that
is E[g_i g_iᵀ] = N·∂²C/∂z_i². N counts samples, not the rows of z: a sequence may have one per position. With p = softmax(z):

    cross-entropy  Σ_i ω_i (Σ_k p u² − (Σ_k p u)²) / Σ_i w(y_i),  ω_i = Σ_k t_ik w_k, t the smoothed target
    MSE            2·Σ u² / numel
    BCE            Σ w (1 + (w₊ − 1) y) σ(1 − σ) u² / numel

It also splits the mean loss of a batch into C = total / normaliser, sums that add up over batches: the loss of several batches
as one is Σ total / Σ normaliser. The normaliser of cross-entropy is Σ_i w(y_i) over the labels that are not ignored, with or
without label smoothing, and the number of entries for targets that are probabilities, whatever the weights; that of the others
is numel.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hgnp.curvature.device import upcast
from hgnp.errors import InputError
from hgnp.state_guards import compiled_functions_run_eagerly

Loss = Callable[[Any, Any], Tensor]
RankRows = tuple[int, int]
"""A rank's part of the joint batch: its first row, and the rows of all ranks."""


class LossCurvature(Protocol):
    def quotient(self, z: Tensor, u: Tensor, target: Tensor) -> Tensor: ...

    def draw(
        self, z: Tensor, target: Tensor, samples: int, generator: torch.Generator, rows: RankRows | None = None
    ) -> Tensor:
        """Cotangents ξ of a batch of N = `samples`, shaped as z. With `rows` all ranks draw for the joint batch,
        and each takes its own part."""

    def total(self, z: Tensor, target: Tensor) -> Tensor: ...

    def normaliser(self, z: Tensor, target: Tensor) -> Tensor: ...


class CrossEntropy:
    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        self.weight, self.ignore_index, self.smoothing = weight, ignore_index, label_smoothing

    def _weights(self, z: Tensor, target: Tensor) -> Tensor:
        """ω_i over the normaliser of the mean, shaped as z without its class dimension."""
        classes = z.shape[1]
        if self.weight is None and not target.is_floating_point():
            counted = (target != self.ignore_index).to(z.dtype)
            return counted / _positive(counted.sum())
        w = z.new_ones(classes) if self.weight is None else self.weight.to(z)
        if target.is_floating_point():
            t = target * (1 - self.smoothing) + self.smoothing / classes
            return torch.einsum("nk...,k->n...", t.to(z), w) * (classes / z.numel())
        counted = target != self.ignore_index
        own = w[target.masked_fill(~counted, 0)] * counted  # torch.where would copy its 0 to the device
        smooth = (1 - self.smoothing) * own + self.smoothing * w.mean() * counted
        return smooth / _positive(own.sum())

    def quotient(self, z: Tensor, u: Tensor, target: Tensor) -> Tensor:
        z, u = upcast(z), upcast(u)
        p = z.softmax(1)
        mean = (p * u).sum(1, keepdim=True)
        return ((p * (u - mean) ** 2).sum(1) * self._weights(z, target)).sum()

    def draw(
        self, z: Tensor, target: Tensor, samples: int, generator: torch.Generator, rows: RankRows | None = None
    ) -> Tensor:
        z = upcast(z)
        p = z.softmax(1).movedim(1, -1)
        # the least of exponential waiting times with rates p, as torch.multinomial draws a label
        label = (p / _noise(p, rows, lambda x: x.exponential_(generator=generator))).argmax(-1)
        xi = p - F.one_hot(label, p.shape[-1])
        # N·mean loss has curvature N·ω per entry; the cotangent of the mean loss itself is 1/N of its root
        return (xi.movedim(-1, 1) * (self._weights(z, target) * samples).sqrt().unsqueeze(1)) / samples

    def total(self, z: Tensor, target: Tensor) -> Tensor:
        z, weight = upcast(z), None if self.weight is None else self.weight.to(upcast(z))
        return F.cross_entropy(
            z, _like(z, target), weight=weight, ignore_index=self.ignore_index, reduction="sum", label_smoothing=self.smoothing
        )  # fmt: skip

    def normaliser(self, z: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return _constant(z.numel() / z.shape[1], z)
        counted = target != self.ignore_index
        if self.weight is None:
            return counted.sum(dtype=torch.double)
        own = self.weight.to(z.device)[target.masked_fill(~counted, 0)]
        return (own * counted).sum(dtype=torch.double)


class SquaredError:
    def quotient(self, z: Tensor, u: Tensor, target: Tensor) -> Tensor:
        return 2 * (upcast(u) ** 2).mean()

    def draw(
        self, z: Tensor, target: Tensor, samples: int, generator: torch.Generator, rows: RankRows | None = None
    ) -> Tensor:
        z = upcast(z)
        noise = _noise(z, rows, lambda x: x.normal_(generator=generator))
        return noise * (2 * samples / z.numel()) ** 0.5 / samples

    def total(self, z: Tensor, target: Tensor) -> Tensor:
        z = upcast(z)
        return F.mse_loss(z, _like(z, target), reduction="sum")

    def normaliser(self, z: Tensor, target: Tensor) -> Tensor:
        return _constant(torch.broadcast_shapes(z.shape, target.shape).numel(), z)


class BinaryCrossEntropy:
    def __init__(self, weight: Tensor | None = None, pos_weight: Tensor | None = None) -> None:
        self.weight, self.pos_weight = weight, pos_weight

    def _weights(self, z: Tensor, target: Tensor) -> Tensor:
        w = torch.ones_like(z) / z.numel()
        w = w if self.weight is None else w * self.weight.to(z)
        return w if self.pos_weight is None else w * (1 + (self.pos_weight.to(z) - 1) * target)

    def quotient(self, z: Tensor, u: Tensor, target: Tensor) -> Tensor:
        z, u = upcast(z), upcast(u)
        p = z.sigmoid()
        return (self._weights(z, target) * p * (1 - p) * u**2).sum()

    def draw(
        self, z: Tensor, target: Tensor, samples: int, generator: torch.Generator, rows: RankRows | None = None
    ) -> Tensor:
        z = upcast(z)
        p = z.sigmoid()
        label = (_noise(p, rows, lambda x: x.uniform_(generator=generator)) < p).to(p.dtype)
        return (p - label) * (self._weights(z, target) * samples).sqrt() / samples

    def total(self, z: Tensor, target: Tensor) -> Tensor:
        z = upcast(z)
        weight, pos_weight = (None if w is None else w.to(z) for w in (self.weight, self.pos_weight))
        return F.binary_cross_entropy_with_logits(
            z, _like(z, target), weight=weight, pos_weight=pos_weight, reduction="sum"
        )

    def normaliser(self, z: Tensor, target: Tensor) -> Tensor:
        return _constant(z.numel(), z)


def weighted(value: Tensor, weight: Tensor | None) -> Tensor:
    """w·C or w·q of a rank, None: it has all of it. 0 where w is 0: if every label is ignored, the mean loss is 0/0."""
    return value if weight is None else torch.where(weight == 0, 0.0, value * weight)


def _noise(like: Tensor, rows: RankRows | None, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Random numbers shaped as `like`; with `rows` its part of those of the joint batch."""
    start, total = rows or (0, like.shape[0])
    return fill(like.new_empty((total, *like.shape[1:])))[start : start + like.shape[0]]


def _positive(total: Tensor) -> Tensor:
    """A normaliser to divide by: 0 of 0 is 0."""
    return total.clamp_min(torch.finfo(total.dtype).tiny)


def _constant(value: float, like: Tensor) -> Tensor:
    """On the device by a kernel, not by a copy, so that a CUDA graph can hold it."""
    return torch.full((), value, dtype=torch.double, device=like.device)


def _like(z: Tensor, target: Tensor) -> Tensor:
    """A target of numbers in the precision of z; labels as they are."""
    return target.to(z.dtype) if target.is_floating_point() else target


def loss_curvature(loss: Loss) -> LossCurvature | None:
    """What is known of the loss, or None: then only the Hessian route can be used.

    F.cross_entropy, F.mse_loss and F.binary_cross_entropy_with_logits, their functools.partial with keywords, and the
    modules nn.CrossEntropyLoss, nn.MSELoss and nn.BCEWithLogitsLoss are known. Radius, curvature and bound refer to the
    mean loss, so any other reduction is refused.
    """
    options: dict[str, Any] = {}
    func: Any = loss
    if isinstance(loss, functools.partial) and not loss.args:
        func, options = loss.func, dict(loss.keywords)
    elif type(loss) is nn.CrossEntropyLoss:
        func = F.cross_entropy
        options = {k: getattr(loss, k) for k in ("weight", "ignore_index", "reduction", "label_smoothing")}
    elif type(loss) is nn.MSELoss:
        func, options = F.mse_loss, {"reduction": loss.reduction}
    elif type(loss) is nn.BCEWithLogitsLoss:
        func = F.binary_cross_entropy_with_logits
        options = {k: getattr(loss, k) for k in ("weight", "pos_weight", "reduction")}
    known: dict[Any, tuple[Callable[..., LossCurvature], set[str]]] = {
        F.cross_entropy: (CrossEntropy, {"weight", "ignore_index", "label_smoothing"}),
        F.mse_loss: (SquaredError, set()),
        F.binary_cross_entropy_with_logits: (BinaryCrossEntropy, {"weight", "pos_weight"}),
    }
    if not isinstance(func, Hashable) or func not in known:
        return None
    if (reduction := options.pop("reduction", "mean")) != "mean":
        raise InputError(
            f"loss must have reduction='mean', to which curvature and bound refer, got reduction={reduction!r}"
        )
    make, allowed = known[func]
    return make(**options) if set(options) <= allowed else None


def normaliser(loss: Loss, output: Any, target: Any) -> Tensor | None:
    """What the mean loss of a batch has in its denominator: a number in double precision on the device, without waiting for it.
    0 if every label is ignored. None for a loss that is not known."""
    known = loss_curvature(loss)
    return None if known is None else known.normaliser(output, target)


def target_normaliser(loss: Loss, target: Any) -> Tensor | None:
    """`normaliser` before there is an output. The target takes its place: labels are counted without one, and any other target
    has its shape."""
    return normaliser(loss, target, target) if isinstance(target, Tensor) else None


def total(loss: Loss, output: Any, target: Any) -> Tensor | None:
    """The mean loss of a batch times its `normaliser`, 0 if every label is ignored. None for a loss that is not known."""
    known = loss_curvature(loss)
    return None if known is None else known.total(output, target).double()


def mean_and_normaliser(loss: Loss, output: Any, target: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch, and its normaliser. Of a loss that is not known it is that of PyTorch's losses which
    it calls with reduction="mean", if all have the same; otherwise the number of samples."""
    with _Normalisers() as calls, compiled_functions_run_eagerly:
        mean = loss(output, target).double().reshape(())
    count = torch.full_like(mean, samples)
    known = [each.to(count.device) for each in calls.found if each is not None]
    if not known or len(known) < len(calls.found):
        return mean, count
    first, *others = known
    agree = torch.ones_like(first, dtype=torch.bool)
    for each in others:
        agree = agree & (each == first)
    return mean, torch.where(agree, first, count)


class _Normalisers(TorchFunctionMode):
    """Records the normaliser of each of PyTorch's losses that is called, None for one that is not a mean."""

    def __init__(self) -> None:
        self.found: list[Tensor | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LABEL_LOSSES or func in _ELEMENTWISE_LOSSES:
            self.found.append(self._normaliser(func, inspect.signature(func).bind(*args, **kwargs).arguments))
        return func(*args, **kwargs)

    def _normaliser(self, func: Any, options: dict[str, Any]) -> Tensor | None:
        z, target = options["input"], options["target"]
        old = options.get("size_average"), options.get("reduce")
        if options.get("reduction", "mean") != "mean" or old != (None, None) or z.dim() < 2:
            return None
        if func in _LABEL_LOSSES:
            return CrossEntropy(options.get("weight"), options.get("ignore_index", -100)).normaliser(z, target)
        return SquaredError().normaliser(z, target)


_LABEL_LOSSES = frozenset({F.cross_entropy, F.nll_loss})
_ELEMENTWISE_LOSSES = frozenset(
    {
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.poisson_nll_loss,
    }
)

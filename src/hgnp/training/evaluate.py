"""Loss and metric over the validation data, in evaluation mode."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.forward import run
from hgnp.curvature.losses import Loss
from hgnp.training.batches import Output, ignored_label, is_classification, samples_in

Metric = Callable[[Tensor, Tensor], Any]


def evaluate(
    net: nn.Module, batches: Iterable[tuple[Any, Any]], loss: Loss, metric: Metric | None, output: Output | None
) -> tuple[float, float]:
    """(mean loss, metric). A given metric sees all outputs and targets at once, as many metrics are no means over batches;
    without one it is accuracy for class labels, and minus the loss otherwise, so that higher is better."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    total: list[Tensor] = []
    right: list[Tensor] = []
    counted: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []
    samples = 0
    try:
        with torch.no_grad():
            for inputs, target in batches:
                out = run(net, inputs, output=output)
                n = samples_in(inputs)
                total.append(loss(out, target).detach().double() * n)
                samples += n
                if metric is not None:
                    seen.append((out, target))
                elif is_classification(loss, target):
                    counts = target != ignored_label(loss)
                    right.append(((out.argmax(1) == target) & counts).sum())
                    counted.append(counts.sum())
            mean = float(torch.stack(total).sum() / samples)
            if metric is not None:
                return mean, _number(metric(_joined([o for o, _ in seen]), _joined([t for _, t in seen])))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return mean, float(torch.stack(right).sum() / torch.stack(counted).sum()) if right else -mean


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"metric: it returned {given}; one number, higher is better, would do") from None


def _joined(parts: list[Any]) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(f"metric: outputs and targets must be tensors, not {type(parts[0]).__name__}; give output")
    return torch.cat(parts)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

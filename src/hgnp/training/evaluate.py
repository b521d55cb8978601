"""Loss and metric over the validation data, in evaluation mode."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.forward import Output, run, samples_in
from hgnp.curvature.losses import Loss
from hgnp.modes import evaluating
from hgnp.training.batches import ignored_label, is_classification

Metric = Callable[[Tensor, Tensor], Any]


def evaluate(
    net: nn.Module, batches: Iterable[tuple[Any, Any]], loss: Loss, metric: Metric | None, output: Output | None
) -> tuple[float, float]:
    """(mean loss, metric). A given metric sees all outputs and targets at once, as many metrics are no means over batches;
    without one it is accuracy for class labels, and minus the loss otherwise, so that higher is better."""
    total: list[Tensor] = []
    right: list[Tensor] = []
    counted: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []
    samples = 0
    with evaluating(net), torch.no_grad():
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
    return mean, int(torch.stack(right).sum()) / int(torch.stack(counted).sum()) if right else -mean


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

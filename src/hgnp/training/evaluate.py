"""Loss and metric over the validation data, in evaluation mode."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.forward import Output, run, samples_in
from hgnp.curvature.losses import Loss
from hgnp.graphs import Capture, Replayed, built_of
from hgnp.modes import evaluating
from hgnp.removal import Removal, listen
from hgnp.training.batches import ignored_label, is_classification

Metric = Callable[[Tensor, Tensor], Any]


class Evaluation:
    """(mean loss, metric) of a network over batches.

    A given metric sees all outputs and targets at once, as many metrics are no means over batches; without one it is accuracy
    for class labels, and minus the loss otherwise, so that higher is better. With `graphs` the passes of a network on a GPU
    come from CUDA graphs; they are in full precision either way.
    """

    def __init__(
        self, net: nn.Module, loss: Loss, metric: Metric | None, output: Output | None, *, graphs: bool = False
    ) -> None:
        self.net, self.loss, self.metric, self.output = net, loss, metric, output
        self._capture: Capture | None = None
        self._of_batch: Callable[[Any], tuple[Tensor, ...]] = self._plain
        if graphs:
            self._capture = Capture(next(net.parameters()).device)
            self._replayed = Replayed(self._plain, net, self._capture)
            self._built: Any = None
            self._of_batch = lambda batch: tuple(part.clone() for part in self._replayed(batch))
            listen(net, self.neurons_removed)

    def __call__(self, batches: Iterable[tuple[Any, Any]]) -> tuple[float, float]:
        parts: list[tuple[Tensor, ...]] = []
        samples = 0
        running = nullcontext() if self._capture is None else self._capture.running()
        with evaluating(self.net), torch.no_grad(), running:
            if self._capture is not None and self._built != (built := built_of(self.net, self.loss)):
                self._built = built
                self._replayed.forget()
            for inputs, target in batches:
                parts.append(self._of_batch((inputs, target)))
                samples += samples_in(inputs)
            total, *rest = zip(*parts, strict=True)
            mean = float(torch.stack(total).sum() / samples)
            if self.metric is not None:
                return mean, _number(self.metric(_joined(rest[0]), _joined(rest[1])))
        if not rest:
            return mean, -mean
        right, counted = (int(torch.stack(counts).sum()) for counts in rest)
        return mean, right / counted

    def _plain(self, batch: tuple[Any, Any]) -> tuple[Tensor, ...]:
        """The batch's sum of losses, and what its metric is made of."""
        inputs, target = batch
        out = run(self.net, inputs, output=self.output)
        total = self.loss(out, target).detach().double() * samples_in(inputs)
        if self.metric is not None:
            return total, out, target
        if not is_classification(self.loss, target):
            return (total,)
        counts = target != ignored_label(self.loss)
        return total, ((out.argmax(1) == target) & counts).sum(), counts.sum()

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._replayed.forget


def metric_name(metric: Metric | None, *, classes: bool) -> str:
    if metric is not None:
        return getattr(metric, "__name__", type(metric).__name__)
    return "accuracy" if classes else "-loss"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"metric: it returned {given}; one number, higher is better, would do") from None


def _joined(parts: Sequence[Any]) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(f"metric: outputs and targets must be tensors, not {type(parts[0]).__name__}; give output")
    return torch.cat(list(parts))

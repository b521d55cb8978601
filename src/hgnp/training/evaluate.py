"""Loss and metric over the validation data, in evaluation mode."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hgnp.curvature.autodiff.forward import Output, run, samples_in
from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.losses import Loss, normaliser, total
from hgnp.errors import InputError, brief
from hgnp.execution.graphs import Capture, Replayed, fingerprint
from hgnp.removal import Removal, listen
from hgnp.state_guards import evaluating
from hgnp.training.data import ignored_label, is_classification


@runtime_checkable
class Accumulator(Protocol):
    """A metric that is given batch by batch, such as torchmetrics'."""

    def update(self, output: Any, target: Any) -> object: ...

    def compute(self) -> Any: ...

    def reset(self) -> object: ...


Metric = Callable[[Any, Any], Any] | Accumulator
Pair = tuple[Any, Any, int]
"""Output, target and number of samples of a batch."""


class Evaluation:
    """(loss, metric) of a network over batches, each None if no label counts.

    The loss is that of all batches as one, Σ total / Σ `normaliser`. One that hgnp does not know is averaged over samples; a
    batch whose loss is NaN though its outputs are finite is taken to have no label that counts, and is left out.

    A metric that is a function sees all outputs and targets at once, as many metrics are no means over batches; an
    `Accumulator` sees them batch by batch. Without one it is accuracy for class labels, and minus the loss otherwise, so that
    higher is better. With `graphs` the passes of a network on a GPU come from CUDA graphs; they are in full precision either
    way.
    """

    def __init__(
        self, net: nn.Module, loss: Loss, metric: Metric | None, output: Output | None, *, graphs: bool = False
    ) -> None:
        self.net, self.loss, self.metric, self.output = net, loss, metric, output
        self.note: str | None = None
        """What a user should know of how the last loss was taken."""
        self._capture: Capture | None = None
        self._of_batch: Callable[[Any], tuple[Any, ...]] = self._plain
        if graphs:
            self._capture = Capture(next(net.parameters()).device)
            self._replayed = Replayed(self._plain, net, self._capture)
            self._built: Any = None
            self._of_batch = lambda batch: tree_map(_copied, self._replayed(batch))
            listen(net, self.neurons_removed)

    def __call__(self, batches: Iterable[tuple[Any, Any]]) -> tuple[float | None, float | None]:
        sums: list[Tensor] = []
        running = nullcontext() if self._capture is None else self._capture.running()
        with evaluating(self.net), torch.no_grad(), running:
            if self._capture is not None and self._built != (built := fingerprint(self.net, self.loss)):
                self._built = built
                self._replayed.forget()
            pairs = self._pairs(batches, sums)
            metric = None if self.metric is None else measured(self.metric, pairs)
            for _ in pairs:  # those that the metric has not asked for
                pass
            summed, counted, lost, *rest = torch.stack(sums).sum(0).tolist()
        loss = summed / counted if counted else None
        self.note = None
        if loss is None:
            self.note = "val: no label counts, so that there is no validation loss"
        elif lost:
            self.note = (
                f"val: {lost:g} of {len(sums)} batches have a loss that is NaN though their outputs are finite; they are left "
                "out of the validation loss, as batches in which no label counts"
            )
        if self.metric is not None:
            return loss, metric
        if not rest:
            return loss, None if loss is None else -loss
        right, labels = rest
        return loss, right / labels if labels else None

    def _pairs(self, batches: Iterable[tuple[Any, Any]], sums: list[Tensor]) -> Iterator[Pair]:
        for inputs, target in batches:
            numbers, *rest = self._of_batch((inputs, target))
            sums.append(numbers)
            yield (*(rest or (None, None)), samples_in(inputs))

    def _plain(self, batch: tuple[Any, Any]) -> tuple[Any, ...]:
        """The batch's part of the sums that loss and accuracy are made of; for a metric, also its output and target."""
        inputs, target = batch
        out = run(self.net, inputs, output=self.output)
        sums = [*self._loss(out, target, samples_in(inputs))]
        if self.metric is None and is_classification(self.loss, target):
            counts = target != ignored_label(self.loss)
            sums += [((out.argmax(1) == target) & counts).sum(), counts.sum()]
        numbers = torch.stack([number.detach().double() for number in sums])
        return (numbers,) if self.metric is None else (numbers, out, target)

    def _loss(self, out: Any, target: Any, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's total and normaliser, and whether it is left out."""
        known, count = total(self.loss, out, target), normaliser(self.loss, out, target)
        if known is not None and count is not None:
            return known, count, torch.zeros_like(count)
        mean = self.loss(out, target).double().reshape(())
        lost = mean.isnan()
        for part in tensors_in(out):
            lost = lost & part.isfinite().all()
        return (mean * samples).masked_fill(lost, 0.0), (~lost).double() * samples, lost

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._replayed.forget


def metric_name(metric: Metric | None, *, classes: bool) -> str:
    if metric is not None:
        return getattr(metric, "__name__", type(metric).__name__)
    return "accuracy" if classes else "-loss"


def check_metric(
    net: nn.Module, metric: Metric, output: Output | None, first: Pair, val: Iterable[tuple[Any, Any]]
) -> None:
    """ValueError, before any training, for a metric that fails on the first validation batch and on the whole set: one batch
    may be too little, as one of a single class is for a ROC curve."""
    try:
        measured(metric, [first])
    except Exception:
        with evaluating(net), torch.no_grad():
            pairs = [(run(net, inputs, output=output), target, samples_in(inputs)) for inputs, target in val]
            try:
                measured(metric, pairs)
            except MetricError:
                raise
            except Exception as error:
                raise InputError(
                    "metric must take all outputs and targets and return one number, or have update, compute and reset; "
                    f"it failed on the validation data: {brief(error)}"
                ) from error


def measured(metric: Metric, pairs: Iterable[Pair]) -> float:
    """The metric's number on batches. An accumulator is empty before and after."""
    if not isinstance(metric, Accumulator):
        outputs, targets, samples = zip(*pairs, strict=True)
        return _number(metric(_joined(outputs, samples, "outputs"), _joined(targets, samples, "targets")))
    metric.reset()
    try:
        for output, target, _ in pairs:
            metric.update(output, target)
        return _number(metric.compute())
    finally:
        metric.reset()


class MetricError(InputError):
    """What a metric returned is no number, or it cannot be given what the network returns."""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise MetricError(f"metric must return one number, higher is better, got {given}") from None


def _joined(parts: Sequence[Any], samples: Sequence[int], what: str) -> Any:
    """The batches' outputs or targets as those of one batch, each of their tensors along its samples."""
    flat = [tree_flatten(part) for part in parts]
    leaves, specs = [leaves for leaves, _ in flat], [spec for _, spec in flat]
    nested = not isinstance(parts[0], Tensor)  # then a list may be one of samples, or one of tensors for all samples
    fit = all(spec == specs[0] for spec in specs) and all(
        isinstance(leaf, Tensor) and leaf.dim() > 0 and (not nested or leaf.shape[0] == count)
        for each, count in zip(leaves, samples, strict=True)
        for leaf in each
    )
    try:
        if fit:
            return tree_unflatten([torch.cat(column) for column in zip(*leaves, strict=True)], specs[0])
        why = f"got {what} that are a {type(parts[0]).__name__}"
    except RuntimeError as error:  # sequences of unequal length
        why = f"got {what} that cannot be joined: {brief(error)}"
    raise MetricError(
        "metric as a function sees the whole set at once, as tensors or tuples, lists and dicts of them with samples first, "
        f"{why}; give output, or an object with update, compute and reset, which is given batch by batch"
    )


def _copied(part: Any) -> Any:
    return part.clone() if isinstance(part, Tensor) else part

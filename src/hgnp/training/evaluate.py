"""Validation: loss and metric over a dataset, in evaluation mode."""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hgnp.curvature.autodiff.forward import Output, run, samples_in
from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.batch_checks import failure_explained, ignored_label, is_classification
from hgnp.curvature.losses import Loss, mean_and_normaliser, normaliser, total
from hgnp.errors import InputError, InputTypeError, brief
from hgnp.execution.graphs import CaptureContext, GraphedFunction, fingerprint
from hgnp.reducer import LOCAL, Reducer
from hgnp.removal import Removal, listen
from hgnp.state_guards import evaluating
from hgnp.training import checkpoint


@runtime_checkable
class Accumulator(Protocol):
    """A metric that is updated batch by batch, such as those of torchmetrics."""

    def update(self, output: Any, target: Any) -> object: ...

    def compute(self) -> Any: ...

    def reset(self) -> object: ...


Metric = Callable[[Any, Any], Any] | Accumulator
BatchOutput = tuple[Any, Any, int]
"""Output, target and number of samples of a batch."""


class Evaluation:
    """Computes (loss, metric) of a network over batches; each is None if every label is ignored.

    The loss is that of the whole set as one batch, Σ total / Σ `normaliser`. A loss that hgnp does not know is weighted by
    `mean_and_normaliser`. A batch whose loss is NaN although its outputs are finite counts as one without labels: it is left
    out.

    A metric that is a function gets all outputs and targets at once, as many metrics are not means over batches; an
    `Accumulator` is updated batch by batch. The default is accuracy for class labels, else minus the loss: higher is better.
    With `loss_needs_training_mode`, the loss is that of training mode with norms and dropout in evaluation mode, and a metric
    gets what the network returns in evaluation mode. With `graphs` the passes of a network on a GPU are replayed from CUDA
    graphs. Precision is always full.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        metric: Metric | None,
        output: Output | None,
        *,
        graphs: bool = False,
        loss_needs_training_mode: bool = False,
        reducer: Reducer = LOCAL,
    ) -> None:
        self.net, self.loss, self.metric, self.output, self.loss_needs_training_mode = (
            net,
            loss,
            metric,
            output,
            loss_needs_training_mode,
        )
        self._reducer = reducer
        self.note: str | None = None
        """Which batches the last loss leaves out, if any."""
        self._capture: CaptureContext | None = None
        self._run_batch: Callable[[Any], tuple[Any, ...]] = self._evaluate_batch
        if graphs:
            self._capture = CaptureContext(next(net.parameters()).device)
            self._replayed = GraphedFunction(self._evaluate_batch, net, self._capture)
            self._built: Any = None
            self._run_batch = lambda batch: tree_map(_clone, self._replayed(batch))
            listen(net, self.neurons_removed)

    def __call__(self, batches: Iterable[tuple[Any, Any]]) -> tuple[float | None, float | None]:
        sums: list[Tensor] = []
        running = nullcontext() if self._capture is None else self._capture.running()
        with evaluating(self.net), torch.no_grad(), running:
            if self._capture is not None and self._built != (built := fingerprint(self.net, self.loss)):
                self._built = built
                self._replayed.forget()
            outputs = self._outputs(batches, sums)
            if self.metric is not None:
                outputs = gathered(outputs, self._reducer, next(self.net.parameters()).device)
            metric = None if self.metric is None else compute_metric(self.metric, outputs)
            metric = json.loads(self._reducer.broadcast(json.dumps(metric).encode()))
            for _ in outputs:  # those that the metric has not consumed
                pass
            summed, counted, skipped, *rest, passes = self._total(sums)
        loss = summed / counted if counted else None
        self.note = None
        if loss is None:
            self.note = "val: every label is ignored, so there is no validation loss"
        elif skipped:
            self.note = (
                f"val: {skipped:g} of {passes:g} batches have finite outputs but a NaN loss, as if every label were ignored; "
                "the validation loss leaves them out"
            )
        if self.metric is not None:
            return loss, metric
        if not rest:
            return loss, None if loss is None else -loss
        right, labels = rest
        return loss, right / labels if labels else None

    def _total(self, sums: list[Tensor]) -> list[float]:
        """The columns of `sums` added up over all ranks, and how many rows they have."""
        total = torch.stack(sums).sum(0)
        total = torch.cat([total, torch.full_like(total[:1], len(sums))])
        return [float(number) for number in self._reducer.sum([total])[0].tolist()]

    def _outputs(self, batches: Iterable[tuple[Any, Any]], sums: list[Tensor]) -> Iterator[BatchOutput]:
        for number, (inputs, target) in enumerate(batches):
            with failure_explained(
                self.net, self.loss, self.output, (inputs, target), "val", where=f"batch {number} of val",
                loss_needs_training_mode=self.loss_needs_training_mode,
            ):  # fmt: skip
                numbers, *rest = self._run_batch((inputs, target))
            sums.append(numbers)
            yield (*(rest or (None, None)), samples_in(inputs))

    def _evaluate_batch(self, batch: tuple[Any, Any]) -> tuple[Any, ...]:
        """One batch's summands of loss and accuracy; for a metric also its output and target."""
        inputs, target = batch
        with evaluating(self.net, loss_needs_training_mode=self.loss_needs_training_mode):
            out = run(self.net, inputs, output=self.output)
        sums = [*self._loss_sums(out, target, samples_in(inputs))]
        if self.metric is None and is_classification(self.loss, target):
            counts = target != ignored_label(self.loss)
            sums += [((out.argmax(1) == target) & counts).sum(), counts.sum()]
        numbers = torch.stack([number.detach().double() for number in sums])
        if self.metric is not None and self.loss_needs_training_mode:
            out = run(self.net, inputs)
        return (numbers,) if self.metric is None else (numbers, out, target)

    def _loss_sums(self, out: Any, target: Any, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """One batch's total loss, its normaliser, and whether the batch is left out."""
        known, count = total(self.loss, out, target), normaliser(self.loss, out, target)
        if known is not None and count is not None:
            return known, count, torch.zeros_like(count)
        mean, count = mean_and_normaliser(self.loss, out, target, samples)
        skipped = mean.isnan()
        for part in tensors_in(out):
            skipped = skipped & part.isfinite().all()
        return (mean * count).masked_fill(skipped, 0.0), count.masked_fill(skipped, 0.0), skipped & (count > 0)

    def neurons_removed(self, removal: Removal) -> Callable[[], None]:
        return self._replayed.forget


def gathered(outputs: Iterable[BatchOutput], reducer: Reducer, device: torch.device) -> Iterator[BatchOutput]:
    """The outputs of all ranks on every rank, batch by batch, until all have come to an end."""
    if reducer.ranks == 1:
        yield from outputs
        return
    own = iter(outputs)
    while True:
        try:
            data = checkpoint.to_bytes({"batch": next(own, None)})
        except InputTypeError as error:
            raise MetricError(
                f"metric must have outputs and targets that ranks can send each other: {error}"
            ) from error
        parts = [checkpoint.from_bytes(part)["batch"] for part in reducer.gather(data)]
        joined = [
            tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, part) for part in parts if part is not None
        ]
        if not joined:
            return
        predictions, targets, samples = zip(*joined, strict=True)
        try:
            yield (
                _concatenate(predictions, samples, "outputs"),
                _concatenate(targets, samples, "targets"),
                sum(samples),
            )
        except MetricError:  # one entry per sample, say: as they are, rank by rank
            yield from joined


def metric_name(metric: Metric | None, *, classes: bool) -> str:
    """What the metric is called in progress, files and pages: its `name` or `__name__`, or that of its class."""
    if metric is not None:
        named = metric.func if isinstance(metric, functools.partial) else metric
        own = getattr(named, "name", None) or getattr(named, "__name__", None) or type(named).__name__
        return own if isinstance(own, str) and own != "<lambda>" else "metric"
    return "accuracy" if classes else "-loss"


def check_metric(
    net: nn.Module,
    metric: Metric,
    output: Output | None,
    first: BatchOutput,
    val: Iterable[tuple[Any, Any]],
    reducer: Reducer = LOCAL,
) -> None:
    """InputError, before any training, for a metric that fails on the first validation batch and on the whole set. One batch
    may be too little: a ROC curve needs both classes."""
    device = next(net.parameters()).device
    try:
        compute_metric(metric, list(gathered([first], reducer, device)))
    except Exception:
        with evaluating(net), torch.no_grad():
            outputs = [(run(net, inputs, output=output), target, samples_in(inputs)) for inputs, target in val]
            try:
                compute_metric(metric, list(gathered(outputs, reducer, device)))
            except MetricError:
                raise
            except Exception as error:
                raise InputError(
                    "metric must take all outputs and targets and return one number, or have update, compute and reset, "
                    f"but failed on the validation data: {brief(error)}"
                ) from error


def compute_metric(metric: Metric, outputs: Iterable[BatchOutput]) -> float:
    """The metric on all batches. An accumulator is reset before and after."""
    if not isinstance(metric, Accumulator):
        predictions, targets, samples = zip(*outputs, strict=True)
        return _as_float(
            metric(_concatenate(predictions, samples, "outputs"), _concatenate(targets, samples, "targets"))
        )
    metric.reset()
    try:
        for output, target, _ in outputs:
            metric.update(output, target)
        return _as_float(metric.compute())
    finally:
        metric.reset()


class MetricError(InputError):
    """A metric that returns no number, or that cannot take what the network returns."""


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise MetricError(f"metric must return one number, higher is better, got {given}") from None


def _concatenate(parts: Sequence[Any], samples: Sequence[int], what: str) -> Any:
    """Outputs or targets of all batches as those of one."""
    try:
        return _join(parts, samples, nested=False)
    except _JoinError as error:
        why = f"got {what} that {error}"
    raise MetricError(
        "metric as a function must take the whole set at once, as tensors with samples first, in tuples, lists, dicts and "
        f"dataclasses, or as lists with one entry per sample, {why}; pass output, or a metric with update, compute and reset, "
        "which is updated batch by batch"
    )


class _JoinError(Exception):
    """Why the parts of batches cannot be joined."""


def _join(parts: Sequence[Any], samples: Sequence[int], *, nested: bool = True) -> Any:
    """Tensors are concatenated along their samples, in every position of a structure that all batches have. A list with one
    entry per sample, such as a detector's, becomes one list. What all batches have alike stays."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _JoinError("have another type in each batch")
    if isinstance(first, Tensor):
        if any(part.dim() == 0 or (nested and len(part) != count) for part, count in zip(parts, samples, strict=True)):
            raise _JoinError("have a tensor whose first dimension does not count samples")
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:  # sequences of unequal length
            raise _JoinError(f"cannot be joined: {brief(error)}") from None
    if dataclasses.is_dataclass(first) and not isinstance(first, type):  # also the outputs of Transformers
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: _join([getattr(part, name) for part in parts], samples) for name in names}
        )
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise _JoinError("have other keys in each batch")
        return {key: _join([part[key] for part in parts], samples) for key in first}
    if isinstance(first, list | tuple):
        return _join_lists(parts, samples)
    if all(part is first or (isinstance(part, str | int | float) and part == first) for part in parts):
        return first
    raise _JoinError(f"have a {type(first).__name__}")


def _join_lists(parts: Sequence[Any], samples: Sequence[int]) -> Any:
    records = all(isinstance(entry, Mapping) for part in parts for entry in part)
    per_sample = (records or isinstance(parts[0], list)) and all(
        len(part) == count for part, count in zip(parts, samples, strict=True)
    )
    if not (records and per_sample) and all(len(part) == len(parts[0]) for part in parts):
        try:
            columns = [_join(column, samples) for column in zip(*parts, strict=True)]
            return type(parts[0])(*columns) if hasattr(parts[0], "_fields") else type(parts[0])(columns)
        except _JoinError:
            if not per_sample:
                raise
    if per_sample:
        return [entry for part in parts for entry in part]
    raise _JoinError(f"are a {type(parts[0]).__name__} of another length in each batch")


def _clone(part: Any) -> Any:
    """A copy of what a graph left, whose next replay overwrites it."""
    return part.clone() if isinstance(part, Tensor) else copy.deepcopy(part)  # tensors may be inside

"""Checks on the first batches, before any training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hgnp.curvature.autodiff.forward import run, samples_in
from hgnp.curvature.batch_checks import check_batch, is_classification
from hgnp.reducer import LOCAL, Reducer
from hgnp.scoring import loss_in_training_only
from hgnp.state_guards import evaluating
from hgnp.training import rng_state
from hgnp.training.evaluate import check_metric, metric_name
from hgnp.training.measure import features
from hgnp.training.task import Task


@dataclass(frozen=True)
class FirstBatches:
    """The first batch of the training data as `inputs` and `target`, that of the validation data, and what they show."""

    inputs: Any
    target: Any
    val: tuple[Any, Any] | None
    """The first validation batch."""
    classes: int | None
    """Number of classes of the training labels; None if they are not class labels."""
    val_classes: int | None
    """The same of the validation labels: they may be classes where training labels are mixed."""
    metric: str
    """Name of the metric."""
    loss_needs_training_mode: bool
    """Whether the network returns what the loss takes in training mode only."""
    features: dict[str, Any]
    """Features of network and data that the paper's hybrid uses."""


def check_first_batches(net: nn.Module, task: Task, reducer: Reducer = LOCAL) -> FirstBatches:
    """Run the network on the first batches; InputError if anything does not fit together. Loaders are restored; drawing the
    training batch advances the random number generators."""
    with rng_state.preserved_position(task.train.loader):
        inputs, target = next(iter(task.train))
    with rng_state.preserved():
        loss_needs_training_mode = loss_in_training_only(net, task.loss, task.output, inputs, target)
    out = check_batch(
        net, task.loss, task.output, (inputs, target), "train", loss_needs_training_mode=loss_needs_training_mode
    )
    classes = out.shape[1] if is_classification(task.loss, target) else None
    val, val_classes = None, None
    if task.val is not None:
        with rng_state.preserved(task.val.loader):
            with rng_state.preserved_position(task.val.loader):
                val = next(iter(task.val))
            val_out = check_batch(
                net, task.loss, task.output, val, "val", loss_needs_training_mode=loss_needs_training_mode
            )
            if task.metric is not None:
                if loss_needs_training_mode:
                    with evaluating(net), torch.no_grad():
                        val_out = run(net, val[0])
                first = val_out, val[1], samples_in(val[0])
                check_metric(
                    net, task.metric, None if loss_needs_training_mode else task.output, first, task.val, reducer
                )
        val_classes = val_out.shape[1] if is_classification(task.loss, val[1]) else None
    shown = classes if task.val is None else val_classes
    return FirstBatches(
        inputs, target, val, classes, val_classes, metric_name(task.metric, classes=shown is not None),
        loss_needs_training_mode,
        features(net, inputs, classes or val_classes, task.train.loader, None if task.val is None else task.val.loader),
    )  # fmt: skip

"""A look at the first batches, before any training: that everything fits together, and what the data is."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hgnp.curvature.autodiff.forward import samples_in
from hgnp.training import rng_state
from hgnp.training.data import check_first, is_classification
from hgnp.training.evaluate import check_metric, metric_name
from hgnp.training.measure import features
from hgnp.training.task import Task


@dataclass(frozen=True)
class First:
    inputs: Any
    target: Any
    val: tuple[Any, Any] | None
    """The first validation batch."""
    classes: int | None
    """Of the training labels; None if they are no classes."""
    val_classes: int | None
    """Of the validation labels, which may be classes where the training's are mixed."""
    metric: str
    """Its name."""
    features: dict[str, Any]
    """What the paper's hybrid looks at."""


def look(net: nn.Module, task: Task) -> First:
    """One line for what does not fit. Loaders stay where they are; the training data's random streams go on."""
    with rng_state.rewound(task.train.loader):
        inputs, target = next(iter(task.train))
    out = check_first(net, task.loss, task.output, (inputs, target), "train")
    classes = out.shape[1] if is_classification(task.loss, target) else None
    val, val_classes = None, None
    if task.val is not None:
        with rng_state.untouched(task.val.loader):
            with rng_state.rewound(task.val.loader):
                val = next(iter(task.val))
            val_out = check_first(net, task.loss, task.output, val, "val")
            if task.metric is not None:
                check_metric(net, task.metric, task.output, (val_out, val[1], samples_in(val[0])), task.val)
        val_classes = val_out.shape[1] if is_classification(task.loss, val[1]) else None
    shown = classes if task.val is None else val_classes
    return First(
        inputs, target, val, classes, val_classes, metric_name(task.metric, classes=shown is not None),
        features(net, inputs, classes or val_classes, task.train.loader, None if task.val is None else task.val.loader),
    )  # fmt: skip

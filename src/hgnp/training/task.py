"""What a run is given, and what it shows its user."""

from dataclasses import dataclass

from torch import nn

from hgnp.curvature.autodiff.forward import Output
from hgnp.curvature.losses import Loss
from hgnp.result import Row
from hgnp.training.data import Batches
from hgnp.training.evaluate import Metric


@dataclass(frozen=True)
class State:
    """What `on_epoch` sees."""

    epoch: int
    row: Row
    history: list[Row]
    net: nn.Module


@dataclass(frozen=True)
class Task:
    """What is to be learned, and from what."""

    train: Batches
    val: Batches | None
    loss: Loss
    metric: Metric | None
    output: Output | None

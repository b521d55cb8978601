"""What a trainer needs of an executor, and which one a run gets."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hgnp.curvature.step import Number, State, Step
from hgnp.execution.eager import AutocastFactory, Eager
from hgnp.execution.graphed import Graphed


class Executor(Protocol):
    """Runs the stages of a step. Per batch: `zero_grad`, `backward`, `optimizer_step`.

    Attributes:
        fetch: Fetches the next batch. An executor may call it before the host waits for the device.
    """

    fetch: Callable[[], Any] | None

    @property
    def uses_graphs(self) -> bool:
        """Whether steps come from CUDA graphs, where they can be captured."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Around the steps of an epoch."""

    def begin_epoch(self) -> None:
        """Network, gradients and optimizer may have changed since the last step."""

    def zero_grad(self) -> None:
        """Before `backward`."""

    def backward(self, inputs: Any, target: Any, *, scale: Number = 1.0) -> Tensor:
        """Leaves scale·∇L in `.grad`, after `zero_grad`, and returns C, which is not scaled."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps on the gradients of the last `backward`."""


def make_executor(step: Step, state: State, precision: AutocastFactory, *, graphs: bool) -> Executor:
    """`graphs`: from CUDA graphs, which need a GPU."""
    return Graphed(step, state, precision) if graphs else Eager(step, state, precision)

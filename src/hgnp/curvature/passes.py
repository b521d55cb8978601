"""Forward passes, and what they showed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hgnp.curvature.blocks import Block
from hgnp.curvature.spectrum import Observer
from hgnp.curvature.tape import Tape


@dataclass(frozen=True)
class Seen:
    """What a step penalised; its numbers are still on the device."""

    block: Block
    direction: list[Tensor]
    radius: Tensor
    residual: Tensor
    curvature: Tensor


@dataclass(frozen=True)
class Pass:
    """A forward pass along v, still to be differentiated."""

    loss: Tensor
    z: Any
    q: Tensor
    observer: Observer | None
    seen: Seen

    def acts(self, bound: float) -> bool:
        """Whether q has to be differentiated: not if the hinge is known to be closed. On a GPU nobody waits to know."""
        return self.q.device.type != "cpu" or bool(self.q > bound)


@dataclass(frozen=True)
class First:
    """A batch's forward pass in the paper's order, before v is known."""

    loss: Tensor
    z: Any
    tape: Tape | None  # None where operations cannot be run again
    kept: bool  # whether it will be differentiated again
    went_back: bool  # whether C's gradient is in .grad
    buffers: dict[str, Tensor]  # as they were before it; norms that write theirs do not read them

"""A number on its way from the device to the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hgnp.curvature.random import capturing


@dataclass(frozen=True)
class Late:
    number: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, number: Tensor) -> "Late":
        """Sends it to the host. In a step that is being captured it stays on the device."""
        if not number.is_cuda or capturing():
            return cls(number, None)
        host = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(number.device))
        return cls(host, ready)

    def item(self) -> float:
        """Waits for this one number, not for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return float(self.number) if self.number.is_floating_point() else int(self.number)

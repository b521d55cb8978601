"""Random state of the CPU and of the devices that tensors are on: saved and restored."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hgnp.curvature.device import capturing


class RandomState:
    """The state of the generators at construction; leaving its `with` block restores it."""

    def __init__(self, *tensors: Tensor) -> None:
        if capturing():
            raise RuntimeError("a random state cannot be restored in a CUDA graph")
        self._cpu = torch.get_rng_state()
        devices = {x.device for x in tensors if x.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def __enter__(self) -> "RandomState":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def unchanged(self) -> bool:
        """Whether nothing was drawn since."""
        cuda = self._cuda.items()
        return self.unchanged_on_cpu() and all(torch.equal(s, torch.cuda.get_rng_state(device)) for device, s in cuda)

    def unchanged_on_cpu(self) -> bool:
        """Whether nothing was drawn on the CPU since."""
        return torch.equal(self._cpu, torch.get_rng_state())

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def preserve_rng(*tensors: Tensor) -> AbstractContextManager[object]:
    """Restores the random state after the block, so that the same numbers are drawn again. In a capture it does nothing."""
    return nullcontext() if capturing() else RandomState(*tensors)

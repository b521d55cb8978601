"""Sharpness-aware minimisation (Foret et al. 2021): the gradient at the worst point nearby, w + ρ·∇C/‖∇C‖.

A second way to flat minima, to be compared with the flatness term. It stands in for `Flatness` in a training loop.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.forward import Output, run
from hgnp.curvature.losses import Loss
from hgnp.curvature.random import undisturbed


class SAM:
    """Leaves the gradient at w + ρ·∇C/‖∇C‖ in `.grad`, in place of `loss.backward()`."""

    def __init__(
        self,
        net: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        rho: float = 0.05,
        output: Output | None = None,
    ) -> None:
        if not (math.isfinite(rho) and rho > 0):
            raise ValueError(f"rho: {rho!r} was given; a finite number above 0 would do")
        self.net, self.loss, self.rho, self.output = net, loss, rho, output

    def backward(self, inputs: Any, target: Any, *, scale: float | Tensor = 1.0) -> Tensor:
        """Adds scale·∇C(w + ε) to `.grad` and returns C(w). Dropout masks are the same in both passes, and buffers see the
        first alone."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        with undisturbed(*parameters):
            loss = self.loss(run(self.net, inputs, output=self.output), target)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
        with torch.no_grad():
            length = torch.stack([g.norm() for _, g in used]).norm()
            step = self.rho / length.clamp_min(torch.finfo(length.dtype).tiny)
            before = [p.clone() for p, _ in used]
            for p, g in used:
                p.add_(g * step)
        torch.clear_autocast_cache()  # which holds half-precision copies of the parameters as they were
        try:
            buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
            (self.loss(run(self.net, inputs, output=self.output, buffers=buffers), target) * scale).backward()
        finally:
            with torch.no_grad():
                for (p, _), value in zip(used, before, strict=True):
                    p.copy_(value)
            torch.clear_autocast_cache()
        return loss.detach()

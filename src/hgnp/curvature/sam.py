"""Sharpness-aware minimisation (Foret et al. 2021): the gradient at the worst point nearby, w + ρ·∇C/‖∇C‖.

Another method for flat minima, to compare with the flatness penalty. It replaces the stages of Algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Output
from hgnp.curvature.autodiff.rng import preserve_rng
from hgnp.curvature.choices import Choices
from hgnp.curvature.losses import Loss, weighted
from hgnp.curvature.step import PLAIN, Number, Plan, State, Step
from hgnp.curvature.validation import finite, without_tensor_hooks
from hgnp.errors import InputError
from hgnp.reducer import LOCAL, Reducer


class SAMStep(Step):
    """SAM's stages: forward, gradient, sum over ranks, perturb, forward, backward, restore. Every step is the same."""

    draws_once = False

    def __init__(
        self,
        net: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        rho: float = 0.05,
        output: Output | None = None,
        reducer: Reducer = LOCAL,
    ) -> None:
        if not (finite(rho) and rho > 0):
            raise InputError(f"rho must be a finite number > 0, got {rho!r}")
        super().__init__(net, loss=loss, output=output, choices=Choices(), reducer=reducer)
        self.rho = rho

    def plan(self, state: State) -> Plan:
        state.plan = PLAIN
        return PLAIN

    def captured_numbers(self) -> dict[str, float]:
        return {"rho": self.rho}

    def plain(self, state: State, inputs: Any, target: Any, *, scale: Number = 1.0) -> None:
        """Dropout masks are the same in both passes, and buffers see the first alone. Both gradients are scaled: in half
        precision either would underflow. The ascent goes by its direction alone; if it is not finite, neither is the gradient
        in the end, and a GradScaler skips the step."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        # hooks get the gradient that is left in .grad, not this one
        with preserve_rng(*parameters), without_tensor_hooks(parameters):
            self.forward(state, inputs, target)
            assert state.current is not None
            ascent = torch.autograd.grad(state.current.loss * scale, parameters, materialize_grads=True)
        before = self._perturb(parameters, ascent)
        torch.clear_autocast_cache()  # which holds half-precision copies of the parameters as they were
        try:
            output = self.passes.run(inputs, self.norms_mode(), side_effect_free=True)
            (weighted(self.loss(output, target), state.weight) * scale).backward()
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
            torch.clear_autocast_cache()

    @torch.no_grad()
    def _perturb(self, parameters: list[nn.Parameter], own: Sequence[Tensor]) -> list[Tensor]:
        """Moves the parameters by ρ along the gradient of all ranks, and returns what they were."""
        gradients = self.reducer.sum(own)
        length = torch.stack([g.norm() for g in gradients]).norm()
        step = self.rho / length.clamp_min(torch.finfo(length.dtype).tiny)
        before = [p.clone() for p in parameters]
        for p, g in zip(parameters, gradients, strict=True):
            p.add_(g * step)
        return before

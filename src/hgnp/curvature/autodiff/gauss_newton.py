"""Gauss–Newton along v: q = uᵀ(∂²C/∂z²)u, u the output's derivative along v, which the forward pass carries with it.

Equal to the Hessian's q, value and gradient, where every path from the block to the output is piecewise linear in the block
(`linearity`).
"""

from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.autodiff.forward import LayerObserver
from hgnp.curvature.autodiff.tangent import Tangent
from hgnp.curvature.losses import LossCurvature, weighted
from hgnp.reducer import LOCAL, Reducer


class GaussNewton(Tangent):
    """A pass along v, given as `tangents`: the block's parameters, each with its part of v."""

    def __init__(
        self,
        tangents: list[tuple[Tensor, Tensor]],
        curvature: LossCurvature,
        *,
        observer: LayerObserver | None,
        reducer: Reducer = LOCAL,
    ) -> None:
        super().__init__(tangents, observer=observer, reducer=reducer)
        self._curvature = curvature

    def quotient(self, loss: Tensor, z: Tensor, target: Any, weight: Tensor | None = None) -> Tensor:
        """w·q, differentiable."""
        u = self.tangent(z)
        if u is not None and not u.requires_grad and torch.is_grad_enabled():
            u.requires_grad_()  # constant, as where the last layer alone is trained; v over the network asks for ∂q/∂u
        return weighted(self._curvature.quotient(z, torch.zeros_like(z) if u is None else u, target), weight)

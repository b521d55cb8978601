"""Gauss–Newton along v: q = uᵀ(∂²C/∂z²)u, u the output's derivative along v, which the forward pass carries with it.

Equal to the Hessian's q, value and gradient, where every path from the block to the output is piecewise linear in the block
(`bends`).
"""

from typing import Any

import torch
from torch import Tensor

from hgnp.curvature.blocks import Block
from hgnp.curvature.check import check_tangent
from hgnp.curvature.forward import Watch
from hgnp.curvature.losses import LossCurvature
from hgnp.curvature.tangent import Tangent


class GaussNewton(Tangent):
    """A pass along `seeds`, the block's parameters with their directions."""

    def __init__(
        self, seeds: list[tuple[Tensor, Tensor]], curvature: LossCurvature, *, watch: Watch | None, frozen: bool
    ) -> None:
        super().__init__(seeds, watch=watch, frozen=frozen)
        self._seeds, self._curvature = seeds, curvature

    def quotient(self, loss: Tensor, z: Tensor, target: Any) -> Tensor:
        """q, differentiable."""
        return self._curvature.quotient(z, self._along(z), target)

    def check(self, block: Block, z: Tensor) -> None:
        """Refuses a block whose tangent is lost on its way to the output."""
        check_tangent(block, z, self._along(z), self._seeds)

    def _along(self, z: Tensor) -> Tensor:
        u = self.tangent(z)
        return torch.zeros_like(z) if u is None else u

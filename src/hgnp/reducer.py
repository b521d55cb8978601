"""Sums over the ranks of a data-parallel step.

Whatever a step sums over samples goes through a `Reducer`: products with the Kronecker factors, the statistics of synchronised
norms, C and q before the decision, gradients, scores. The base class is a single process, for which a sum over ranks is what it
was given.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Reducer:
    """A single process. Subclasses sum over several."""

    ranks = 1
    sync_norms = False
    """Whether BatchNorm takes its statistics from the samples of all ranks."""

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the ranks, detached; all of them in one buffer. Every rank calls it in the same order."""
        return list(tensors)

    def differentiable_sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, with derivatives of every order: the adjoint of a sum over ranks is a sum over ranks."""
        if self.ranks == 1:
            return x
        summed: Tensor = _Sum.apply(x, self)
        return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reducer: Reducer) -> Tensor:
        ctx.reducer = reducer
        return reducer.sum([x.detach()])[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.reducer), None


LOCAL = Reducer()
"""The reducer of a single process."""

"""The full Hessian along v: q = VᵀHV by two reverse passes over a forward whose norms are primitive operations. It supports any
operation and loss that PyTorch can differentiate often enough; `second_tangent` is the faster way where it can be taken.

V may depend on the weights (the scale-invariant direction does). It enters the second pass as a cotangent, which that pass does
not differentiate; the gradient of q does.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hgnp.curvature.autodiff.forward import Forward, LayerObserver
from hgnp.curvature.autodiff.norms import PRIMITIVE
from hgnp.curvature.autodiff.operations import Func, name_of, tensors_in
from hgnp.curvature.autodiff.tangent import FUSED
from hgnp.curvature.validation import without_tensor_hooks
from hgnp.reducer import LOCAL, Reducer


class Primitive(Forward):
    """Runs the network with every operation replaced whose higher derivatives PyTorch gets wrong or lacks."""

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with sdpa_kernel(SDPBackend.MATH) if name_of(func) in FUSED else contextlib.nullcontext():
            return self.primal(PRIMITIVE.get(func, func), args, kwargs)


class Hessian(Primitive):
    """A pass that yields q along v, given as `tangents`: the block's parameters, each with its part of v. Operations before the
    block run unchanged, as they are differentiated only once."""

    def __init__(
        self, tangents: list[tuple[Tensor, Tensor]], *, observer: LayerObserver | None, reducer: Reducer = LOCAL
    ) -> None:
        super().__init__(observer=observer, reducer=reducer)
        self._tangents = tangents
        self._reached = False

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._reached:
            self._reached = any(x is parameter for x in tensors_in((args, kwargs)) for parameter, _ in self._tangents)
        return super().compute(func, args, kwargs) if self._reached else self.primal(func, args, kwargs)

    def quotient(self, loss: Tensor, z: Any, target: Any, weight: Tensor | None = None) -> Tensor:
        """w·q, differentiable, as `loss` is w·C. Hooks on the parameters see the step's own backward pass, not these two."""
        with without_tensor_hooks(parameter for parameter, _ in self._tangents):
            return self._quotient(loss)

    def _quotient(self, loss: Tensor) -> Tensor:
        parameters = [parameter for parameter, _ in self._tangents]
        directions = [direction for _, direction in self._tangents]
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        curved = [(g, d) for g, d in zip(gradients, directions, strict=True) if g is not None and g.requires_grad]
        if not curved:  # C is linear in the block, or does not depend on it
            return loss * 0.0
        products = torch.autograd.grad(
            [g for g, _ in curved], parameters, [d for _, d in curved], create_graph=True, materialize_grads=True
        )
        return torch.stack([(p * d).sum() for p, d in zip(products, directions, strict=True)]).sum()

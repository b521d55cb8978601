"""The full Hessian along v by second-order tangents: beside every tensor x that depends on the block, ẋ and ẍ.

With the block's parameters at W + t·v, ẋ and ẍ are the first two derivatives of x by t. The output z then gives

    q = vᵀHv = żᵀ(∂²C/∂z²)ż + (∂C/∂z)ᵀz̈,

Gauss–Newton's q and the part that it leaves out. One ordinary backward pass differentiates it. `hessian` takes two reverse
passes, and one through both of them, instead: it supports more operations and losses, and takes longer.

Operations that are linear between kinks map ẋ and ẍ alike, products follow Leibniz's rule, and a norm with batch statistics has
its own function (`norms.BatchNormSecond`). Whatever else depends on the block is refused.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.autodiff.forward import LayerObserver, UnsupportedOperationError, layer_options
from hgnp.curvature.autodiff.norms import BatchNormSecond
from hgnp.curvature.autodiff.operations import (
    PASSIVE,
    SAME,
    Func,
    batch_norm_options,
    name_of,
    tensors_in,
    uses_batch_statistics,
)
from hgnp.curvature.autodiff.rules import POOLS, RULES, pool_with_indices
from hgnp.curvature.autodiff.tangent import Tangent
from hgnp.curvature.autodiff.tape import Call, saved_tensor_hooks_active
from hgnp.curvature.device import upcast
from hgnp.curvature.losses import LossCurvature, weighted
from hgnp.reducer import LOCAL, Reducer

LINEAR_RULES = frozenset(
    {*SAME, *POOLS, "add", "sub", "__rsub__", "subtract", "cat", "concat", "concatenate", "stack", "div", "true_divide"}
    | {"relu", "pad", "batch_norm", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
)
"""Operations whose rule of `rules` maps a second derivative as it maps a first one: a norm in evaluation mode, a dropout that
draws nothing, a division by a constant."""
LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
PRODUCTS = ("mul", "multiply", "matmul", "mm", "bmm")


class SecondTangent(Tangent):
    """A pass along v, given as `tangents`: the block's parameters, each with its part of v."""

    def __init__(
        self,
        tangents: list[tuple[Tensor, Tensor]],
        curvature: LossCurvature,
        *,
        observer: LayerObserver | None = None,
        reducer: Reducer = LOCAL,
    ) -> None:
        self._seconds: dict[int, Tensor] = {}
        super().__init__(tangents, observer=observer, reducer=reducer)
        self._curvature = curvature

    def quotient(self, loss: Tensor, z: Tensor, target: Any, weight: Tensor | None = None) -> Tensor:
        """w·q, differentiable. `loss` is w·C."""
        u, second = self.tangent(z), self.second(z)
        q = weighted(self._curvature.quotient(z, torch.zeros_like(z) if u is None else u, target), weight)
        if second is None:
            return q
        (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
        return q + (upcast(gradient) * upcast(second)).sum()

    def second(self, x: Any) -> Tensor | None:
        """ẍ; None: zero."""
        return self._seconds.get(id(x)) if self.tangent(x) is not None else None

    def record(self, x: Tensor, tangent: Tensor | None) -> None:
        super().record(x, tangent)
        self._seconds.pop(id(x), None)

    def record_second(self, x: Tensor, second: Tensor) -> None:
        """ẍ of a tensor whose ẋ is recorded."""
        self._seconds[id(x)] = second.to(x.dtype)

    def drop(self, key: int) -> None:
        super().drop(key)
        self._seconds.pop(key, None)

    def carry(self, old: Tensor, fresh: Tensor) -> None:
        second = self.second(fresh)
        super().carry(old, fresh)
        if second is not None:
            self.record_second(old, second)

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [x for x in tensors_in((args, kwargs)) if self.tangent(x) is not None]
        name = name_of(func)
        if not given or not torch.is_grad_enabled():
            return self.primal(func, args, kwargs)
        if name == "register_hook":  # which reverse passes would call
            raise _unsupported("a hook on a gradient")
        if saved_tensor_hooks_active():  # a checkpointed part runs again in the backward pass, without tangents
            raise _unsupported("saved-tensor hooks, as activation checkpointing has")
        if name in PASSIVE:
            return self._passive(func, args, kwargs)
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if func is F.batch_norm:
            options = batch_norm_options(args, kwargs)
            linear = [options["input"], options["bias"]] if not uses_batch_statistics(options) else [options["input"]]
            if any(all(x is not each for each in linear) for x in given):
                raise _unsupported("batch_norm with weights or statistics that depend on it")
            if uses_batch_statistics(options):
                return self._batch_norm(func, args, kwargs)
        if name in LAYERS:
            return self._product(func, args, kwargs, self._second_of_layer(func, args, kwargs))
        if name in PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(func, args, kwargs, self._second_of_product(func, args))
        if name in LINEAR_RULES and kwargs.get("out") is None and not _reinterprets(name, args, kwargs):
            return self._linear(func, args, kwargs)
        raise _unsupported(name)

    def _attribute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        second, out = self.second(args[0]), super()._attribute(func, args, kwargs)
        if second is not None and self.known(out):
            self.record_second(out, func(second))
        return out

    def _linear(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation's rule on ẋ, then the same rule on ẍ."""
        name = name_of(func)
        if "dropout" in name and _draws(args, kwargs):
            raise _unsupported(f"{name} in place")
        # read before the call, which may write in place
        seconds = {id(x): each for x in tensors_in((args, kwargs)) if (each := self.second(x)) is not None}
        before, call = self.call, self.call
        if name in POOLS and (call is None or call.saved is None) and not kwargs.get("return_indices"):
            call = Call(func, args, kwargs, [], *pool_with_indices(func, args, kwargs))  # one pooling for ẋ and ẍ
        try:
            self.call = call
            out = RULES[name](self, func, args, kwargs)
        finally:
            self.call = before
        mapped = out
        if seconds and out is not NotImplemented:
            mapped = RULES[name](cast(Tangent, _OnSeconds(self, seconds, out, call)), func, args, kwargs)
        if mapped is NotImplemented:
            raise _unsupported(name)
        return out

    def _second_of_product(self, func: Func, args: tuple[Any, ...]) -> Tensor | None:
        """ẍy + 2ẋẏ + xÿ"""
        x, y = args
        tx, ty, sx, sy = self.tangent(x), self.tangent(y), self.second(x), self.second(y)
        plain = torch.mul if name_of(func) in ("mul", "multiply") else torch.matmul
        return _sum(
            None if sx is None else plain(sx, y),
            None if sy is None else plain(x, sy),
            None if tx is None or ty is None else 2 * plain(tx, ty),
        )

    def _second_of_layer(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """W ẍ + 2Ẇ ẋ + Ẅ x + b̈"""
        options = layer_options(name_of(func), args, kwargs)
        x, weight, bias = options.pop("input"), options.pop("weight"), options.pop("bias")
        tx, tweight, sx, sweight, sbias = (
            self.tangent(x), self.tangent(weight), self.second(x), self.second(weight), self.second(bias)
        )  # fmt: skip
        if sbias is not None and sweight is None:
            sweight = torch.zeros_like(weight)
        lowered = None if self.call is None else self.call.saved  # as autocast has cast it
        return _sum(
            None if sx is None else func(sx, weight if lowered is None else lowered, None, **options),
            None if sweight is None else func(x, sweight, sbias, **options),
            None if tx is None or tweight is None else 2 * func(tx, tweight, None, **options),
        )

    def _product(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], second: Tensor | None) -> Any:
        out = RULES[name_of(func)](self, func, args, kwargs)
        if out is NotImplemented:
            raise _unsupported(name_of(func))
        if second is not None:
            self.record_second(out, second.expand(out.shape))
        return out

    def _batch_norm(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A norm that uses batch statistics."""
        options = batch_norm_options(args, kwargs)
        x, call = options["input"], self.call
        if self.reducer.sync_norms:
            raise _unsupported("batch_norm with statistics of all ranks")
        if x.numel() == x.shape[1]:
            return self.primal(func, args, kwargs)  # refuses a batch too small
        known = None if call is None else call.saved
        y, tangent, second = BatchNormSecond.apply(
            x, self.tangent(x), self.second(x), options["weight"], options["bias"], options["running_mean"],
            options["running_var"], options["momentum"], options["eps"], known,
        )  # fmt: skip
        out: Tensor = y if known is None or call is None else call.out
        self.record(out, tangent)
        self.record_second(out, second)
        return out


class _OnSeconds:
    """The mode as a rule sees it that maps ẍ: in the place of each ẋ, for a call whose result is known."""

    def __init__(self, mode: SecondTangent, seconds: dict[int, Tensor], out: Any, call: Call | None) -> None:
        self._mode, self._seconds, self._out, self.call, self.reducer = mode, seconds, out, call, mode.reducer

    def tangent(self, x: Any) -> Tensor | None:
        return self._seconds.get(id(x))

    def record(self, x: Tensor, second: Tensor) -> None:
        self._mode.record_second(x, second)

    written = record

    def primal(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._out


def _sum(*parts: Tensor | None) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return sum(given[1:], given[0]) if given else None


def _draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    options = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    return bool(options.get("p", 0.5)) and bool(options.get("training", options.get("train", True)))


def _reinterprets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether x.view(dtype) reads the bits of x as those of another type, which has no derivative."""
    return name == "view" and any(isinstance(each, torch.dtype) for each in (*args[1:], *kwargs.values()))


def _unsupported(what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"must have second derivatives along v that hgnp knows, got {what}")

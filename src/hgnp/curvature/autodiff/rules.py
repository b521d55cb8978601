"""Tangents of the common operations, in differentiable operations and without needless memory.

A rule runs the operation itself, through `mode.primal`, and records the tangent of the result. It returns
NotImplemented for arguments that it does not support; `torch.func.jvp` is used then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.autodiff.forward import layer_options
from hgnp.curvature.autodiff.norms import BatchNormDual, synchronised_batch_norm
from hgnp.curvature.autodiff.operations import (
    SAME,
    Func,
    batch_norm_options,
    differentiable,
    embedding_options,
    in_place,
    name_of,
    tensors_in,
    uses_batch_statistics,
)
from hgnp.curvature.autodiff.rng import RandomState

if TYPE_CHECKING:
    from hgnp.curvature.autodiff.tangent import Tangent

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _record_result(mode: Tangent, args: Args, out: Any, tangent: Tensor) -> Any:
    """Records the tangent of a result, which may be the first argument itself, changed in place."""
    if args and out is args[0]:
        mode.written(out, tangent)
    else:
        mode.record(out, tangent)
    return out


def _only_first(mode: Tangent, args: Args, kwargs: Kwargs) -> Tensor | None:
    """ẋ if the first argument alone has a tangent."""
    if not args or any(mode.tangent(x) is not None for x in tensors_in((args[1:], kwargs))):
        return None
    return mode.tangent(args[0])


def same(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tangent = _only_first(mode, args, kwargs)
    if tangent is None:
        return NotImplemented
    out = mode.primal(func, args, kwargs)
    if in_place(func, args, kwargs):  # not into a tangent that other tensors share
        tangent = tangent.clone()
    if isinstance(out, Tensor):
        if differentiable(out):
            # a tangent may have other strides than its tensor, and then no such view
            view = name_of(func) in ("view", "view_as") and out.numel() == tangent.numel()
            mode.record(out, tangent.reshape(out.shape) if view else func(tangent, *args[1:], **kwargs))
        return out
    if isinstance(out, str):  # x.type() names the type, x.type(dtype) converts
        return out
    for x, t in zip(out, func(tangent, *args[1:], **kwargs), strict=True):
        mode.record(x, t)
    return out


def add(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or set(kwargs) - {"alpha"}:
        return NotImplemented
    tx, ty = mode.tangent(args[0]), mode.tangent(args[1])
    left, right = (1, kwargs.get("alpha", 1)) if name_of(func) == "add" else (1, -kwargs.get("alpha", 1))
    if name_of(func) == "__rsub__":
        left, right = -1, 1
    out = mode.primal(func, args, kwargs)
    if tx is not None and ty is not None:
        tangent = torch.add(tx, ty, alpha=right) if left == 1 else torch.sub(ty, tx)
    else:
        one, sign = (tx, left) if tx is not None else (ty, right)
        assert one is not None
        tangent = (one if sign == 1 else one * sign).expand(out.shape)
    return _record_result(mode, args, out, tangent)


def cat(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    tangents = [mode.tangent(x) for x in args[0]]
    filled = [torch.zeros_like(x) if t is None else t for x, t in zip(args[0], tangents, strict=True)]
    out = mode.primal(func, args, kwargs)
    mode.record(out, func(filled, *args[1:], **kwargs))
    return out


def mul(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    x, y = args
    tx, ty = mode.tangent(x), mode.tangent(y)
    tangent = None if tx is None else tx * y
    if ty is not None:
        tangent = x * ty if tangent is None else tangent + x * ty
    assert tangent is not None
    if getattr(func, "__name__", "").endswith("_") and (ty is not None):
        return NotImplemented  # x is about to be overwritten while its product with ẏ still needs it
    out = mode.primal(func, args, kwargs)
    return _record_result(mode, args, out, tangent.expand(out.shape))


def div(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tx = _only_first(mode, args, kwargs)
    if tx is None or len(args) != 2 or kwargs:
        return NotImplemented
    tangent = tx / args[1]
    out = mode.primal(func, args, kwargs)
    return _record_result(mode, args, out, tangent.expand(out.shape))


def matmul(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    tx, ty = mode.tangent(args[0]), mode.tangent(args[1])
    parts = [func(tx, args[1])] if tx is not None else []
    parts += [func(args[0], ty)] if ty is not None else []
    out = mode.primal(func, args, kwargs)
    mode.record(out, parts[0] if len(parts) == 1 else parts[0] + parts[1])
    return out


def layer(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Linear and convolution: W ẋ + Ẇ x + ḃ."""
    options = layer_options(name_of(func), args, kwargs)
    x, weight, bias = options.pop("input"), options.pop("weight"), options.pop("bias")
    tx, tweight, tbias = mode.tangent(x), mode.tangent(weight), mode.tangent(bias)
    tangent = None
    if tweight is not None:
        tangent = func(x, tweight, tbias, **options)
    if tx is not None:
        if mode.call is not None and mode.call.saved is not None:
            weight = mode.call.saved
        through = func(tx, weight, tbias if tweight is None else None, **options)
        tangent = through if tangent is None else tangent + through
    if tangent is None:
        return NotImplemented
    out = mode.primal(func, args, kwargs)
    mode.record(out, tangent)
    return out


def relu(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tangent = mode.tangent(args[0]) if args else None
    if tangent is None:
        return NotImplemented
    out = mode.primal(func, args, kwargs)
    # the mask is read off the result, which ReLU's own backward keeps too
    return _record_result(mode, args, out, torch.ops.aten.threshold_backward(tangent, out.detach(), 0))


POOLS: dict[str, Callable[..., Any]] = {
    "max_pool1d": F.max_pool1d_with_indices,
    "max_pool2d": F.max_pool2d_with_indices,
    "max_pool3d": F.max_pool3d_with_indices,
}


def pool_with_indices(func: Func, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """What a max pooling returns, and the positions that it picked."""
    options = {k: v for k, v in kwargs.items() if k != "return_indices"}
    pooled: tuple[Tensor, Tensor] = POOLS[name_of(func)](*args[:6], **options)
    return pooled


def max_pool(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tangent = mode.tangent(args[0]) if args else None
    if tangent is None or kwargs.get("return_indices") or tangent.dim() != int(name_of(func)[-2]) + 2:
        return NotImplemented
    if mode.call is not None and mode.call.saved is not None:
        out, index = mode.call.out, mode.call.saved
    else:
        out, index = pool_with_indices(func, args, kwargs)
    if tangent.is_contiguous() or not index.movedim(1, -1).is_contiguous():
        picked = tangent.flatten(2).gather(2, index.flatten(2)).view(index.shape)
    else:  # channels last
        at = index.movedim(1, -1)
        picked = tangent.movedim(1, -1).flatten(1, -2).gather(1, at.flatten(1, -2)).view(at.shape).movedim(-1, 1)
    mode.record(out, picked)
    return out


def dropout(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """In place, or drawing nothing. The mask is drawn again from the same random state, on ones: the generator ends in the
    state of a plain dropout."""
    tangent = mode.tangent(args[0]) if args else None
    if tangent is None:
        return NotImplemented
    options = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    if options.get("p", 0.5) == 0 or not options.get("training", True):  # nothing is drawn
        return _record_result(mode, args, mode.primal(func, args, kwargs), tangent)
    before = RandomState(args[0])
    out = mode.primal(func, args, kwargs)
    after = RandomState(args[0])
    before.restore()
    mask = func(torch.ones_like(args[0], requires_grad=False), *args[1:], **kwargs)
    after.restore()
    return _record_result(mode, args, out, tangent * mask)


def pad(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tangent = _only_first(mode, args, kwargs)
    if tangent is None:
        return NotImplemented
    mode_args = {"mode": args[2]} if len(args) > 2 else {k: v for k, v in kwargs.items() if k == "mode"}
    widths = args[1] if len(args) > 1 else kwargs["pad"]
    out = mode.primal(func, args, kwargs)
    mode.record(out, F.pad(tangent, widths, **mode_args))
    return out


def embedding(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Row `padding_idx` of the weight gets no gradient: to autograd it is a constant, so its tangent is zero here. PyTorch's
    forward derivative ignores that."""
    options = embedding_options(func, args, kwargs)
    index, weight, padding = options["input"], options["weight"], options["padding_idx"]
    tangent = mode.tangent(weight)
    if tangent is None:
        return NotImplemented
    out = mode.primal(func, args, kwargs)
    if options["max_norm"] is not None:  # it has scaled rows in place, of which autograd knows nothing
        mode.record(weight, tangent)
    rows = torch.embedding(tangent, index)
    mode.record(out, rows if padding is None else rows.masked_fill((index == padding).unsqueeze(-1), 0.0))
    return out


def batch_norm(mode: Tangent, func: Func, args: Args, kwargs: Kwargs) -> Any:
    options = batch_norm_options(args, kwargs)
    if mode.reducer.sync_norms and uses_batch_statistics(options):
        return _synchronised_batch_norm(mode, options)
    statistics = [options["running_mean"], options["running_var"]]
    tangent = mode.tangent(options["input"])
    if tangent is None or func is not F.batch_norm or any(mode.tangent(x) is not None for x in statistics):
        return NotImplemented
    x, eps, affine = options["input"], options["eps"], _affine_tangent(mode, options)
    if uses_batch_statistics(options):
        if x.numel() == x.shape[1]:
            return mode.primal(func, args, kwargs)  # refuses a batch too small
        known = None if mode.call is None else mode.call.saved
        out, tangent = BatchNormDual.apply(
            x, tangent, options["weight"], options["bias"], options["running_mean"], options["running_var"],
            options["momentum"], eps, known,
        )  # fmt: skip
        out = mode.primal(func, args, kwargs) if known is not None else out
        mode.record(out, tangent if affine is None else tangent + affine)
        return out
    out = mode.primal(func, args, kwargs)
    zero = torch.zeros_like(options["running_mean"])
    tangent = func(tangent, zero, options["running_var"], options["weight"], None, False, 0.0, eps)
    mode.record(out, tangent if affine is None else tangent + affine)
    return out


def _affine_tangent(mode: Tangent, options: Kwargs) -> Tensor | None:
    """γ̇·n + β̇: the norm itself with γ̇ and β̇ as its weight and bias. It is differentiated once, where PyTorch is right."""
    dweight, dbias = mode.tangent(options["weight"]), mode.tangent(options["bias"])
    if dweight is None and dbias is None:
        return None
    x, batch = options["input"], uses_batch_statistics(options)
    dweight = torch.zeros_like(options["bias"]) if dweight is None else dweight
    mean, variance = (None, None) if batch else (options["running_mean"], options["running_var"])
    return F.batch_norm(x, mean, variance, dweight, dbias, batch, 0.0, options["eps"])


def _synchronised_batch_norm(mode: Tangent, options: Kwargs) -> Tensor:
    """Input, weight and bias may each have a tangent, as `torch.func.jvp` cannot follow sums over ranks. The tangent of an
    earlier call computes the norm's statistics again."""
    out, norm = synchronised_batch_norm(options, mode.reducer)
    x, weight, bias = options["input"], options["weight"], options["bias"]
    mode.record(out, norm.tangent(mode.tangent(x), weight, mode.tangent(weight), mode.tangent(bias)))
    return out


RULES: dict[str, Callable[[Tangent, Func, Args, Kwargs], Any]] = {
    **dict.fromkeys(SAME, same),
    **dict.fromkeys(("add", "sub", "__rsub__", "subtract"), add),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), cat),
    **dict.fromkeys(("mul", "multiply"), mul),
    **dict.fromkeys(("div", "true_divide"), div),
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), layer),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), dropout),
    **dict.fromkeys(POOLS, max_pool),
    "embedding": embedding,
    "relu": relu,
    "pad": pad,
    "batch_norm": batch_norm,
}

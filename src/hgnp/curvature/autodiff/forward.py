"""The network's forward pass, intercepted operation by operation.

`Forward` runs every operation as it is, except that a block's layer is shown to an `observer`, that BatchNorm takes its
statistics over all ranks where the `reducer` synchronises norms, and that dropout is a product with a mask, so that whatever
repeats the pass repeats the mask. The routes override `compute`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from hgnp.curvature.autodiff.norms import batch_norm, synchronised_batch_norm
from hgnp.curvature.autodiff.operations import (
    CONVOLUTIONS,
    Func,
    batch_norm_options,
    name_of,
    tensors_in,
    uses_batch_statistics,
)
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.autodiff.tape import Tape
from hgnp.curvature.device import capturing
from hgnp.errors import InputError, one_line
from hgnp.reducer import LOCAL, Reducer

Output = Callable[[Any], Any]
"""Picks what the loss takes from what the network returns."""
# the same norms by their names below torch.nn.functional, whose fused third derivatives are wrong
_HIDDEN_NORMS = frozenset(
    """batch_norm layer_norm instance_norm native_batch_norm native_layer_norm _native_batch_norm_legit
    cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index""".split()  # noqa: SIM905
)
CHECKPOINTED_NETWORK = (
    "direction_over must be 'block' for a network with activation checkpointing, got 'network': a checkpointed part runs again "
    "in the backward pass without derivatives along v; or turn checkpointing off"
)
CHECKPOINTED = (
    "net must run without activation checkpointing after the penalised layer, got a checkpointed part, which runs again in the "
    "backward pass without derivatives along v; turn it off, or use curvature='hessian'"
)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class UnsupportedOperationError(InputError):
    """An operation that the chosen route does not support."""


class LayerObserver(Protocol):
    """Sees the calls of linear layers and convolutions in a forward pass."""

    def layer(self, options: dict[str, Any], out: Tensor) -> Tensor:
        """Sees a layer's call (input, weight, bias and a convolution's options) and may add a probe to its output."""

    def forget(self) -> None:
        """Drops the calls so far: their pass was abandoned."""


def check_gradients() -> None:
    if not torch.is_grad_enabled():
        raise InputError(
            "gradients must be enabled, got torch.no_grad() or torch.inference_mode(); call it outside of these"
        )


def layer_options(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a linear or convolution call by name."""
    if name == "linear":
        return {"bias": None} | dict(zip(_CONV, args, strict=False)) | kwargs
    return _CONV_DEFAULTS | dict(zip(_CONV, args, strict=False)) | kwargs


class Forward(TorchFunctionMode):
    """A mode in which a network's forward pass is run operation by operation.

    Subclasses override `compute`, e.g. to carry a tangent beside each value; `primal` is the operation itself.

    Args:
        observer: Is shown the calls of linear layers and convolutions.
        tape: Records all calls.
        reducer: Sums over ranks, for norms that take their statistics over all of them.
        before: The random state before the pass, for `drew_only_masks`.
    """

    def __init__(
        self,
        *,
        observer: LayerObserver | None = None,
        tape: Tape | None = None,
        reducer: Reducer = LOCAL,
        before: RandomState | None = None,
    ) -> None:
        super().__init__()
        self.observer = observer
        self.tape = tape
        self.reducer = reducer
        self._drawn = before
        """The random state after the last mask; at first, that before the pass."""
        self._others_drew = False
        self.unsupported: UnsupportedOperationError | None = None
        """The first operation without support, as an error; the network's own code may have caught it."""

    def __torch_function__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except UnsupportedOperationError as error:
            self.unsupported = self.unsupported or error
            raise

    def _call(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HIDDEN_NORMS and func not in (F.batch_norm, F.layer_norm, F.instance_norm):
            raise UnsupportedOperationError(
                f"must call norms by torch.nn.functional, got torch.{name}, whose third derivative PyTorch gets wrong"
            )
        if func in _DROPOUTS and (p := _drop_rate(args, kwargs)):
            kept = self._mask(func, args, kwargs)
            scaled = 0.0 if p == 1 else 1 / (1 - p)  # after the product, so that it is rounded once as in PyTorch's own
            return self._operation(torch.mul, (self._operation(torch.mul, (args[0], kept), {}), scaled), {})
        return self._operation(func, args, kwargs)

    def _mask(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Which entries dropout keeps. It is drawn on ones of the same type and layout, which draws as many
        random numbers, in the same order."""
        if self._drawn is not None and not capturing():
            self._others_drew |= not self._drawn.unchanged()
        kept: Tensor = func(torch.ones_like(args[0], requires_grad=False), *args[1:], **kwargs) != 0
        self._drawn = None if capturing() else RandomState(args[0])
        return kept

    def drew_only_masks(self) -> bool:
        """Whether nothing but dropout masks was drawn since `before`."""
        assert self._drawn is not None
        return not self._others_drew and self._drawn.unchanged()

    def _operation(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tape is None:
            return self.compute(func, args, kwargs)
        given = self.tape.given(args, kwargs)
        out = self.compute(func, args, kwargs)
        self.tape.note(func, args, kwargs, given, out)
        return out

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.primal(func, args, kwargs)

    def primal(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.reducer.sync_norms and func in (F.batch_norm, batch_norm):
            options = batch_norm_options(args, kwargs)
            if uses_batch_statistics(options):
                return synchronised_batch_norm(options, self.reducer)[0]
        out = func(*args, **kwargs)
        if self.observer is not None:
            name = name_of(func)
            if (name == "linear" or name in CONVOLUTIONS) and torch.is_grad_enabled():
                return self.observer.layer(layer_options(name, args, kwargs), out)
        return out


def _drop_rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """p of a dropout that draws a mask and does not write in place, else 0."""
    options = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    draws = options.get("training", options.get("train", True)) and not options.get("inplace", False)
    return float(options.get("p", 0.5)) if args and draws else 0.0


def run(
    net: nn.Module,
    inputs: Any,
    *,
    output: Output | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> Any:
    """The network on a tensor, a tuple or list (positional) or a dictionary (keywords), on these buffers if given;
    then `output` of what it returns."""
    args: tuple[Any, ...] = (inputs,)
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    out = net(*args, **kwargs) if buffers is None else torch.func.functional_call(net, buffers, args, kwargs)
    return out if output is None else output(out)


def sample_entries(inputs: Any) -> list[Any] | tuple[Any, ...] | None:
    """The network's first argument, if it has one entry per sample, as torchvision's detectors take images: a list, or a tuple
    as long as a list or tuple of targets among the other arguments. Another tuple holds parts of one batch."""
    arguments = list(inputs.values()) if isinstance(inputs, dict) else inputs
    if not isinstance(arguments, tuple | list) or not arguments:
        return None
    first, others = arguments[0], arguments[1:]
    alike = any(isinstance(other, tuple | list) and len(other) == len(first) for other in others)
    return first if isinstance(first, list) or (isinstance(first, tuple) and alike) else None


def samples_in(inputs: Any) -> int:
    """The number of samples: entries of a first argument with one per sample, or the first dimension of the first tensor."""
    entries = sample_entries(inputs)
    if entries is not None:
        return len(entries)
    first = next(tensors_in(inputs), None)
    if first is None or first.dim() == 0:
        raise InputError("inputs must hold a tensor whose first dimension counts samples, got none")
    return first.shape[0]


def autocast_off(like: Tensor) -> AbstractContextManager[Any]:
    """Curvature is summed up in full precision, whatever the network's pass runs in."""
    return torch.autocast(like.device.type, enabled=False)


@contextmanager
def derivatives_explained(checkpointed: str = CHECKPOINTED) -> Iterator[None]:
    """Around what differentiates derivatives: an InputError if PyTorch cannot, or if it meets a part that is checkpointed."""
    try:
        yield
    except CheckpointError as error:
        raise InputError(checkpointed) from error
    except RuntimeError as error:
        if is_missing_derivative(error):
            reason = one_line(error).rstrip(".")
            raise InputError(
                f"net and loss must have operations that PyTorch can differentiate twice more, got: {reason}; use mu=0, or "
                "method='taylor' in a recipe"
            ) from error
        raise


def is_missing_derivative(error: RuntimeError) -> bool:
    """Whether PyTorch has no formula for a derivative."""
    # It raises NotImplementedError, as user code may, or a plain RuntimeError: there is no class or API to ask.
    # tests/curvature/test_missing_derivative.py fails if PyTorch changes the text.
    return "is not implemented" in str(error)

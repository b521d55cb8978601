"""The operations of a forward pass, kept so that what depends on one block can be run again along a direction.

In the paper's order v is known only after the forward and backward pass of the batch. All values are known by then: tangents
are computed beside them (`tangent`), or, for the Hessian, the operations after the block run once more (`rerun`). One backward
pass then covers all of it.

What cannot be repeated exactly is refused, and the caller runs a second forward pass: a tensor that was written to since, one
that was created or changed outside the recorded operations, a hook on a gradient, a part that runs in another precision than
its caller, or a pass that draws random numbers, which the caller checks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hgnp.curvature.autodiff.operations import CONVOLUTIONS, Func, map_tensors, name_of, tensors_in, untracked

if TYPE_CHECKING:
    from hgnp.curvature.autodiff.forward import Forward
    from hgnp.curvature.autodiff.tangent import Tangent

Given = list[tuple[Tensor, int]]
"""Tensors with their versions."""
IN_PLACE = frozenset({"relu", "add", "sub"})
"""Their rules read results and tangents, not the arguments before the call."""
SAVED = frozenset({"batch_norm", "max_pool2d", "max_pool3d", *CONVOLUTIONS})
UNVERSIONED = frozenset(
    {"__set__", "register_hook", "retain_grad"}
)  # they change a tensor without a trace in its version


@dataclass(frozen=True)
class Call:
    func: "Func"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Given
    out: Any
    saved: Any
    """What autograd saves for the derivative, where a rule can use it: mean and 1/√(variance + ε) of a norm's batch, the
    indices that a pooling picked, a convolution's weight as autocast cast it. None: not known."""


class Tape:
    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._made: dict[int, int] = {}  # versions that calls left tensors with
        self._precision = _precision()
        self._whole = True  # whether it has every call on its tensors, in one precision

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """The tensors that a call is about to be made with."""
        return [(x, x._version) for x in tensors_in((args, kwargs))]

    def note(self, func: "Func", args: tuple[Any, ...], kwargs: dict[str, Any], given: Given, out: Any) -> None:
        """Appends a call, in the order of the pass. The tape holds its tensors, so that their ids stay unique."""
        if getattr(func, "__name__", "") in UNVERSIONED:
            self._whole &= all(id(x) not in self._made for x, _ in given)
        made = list(tensors_in(out))
        if not made or not torch.is_grad_enabled():
            return
        self._whole &= all(self._made.get(id(x), version if x.is_leaf else None) == version for x, version in given)
        self._whole &= _precision() == self._precision
        self._made |= {id(x): x._version for x in made}
        args, kwargs = map_tensors((args, kwargs), lambda x: x)  # a list may grow afterwards
        self._calls.append(Call(func, args, kwargs, given, out, _saved(func, given, out)))

    def tangent(self, mode: "Tangent", z: Any) -> Tensor | None:
        """The tangent of z along `mode`'s direction, by the rules alone. It uses the values of the recorded pass and is
        differentiable with them. None where that is not possible."""
        if not self._whole:
            return None
        for call in self._calls:
            carried = [x for x, _ in call.given if mode.known(x)]
            if not carried:
                continue
            name = name_of(call.func)
            written = [x for x, version in call.given if x._version != version]
            if written and not (name in IN_PLACE and len(written) == 1 and written[0] is call.out is call.args[0]):
                return None
            args, kwargs = untracked(call.func, call.args, call.kwargs)
            out = mode.computed(call, args, kwargs)
            for old, fresh in zip(tensors_in(call.out), tensors_in(out), strict=True):
                if old is not fresh and mode.known(fresh):
                    mode.carry(old, fresh)
        return mode.tangent(z)

    def rerun(self, mode: "Forward", parameters: list[Tensor], z: Any) -> Tensor | None:
        """z by running again, in `mode`, all that depends on the parameters; None where that is not possible."""
        calls = self.calls_after(parameters)
        if calls is None:
            return None
        new: dict[int, Tensor] = {}

        def now(x: Tensor) -> Tensor:
            return new.get(id(x), x)

        for call in calls:
            args, kwargs = untracked(call.func, call.args, call.kwargs)
            out = mode.compute(call.func, map_tensors(args, now), map_tensors(kwargs, now))
            new |= {id(old): fresh for old, fresh in zip(tensors_in(call.out), tensors_in(out), strict=True)}
        return new.get(id(z))

    def calls_after(self, parameters: Iterable[Tensor]) -> list[Call] | None:
        """The calls that depend on the parameters; None if they cannot be repeated, as a tensor that one of them reads has
        been written since."""
        if not self._whole:
            return None
        changed, new, calls = {id(parameter) for parameter in parameters}, set[int](), []
        for call in self._calls:
            if not any(id(x) in new or id(x) in changed for x, _ in call.given):
                continue
            if any(id(x) not in new and x._version != version for x, version in call.given):
                return None
            calls.append(call)
            new |= {id(x) for x in tensors_in(call.out)}
        return calls


def _saved(func: "Func", given: Given, out: Any) -> Any:
    node: Any = getattr(out, "grad_fn", None)
    name = name_of(func)
    if name not in SAVED or saved_tensor_hooks_active():
        return None
    if name in CONVOLUTIONS and all(x.dtype == out.dtype for x, _ in given):
        return None  # not by autocast
    while type(node).__name__ == "_ProbeBackward":  # a block's layer is observed
        node = node.next_functions[0][0]
    match type(node).__name__:
        case "NativeBatchNormBackward0" | "CudnnBatchNormBackward0" if node._saved_training:
            return node._saved_result1.detach(), node._saved_result2.detach()
        case "MaxPool2DWithIndicesBackward0" | "MaxPool3DWithIndicesBackward0":
            return node._saved_result1
        case "ConvolutionBackward0":
            return node._saved_weight
    return None


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks are active, as in a checkpointed part: reading what autograd saves may recompute it. Before
    torch 2.8 that is not known, and may be: an error within a checkpointed part would leave its hooks to all that follows."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8
    return hooks is None or hooks(True) is not None


def _precision() -> list[tuple[bool, torch.dtype]]:
    """What autocast does now."""
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

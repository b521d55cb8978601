"""The forward tangent pass: beside every tensor x that depends on the block, ẋ = its derivative along v.

Operations before the block run untouched. After it, the common ones have rules written in differentiable operations,
so that an ordinary backward through (outputs, tangents) gives exact derivatives of both; every other operation is
differentiated by `torch.func.jvp`, norms through their primitive form; a few by reverse mode twice. The rules are in `rules`.

Tangents are kept beside tensors, not in them. A tensor changed through an alias is detected by its version counter and
refused.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hgnp.curvature.autodiff.forward import Forward, LayerObserver, UnsupportedOperationError
from hgnp.curvature.autodiff.norms import PRIMITIVE
from hgnp.curvature.autodiff.operations import (
    PASSIVE,
    VIEW_ATTRIBUTES,
    Func,
    attribute_of,
    differentiable,
    in_place,
    map_tensors,
    name_of,
    tensors_in,
    untracked,
)
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.autodiff.rules import RULES
from hgnp.curvature.autodiff.tape import Call
from hgnp.reducer import LOCAL, Reducer

# fused attention kernels have no second derivatives; PyTorch's own formula in plain operations has
FUSED = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})

NO_HESSIAN = "nor has it what curvature='hessian' needs, so use mu=0, or method='taylor' in a recipe"

# what PyTorch's forward derivative of these saves has no history, or divides by zero: its own gradient is silently wrong
BY_REVERSE = frozenset(
    """det logdet slogdet linalg_det linalg_slogdet linalg_solve linalg_solve_ex linalg_tensorsolve orgqr
    linalg_householder_product cumprod scatter_reduce linear_cross_entropy""".split()  # noqa: SIM905
)


class Tangent(Forward):
    """Runs the network and propagates tangents, starting from `tangents`: parameters, each with its tangent."""

    def __init__(
        self, tangents: list[tuple[Tensor, Tensor]], *, observer: LayerObserver | None = None, reducer: Reducer = LOCAL
    ) -> None:
        super().__init__(observer=observer, reducer=reducer)
        self.call: Call | None = None
        """The call of an earlier pass whose tangent is wanted."""
        self._records: dict[int, tuple[weakref.ref[Tensor], Tensor | None, int]] = {}
        for parameter, direction in tangents:
            self.record(parameter, direction)

    def record(self, x: Tensor, tangent: Tensor | None) -> None:
        """ẋ for x as it is now; None marks x as no longer known."""
        key = id(x)
        if tangent is not None and tangent.dtype != x.dtype:
            tangent = tangent.to(x.dtype)
        self._records[key] = (weakref.ref(x, self._forget(key)), tangent, x._version)

    def _forget(self, key: int) -> Callable[[Any], None]:
        """Drops a record with its tensor. It does not hold the mode, which holds it: only garbage collection would free
        both."""
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            mode = owner()
            if mode is not None:
                mode.drop(key)

        return forget

    def drop(self, key: int) -> None:
        """Forgets a tensor, by its id."""
        self._records.pop(key, None)

    def carry(self, old: Tensor, fresh: Tensor) -> None:
        """`old` is the same as `fresh`, in an earlier pass."""
        self.record(old, self.tangent(fresh))

    def tangent(self, x: Any) -> Tensor | None:
        if not isinstance(x, Tensor):
            return None
        record = self._records.get(id(x))
        if record is None:
            if x._is_view() and id(x._base) in self._records and differentiable(x):
                raise _unsupported("a view that is used after its base was written to")
            return None
        if record[2] != x._version or record[1] is None:
            raise _unsupported("a tensor that is used after it was written to through another view")
        return record[1]

    def known(self, x: Any) -> bool:
        """Whether x carries a tangent."""
        return isinstance(x, Tensor) and id(x) in self._records and self.tangent(x) is not None

    def computed(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `compute`, for a call whose result is known already."""
        self.call = call
        try:
            return self.compute(call.func, args, kwargs)
        finally:
            self.call = None

    def primal(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().primal(func, args, kwargs) if self.call is None else self.call.out

    def written(self, x: Tensor, tangent: Tensor) -> None:
        """x was returned, perhaps changed in place: then a base without a tangent is no longer known."""
        record = self._records.get(id(x))
        changed = record is None or record[2] != x._version
        self.record(x, tangent)
        base = x._base
        if changed and base is not None and id(base) not in self._records:
            self.record(base, None)

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or all(self.tangent(x) is None for x in tensors_in((args, kwargs))):
            return self.primal(func, args, kwargs)
        name = name_of(func)
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if name in PASSIVE:
            return self._passive(func, args, kwargs)
        if name == "__set__" and attribute_of(func) in ("data", "real", "imag"):
            raise _unsupported(f"an assignment to .{attribute_of(func)}")
        if kwargs.get("out") is not None:
            raise _unsupported(f"{name}(out=…), which writes into an existing tensor")
        rule = RULES.get(name)
        if rule is not None:
            out = rule(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return (self._by_reverse if name in BY_REVERSE else self._by_jvp)(func, args, kwargs)

    def _passive(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.primal(func, args, kwargs)
        if getattr(func, "__name__", "") == "detach_":  # the same tensor, without its history
            self.drop(id(args[0]))
        return out

    def _attribute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if attribute_of(func) in VIEW_ATTRIBUTES and (tangent := self.tangent(args[0])) is not None:
            self.record(out, func(tangent))
        return out

    def _by_reverse(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tangent by reverse mode twice: ẏ = ∂/∂c ⟨∂⟨c, y⟩/∂x, ẋ⟩, whatever c is."""
        if in_place(func, args, kwargs):
            raise _unsupported(f"{name_of(func)} in place")
        out = self.primal(func, args, kwargs)
        duals = {id(x): (x, tangent) for x in tensors_in((args, kwargs)) if (tangent := self.tangent(x)) is not None}
        # aliases: one argument may be computed from another, and partial derivatives are wanted
        aliases = {
            key: x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for key, (x, _) in duals.items()
        }

        def given(x: Tensor) -> Tensor:
            return aliases.get(id(x), x)

        y = [x for x in tensors_in(func(*map_tensors(args, given), **map_tensors(kwargs, given))) if differentiable(x)]
        c = [torch.zeros_like(x, requires_grad=True) for x in y]
        try:
            gradients = torch.autograd.grad(y, list(aliases.values()), c, create_graph=True, materialize_grads=True)
            along = [(g * tangent).sum() for g, (_, tangent) in zip(gradients, duals.values(), strict=True)]
            tangents = torch.autograd.grad(torch.stack(along).sum(), c, create_graph=True, materialize_grads=True)
        except RuntimeError as error:
            raise _unsupported(f"{name_of(func)}, which has no second derivative in PyTorch", NO_HESSIAN) from error
        for x, tangent in zip((x for x in tensors_in(out) if differentiable(x)), tangents, strict=True):
            self.record(x, tangent)
        return out

    def _by_jvp(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Value and tangent at once by forward-mode differentiation of this one operation."""
        name = name_of(func)
        writes = in_place(func, args, kwargs)
        if writes and self.call is not None:
            raise _unsupported(f"{name}, which has written in place already")
        if writes and name == "__setitem__":
            raise _unsupported("an indexed assignment")
        given, options = untracked(func, args, kwargs)
        if given is not args and self.call is None:
            self.primal(func, args, kwargs)  # jvp cannot update running statistics
        args, kwargs = given, options
        written = args[0] if writes else None  # has a tangent afterwards, zero before if it had none
        duals = {id(x): x for x in tensors_in((args, kwargs)) if self.tangent(x) is not None or x is written}
        tangents = tuple(torch.zeros_like(x) if (t := self.tangent(x)) is None else t for x in duals.values())
        body = PRIMITIVE.get(func, func)
        structure: list[Any] = []
        lowered = _autocast_dtype(args) if name in FUSED else None

        def call(*values: Tensor) -> tuple[Tensor, ...]:
            now = {key: value.clone() if writes else value for key, value in zip(duals, values, strict=True)}

            def given(x: Tensor) -> Tensor:
                x = now.get(id(x), x)
                return x.to(lowered) if lowered is not None and x.is_floating_point() else x

            out = body(*map_tensors(args, given), **map_tensors(kwargs, given))
            structure.append(out)
            return tuple(x for x in tensors_in(out) if differentiable(x)) or (values[0],)

        state = RandomState(args[0]) if writes else None
        with contextlib.ExitStack() as stack:
            if name in FUSED:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if lowered is not None:  # inside, autocast would take the softmax to float32 and break its own backward
                stack.enter_context(torch.autocast(args[0].device.type, enabled=False))
            load_jvp()
            try:
                primals, outs = torch.func.jvp(call, tuple(duals.values()), tangents)  # type: ignore[misc]
            except NotImplementedError as error:
                raise _unsupported(
                    f"{name}, which has no forward derivative in PyTorch",
                    "use curvature='hessian'" if _differentiable_twice(func, args, kwargs) else NO_HESSIAN,
                ) from error
        if writes:
            assert state is not None
            state.restore()
            out = func(*args, **kwargs)
            self.written(args[0], outs[0])
            return out
        results = iter(zip(primals, outs, strict=True))

        def place(x: Tensor) -> Tensor:
            if not differentiable(x):
                return torch._C._functorch.get_unwrapped(x) if torch._C._functorch.is_functorch_wrapped_tensor(x) else x
            value, tangent = next(results)
            self.record(value, tangent)
            return value

        return map_tensors(structure[0], place)


def _autocast_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    device = next(tensors_in(args)).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _differentiable_twice(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether reverse mode, and with it the Hessian's route, can differentiate the operation twice."""
    copies = {id(x): x.detach().requires_grad_() for x in tensors_in((args, kwargs)) if differentiable(x)}
    inputs = list(copies.values())

    def given(x: Tensor) -> Tensor:
        return copies.get(id(x), x)

    try:
        out = [x for x in tensors_in(func(*map_tensors(args, given), **map_tensors(kwargs, given))) if x.requires_grad]
        for _ in range(2):  # squares, whose derivative is not constant
            total = torch.stack([x.abs().square().sum() for x in out if x.requires_grad]).sum()
            out = list(torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True))
    except RuntimeError:
        return False
    return True


def _unsupported(reason: str, what_to_do: str = "use curvature='hessian'") -> UnsupportedOperationError:
    return UnsupportedOperationError(f"must be differentiable by Gauss–Newton, got {reason}; {what_to_do}")


@functools.cache
def load_jvp() -> None:
    """PyTorch loads what jvp needs at its first call, and then warns about its own use of torch.jit.script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))

"""The operations of a forward pass, kept so that what depends on one block can be run again along a direction.

In the paper's order v is known only after the batch went forward and back. The tensors before the block are there already:
only the operations behind it run once more, with tangents, and one backward pass then goes through both parts.

What could not be repeated faithfully is refused, and the caller goes forward a second time: a tensor that was written to since,
one whose origin or change was not seen, a hook on a gradient, or (the caller's to notice) a pass that draws random numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.curvature.operations import map_tensors, tensors_in

if TYPE_CHECKING:
    from hgnp.curvature.forward import Forward, Func

Given = list[tuple[Tensor, int]]
"""Tensors with their versions."""
UNSEEN = frozenset({"__set__", "register_hook", "retain_grad"})  # they change a tensor without a trace in its version


@dataclass(frozen=True)
class Call:
    func: "Func"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Given
    out: Any


class Tape:
    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._made: dict[int, int] = {}  # versions that calls left tensors with
        self._whole = True

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """What a call is about to be made with."""
        return [(x, x._version) for x in tensors_in((args, kwargs))]

    def note(self, func: "Func", args: tuple[Any, ...], kwargs: dict[str, Any], given: Given, out: Any) -> None:
        """A call, in the order of the pass. The tape holds its tensors, so that they are known by their identity."""
        if getattr(func, "__name__", "") in UNSEEN:
            self._whole &= all(id(x) not in self._made for x, _ in given)
        made = list(tensors_in(out))
        if not made or not torch.is_grad_enabled():
            return
        self._whole &= all(self._made.get(id(x), version if x.is_leaf else None) == version for x, version in given)
        self._made |= {id(x): x._version for x in made}
        self._calls.append(Call(func, args, kwargs, given, out))

    def again(self, mode: "Forward", parameters: list[Tensor], z: Any) -> Tensor | None:
        """z by running again, in `mode`, all that depends on the parameters; None where that cannot be."""
        if not self._whole:
            return None
        seeds = {id(parameter) for parameter in parameters}
        new: dict[int, Tensor] = {}

        def now(x: Tensor) -> Tensor:
            return new.get(id(x), x)

        for call in self._calls:
            depends = [id(x) in new or id(x) in seeds for x, _ in call.given]
            if not any(depends):
                continue
            if any(id(x) not in new and x._version != version for x, version in call.given):
                return None
            args, kwargs = _without_statistics(call)
            out = mode.compute(call.func, map_tensors(args, now), map_tensors(kwargs, now))
            new |= {id(old): fresh for old, fresh in zip(tensors_in(call.out), tensors_in(out), strict=True)}
        return new.get(id(z))


def _without_statistics(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; a norm that goes by its batch has updated its running statistics already."""
    from hgnp.curvature.forward import batch_norm_options  # forward writes tapes

    if call.func is not F.batch_norm or not batch_norm_options(call.args, call.kwargs)["training"]:
        return call.args, call.kwargs
    return (), batch_norm_options(call.args, call.kwargs) | {"running_mean": None, "running_var": None}

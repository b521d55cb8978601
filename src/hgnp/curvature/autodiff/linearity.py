"""Where Gauss–Newton and Hessian differ: for each block, the first operation after it that is nonlinear along v.

vᵀHv − q_ggn = Σ ∂C/∂z·z̈ with z̈ the output's second derivative along v. It vanishes identically when every path from
the block to the output is piecewise linear in the block's parameters. One pass follows all blocks at once.

The same pass finds blocks whose tangent would be lost silently, in an operation that PyTorch does not show to a mode (a
custom autograd.Function, a scripted function): autograd's graph leads from an operation's argument to the block, but no record
does. No numbers are compared, so that neither the size of a tangent nor the precision makes a difference.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from hgnp.curvature.autodiff.forward import Forward, UnsupportedOperationError, layer_options
from hgnp.curvature.autodiff.operations import (
    BILINEAR,
    CONVOLUTIONS,
    LINEAR,
    PASSIVE,
    VIEW_ATTRIBUTES,
    Func,
    attribute_of,
    batch_norm_options,
    embedding_options,
    name_of,
    tensors_in,
)
from hgnp.curvature.choices import Curvature
from hgnp.curvature.factors import Block, WholeNetwork
from hgnp.reducer import LOCAL, Reducer

Reasons = dict[str, str | None]


class Linearity(Forward):
    """Runs the network; `end(output)` then names, for each block the output depends on, what is nonlinear, or None."""

    def __init__(self, blocks: Sequence[Block | WholeNetwork], *, reducer: Reducer = LOCAL) -> None:
        super().__init__(reducer=reducer)
        self._records: dict[int, tuple[weakref.ref[Tensor], Reasons]] = {}
        self._names: dict[int, str] = {}
        self._reached: dict[Node, frozenset[str]] = {}
        self.lost: dict[str, str] = {}
        """Block → the operation that its tangent is lost in, by the name of its node in autograd's graph."""
        whole = any(isinstance(block, WholeNetwork) for block in blocks)
        self._series = "layers in series" if whole else "a layer reused in series"
        for block in blocks:
            for parameter in block.parameters.values():
                self._names[id(parameter)] = block.name
                self._record(parameter, {block.name: None})

    def _record(self, x: Tensor, reasons: Reasons) -> None:
        key = id(x)
        owner = weakref.ref(self)  # a strong one would be a cycle, freed by garbage collection alone

        def forget(_: Any) -> None:
            mode = owner()
            if mode is not None:
                mode._records.pop(key, None)

        self._records[key] = (weakref.ref(x, forget), reasons)

    def reasons(self, x: Any) -> Reasons:
        record = self._records.get(id(x))
        return {} if record is None else record[1]

    def end(self, z: Any) -> Reasons:
        """`reasons` of the network's output. From now on `lost` is complete."""
        for x in tensors_in(z):
            self._compare(x.grad_fn, self.reasons(x))
        return self.reasons(z)

    def _compare(self, node: Node | None, reasons: Reasons) -> None:
        if node is not None and torch.is_grad_enabled():
            for block in self._blocks_reached(node) - reasons.keys():
                self.lost.setdefault(block, node.name())

    def _blocks_reached(self, node: Node) -> frozenset[str]:
        """The blocks that autograd's graph leads to; every node is visited once."""
        waiting = [node]
        while waiting:
            here = waiting[-1]
            before = [each for each, _ in here.next_functions if each is not None]
            unknown = [each for each in before if each not in self._reached]
            if unknown and here not in self._reached:
                waiting += unknown
                continue
            parameter = id(getattr(here, "variable", None))  # where the graph ends at a leaf
            own = {self._names[parameter]} if parameter in self._names else set()
            self._reached[here] = frozenset(own.union(*(self._reached[each] for each in before)))
            waiting.pop()
        return self._reached[node]

    def compute(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name == "embedding":
            self._check_embedding(embedding_options(func, args, kwargs))
        inputs = [self.reasons(x) for x in tensors_in((args, kwargs))]
        given = [x.grad_fn for x in tensors_in((args, kwargs))]  # as they are before a call that writes in place
        out = self.primal(func, args, kwargs)
        if name not in PASSIVE and any(x.requires_grad for x in tensors_in(args[0] if name == "__setitem__" else out)):
            for node, reasons in zip(given, inputs, strict=True):
                self._compare(node, reasons)
        if not any(inputs) or name in PASSIVE or not torch.is_grad_enabled():
            return out
        if name == "__get__" and attribute_of(func) not in VIEW_ATTRIBUTES:
            return out
        if name == "linear" or name in CONVOLUTIONS:
            options = layer_options(name, args, kwargs)
            factors = [self.reasons(options["input"]), self.reasons(options["weight"])]
            merged = _product(factors, self._series)
            merged = _sum([merged, self.reasons(options["bias"])])
        elif name in BILINEAR:
            merged = _product(inputs, f"{name} of two tensors that depend on it")
        elif self._is_linear(func, name, args, kwargs):
            merged = _sum(inputs)
        else:
            merged = {block: why or name for reasons in inputs for block, why in reasons.items()}
        for x in tensors_in(out if name != "__setitem__" else args[0]):
            self._record(x, merged)
        return out

    def _check_embedding(self, options: dict[str, Any]) -> None:
        """`scale_grad_by_freq` scales first derivatives in reverse mode, and no others: neither route gets a q of them."""
        if options["scale_grad_by_freq"] and self.reasons(options["weight"]):
            raise UnsupportedOperationError(
                "must have scale_grad_by_freq=False where v may have a part in its weight, got True; create it without, or set "
                "mu=0"
            )

    def _is_linear(self, func: Func, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ("div", "true_divide", "lerp"):  # linear in all but the last argument: divisor, weight
            last = args[2:] if name == "lerp" else args[1:]
            return not any(self.reasons(x) for x in tensors_in((last, kwargs)))
        if func is F.batch_norm:
            options = batch_norm_options(args, kwargs)
            return not options["training"] and options["running_mean"] is not None
        if name in ("dropout", "__get__", "__setitem__"):
            return True
        if name == "abs":  # of a complex number it is no piecewise linear function
            return not any(x.is_complex() for x in tensors_in((args, kwargs)))
        return name in LINEAR


def described(reasons: Reasons, curvature: Curvature) -> dict[str, str]:
    """What q is for each block: exact (Gauss–Newton and Hessian agree), or which of the two and why they differ."""
    start = {"ggn": "ggn, differs from the Hessian by", "hessian": "hessian, differs from Gauss–Newton by"}[curvature]
    return {name: "exact" if why is None else f"{start}: {why}" for name, why in sorted(reasons.items())}


def _sum(parts: list[Reasons]) -> Reasons:
    merged: Reasons = {}
    for reasons in parts:
        for block, why in reasons.items():
            merged[block] = merged.get(block) or why
    return merged


def _product(factors: list[Reasons], name: str) -> Reasons:
    merged = _sum(factors)
    for block, why in merged.items():
        if why is None and sum(block in reasons for reasons in factors) > 1:
            merged[block] = name
    return merged

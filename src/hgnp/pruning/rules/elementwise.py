"""Operators that work entry by entry, and the tensors they fill."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hgnp.pruning.labels import Labelled, Result, tail, varies
from hgnp.pruning.rules.registry import name_of, rule, tensors

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower


def unknown(f: "Follower", *args: Any, **kwargs: Any) -> Result:
    for operand in tensors(args, kwargs):
        for label in operand.labels:
            f.fix(label, "this operator is not followed")
    return Result([], filler=False)


@rule("leaky_relu", "hardtanh", "native_dropout", "_to_copy", "detach", "alias", "lift_fresh", "contiguous", "hardswish",
      "_prelu_kernel", "rrelu_with_noise", "rrelu_with_noise_functional", "log_sigmoid_forward", "tanhshrink", "bernoulli",
      "floor_divide", "complex", "polar")  # fmt: skip
def elementwise(f: "Follower", *args: Any, **kwargs: Any) -> Result:
    operands = tensors(args, kwargs)
    ndim = max(len(operand.shape) for operand in operands)
    met = f.meet(operands, ndim)
    if name_of(f.step.op).removesuffix("_") in ("add", "sub", "rsub") and any(operand.carried for operand in operands):
        numbers = [Labelled(())] if any(isinstance(arg, int | float) and arg for arg in args) else []
        fix_offsets(f, met, [*operands, *numbers])
    return Result(met)


def fix_offsets(f: "Follower", labels: list[Tensor], operands: list[Labelled]) -> None:
    """Fix labels that some operand does not have: it adds to dead channels too, which then do not read as zero."""
    for label in labels:
        dims = set(varies(label))
        for operand in operands:
            mine = {dim for other in operand.labels for dim in varies(tail(other, label.dim()))}
            if not dims & mine:
                f.fix(label, "a layer over other dimensions adds a number of its own to it")


@rule("copy_")
def copy(f: "Follower", target: Labelled, source: Labelled, *args: Any) -> Result:
    f.meet([replace(target, filler=True), source], len(target.shape))
    return Result(list(source.labels), filler=source.filler)


@rule("fill", "zero")
def fill(f: "Follower", x: Labelled, *args: Any) -> Result:
    return Result(list(x.labels))


@rule("zeros", "ones", "full", "empty", "empty_strided", "new_zeros", "new_ones", "new_full", "new_empty",
      "new_empty_strided", "zeros_like", "ones_like", "full_like", "empty_like", "scalar_tensor", "rand", "randn",
      "rand_like", "randn_like", "bernoulli_", "normal_", "uniform_", "random_", "exponential_")  # fmt: skip
def filler(f: "Follower", *args: Any, **kwargs: Any) -> Result:
    return Result([], filler=True)


@rule("glu")
def glu(f: "Follower", x: Labelled, dim: int = -1) -> Result:
    dim %= len(x.shape)
    labels = []
    for label in x.labels:
        if label.shape[dim] > 1:
            label, gate = label.chunk(2, dim)
            f.tie(label, gate)
        labels.append(label)
    return Result(labels)

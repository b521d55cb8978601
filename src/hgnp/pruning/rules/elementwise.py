"""Elementwise operators, and operators that create a tensor of one value or noise."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hgnp.pruning.labels import LabelledTensor, RuleResult, add_leading_dims, slots_in, varying_dims
from hgnp.pruning.rules.registry import op_name, rule, tensor_arguments

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation


def unsupported(p: "LabelPropagation", *args: Any, **kwargs: Any) -> RuleResult:
    for operand in tensor_arguments(args, kwargs):
        for label in operand.labels:
            p.freeze(label, "this operator has no rule")
    return RuleResult([], filler=False)


@rule("leaky_relu", "hardtanh", "native_dropout", "_to_copy", "detach", "alias", "lift_fresh", "contiguous", "hardswish",
      "_prelu_kernel", "rrelu_with_noise", "rrelu_with_noise_functional", "log_sigmoid_forward", "tanhshrink", "bernoulli",
      "floor_divide", "complex", "polar")  # fmt: skip
def elementwise(p: "LabelPropagation", *args: Any, **kwargs: Any) -> RuleResult:
    operands = tensor_arguments(args, kwargs)
    ndim = max(len(operand.shape) for operand in operands)
    combined = p.broadcast(operands, ndim)
    name = op_name(p.call.op).removesuffix("_")
    passed = _labels_beside([(operand, operand.passed_through) for operand in operands], combined)
    if name in ("add", "sub", "rsub"):
        numbers = [LabelledTensor(())] if any(isinstance(arg, int | float) and arg for arg in args) else []
        freeze_offset_channels(p, passed, [*operands, *numbers])
    repeated = tuple(dim for dim in range(ndim) if all(operand.repeats(dim, ndim) for operand in operands))
    nonzero = [operand.nonzero_slots for operand in operands] + _labels_beside(
        [(each, each.nonzero_slots) for each in operands], combined
    )
    return RuleResult(
        combined,
        repeated=repeated,
        passed_through=slots_in(passed),
        nonzero_slots=nonzero_in_product(operands, combined) if name == "mul" else slots_in(nonzero),
    )


def _labels_beside(operands: list[tuple[LabelledTensor, Tensor]], combined: list[Tensor]) -> list[Tensor]:
    """The combined labels of operands along whose dimensions one of them has some of the slots beside it."""
    found = []
    for label in combined:
        dims = set(varying_dims(label))
        for operand, slots in operands if any(len(slots) for _, slots in operands) else ():
            mine = [own for own in operand.labels if dims & set(varying_dims(add_leading_dims(own, label.dim())))]
            if any(bool(torch.isin(own, slots).any()) for own in mine):
                found.append(label)
                break
    return found


def nonzero_in_product(factors: list[LabelledTensor], labels: list[Tensor]) -> Tensor:
    """The slots that may be nonzero in a product with these labels: one factor that reads as zero is enough."""
    ndim = max(len(factor.shape) for factor in factors)
    zero = [add_leading_dims(own, ndim) for factor in factors for own in factor.labels if factor.reads_zero(own)]
    zero_dims = {dim for own in zero for dim in varying_dims(own)}
    nonzero = slots_in([factor.nonzero_slots for factor in factors])
    return nonzero[~torch.isin(nonzero, slots_in([label for label in labels if zero_dims & set(varying_dims(label))]))]


def freeze_offset_channels(p: "LabelPropagation", labels: list[Tensor], operands: list[LabelledTensor]) -> None:
    """Freezes labels that an operand of an addition lacks: it is added to removed channels too, which are then not zero."""
    for label in labels:
        dims = set(varying_dims(label))
        for operand in operands:
            mine = {dim for other in operand.labels for dim in varying_dims(add_leading_dims(other, label.dim()))}
            if not dims & mine:
                p.freeze(label, "the bias of a layer over other dimensions is added to it")


@rule("copy_")
def copy(p: "LabelPropagation", target: LabelledTensor, source: LabelledTensor, *args: Any) -> RuleResult:
    p.broadcast([replace(target, filler=True), source], len(target.shape))
    return RuleResult(list(source.labels), filler=source.filler)


@rule("fill", "zero")
def fill(p: "LabelPropagation", x: LabelledTensor, *args: Any) -> RuleResult:
    return RuleResult(list(x.labels))


@rule("zeros", "ones", "full", "empty", "empty_strided", "new_zeros", "new_ones", "new_full", "new_empty",
      "new_empty_strided", "zeros_like", "ones_like", "full_like", "empty_like", "scalar_tensor", "rand", "randn",
      "rand_like", "randn_like", "bernoulli_", "normal_", "uniform_", "random_", "exponential_")  # fmt: skip
def filler(p: "LabelPropagation", *args: Any, **kwargs: Any) -> RuleResult:
    return RuleResult([], filler=True)


@rule("glu")
def glu(p: "LabelPropagation", x: LabelledTensor, dim: int = -1) -> RuleResult:
    dim %= len(x.shape)
    labels = []
    for label in x.labels:
        if label.shape[dim] > 1:
            label, gate = label.chunk(2, dim)
            p.union(label, gate)
        labels.append(label)
    return RuleResult(labels)

"""Matrix products and convolutions: the channels of their inputs end there and new ones begin."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hgnp.pruning.labels import LabelledTensor, RuleResult, heads_dims, slots_in, varying_dims, vector_label
from hgnp.pruning.rules.elementwise import freeze_offset_channels, nonzero_in_product
from hgnp.pruning.rules.registry import rule

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation


def _label_along(p: "LabelPropagation", x: LabelledTensor, dim: int) -> Tensor | None:
    """The label along `dim` as a vector, with its slots along other dimensions united."""
    label = x.along(dim)
    return None if label is None else p.collapse(label, (dim,)).reshape(-1)


def _contract(p: "LabelPropagation", a: LabelledTensor, a_dim: int, b: LabelledTensor, b_dim: int) -> None:
    """Σ over a's dimension and b's: its entries are coupled; a removed one adds nothing, unless both operands are weights."""
    one, other = _label_along(p, a, a_dim), _label_along(p, b, b_dim)
    weights = a.is_weight and b.is_weight
    ends = [
        (operand, label) for operand, label in ((a, one), (b, other)) if label is not None and not operand.is_weight
    ]
    if ends:  # channels that both factors have are the same, and end once, where they read as zero
        p.consume(*max(ends, key=lambda end: end[0].reads_zero(end[1])))
    if one is not None and other is not None and not weights:
        p.union(one, other)
        return
    for label, partner, dim in ((one, b, b_dim), (other, a, a_dim)):
        if label is not None and (partner.distinct(dim) or weights):
            p.freeze(label, "it is multiplied with a tensor that cannot be cut")


def _product(p: "LabelPropagation", a: LabelledTensor, b: LabelledTensor) -> tuple[list[Tensor], Tensor]:
    """The labels of (…, m, k) by (…, k, n), both with the same number of dimensions, and which slots may be nonzero."""
    ndim = len(a.shape)
    p.add_heads(a, b)
    _contract(p, a, ndim - 1, b, ndim - 2)
    left = replace(
        a, shape=(*a.shape[:-1], 1), labels=tuple(label for label in a.labels if label.shape[-1] == 1), expanded=()
    )
    right = replace(
        b,
        shape=(*b.shape[:-2], 1, b.shape[-1]),
        labels=tuple(label for label in b.labels if label.shape[-2] == 1),
        expanded=(),
    )
    combined = p.broadcast([left, right], ndim)
    # a layer applied to a parameter (a learned query, a position embedding): both are weights, and the layer's is on the right
    rows = b.along(ndim - 1) if b.is_weight else a.along(ndim - 2) if a.is_weight else None
    computes_weight = a.is_weight and b.is_weight and not p.applies_layer()  # such as the low-rank part of LoRA
    if rows is not None and not computes_weight:
        p.add_rows(rows.reshape(-1))
    return combined, nonzero_in_product([left, right], combined)


@rule("mm", "bmm")
def mm(p: "LabelPropagation", a: LabelledTensor, b: LabelledTensor, *args: Any) -> RuleResult:
    combined, nonzero = _product(p, a, b)
    return RuleResult(combined, passed_through=slots_in(_passed_through(a, b, combined)), nonzero_slots=nonzero)


@rule("addmm", "baddbmm")
def addmm(
    p: "LabelPropagation", bias: LabelledTensor, a: LabelledTensor, b: LabelledTensor, **kwargs: Any
) -> RuleResult:
    shape = (*a.shape[:-1], b.shape[-1])
    product, nonzero = _product(p, a, b)
    passed_through = _passed_through(a, b, product)
    freeze_offset_channels(p, passed_through, [bias])
    return RuleResult(
        p.broadcast([LabelledTensor(shape, tuple(product)), bias], len(shape)),
        passed_through=slots_in(passed_through),
        nonzero_slots=slots_in([bias.nonzero_slots, nonzero]),
    )


def _passed_through(a: LabelledTensor, b: LabelledTensor, combined: list[Tensor]) -> list[Tensor]:
    """Labels of features, not of weights, that pass through a product over another dimension. Heads do not: both factors have
    them."""
    own = slots_in([label for operand in (a, b) if not operand.is_weight for label in operand.labels])
    shared = set(heads_dims(a)) & set(heads_dims(b))
    return [label for label in combined if bool(torch.isin(label, own).any()) and not shared & set(varying_dims(label))]


@rule("mv")
def mv(p: "LabelPropagation", a: LabelledTensor, b: LabelledTensor) -> RuleResult:
    _contract(p, a, 1, b, 0)
    return RuleResult([label.reshape(-1) for label in a.labels if label.shape[1] == 1])


@rule("dot", "vdot")
def dot(p: "LabelPropagation", a: LabelledTensor, b: LabelledTensor) -> RuleResult:
    _contract(p, a, 0, b, 0)
    return RuleResult([])


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def convolution(
    p: "LabelPropagation",
    x: LabelledTensor,
    w: LabelledTensor,
    b: LabelledTensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *args: Any,
) -> RuleResult:
    ndim = len(x.shape)
    for label in w.labels:
        if max(varying_dims(label)) > 1:
            p.freeze(label, "it is a kernel size")
    if groups == 1:
        _contract(p, x, 1, w, 0 if transposed else 1)
        out = _label_along(p, w, 1 if transposed else 0)
    else:
        out = _grouped(p, x, w, transposed, groups)
    channels = w.shape[1] * groups if transposed else w.shape[0]
    labels = [] if out is None else [out]
    if out is not None:
        p.add_rows(out)
    if b is not None:
        entry = LabelledTensor((channels,), tuple(labels))
        p.broadcast([entry, b], 1)
    batch = [p.collapse(label, (0,)) for label in x.labels if label.shape[1] == 1]
    return RuleResult([vector_label(out, 1, ndim) for out in labels] + [label for label in batch if label.shape[0] > 1])


def _grouped(
    p: "LabelPropagation", x: LabelledTensor, w: LabelledTensor, transposed: bool, groups: int
) -> Tensor | None:
    """The labels of the outputs of a grouped convolution.

    Every group must keep as many inputs, and as many outputs, as the others. Either whole groups are removed (the only way for
    a depthwise convolution), or the j-th channel of every group is: whichever takes fewer neurons at a time. Where the inputs
    of a group are removed together, as those of a head are, only whole groups can be.
    """
    inputs, rows, columns = _label_along(p, x, 1), _label_along(p, w, 0), _label_along(p, w, 1)
    inside = x.shape[1] // groups
    outside = w.shape[1] if transposed else w.shape[0] // groups
    whole = (
        inside == 1 or inside + outside <= groups or (inputs is not None and p.is_coupled(inputs.reshape(groups, -1)))
    )
    if rows is None:
        for label in (inputs, columns):
            if label is not None:
                p.freeze(label, "it is convolved with a kernel that cannot be cut")
        return None
    per_group = rows.reshape(groups, -1)
    if whole:
        p.union(per_group[:, :1], per_group)
        if inputs is not None:
            p.union(per_group[:, :1], inputs.reshape(groups, -1))
        elif x.distinct(1):
            p.freeze(rows, "it reads a tensor that cannot be cut")
        if columns is not None:
            p.freeze(columns, "whole groups are removed")
        p.groups[p.call.module] = per_group[:, 0]
        return per_group[:, 0].repeat_interleave(outside) if transposed else rows
    p.union(per_group[:1], per_group)
    if inputs is not None and not x.is_weight:
        p.consume(x, inputs)
    shared = per_group[0] if transposed else columns
    if inputs is not None and shared is not None:
        p.union(shared, inputs.reshape(groups, -1))
    elif inputs is not None:
        p.freeze(inputs, "it is convolved with a kernel that cannot be cut")
    elif shared is not None and x.distinct(1):
        p.freeze(shared, "it reads a tensor that cannot be cut")
    return columns.repeat(groups) if transposed and columns is not None else None if transposed else rows

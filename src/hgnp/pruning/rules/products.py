"""Matrix products and convolutions: where channels are consumed and new ones made."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hgnp.pruning.labels import Labelled, Result, varies, vector
from hgnp.pruning.rules.elementwise import fix_offsets
from hgnp.pruning.rules.registry import rule

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower


def _flat(f: "Follower", x: Labelled, dim: int) -> Tensor | None:
    label = x.along(dim)
    return None if label is None else f.collapse(label, (dim,)).reshape(-1)


def _contract(f: "Follower", a: Labelled, a_dim: int, b: Labelled, b_dim: int) -> None:
    """Σ over a's dimension and b's: the entries go together; a dead one adds nothing, unless both sides are weights."""
    one, other = _flat(f, a, a_dim), _flat(f, b, b_dim)
    weights = a.weight and b.weight
    for operand, label in ((a, one), (b, other)):
        if label is not None and not operand.weight:
            f.consume(operand, label)  # channels that both factors carry are one channel, read once
            break
    if one is not None and other is not None and not weights:
        f.tie(one, other)
        return
    for label, partner, dim in ((one, b, b_dim), (other, a, a_dim)):
        if label is not None and (partner.solid(dim) or weights):
            f.fix(label, "it is multiplied with a tensor that cannot be cut")


def _product(f: "Follower", a: Labelled, b: Labelled) -> list[Tensor]:
    """(…, m, k) by (…, k, n), both with the same number of dimensions."""
    ndim = len(a.shape)
    _contract(f, a, ndim - 1, b, ndim - 2)
    left = replace(
        a, shape=(*a.shape[:-1], 1), labels=tuple(label for label in a.labels if label.shape[-1] == 1), repeated=()
    )
    right = replace(
        b,
        shape=(*b.shape[:-2], 1, b.shape[-1]),
        labels=tuple(label for label in b.labels if label.shape[-2] == 1),
        repeated=(),
    )
    met = f.meet([left, right], ndim)
    # where a layer is applied to a parameter (a learned query, a table of places) both are weights: the layer's is on the right
    rows = b.along(ndim - 1) if b.weight else a.along(ndim - 2) if a.weight else None
    if rows is not None:
        f.saw_rows(rows.reshape(-1))
    return met


@rule("mm", "bmm")
def mm(f: "Follower", a: Labelled, b: Labelled, *args: Any) -> Result:
    met = _product(f, a, b)
    return Result(met, carried=bool(_carried(a, b, met)))


@rule("addmm", "baddbmm")
def addmm(f: "Follower", bias: Labelled, a: Labelled, b: Labelled, **kwargs: Any) -> Result:
    shape = (*a.shape[:-1], b.shape[-1])
    product = _product(f, a, b)
    carried = _carried(a, b, product)
    fix_offsets(f, carried, [bias])
    return Result(f.meet([Labelled(shape, tuple(product)), bias], len(shape)), carried=bool(carried))


def _carried(a: Labelled, b: Labelled, met: list[Tensor]) -> list[Tensor]:
    """Labels of features, not of weights, that a product over another dimension hands on."""
    own = [label for operand in (a, b) if not operand.weight for label in operand.labels]
    return [label for label in met if any(label is other for other in own)]


@rule("mv")
def mv(f: "Follower", a: Labelled, b: Labelled) -> Result:
    _contract(f, a, 1, b, 0)
    return Result([label.reshape(-1) for label in a.labels if label.shape[1] == 1])


@rule("dot", "vdot")
def dot(f: "Follower", a: Labelled, b: Labelled) -> Result:
    _contract(f, a, 0, b, 0)
    return Result([])


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def convolution(f: "Follower", x: Labelled, w: Labelled, b: Labelled | None, stride: Any, padding: Any, dilation: Any,
                transposed: bool, output_padding: Any, groups: int, *args: Any) -> Result:  # fmt: skip
    ndim = len(x.shape)
    for label in w.labels:
        if max(varies(label)) > 1:
            f.fix(label, "a kernel keeps its size")
    if groups == 1:
        _contract(f, x, 1, w, 0 if transposed else 1)
        out = _flat(f, w, 1 if transposed else 0)
    else:
        out = _grouped(f, x, w, transposed, groups)
    channels = w.shape[1] * groups if transposed else w.shape[0]
    labels = [] if out is None else [out]
    if out is not None:
        f.saw_rows(out)
    if b is not None:
        entry = Labelled((channels,), tuple(labels))
        f.meet([entry, b], 1)
    batch = [f.collapse(label, (0,)) for label in x.labels if label.shape[1] == 1]
    return Result([vector(out, 1, ndim) for out in labels] + [label for label in batch if label.shape[0] > 1])


def _grouped(f: "Follower", x: Labelled, w: Labelled, transposed: bool, groups: int) -> Tensor | None:
    """The labels of the outputs of a grouped convolution.

    Every group must keep as many inputs, and as many outputs, as the others. Either whole groups go (the only way for a
    depthwise convolution), or the j-th channel of every group goes: whichever takes fewer neurons at a time.
    """
    inputs, rows, columns = _flat(f, x, 1), _flat(f, w, 0), _flat(f, w, 1)
    inside = x.shape[1] // groups
    outside = w.shape[1] if transposed else w.shape[0] // groups
    whole = inside == 1 or inside + outside <= groups
    if rows is None:
        for label in (inputs, columns):
            if label is not None:
                f.fix(label, "it is convolved with a kernel that cannot be cut")
        return None
    per_group = rows.reshape(groups, -1)
    if whole:
        f.tie(per_group[:, :1], per_group)
        if inputs is not None:
            f.tie(per_group[:, :1], inputs.reshape(groups, -1))
        elif x.solid(1):
            f.fix(rows, "it reads a tensor that cannot be cut")
        if columns is not None:
            f.fix(columns, "whole groups go")
        f.blocks[f.step.module] = per_group[:, 0]
        return per_group[:, 0].repeat_interleave(outside) if transposed else rows
    f.tie(per_group[:1], per_group)
    if inputs is not None and not x.weight:
        f.consume(x, inputs)
    shared = per_group[0] if transposed else columns
    if inputs is not None and shared is not None:
        f.tie(shared, inputs.reshape(groups, -1))
    elif inputs is not None:
        f.fix(inputs, "it is convolved with a kernel that cannot be cut")
    elif shared is not None and x.solid(1):
        f.fix(shared, "it reads a tensor that cannot be cut")
    return columns.repeat(groups) if transposed and columns is not None else None if transposed else rows

"""Operators that reduce, accumulate, pool or resample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hgnp.pruning.labels import LabelledTensor, RuleResult, slots_in, varying_dims, vector_label
from hgnp.pruning.rules.elementwise import elementwise
from hgnp.pruning.rules.registry import Rule, normalise_dims, rule, tensor_arguments

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation


def _reduce(
    p: "LabelPropagation", x: LabelledTensor, dims: tuple[int, ...], keepdim: bool, *, exact: bool, norm: bool
) -> RuleResult:
    labels = []
    for label in x.labels:
        inside = set(varying_dims(label)) & set(dims)
        if inside and set(varying_dims(label)) - inside:
            label = p.collapse(label, tuple(d for d in varying_dims(label) if d not in dims))
        elif inside:
            if not ((exact and not x.is_weight) or (norm and p.approximate and not x.is_weight)):
                p.freeze(label, "its channels are reduced to one value")
            elif not x.is_weight:
                p.consume(x, label)
            continue
        labels.append(label if keepdim else label.squeeze(dims))
    return RuleResult(labels)


@rule("sum")
def total(
    p: "LabelPropagation", x: LabelledTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> RuleResult:
    return _reduce(p, x, normalise_dims(dim, len(x.shape)), keepdim, exact=True, norm=False)


@rule("linalg_vector_norm")
def vector_norm(
    p: "LabelPropagation", x: LabelledTensor, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> RuleResult:
    exact = isinstance(order, int | float) and 0 < order < float("inf")
    return _reduce(p, x, normalise_dims(dim, len(x.shape)), keepdim, exact=exact, norm=False)


@rule("norm")
def norm(
    p: "LabelPropagation", x: LabelledTensor, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> RuleResult:
    return vector_norm(p, x, 2 if order is None else order, dim, keepdim)  # type: ignore[return-value]


@rule("mean", "var", "std", "var_mean", "std_mean")
def mean(
    p: "LabelPropagation", x: LabelledTensor, dim: Any = None, keepdim: bool = False, *args: Any, **kwargs: Any
) -> RuleResult:
    if isinstance(dim, bool):  # var(x, unbiased) reduces everything
        dim = None
    return _reduce(
        p, x, normalise_dims(dim, len(x.shape)), bool(kwargs.get("keepdim", keepdim)), exact=False, norm=True
    )


@rule("amax", "amin", "prod", "logsumexp", "argmax", "argmin", "any", "all", "median")
def extreme(
    p: "LabelPropagation", x: LabelledTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> RuleResult:
    if dim is None and p.call.reads[0] in p.graph.finite_checks:  # a removed entry reads as zero, which is finite
        return RuleResult([])
    return _reduce(p, x, normalise_dims(dim, len(x.shape)), keepdim, exact=False, norm=False)


@rule("max", "min")
def maximum(p: "LabelPropagation", x: LabelledTensor, dim: Any = None, keepdim: bool = False) -> RuleResult:
    if isinstance(dim, LabelledTensor):
        return elementwise(p, x, dim)  # type: ignore[return-value]
    return extreme(p, x, dim, keepdim)  # type: ignore[return-value]


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(p: "LabelPropagation", x: LabelledTensor, dim: int, *args: Any, **kwargs: Any) -> RuleResult:
    """The outputs of a softmax are never zero: over channels, one that is removed changes the others; over other dimensions, it
    no longer reads as zero."""
    dim %= max(len(x.shape), 1)
    labels = []
    for label in x.labels:
        others = tuple(d for d in varying_dims(label) if d != dim)
        if others:
            labels.append(p.collapse(label, others))
        else:
            p.freeze(label, "a softmax makes it nonzero")
    return RuleResult(labels, nonzero_slots=slots_in(labels))


@rule("cumsum", "cumprod", "logcumsumexp", "sort")
def mixed(p: "LabelPropagation", x: LabelledTensor, dim: int = -1, *args: Any, **kwargs: Any) -> RuleResult:
    dim %= max(len(x.shape), 1)
    labels = []
    for label in x.labels:
        if label.shape[dim] > 1 and varying_dims(label) == (dim,):
            p.freeze(label, "each of its channels depends on the others")
            continue
        labels.append(
            p.collapse(label, tuple(d for d in varying_dims(label) if d != dim)) if label.shape[dim] > 1 else label
        )
    return RuleResult(labels)


# Spatial pooling, resampling and padding


def _spatial(dims: int) -> Rule:
    def channelwise(p: "LabelPropagation", x: LabelledTensor, *args: Any, **kwargs: Any) -> RuleResult:
        space = range(len(x.shape) - dims, len(x.shape))
        for label in [label for other in tensor_arguments(args, kwargs) for label in other.labels]:
            p.freeze(label, "it holds indices, not channels")
        labels = []
        for label in x.labels:
            if set(varying_dims(label)) <= set(space):
                p.freeze(label, "its channels are mixed as if they were spatial positions")
            else:
                labels.append(p.collapse(label, tuple(d for d in varying_dims(label) if d not in space)))
        return RuleResult(labels)

    return channelwise


for _dims in (1, 2, 3):
    rule(*(f"{name}{_dims}d" for name in (
        "avg_pool", "_adaptive_avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_pool", "lp_pool",
        "reflection_pad", "replication_pad", "upsample_nearest", "_upsample_nearest_exact")))(_spatial(_dims))  # fmt: skip
    rule(f"max_pool{_dims}d_with_indices", f"fractional_max_pool{_dims}d")(_spatial(_dims))
rule("upsample_linear1d")(_spatial(1))
rule("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler_2d",
     "grid_sampler")(_spatial(2))  # fmt: skip
rule("upsample_trilinear3d", "grid_sampler_3d")(_spatial(3))


@rule("im2col")
def im2col(p: "LabelPropagation", x: LabelledTensor, kernel: Sequence[int], *args: Any) -> RuleResult:
    labels = [p.collapse(label, (1,)) for label in x.labels]
    patch = kernel[0] * kernel[1]
    return RuleResult([vector_label(label.reshape(-1).repeat_interleave(patch), 1, 3) for label in labels])


@rule("col2im")
def col2im(
    p: "LabelPropagation", x: LabelledTensor, size: Sequence[int], kernel: Sequence[int], *args: Any
) -> RuleResult:
    labels = []
    for label in x.labels:
        patches = p.collapse(label, (1,)).reshape(-1, kernel[0] * kernel[1])
        p.union(patches[:, :1], patches)
        labels.append(vector_label(patches[:, 0], 1, 4))
    return RuleResult(labels)

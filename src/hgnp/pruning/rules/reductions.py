"""Operators that reduce, mix, pool or resample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hgnp.pruning.labels import Labelled, Result, varies, vector
from hgnp.pruning.rules.elementwise import elementwise
from hgnp.pruning.rules.registry import Rule, positive, rule, tensors

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower


def _reduce(f: "Follower", x: Labelled, dims: tuple[int, ...], keepdim: bool, *, exact: bool, norm: bool) -> Result:
    labels = []
    for label in x.labels:
        inside = set(varies(label)) & set(dims)
        if inside and set(varies(label)) - inside:
            label = f.collapse(label, tuple(d for d in varies(label) if d not in dims))
        elif inside:
            if not ((exact and not x.weight) or (norm and f.approximate and not x.weight)):
                f.fix(label, "its channels are reduced to one value")
            elif not x.weight:
                f.consume(x, label)
            continue
        labels.append(label if keepdim else label.squeeze(dims))
    return Result(labels)


@rule("sum")
def total(f: "Follower", x: Labelled, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Result:
    return _reduce(f, x, positive(dim, len(x.shape)), keepdim, exact=True, norm=False)


@rule("linalg_vector_norm")
def vector_norm(
    f: "Follower", x: Labelled, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Result:
    exact = isinstance(order, int | float) and 0 < order < float("inf")
    return _reduce(f, x, positive(dim, len(x.shape)), keepdim, exact=exact, norm=False)


@rule("norm")
def norm(f: "Follower", x: Labelled, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Result:
    return vector_norm(f, x, 2 if order is None else order, dim, keepdim)  # type: ignore[return-value]


@rule("mean", "var", "std", "var_mean", "std_mean")
def mean(f: "Follower", x: Labelled, dim: Any = None, keepdim: bool = False, *args: Any, **kwargs: Any) -> Result:
    if isinstance(dim, bool):  # var(x, unbiased) reduces everything
        dim = None
    return _reduce(f, x, positive(dim, len(x.shape)), bool(kwargs.get("keepdim", keepdim)), exact=False, norm=True)


@rule("amax", "amin", "prod", "logsumexp", "argmax", "argmin", "any", "all", "median")
def extreme(f: "Follower", x: Labelled, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Result:
    return _reduce(f, x, positive(dim, len(x.shape)), keepdim, exact=False, norm=False)


@rule("max", "min")
def maximum(f: "Follower", x: Labelled, dim: Any = None, keepdim: bool = False) -> Result:
    if isinstance(dim, Labelled):
        return elementwise(f, x, dim)  # type: ignore[return-value]
    return extreme(f, x, dim, keepdim)  # type: ignore[return-value]


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(f: "Follower", x: Labelled, *args: Any, **kwargs: Any) -> Result:
    """Shares are never zero, so a channel that is turned into shares, over whatever dimension, does not read as zero after."""
    for label in x.labels:
        f.fix(label, "it is turned into shares that add up to one")
    return Result([])


@rule("cumsum", "cumprod", "logcumsumexp", "sort")
def mixed(f: "Follower", x: Labelled, dim: int = -1, *args: Any, **kwargs: Any) -> Result:
    dim %= max(len(x.shape), 1)
    labels = []
    for label in x.labels:
        if label.shape[dim] > 1 and varies(label) == (dim,):
            f.fix(label, "each of its channels depends on the others")
            continue
        labels.append(f.collapse(label, tuple(d for d in varies(label) if d != dim)) if label.shape[dim] > 1 else label)
    return Result(labels)


# Pooled, resampled, padded in space


def _spatial(dims: int) -> Rule:
    def channelwise(f: "Follower", x: Labelled, *args: Any, **kwargs: Any) -> Result:
        space = range(len(x.shape) - dims, len(x.shape))
        for label in [label for other in tensors(args, kwargs) for label in other.labels]:
            f.fix(label, "it holds places, not channels")
        labels = []
        for label in x.labels:
            if set(varies(label)) <= set(space):
                f.fix(label, "its channels are mixed as if they were places")
            else:
                labels.append(f.collapse(label, tuple(d for d in varies(label) if d not in space)))
        return Result(labels)

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
def im2col(f: "Follower", x: Labelled, kernel: Sequence[int], *args: Any) -> Result:
    labels = [f.collapse(label, (1,)) for label in x.labels]
    patch = kernel[0] * kernel[1]
    return Result([vector(label.reshape(-1).repeat_interleave(patch), 1, 3) for label in labels])


@rule("col2im")
def col2im(f: "Follower", x: Labelled, size: Sequence[int], kernel: Sequence[int], *args: Any) -> Result:
    labels = []
    for label in x.labels:
        patches = f.collapse(label, (1,)).reshape(-1, kernel[0] * kernel[1])
        f.tie(patches[:, :1], patches)
        labels.append(vector(patches[:, 0], 1, 4))
    return Result(labels)

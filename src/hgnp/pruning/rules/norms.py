"""Normalisation. Per channel it is exact; across channels it fixes them, unless an approximation will do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hgnp.pruning.labels import Labelled, Result, varies, vector
from hgnp.pruning.rules.registry import rule, tensors

if TYPE_CHECKING:
    from hgnp.pruning.propagation import Follower

MIXES = "a norm mixes its channels; approximate=True lets them go"


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
      "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
      "_batch_norm_with_update_functional", "_batch_norm_no_update")  # fmt: skip
def batch_norm(f: "Follower", x: Labelled, *args: Any, **kwargs: Any) -> list[Result]:
    ndim = len(x.shape)
    entries = [_per_channel(entry, ndim) for entry in tensors(args, kwargs)]
    labels = []
    for label in x.labels:
        if label.shape[1] > 1:
            label = f.collapse(label, (1,))
        elif not f.approximate:  # normalised over: features of a sequence, the columns of a standardised weight
            f.fix(label, MIXES)
        labels.append(label)
    met = f.meet([replace(x, labels=tuple(labels)), *entries], ndim)
    return [Result(met)] + [Result([], filler=False, aside=True)] * (len(f.step.writes) - 1)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(f: "Follower", x: Labelled, shape: Sequence[int], *args: Any) -> list[Result]:
    normalised = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    labels = []
    for label in x.labels:
        inside = set(varies(label)) & set(normalised)
        if inside and set(varies(label)) - inside:
            label = f.collapse(label, tuple(d for d in varies(label) if d not in normalised))
        elif inside and not f.approximate:
            f.fix(label, MIXES)
        labels.append(label)
    met = f.meet([replace(x, labels=tuple(labels)), *tensors(args)], len(x.shape))
    return [Result(met)] + [Result([], filler=False, aside=True)] * (len(f.step.writes) - 1)


@rule("native_group_norm")
def group_norm(
    f: "Follower", x: Labelled, weight: Any, bias: Any, n: int, channels: int, hw: int, groups: int, eps: float
) -> list[Result]:
    labels = []
    for label in x.labels:
        label = f.collapse(label, (1,))
        if label.shape[1] > 1:
            grid = label.reshape(groups, -1)
            if groups < channels and not f.approximate:
                f.fix(label, MIXES)
            elif groups > 1:
                f.tie(grid[:, :1], grid)
                f.blocks[f.step.module] = grid[:, 0]
        labels.append(label)
    ndim = len(x.shape)
    entries = [_per_channel(entry, ndim) for entry in tensors(weight, bias)]
    met = f.meet([replace(x, labels=tuple(labels)), *entries], ndim)
    return [Result(met)] + [Result([], filler=False, aside=True)] * (len(f.step.writes) - 1)


@rule("_weight_norm_interface")
def weight_norm(f: "Follower", direction: Labelled, magnitude: Labelled, dim: int = 0) -> list[Result]:
    """Each slice along `dim` is scaled by the norm of its other entries: those stay, or its weights would change."""
    for label in direction.labels:
        if label.shape[dim] == 1 and not f.approximate:
            f.fix(label, MIXES)
    met = f.meet([direction, magnitude], len(direction.shape))
    return [Result(met), Result([], filler=False, aside=True)]


def _per_channel(entry: Labelled, ndim: int) -> Labelled:
    """A vector over channels, seen as (C, 1, …, 1) beside a tensor of `ndim` dimensions."""
    labels = tuple(vector(label, 0, ndim - 1) for label in entry.labels)
    return replace(entry, shape=(entry.shape[0],) + (1,) * (ndim - 2), labels=labels, repeated=())

"""Normalisation. Per channel it is exact; across channels it freezes them, unless `approximate` is set."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hgnp.pruning.labels import LabelledTensor, RuleResult, varying_dims, vector_label
from hgnp.pruning.rules.registry import rule, tensor_arguments

if TYPE_CHECKING:
    from hgnp.pruning.propagation import LabelPropagation

MIXES_CHANNELS = "a norm mixes its channels; approximate=True allows removing them"


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
      "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
      "_batch_norm_with_update_functional", "_batch_norm_no_update")  # fmt: skip
def batch_norm(p: "LabelPropagation", x: LabelledTensor, *args: Any, **kwargs: Any) -> list[RuleResult]:
    ndim = len(x.shape)
    entries = [_per_channel(entry, ndim) for entry in tensor_arguments(args, kwargs)]
    labels = []
    for label in x.labels:
        if label.shape[1] > 1:
            label = p.collapse(label, (1,))
        elif not p.approximate:  # normalised over: features of a sequence, columns of a standardised weight
            p.freeze(label, MIXES_CHANNELS)
        labels.append(label)
    combined = p.broadcast([replace(x, labels=tuple(labels)), *entries], ndim)
    return [RuleResult(combined)] + [RuleResult([], filler=False, byproduct=True)] * (len(p.call.writes) - 1)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(p: "LabelPropagation", x: LabelledTensor, shape: Sequence[int], *args: Any) -> list[RuleResult]:
    normalised = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    labels = []
    for label in x.labels:
        inside = set(varying_dims(label)) & set(normalised)
        if inside and set(varying_dims(label)) - inside:
            label = p.collapse(label, tuple(d for d in varying_dims(label) if d not in normalised))
        elif inside and not p.approximate:
            p.freeze(label, MIXES_CHANNELS)
        labels.append(label)
    combined = p.broadcast([replace(x, labels=tuple(labels)), *tensor_arguments(args)], len(x.shape))
    return [RuleResult(combined)] + [RuleResult([], filler=False, byproduct=True)] * (len(p.call.writes) - 1)


@rule("native_group_norm")
def group_norm(
    p: "LabelPropagation",
    x: LabelledTensor,
    weight: Any,
    bias: Any,
    n: int,
    channels: int,
    hw: int,
    groups: int,
    eps: float,
) -> list[RuleResult]:
    labels = []
    for label in x.labels:
        label = p.collapse(label, (1,))
        if label.shape[1] > 1:
            grid = label.reshape(groups, -1)
            if groups < channels and not p.approximate:
                p.freeze(label, MIXES_CHANNELS)
            elif groups > 1:
                p.union(grid[:, :1], grid)
                p.groups[p.call.module] = grid[:, 0]
        labels.append(label)
    ndim = len(x.shape)
    entries = [_per_channel(entry, ndim) for entry in tensor_arguments(weight, bias)]
    combined = p.broadcast([replace(x, labels=tuple(labels)), *entries], ndim)
    return [RuleResult(combined)] + [RuleResult([], filler=False, byproduct=True)] * (len(p.call.writes) - 1)


@rule("_weight_norm_interface")
def weight_norm(
    p: "LabelPropagation", direction: LabelledTensor, magnitude: LabelledTensor, dim: int = 0
) -> list[RuleResult]:
    """Each slice along `dim` is divided by its norm over the other dimensions: slots there stay, or the norm would change."""
    for label in direction.labels:
        if label.shape[dim] == 1 and not p.approximate:
            p.freeze(label, MIXES_CHANNELS)
    combined = p.broadcast([direction, magnitude], len(direction.shape))
    return [RuleResult(combined), RuleResult([], filler=False, byproduct=True)]


def _per_channel(entry: LabelledTensor, ndim: int) -> LabelledTensor:
    """A vector over channels, reshaped to (C, 1, …, 1) to broadcast with a tensor of `ndim` dimensions."""
    labels = tuple(vector_label(label, 0, ndim - 1) for label in entry.labels)
    return replace(entry, shape=(entry.shape[0],) + (1,) * (ndim - 2), labels=labels, expanded=())

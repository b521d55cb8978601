"""Rules: what each ATen operator does to channels.

A rule takes the label propagation `p` and the operator's own arguments, with each tensor replaced by its `LabelledTensor`. It
unites and freezes slots through `p` and returns a `RuleResult` for each tensor that the operator returns (or one for all).

Exactness is measured against masking: a removed entry reads as zero. Matrix products, convolutions and sums over channels
are therefore exact; means, maxima and softmaxes over channels are not, and freeze them.
"""

from functools import cache

import torch
from torch._ops import OpOverload

from hgnp.pruning.rules import norms, products, reductions
from hgnp.pruning.rules.elementwise import elementwise, fill, filler, unsupported
from hgnp.pruning.rules.registry import RULES, Rule, op_name
from hgnp.pruning.rules.views import (
    RESHAPES,
    independent_dims,
    permutes_dims,
    rearrange,
    rearrangement,
    resolved_sizes,
    scatter,
    split,
)

__all__ = [
    "PRODUCTS",
    "RESHAPES",
    "elementwise",
    "filler",
    "independent_dims",
    "norms",
    "op_name",
    "permutes_dims",
    "products",
    "rearrangement",
    "reductions",
    "resolved_sizes",
    "rule_for",
]


PRESERVES_FILLER: tuple[Rule, ...] = (elementwise, rearrange, split, fill, scatter)
"""Rules that treat each channel alone, so that a filler among the operands fits any width: a sum over a filler, in contrast,
depends on its size."""


PRODUCTS: tuple[Rule, ...] = (products.mm, products.addmm, products.mv, products.dot, products.convolution)


@cache
def rule_for(op: OpOverload) -> Rule:
    name = op_name(op)
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if rule is rearrange and name.endswith("_"):  # reshapes its argument in place
        return unsupported
    if rule is not None:
        return rule
    return elementwise if torch.Tag.pointwise in op.tags else unsupported

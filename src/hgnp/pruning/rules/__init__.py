"""What each ATen operator does to channels.

A rule takes the operator's own arguments, tensors replaced by `Labelled`, ties and fixes slots through the follower `f`
and returns a `Result` for each tensor the operator returns (one for all, if it returns a single one).

Exactness is measured against masking: a dead entry reads as zero. Matrix products, convolutions and sums over channels
are therefore exact; means, maxima and softmaxes over channels are not and fix them.
"""

import torch
from torch._ops import OpOverload

from hgnp.pruning.rules import norms, products, reductions
from hgnp.pruning.rules.elementwise import elementwise, fill, filler, unknown
from hgnp.pruning.rules.registry import RULES, Rule, name_of
from hgnp.pruning.rules.views import RESHAPES, move, mover, split, turns

__all__ = [
    "RESHAPES",
    "elementwise",
    "filler",
    "mover",
    "name_of",
    "norms",
    "products",
    "reductions",
    "rule_for",
    "turns",
]


KEEP_FILLER: tuple[Rule, ...] = (elementwise, move, split, fill)
"""One value everywhere stays so entry by entry and when moved about; a sum over it depends on how many there are."""


def rule_for(op: OpOverload) -> Rule:
    name = name_of(op)
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if rule is move and name.endswith("_"):  # reshapes its argument in place
        return unknown
    if rule is not None:
        return rule
    return elementwise if torch.Tag.pointwise in op.tags else unknown

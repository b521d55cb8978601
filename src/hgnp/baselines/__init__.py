"""What HGNP is compared with: scores that look at weights alone, and SAM as another way to flat minima.

The Taylor baseline is `sensitivity` of the loss without its flatness term.
"""

from collections.abc import Callable

from hgnp.baselines.bn_scale import bn_scale
from hgnp.baselines.geometric_median import geometric_median
from hgnp.baselines.magnitude import l1, l2
from hgnp.baselines.random import random
from hgnp.baselines.sam import SAM
from hgnp.neurons import Neurons, Scores

WEIGHT_SCORES: dict[str, Callable[[Neurons], Scores]] = {
    "l1": l1,
    "l2": l2,
    "bn_scale": bn_scale,
    "geometric_median": geometric_median,
    "random": random,
}

__all__ = ["SAM", "WEIGHT_SCORES"]

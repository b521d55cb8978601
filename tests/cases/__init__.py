"""The test zoo: small networks, one for each way in which channels are combined.

`CASES[name]` builds a network (float64, every parameter and statistic random) and an example input, and lists the layers that
must be frozen; every other layer must be prunable.
"""

from cases import heads, joined, plain, reshaped, shared, stated  # noqa: F401  (each registers its networks)
from cases.case import CASES, Case, Net, block, conv, head

__all__ = ["CASES", "Case", "Net", "block", "conv", "head"]

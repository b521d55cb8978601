"""Multiply–accumulates: of operator calls by their shapes, and of a forward pass on data."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hgnp.pruning.graph import Inputs
from hgnp.pruning.rules import op_name
from hgnp.pruning.trace import visible_operators
from hgnp.pruning.widths import Shape
from hgnp.state_guards import evaluating, preserve_state

PRODUCT_NAMES = frozenset(
    """convolution mm bmm addmm baddbmm addbmm mv addmv dot _trilinear mkldnn_rnn_layer _cudnn_rnn""".split()  # noqa: SIM905
)
"""Operators that multiply and accumulate."""


def macs_of(name: str, args: Sequence[Any], reads: Sequence[Shape], writes: Sequence[Shape]) -> int:
    """Of one call: convolutions, matrix products and recurrent layers. `args`: the operator's own arguments; `reads` and
    `writes`: the shapes of its tensors, in order."""
    if name not in PRODUCT_NAMES:
        return 0
    if name == "convolution":
        transposed = args[6]
        return math.prod(reads[0] if transposed else writes[0]) * math.prod(reads[1][1:])
    if name == "_trilinear":  # nn.Bilinear
        return math.prod(reads[0][:-1]) * math.prod(reads[1])
    if name in ("mkldnn_rnn_layer", "_cudnn_rnn"):  # every step of every sample has a product with every matrix
        weights = reads[1:3] if name == "mkldnn_rnn_layer" else reads[1 : 1 + len(args[1])]
        return math.prod(reads[0][:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)
    a, b = reads[-2:]
    summed = min(a[-1], b[-2] if len(b) > 1 else b[-1])  # a state of zeros that fits any width is as wide as it was
    return math.prod(a[:-1]) * summed * (b[-1] if len(b) > 1 else 1)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        reads, writes = (
            [tuple(leaf.shape) for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (args, result)
        )
        self.macs += macs_of(op_name(op), args, reads, writes)
        return result


def measured_macs(net: nn.Module, forward: Callable[..., Any], inputs: Inputs) -> int:
    """Of `forward`, a forward pass of the network in evaluation mode, which changes nothing."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    counter = _Counter()
    with torch.no_grad(), evaluating(net), preserve_state(net), visible_operators(), counter:
        forward(*inputs[0], **inputs[1])
    for buffer, before in buffers:
        buffer.copy_(before)
    return counter.macs

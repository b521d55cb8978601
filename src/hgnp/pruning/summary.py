"""What `Neurons` reports: layers, frozen neurons, previews, and a table of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hgnp.errors import list_names


@dataclass(frozen=True)
class Layer:
    """A layer with prunable neurons.

    Attributes:
        name: The name of its module.
        alive: How many neurons it has now.
        total: How many it had when `Neurons` was created.
    """

    name: str
    alive: int
    total: int


@dataclass(frozen=True)
class Frozen:
    """Neurons of a layer that cannot be removed, and why.

    Attributes:
        name: The name of the layer's module.
        reason: Why they cannot be removed.
        count: How many neurons have this reason.
    """

    name: str
    reason: str
    count: int


@dataclass(frozen=True)
class Preview:
    """The size of a network after a removal.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> hgnp.Neurons(net, torch.zeros(1, 4)).preview({"0": [0, 1]})
    Preview(parameters=44, neurons=6, macs=36, kept=0.7586206896551724)

    Attributes:
        parameters: Number of parameters.
        neurons: Number of neurons that can be removed.
        macs: Multiply–accumulates of one forward pass of the example input.
        kept: `parameters` as a fraction of the original number.
    """

    parameters: int
    neurons: int
    macs: int
    kept: float


def table(layers: Sequence[Layer], frozen: Sequence[Frozen], left_out: Sequence[Layer], state: Preview) -> str:
    width = max([len(layer.name) for layer in layers] + [5])
    lines = [f"{'layer':<{width}}  alive  total"]
    lines += [f"{layer.name:<{width}}  {layer.alive:>5}  {layer.total:>5}" for layer in layers]
    lines.append(
        f"{state.neurons} neurons, {state.parameters:,} parameters ({state.kept:.1%} kept), {state.macs:,} MACs"
    )
    reasons: dict[str, list[Frozen]] = defaultdict(list)
    for entry in frozen:
        reasons[entry.reason].append(entry)
    for reason, entries in reasons.items():
        shown = list_names([entry.name for entry in entries])
        lines.append(f"frozen: {sum(entry.count for entry in entries)} in {shown}: {reason}")
    if left_out:
        shown = list_names([layer.name for layer in left_out])
        lines.append(f"in outputs that are left out: {sum(layer.alive for layer in left_out)} in {shown}")
    return "\n".join(lines)

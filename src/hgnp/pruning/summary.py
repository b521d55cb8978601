"""What `Neurons` reports: layers, frozen neurons, previews, and a table of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hgnp.errors import list_names


@dataclass(frozen=True)
class Layer:
    """A layer with prunable neurons: how many are alive, and how many there were."""

    name: str
    alive: int
    total: int


@dataclass(frozen=True)
class Frozen:
    """Neurons of a layer that cannot be removed, and why."""

    name: str
    reason: str
    count: int


@dataclass(frozen=True)
class Preview:
    """The size of a network: `kept` is the fraction of the original parameters."""

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
        lines.append(f"in outputs that do not count: {sum(layer.alive for layer in left_out)} in {shown}")
    return "\n".join(lines)

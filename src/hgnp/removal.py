"""Removal events and their listeners.

Objects that keep state per neuron or weight (eigenvectors, an average, statistics) register a listener. Before any tensor
shrinks it is called with a `Removal`, does all work that can fail, and returns a function that only assigns.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Slices = Mapping[int, Tensor]
"""Dimension → the positions that remain."""


@dataclass(frozen=True)
class Removal:
    """What a removal changes. Passed to every listener.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> neurons, average = hgnp.Neurons(net, torch.zeros(1, 4)), {"0.bias": torch.tensor([1.0, 2.0, 3.0])}
    >>> def listener(removal):
    ...     smaller = removal.cut("0.bias", average["0.bias"])  # anything that can fail
    ...     return lambda: average.update({"0.bias": smaller})  # assignments alone
    >>> neurons.listeners.append(listener)
    >>> neurons.remove({"0": [1]})
    Selection(1 neurons; 0: 1)
    >>> average["0.bias"]
    tensor([1., 3.])

    Attributes:
        slices: Parameter or buffer name → dimension → the positions that remain. Tensors that keep their shape are not listed.
        widths: Module name → attribute → its new value, for attributes that change.
    """

    slices: Mapping[str, Slices]
    widths: Mapping[str, Mapping[str, Any]]

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The remaining entries, as a copy, of a `tensor` with the shape of the parameter or buffer `name`."""
        return cut(tensor, self.slices.get(name, {}))


Listener = Callable[[Removal], Callable[[], None]]
"""Prepares (may raise) and returns a function that commits (only assigns)."""

_LISTENERS: "weakref.WeakKeyDictionary[nn.Module, list[weakref.WeakMethod[Listener]]]" = weakref.WeakKeyDictionary()


def listen(net: nn.Module, method: Listener) -> None:
    """Registers a bound method that is called at every removal from `net` while its object exists."""
    listeners = _LISTENERS.setdefault(net, [])
    listeners.append(weakref.WeakMethod(method, listeners.remove))


def listeners_of(net: nn.Module) -> list[Listener]:
    methods = [
        reference() for reference in tuple(_LISTENERS.get(net, ()))
    ]  # a dead reference removes itself from the list
    return [method for method in methods if method is not None]


def cut(tensor: Tensor, slices: Slices) -> Tensor:
    """The remaining entries, as a copy in the same memory format and on the same device."""
    form = torch.preserve_format
    if tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            form = last
    result = tensor.detach()
    for dim, positions in slices.items():
        result = result.index_select(dim, positions.to(tensor.device))
    return result.contiguous(memory_format=form) if form != torch.preserve_format else result

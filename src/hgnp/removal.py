"""What is told when neurons go, and to whom.

Whatever keeps a number for each neuron or weight (eigenvectors, an average, statistics) listens: before anything shrinks it
is called with a `Removal`, does all work that can fail, and returns a function that only assigns.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Slices = Mapping[int, Tensor]
"""Dimension → the positions that stay."""


@dataclass(frozen=True)
class Removal:
    """What goes, told to every listener."""

    slices: Mapping[str, Slices]
    """Parameter or buffer name → dimension → the positions that stay. Tensors that keep their shape are not listed."""
    widths: Mapping[str, Mapping[str, Any]]
    """Module name → attributes that change, with their new values."""

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, which is shaped like the parameter or buffer `name`, with what stays of it."""
        return cut(tensor, self.slices.get(name, {}))


Listener = Callable[[Removal], Callable[[], None]]
"""Prepares (may raise) and returns a function that commits (only assigns)."""

_LISTENERS: "weakref.WeakKeyDictionary[nn.Module, list[weakref.WeakMethod[Listener]]]" = weakref.WeakKeyDictionary()


def listen(net: nn.Module, method: Listener) -> None:
    """Have `method`, a bound method, called at every removal from `net` for as long as its object lives."""
    listeners = _LISTENERS.setdefault(net, [])
    listeners.append(weakref.WeakMethod(method, listeners.remove))


def listeners_of(net: nn.Module) -> list[Listener]:
    methods = [reference() for reference in tuple(_LISTENERS.get(net, ()))]  # one that dies meanwhile takes itself out
    return [method for method in methods if method is not None]


def cut(tensor: Tensor, slices: Slices) -> Tensor:
    """A copy with what stays, in the same memory format, on the same device."""
    form = torch.preserve_format
    if tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            form = last
    result = tensor.detach()
    for dim, stay in slices.items():
        result = result.index_select(dim, stay.to(tensor.device))
    return result.contiguous(memory_format=form) if form != torch.preserve_format else result

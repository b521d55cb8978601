"""From what a user hands over to layers with neurons."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.errors import InputError, InputTypeError, meant
from hgnp.pruning.graph import Inputs
from hgnp.pruning.structure import Structure
from hgnp.pruning.widths import weight_name


def as_inputs(example: Any) -> Inputs:
    """Positional and keyword arguments from a tensor, a tuple or a dict."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise InputTypeError(
        f"example_input must be a tensor, a tuple or a dict of keyword arguments, not {type(example).__name__}"
    )


def inside(net: nn.Module, protect: Iterable[str]) -> set[str]:
    """The names of all modules in the modules named."""
    if isinstance(protect, str):
        raise InputTypeError(f"protect must be a list of names: protect=[{protect!r}]")
    if not isinstance(protect, Iterable):
        raise InputTypeError(f"protect must be a list of names, not {type(protect).__name__}; [] protects nothing")
    names = [name for name, _ in net.named_modules()]
    protected = set()
    for entry in protect:
        inside = {name for name in names if name == entry or name.startswith(f"{entry}.")}
        if not inside:
            raise InputError(f"protect: no module {entry!r}{meant(entry, [name for name in names if name])}")
        protected |= inside
    return protected


def rows_of(net: nn.Module, structure: Structure) -> dict[str, Tensor]:
    """Layer → the slots of its neurons.

    Linear layers and convolutions, whether their own forward or a surrounding module's uses their weight; and any other
    module without children that multiplies with exactly one weight of its own.
    """
    result: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        seen = [rows for follower in structure.followers.values() for rows in follower.rows.get(name, [])]
        plain = isinstance(module, nn.Linear | _ConvNd)
        alone = not any(True for _ in module.children()) and all(torch.equal(rows, seen[0]) for rows in seen)
        if seen and (plain or alone):
            result[name] = seen[0]
        elif plain:
            dim = 1 if getattr(module, "transposed", False) else 0
            slots = structure.ties.slots.get((f"{name}.{weight_name(module)}".removeprefix("."), dim))
            if slots is not None:
                result[name] = slots
    return result

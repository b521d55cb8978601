"""Trials on real tensors: where recording of the forward pass stops, removal must equal masking in what was not recorded too.

A sample of the neurons is removed from one copy of the network and masked, by closed gates, in another. Both copies run on the
example input from the same random state: in evaluation mode, and in training mode with norms and dropout in evaluation mode.
What they return must agree, and so must whatever their modules return in the same shape. Where the code reads the truth of a
tensor, as in `if x.mean() > 0:`, they run again with the other outcome, unless the code refuses it.
"""

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hgnp.errors import first_line
from hgnp.pruning.gated_forward import gated_forward
from hgnp.pruning.gates import Gates
from hgnp.pruning.graph import Inputs
from hgnp.pruning.structure import PathError, Structure
from hgnp.pruning.surgery import changes_to_net, commit
from hgnp.pruning.trace import place_in_code, tensors_in_output
from hgnp.state_guards import evaluating, preserve_state

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
Fingerprint = tuple[bool, tuple[int, ...], float, float]
"""Whether the network itself returns it; shape, norm and a projection of a tensor."""


def disagreement(structure: Structure, gates_by_mode: Mapping[bool, Gates], alive: Tensor) -> str | None:
    """How the copies differ if the slots that are not `alive` are removed, or None. `gates_by_mode`: the gates in evaluation
    mode (False) and in training mode (True)."""
    try:
        whole = copy.deepcopy(structure.net).double()
        inputs = tree_map(_as_double, structure.inputs)
        try:
            with torch.no_grad(), evaluating(whole), preserve_state(whole):
                whole(*inputs[0], **inputs[1])
        except Exception:  # its code may create tensors of another type
            whole, inputs = copy.deepcopy(structure.net), structure.inputs
        cut = copy.deepcopy(whole)
        commit(changes_to_net(cut, structure.removal(torch.ones_like(alive), alive)))
        removed = torch.unique(structure.roots[~alive])
        dtype = torch.float64 if all(p.dtype == torch.float64 for p in whole.parameters()) else torch.float32
        for losses, gates in gates_by_mode.items():
            closed = torch.ones(1, gates.count + 1, dtype=dtype)
            closed[:, gates.units.unit[removed]] = 0
            with_gates = partial(gated_forward, whole, gates.paths[0], closed[:, :-1])
            pending: list[str | None] = [None]
            while pending:
                decisions = _Decisions(pending.pop())
                try:
                    expected = _fingerprints(whole, inputs, losses, with_gates, decisions)
                except Exception as error:
                    if decisions.other is None or isinstance(error, PathError):
                        raise
                    continue  # a check: the code refuses this outcome
                found = _fingerprints(cut, inputs, losses, nullcontext, _Decisions(decisions.other))
                if len(found) != len(expected) or not all(map(partial(_agree, TOLERANCE[dtype]), found, expected)):
                    other = "" if decisions.other is None else f" with the other outcome at {decisions.other}"
                    return (
                        f"a trial on the example input differs in {'training' if losses else 'evaluation'} mode{other}"
                    )
                if decisions.other is None:
                    pending += decisions.places
    except Exception as error:
        return f"a trial on the example input fails: {first_line(error)}"
    return None


class _Decisions(TorchFunctionMode):
    """Notes the places in the code where the truth of a tensor is read; at the first such read at `other` it has the other
    outcome."""

    def __init__(self, other: str | None) -> None:
        super().__init__()
        self.other, self.places = other, dict[str, None]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.__bool__:
            return result
        place = place_in_code()
        first = place not in self.places
        self.places[place] = None
        return result != (first and place == self.other)


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _fingerprints(
    net: nn.Module,
    inputs: Inputs,
    losses: bool,
    within: Callable[[], AbstractContextManager[None]],
    decisions: _Decisions,
) -> list[Fingerprint]:
    """Those of all that the network's modules return, and in the end of its outputs."""
    found: list[Fingerprint] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            found.extend((module is net, *_fingerprint(tensor)) for tensor in tensors_in_output(output))

    with torch.no_grad(), evaluating(net, losses=losses), preserve_state(net):
        handles = [module.register_forward_hook(note) for module in net.modules()]
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            with decisions, within():
                net(*inputs[0], **inputs[1])
        finally:
            for handle in handles:
                handle.remove()
    return found


def _fingerprint(tensor: Tensor) -> tuple[tuple[int, ...], float, float]:
    values = tensor.detach().double().flatten().cpu()
    return tuple(tensor.shape), float(values.norm()), float((values * torch.arange(len(values)).cos()).sum())


def _agree(tolerance: float, found: Fingerprint, expected: Fingerprint) -> bool:
    """Tensors of other shapes inside the network have lost channels: what is computed from them is compared."""
    returned, shape, norm, projection = expected
    if found[1] != shape:
        return not returned and len(found[1]) == len(shape)
    return abs(found[2] - norm) + abs(found[3] - projection) <= tolerance * (norm + 1e-30)

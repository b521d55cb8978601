"""Trials on real tensors: where recording of the forward pass stops, removal must equal masking in what was not recorded too.

A sample of the neurons is removed from one copy of the network and masked, by closed gates, in another. Both copies run on the
example input from the same random state: in evaluation mode, and in training mode with norms and dropout in evaluation mode.
What they return must agree, and so must whatever their modules return in the same shape.
"""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hgnp.errors import first_line
from hgnp.pruning.gated_forward import gated_forward
from hgnp.pruning.gates import find_gates
from hgnp.pruning.graph import Inputs
from hgnp.pruning.structure import Structure
from hgnp.pruning.surgery import changes_to_net, commit
from hgnp.pruning.trace import tensors_in_output
from hgnp.state_guards import evaluating, preserve_state

TOLERANCE = 1e-8
Fingerprint = tuple[tuple[int, ...], float, float]
"""Shape, norm and a random projection of a tensor."""


def disagreement(structure: Structure, rows: Mapping[str, Tensor], alive: Tensor) -> str | None:
    """How the copies differ if the slots that are not `alive` are removed, or None."""
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
        dtype = max((p.dtype for p in whole.parameters()), key=lambda dtype: dtype == torch.float64)
        for losses in (False, True):
            gates = find_gates(structure, rows, torch.ones_like(alive), per_branch=False, losses=losses)
            closed = torch.ones(1, gates.count + 1, dtype=dtype)
            closed[:, gates.units.unit[removed]] = 0
            with_gates = gated_forward(whole, gates.paths[0], closed[:, :-1])
            expected = list(_fingerprints(whole, inputs, losses, with_gates))
            found = list(_fingerprints(cut, inputs, losses, nullcontext()))
            if len(found) != len(expected) or not all(map(_agree, found, expected)):
                return f"a trial on the example input differs in {'training' if losses else 'evaluation'} mode"
    except Exception as error:
        return f"a trial on the example input fails: {first_line(error)}"
    return None


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _fingerprints(
    net: nn.Module, inputs: Inputs, losses: bool, within: AbstractContextManager[None]
) -> Iterator[Fingerprint]:
    """Those of all that the network's modules return, and in the end of its outputs."""
    found: list[Fingerprint] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            found.extend(_fingerprint(tensor) for tensor in tensors_in_output(output))

    with torch.no_grad(), evaluating(net, losses=losses), preserve_state(net):
        handles = [module.register_forward_hook(note) for module in net.modules()]
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            with within:
                net(*inputs[0], **inputs[1])
        finally:
            for handle in handles:
                handle.remove()
    return iter(found)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    values = tensor.detach().double().flatten().cpu()
    return tuple(tensor.shape), float(values.norm()), float((values * torch.arange(len(values)).cos()).sum())


def _agree(found: Fingerprint, expected: Fingerprint) -> bool:
    """Tensors of other shapes have lost channels: what is computed from them is compared."""
    if found[0] != expected[0]:
        return len(found[0]) == len(expected[0])
    return abs(found[1] - expected[1]) + abs(found[2] - expected[2]) <= TOLERANCE * (expected[1] + 1e-30)

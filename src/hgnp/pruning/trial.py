"""Trials on real tensors: where tracing of the forward pass stops, removal must equal masking in the untraced rest too.

A sample of the neurons is removed from one copy of the network and masked, by closed gates, in another. Both copies run on the
example input from the same random state: in evaluation mode, and in training mode with norms and dropout in evaluation mode.
What they return must agree, and so must whatever their modules return in the same shape. Where the code reads the truth of a
tensor, as in `if x.mean() > 0:`, they run again with the other outcome, unless the code refuses it. At checks for values that
are not finite they run with the example's own outcome alone, which must be that of finite values.

An untrained network is a weak test: its signals vanish beside its biases, or its scores are equal up to rounding,
which then decides what a sort or non-maximum suppression returns. So the trial runs twice: on the network as it is, and on
copies with noise on the weights and norms that have the example's statistics.
"""

import copy
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hgnp.errors import first_line
from hgnp.pruning.gated_forward import gated_forward
from hgnp.pruning.gates import Gates
from hgnp.pruning.graph import Inputs
from hgnp.pruning.structure import PathError, Structure
from hgnp.pruning.surgery import changes_to_net, commit
from hgnp.pruning.trace import place_in_code, tensors_in_output, visible_operators
from hgnp.state_guards import evaluating, preserve_state

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING = 16
"""How much noise on the gates stands for rounding, in units of the last place."""
Fingerprint = tuple[bool, tuple[int, ...], float, float]
"""Whether the network itself returns it; shape, norm and a projection of a tensor."""


@visible_operators()
def disagreement(structure: Structure, gates_by_mode: Mapping[bool, Gates], alive: Tensor) -> str | None:
    """How the copies differ if the slots that are not `alive` are removed, or None. `gates_by_mode`: the gates in evaluation
    mode (False) and in training mode (True)."""
    try:
        unstable = []
        for conditioned in (False, True):
            trial = _Trial(structure, alive, conditioned=conditioned)
            trial.run(gates_by_mode)
            if trial.problem is not None:
                return trial.problem
            unstable.append(trial.unstable)
        return "a trial on the example input tells nothing, as rounding decides its outcome" if all(unstable) else None
    except Exception as error:
        return f"a trial on the example input fails: {first_line(error)}"


class _Trial:
    """Runs a copy of the network with gates that are closed and a copy without the neurons, side by side. With `conditioned`,
    the copies have noise on the weights and norms with the example's statistics."""

    def __init__(self, structure: Structure, alive: Tensor, *, conditioned: bool) -> None:
        self._whole = copy.deepcopy(structure.net).double()
        inputs = structure.inputs_beside_network()
        self._inputs = tree_map(_as_double, inputs)
        try:
            with torch.no_grad(), evaluating(self._whole), preserve_state(self._whole):
                self._whole(*self._inputs[0], **self._inputs[1])
        except Exception:  # its code may create tensors of another type
            self._whole, self._inputs = copy.deepcopy(structure.net), inputs
        self._conditioned = conditioned
        self._assumed_finite = {
            place for each in structure.propagations.values() for place in each.graph.assumed_finite
        }
        if conditioned:
            read = {name for each in structure.propagations.values() for name in each.graph.read_values}
            _condition(self._whole, self._inputs, read)
        self._cut = copy.deepcopy(self._whole)
        commit(changes_to_net(self._cut, structure.removal(torch.ones_like(alive), alive)))
        self._removed = torch.unique(structure.roots[~alive])
        exact = all(p.dtype == torch.float64 for p in self._whole.parameters())
        self._dtype = torch.float64 if exact else torch.float32
        self.problem: str | None = None
        """How the copies differ."""
        self.unstable = False
        """Whether the copies cannot be compared, as rounding changes what the masked one returns."""

    def run(self, gates_by_mode: Mapping[bool, Gates]) -> None:
        for loss_needs_training_mode, gates in gates_by_mode.items():
            pending: list[str | None] = [None]
            while pending and self.problem is None:
                decisions = _DecisionMode(pending.pop())
                try:
                    expected = self._fingerprints(loss_needs_training_mode, gates, decisions)
                except Exception as error:
                    if isinstance(error, PathError) or (decisions.other is None and not self._conditioned):
                        raise
                    self.unstable |= decisions.other is None
                    continue  # a check: the code refuses this outcome, or these weights
                found = self._fingerprints(
                    loss_needs_training_mode, None, _DecisionMode(decisions.other), net=self._cut
                )
                if not self._agree(found, expected):
                    self._compare_stable(found, expected, loss_needs_training_mode, gates, decisions.other)
                if decisions.other is None:
                    pending += [place for place in decisions.places if place not in self._assumed_finite]

    def _compare_stable(
        self,
        found: list[Fingerprint],
        expected: list[Fingerprint],
        loss_needs_training_mode: bool,
        gates: Gates,
        other: str | None,
    ) -> None:
        """Where rounding changes the masked copy too, the copies cannot be compared; elsewhere they must agree."""
        rounded = self._fingerprints(
            loss_needs_training_mode, gates, _DecisionMode(other), noise=ROUNDING * torch.finfo(self._dtype).eps
        )
        stable = [self._agree([one], [same]) for one, same in zip(rounded, expected, strict=False)]
        self.unstable |= not all(stable) or len(rounded) != len(expected)
        alike = len(found) == len(expected) or self.unstable
        if alike and all(
            self._agree([one], [same])
            for one, same, is_stable in zip(found, expected, stable, strict=False)
            if is_stable
        ):
            return
        mode = "training" if loss_needs_training_mode else "evaluation"
        outcome = "" if other is None else f" with the other outcome at {other}"
        self.problem = f"a trial on the example input differs in {mode} mode{outcome}"

    def _agree(self, found: list[Fingerprint], expected: list[Fingerprint]) -> bool:
        return len(found) == len(expected) and all(map(partial(_agree, TOLERANCE[self._dtype]), found, expected))

    def _fingerprints(
        self,
        loss_needs_training_mode: bool,
        gates: Gates | None,
        decisions: "_DecisionMode | None" = None,
        *,
        net: nn.Module | None = None,
        noise: float = 0.0,
    ) -> list[Fingerprint]:
        """Those of all that the modules return, and in the end of the network's outputs. With `gates`, those of the neurons are
        closed, and the others differ from 1 by the noise."""
        net, found = net or self._whole, list[Fingerprint]()

        def note(module: nn.Module, args: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():
                found.extend((module is net, *_fingerprint(tensor)) for tensor in tensors_in_output(output))

        within: AbstractContextManager[None] = nullcontext()
        if gates is not None:
            generator = torch.Generator().manual_seed(0)
            gamma = 1 + noise * torch.randn(1, gates.count + 1, dtype=self._dtype, generator=generator)
            gamma[:, gates.units.unit[self._removed]] = 0
            device = next(net.parameters()).device
            within = gated_forward(net, gates.paths[0].to(device), gamma[:, :-1].to(device))
        with torch.no_grad(), evaluating(net, loss_needs_training_mode=loss_needs_training_mode), preserve_state(net):
            handles = [module.register_forward_hook(note) for module in net.modules()]
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            try:
                with decisions or nullcontext(), within:
                    net(*self._inputs[0], **self._inputs[1])
            finally:
                for handle in handles:
                    handle.remove()
        return found


def _condition(net: nn.Module, inputs: Inputs, read: set[str]) -> None:
    """Adds noise to the weights, but those whose values are `read`, and gives norms the statistics of the inputs."""
    generator = torch.Generator().manual_seed(0)
    norms = [each for each in net.modules() if isinstance(each, _NormBase) and each.running_mean is not None]
    statistics = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    with torch.no_grad(), preserve_state(net):
        for name, parameter in net.named_parameters():
            if parameter.requires_grad and name not in read:
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
                parameter.add_(0.2 * (spread or parameter[0].numel() ** -0.5 if parameter.dim() else 1.0) * noise)
        for module in net.modules():
            module.training = not isinstance(module, _DropoutNd)
        for norm in norms:
            norm.momentum = None
            norm.reset_running_stats()
        try:
            net(*inputs[0], **inputs[1])
        except Exception:  # one value per channel cannot be normalised over the batch
            for norm, before in zip(norms, statistics, strict=True):
                for name, buffer in norm.named_buffers():
                    buffer.copy_(before[name])


class _DecisionMode(TorchFunctionMode):
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


def _fingerprint(tensor: Tensor) -> tuple[tuple[int, ...], float, float]:
    values = tensor.detach().double().flatten().cpu()
    return tuple(tensor.shape), float(values.norm()), float((values * torch.arange(len(values)).cos()).sum())


def _agree(tolerance: float, found: Fingerprint, expected: Fingerprint) -> bool:
    """Tensors of other shapes inside the network have lost channels: what is computed from them is compared."""
    returned, shape, norm, projection = expected
    if found[1] != shape:
        return not returned and len(found[1]) == len(shape)
    return abs(found[2] - norm) + abs(found[3] - projection) <= tolerance * (norm + 1e-30)

"""A piece of a step in a CUDA graph, and the memory in which pieces pass eigenpairs on."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hgnp.curvature.autodiff.passes import Pass
from hgnp.curvature.device import HostScalar
from hgnp.curvature.direction import BlockChoice, KroneckerEigenpair
from hgnp.curvature.network_direction import AnyDirection, NetworkVector
from hgnp.curvature.step import Plan, State, StepStatistics
from hgnp.execution.graphs import GraphSequence, refill
from hgnp.execution.optimizer import Gradients

Pair = KroneckerEigenpair | NetworkVector
PieceName = Literal["plain", "unpenalized", "forward", "active", "inactive", "loss", "q", "penalty"]
GRADIENTS: dict[PieceName, Literal["replace", "add", "none"]] = {
    # the one piece of a step without a penalty: without a refresh, and with one
    "plain": "replace",
    "unpenalized": "replace",
    # with lagged v, the second piece with the penalty or without
    "forward": "none",
    "active": "replace",
    "inactive": "replace",
    # in the paper's order
    "loss": "replace",
    "q": "none",
    "penalty": "add",
}
"""Piece → what it does to the gradients that are there. "q" and "penalty" follow "loss" in the same step and read its batch."""


class GraphKey(NamedTuple):
    """What the graph of a piece depends on, besides the network."""

    piece: PieceName
    plan: Plan
    block: str | None
    """The block that is penalised, where the piece depends on it."""
    shape: Any
    """`graphs.shape_key` of the batch."""
    samples: int | None
    """Of all ranks, where v is refreshed on several: factors are divided by it."""


@dataclass(frozen=True)
class Captured:
    """One piece: where it reads its batch from and where it leaves its results."""

    key: GraphKey
    graph: GraphSequence
    batch: Any
    loss: Tensor | None
    grads: Gradients
    statistics: StepStatistics | None
    choice: BlockChoice | None
    """The next block, on the device."""
    taped: Pass | None
    """The pass that the pieces after it continue from, if this graph computes it."""
    loss_differentiated: bool
    """`State.loss_differentiated` after the piece."""
    versions: "Versions"
    """Of parameters, buffers and batch when it was captured."""

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        return tree_flatten(self.batch)[0]

    def replay(self, state: State, batch: Any, *, send: bool) -> Tensor | None:
        """Computes the piece on a batch, and leaves in the state what later stages read there. Returns C, if the piece has it.
        With `send`, q is sent to the host at once."""
        if batch is not self.batch:
            refill(self.leaves, batch)
        self.graph.replay()
        state.loss_differentiated = self.loss_differentiated
        if self.taped is not None:
            state.current = self.taped
            self.versions.restore()  # the replay computed it with the parameters as they are
        if self.choice is not None:
            last = state.direction.choice
            state.direction.choice = BlockChoice.of(self.choice.index.number, self.choice.blocks, after=last)
        if self.statistics is not None:
            state.statistics = self._copy_statistics(self.statistics, send)
        return None if self.loss is None else self.loss.clone()

    @staticmethod
    def _copy_statistics(statistics: StepStatistics, send: bool) -> StepStatistics:
        """Copies of them, the numbers by one kernel, since other graphs reuse this memory. With `send`, q's copy to the host
        starts first."""
        penalized, curvature = statistics.penalized, statistics.curvature
        sent = HostScalar.of(curvature) if send else None
        radius, residuals, q = torch._foreach_mul((penalized.radius, penalized.residuals, curvature), 1)
        vectors = [part.clone() for part in penalized.vectors]
        return StepStatistics(replace(penalized, vectors=vectors, radius=radius, residuals=residuals), q, sent)


@dataclass(frozen=True)
class Versions:
    """Tensors with the counters of changes that autograd knew them by."""

    tensors: tuple[Tensor, ...]
    counters: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Versions":
        tensors = tuple(tensors)
        return cls(tensors, tuple(tensor._version for tensor in tensors))

    def restore(self) -> None:
        """Makes autograd take what it has saved of the tensors for unchanged: only where a replay has recomputed that."""
        set_counter: Any = torch._C._autograd._unsafe_set_version_counter
        try:
            set_counter(self.tensors, self.counters)
        except TypeError:  # PyTorch 2.6 takes one tensor
            for tensor, counter in zip(self.tensors, self.counters, strict=True):
                set_counter(tensor, counter)


class EigenpairMemory:
    """Where graphs read and write eigenpairs: the same memory in every step."""

    def __init__(self) -> None:
        self.pairs: dict[str, Pair] = {}
        self.tensors: list[Tensor] = []
        """Those of the pairs, flat."""

    def adopt(self, direction: AnyDirection) -> None:
        """Makes a direction keep its eigenpairs here: copies them, unless they are here already."""
        pairs: Any = direction.pairs
        if pairs is self.pairs:
            return
        if pairs.keys() != self.pairs.keys():
            self.pairs = {
                name: pair.of_state({kind: tensor.clone() for kind, tensor in pair.state().items()})
                for name, pair in pairs.items()
            }
            self.tensors = self._flat(self.pairs)
        elif any(pairs[name] is not self.pairs[name] for name in pairs):
            self.write(pairs)
        direction.pairs = self.pairs  # type: ignore[assignment]

    def write(self, pairs: Mapping[str, Pair]) -> None:
        """Copies eigenpairs here, all tensors of one type at once."""
        values = self._flat(pairs)
        for floating in (True, False):
            mine = [number for number, tensor in enumerate(self.tensors) if tensor.is_floating_point() is floating]
            if mine:
                torch._foreach_copy_([self.tensors[number] for number in mine], [values[number] for number in mine])

    def _flat(self, pairs: Mapping[str, Pair]) -> list[Tensor]:
        """The tensors of these pairs, in the order of those that are here."""
        return [tensor.reshape(-1) for name in self.pairs for _, tensor in sorted(pairs[name].state().items())]

"""A piece of a step in a CUDA graph, and the memory in which pieces pass eigenpairs on."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hgnp.curvature.autodiff.passes import Pass
from hgnp.curvature.device import HostScalar
from hgnp.curvature.direction import BlockChoice, KroneckerEigenpair
from hgnp.curvature.network_direction import NetworkVector
from hgnp.curvature.step import BlockDirection, Statistics
from hgnp.execution.graphs import Graphs
from hgnp.execution.optimizer import Gradients

Pair = KroneckerEigenpair | NetworkVector


@dataclass(frozen=True)
class Captured:
    """One piece: where it reads its batch from and where it leaves its results."""

    graph: Graphs
    batch: Any
    loss: Tensor | None
    grads: Gradients
    after: bool
    """Whether it adds to the gradients of a piece before it."""
    statistics: Statistics | None
    choice: BlockChoice | None
    """The next block, on the device."""
    taped: Pass | None
    """The pass that the pieces after it continue from, if this graph computes it."""
    versions: "Versions"
    """Of parameters, buffers and batch when it was captured."""

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        return tree_flatten(self.batch)[0]

    def copy_statistics(self, *, send: bool) -> Statistics:
        """Other graphs share their memory. With `send` q is sent to the host before that; numbers are copied by one kernel."""
        assert self.statistics is not None
        penalized, curvature = self.statistics.penalized, self.statistics.curvature
        sent = HostScalar.of(curvature) if send else None
        radius, residuals, q = torch._foreach_mul((penalized.radius, penalized.residuals, curvature), 1)
        vectors = [part.clone() for part in penalized.vectors]
        return Statistics(BlockDirection(penalized.block, vectors, radius, residuals), q, sent)


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
        torch._C._autograd._unsafe_set_version_counter(self.tensors, self.counters)


def copied(pair: Pair) -> Pair:
    return pair.of_state({name: tensor.clone() for name, tensor in pair.state().items()})


def tensors_of(pairs: Mapping[str, Pair], order: Mapping[str, Pair]) -> list[Tensor]:
    return [tensor.reshape(-1) for name in order for _, tensor in sorted(pairs[name].state().items())]


def copy_into(into: list[Tensor], values: list[Tensor]) -> None:
    """All that are of one type at once."""
    for of_kind in (torch.is_floating_point, lambda x: not torch.is_floating_point(x)):
        mine = [number for number, tensor in enumerate(into) if of_kind(tensor)]
        if mine:
            torch._foreach_copy_([into[number] for number in mine], [values[number] for number in mine])

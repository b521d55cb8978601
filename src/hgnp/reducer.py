"""Sums over the ranks of a data-parallel step, and what else ranks tell each other.

Whatever a step sums over samples goes through a `Reducer`: products with the Kronecker factors, the statistics of synchronised
norms, C and q before the decision, gradients, scores. The base class is a single process, for which a sum over ranks is what it
was given. `execution/process_group.py` has the ranks of torch.distributed.
"""

import builtins
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hgnp import errors
from hgnp.errors import InputError, RankError


class Reducer:
    """A single process. Subclasses have several. Every rank calls the methods in the same order."""

    ranks = 1
    rank = 0
    sync_norms = False
    """Whether BatchNorm takes its statistics from the samples of all ranks. No option sets it: with it, tests compare networks
    with BatchNorm on several ranks with one process."""

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the ranks, in one buffer per dtype. The sums of several ranks are detached: they have no
        gradient."""
        return list(tensors)

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's data."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of ranks."""
        return [data]

    def from_rank_zero(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's tensors, detached; all of them in one buffer. They have the same shapes on every rank."""
        if self.ranks == 1:
            return list(tensors)
        return self.sum([x.detach() if self.rank == 0 else torch.zeros_like(x) for x in tensors])

    def on_rank_zero(self, function: Callable[[], bytes]) -> bytes:
        """What `function` returns on rank 0, where alone it is called. An error that it raises is raised on every rank."""
        if self.ranks == 1:
            return function()
        failure, data = None, b""
        if self.rank == 0:
            try:
                data = b"+" + function()
            except Exception as error:
                failure, data = error, b"-" + json.dumps([type(error).__name__, str(error)]).encode()
        data = self.broadcast(data)
        if failure is not None:
            raise failure
        if data[:1] == b"-":
            raise _rebuilt(*json.loads(data[1:]))
        return data[1:]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.ranks == 1 else bool(self.sum([torch.tensor(float(flag))])[0] > 0)

    def differentiable_sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, with derivatives of every order: the adjoint of a sum over ranks is a sum over ranks."""
        if self.ranks == 1:
            return x
        summed: Tensor = _Sum.apply(x, self)
        return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reducer: Reducer) -> Tensor:
        ctx.reducer = reducer
        return reducer.sum([x.detach()])[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.reducer), None


LOCAL = Reducer()
"""The reducer of a single process."""


def broadcast_networks(reducer: Reducer, *networks: nn.Module) -> None:
    """Every rank's networks get the weights and buffers of rank 0's. InputError if they are not of one shape."""
    if reducer.ranks == 1:
        return
    tensors = [x for net in networks for x in (*net.parameters(), *net.buffers())]
    first, *others = reducer.gather(json.dumps([[list(x.shape), str(x.dtype)] for x in tensors]).encode())
    for rank, shapes in enumerate(others, 1):
        if shapes != first:
            raise InputError(
                f"net must be the same network on every rank, got other shapes on rank {rank} than on rank 0; build it from "
                "the same arguments"
            )
    with torch.no_grad():
        for tensor, value in zip(tensors, reducer.from_rank_zero([x.detach() for x in tensors]), strict=True):
            tensor.copy_(value)


def average_statistics(reducer: Reducer, *networks: nn.Module) -> None:
    """Running statistics of norms become their averages over the ranks, and every other buffer becomes rank 0's. One process
    would have them that normalises the samples of each rank by themselves and averages the statistics of the parts."""
    if reducer.ranks == 1:
        return
    buffers = [buffer for net in networks for buffer in net.buffers()]
    norms = [m for net in networks for m in net.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    averaged = {id(x) for norm in norms for x in (norm.running_mean, norm.running_var)}
    own = [x if id(x) in averaged or reducer.rank == 0 else torch.zeros_like(x) for x in buffers]
    if not own:
        return
    with torch.no_grad():
        for buffer, total in zip(buffers, reducer.sum(own), strict=True):
            buffer.copy_(total / reducer.ranks if id(buffer) in averaged else total)


def _rebuilt(name: str, text: str) -> Exception:
    """The error that rank 0 raised, from its class and its message."""
    kind = getattr(errors, name, getattr(builtins, name, None))
    if isinstance(kind, type) and issubclass(kind, errors.HgnpError | OSError):
        return kind(text)
    return RankError(f"rank 0 failed: {name}: {text}")

"""Ranks as threads of one process, which meet at a barrier to sum."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from graphed_cases import Stand
from hgnp.reducer import Reducer

Result = TypeVar("Result")


class ThreadReducer(Reducer):
    sync_norms = True

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.ranks, self.rank = barrier.parties, rank
        self._barrier, self._shared = barrier, shared

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if Stand.recording:  # a capture computes nothing
            return [x.detach().clone() for x in tensors]
        self._shared[self.rank] = [x.detach().clone() for x in tensors]
        self._barrier.wait(timeout=60)
        given = list(self._shared)
        self._barrier.wait(timeout=60)  # nobody writes before everybody has read
        assert all([x.shape for x in each] == [x.shape for x in given[0]] for each in given)
        return [sum(parts[1:], parts[0].clone()) for parts in zip(*given, strict=True)]


def run_ranks(n: int, function: Callable[[int, ThreadReducer], Result]) -> list[Result]:
    """function(rank, reducer) of n ranks at once; the first error of one of them is raised."""
    barrier, shared = threading.Barrier(n), [None] * n

    def one(rank: int) -> Result:
        try:
            return function(rank, ThreadReducer(rank, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(one, rank) for rank in range(n)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]

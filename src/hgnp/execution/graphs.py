"""Work on batches from CUDA graphs: what is done again and again on the same shapes is launched as a whole.

A small network's pass is a few hundred kernels of microseconds each, and launching them takes longer than running them. The
first piece of a kind runs as it is (libraries choose their algorithms then), the second is captured, and from then on it is
replayed. What a graph reads must stay where it is: whoever owns one forgets it when the network changes.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hgnp.curvature.device import keeping
from hgnp.errors import first_line

T = TypeVar("T")


class RefusedError(Exception):
    """Work that cannot be captured."""


class Capture:
    """Where graphs are captured: one stream, and one pool of memory that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device, threading.get_ident())
        self._pool: Any = None
        self._kept: list[list[object]] = []
        """What its graphs read and others may let go of."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around captured work: all of it on one stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the work, and what it returns: tensors that a replay fills. Nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.clear_autocast_cache()  # it may be gone when the graph runs
        failed: Exception | None = None
        try:
            with (
                keeping() as kept,
                torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self._kept.append(kept)
                try:
                    made = work()
                except Exception as error:
                    failed = error  # the end of the capture may raise another
                    raise
        except Exception as error:
            raise RefusedError(first_line(failed or error)) from (failed or error)
        finally:
            failed = None  # or it would hold itself, and all that the work made
            torch.clear_autocast_cache()  # copies of parameters that nothing has computed yet
        return graph, made

    def forget(self) -> None:
        """Once its graphs are gone."""
        self._pool = None  # it goes with its last graph
        self._kept.clear()


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """One for all captures, as libraries keep memory for every stream that they have ever worked on. Its work goes before that
    of branches."""
    return torch.cuda.Stream(device, priority=-1)


def kind_of(batch: Any, device: torch.device) -> tuple[Any, ...] | None:
    """What a graph of work on this batch depends on; None if it is not of tensors on this device alone."""
    leaves, spec = tree_flatten(batch)
    if not all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
        return None
    return str(spec), *((leaf.shape, leaf.dtype) for leaf in leaves)


def built_of(*parts: Any) -> tuple[Any, ...]:
    """What graphs of work by a network (and a loss, if it is a module) have in them: where tensors lie, which are trained, and
    the numbers of modules (modes, a norm's momentum, a dropout's rate)."""
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    own = [x for module in modules for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    numbers = [
        {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        for module in modules
    ]
    return [(id(x), x.data_ptr(), x.requires_grad) for x in own], numbers


def laid_out(batch: T, net: nn.Module, *, copy: bool = True) -> T:
    """A copy of a batch, pictures with their channels last if the network's convolutions have theirs so. Without `copy`,
    what is so already is the batch's own."""
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
    last = any(not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last) for w in weights)

    def place(leaf: Tensor) -> Tensor:
        picture = last and leaf.dim() == 4 and leaf.is_floating_point()
        form = torch.channels_last if picture else torch.contiguous_format
        return leaf.clone(memory_format=form) if copy else leaf.contiguous(memory_format=form)

    return tree_map(place, batch)


def refill(leaves: list[Tensor], batch: Any) -> None:
    torch._foreach_copy_(leaves, tree_flatten(batch)[0])


class Replayed:
    """A function of a batch, by a network, that changes nothing: from graphs, one for each shape of a batch. What it returns
    is good until the next call from a graph of the same `Capture`, whose memory they share."""

    def __init__(self, function: Callable[[Any], Any], net: nn.Module, capture: Capture) -> None:
        self._function, self._net, self._capture = function, net, capture
        self._met: set[Any] = set()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Any]] = {}
        self.refused: str | None = None
        """Why it is not captured, if it is not."""

    def __call__(self, batch: Any) -> Any:
        """Within `Capture.running`, but for the first of all."""
        kind = kind_of(batch, self._capture.device)
        if kind is None or self.refused is not None:
            return self._function(batch)
        if kind not in self._graphs:
            if kind not in self._met:
                self._met.add(kind)
                return self._function(laid_out(batch, self._net, copy=False))
            batch = laid_out(batch, self._net)
            try:
                graph, made = self._capture.capture(lambda: self._function(batch))
            except RefusedError as error:
                self.refused = str(error)
            if self.refused is not None:  # no longer within `except`: the error holds what its capture took
                return self._function(batch)
            self._graphs[kind] = graph, tree_flatten(batch)[0], made
        graph, leaves, made = self._graphs[kind]
        refill(leaves, batch)
        graph.replay()
        return made

    def forget(self) -> None:
        self._graphs.clear()
        self._met.clear()
        self._capture.forget()

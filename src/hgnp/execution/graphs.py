"""Work on batches from CUDA graphs: what repeats on the same shapes is launched as a whole.

A small network's pass is a few hundred kernels of microseconds each, and launching them takes longer than running them. The
first batch of a shape runs eagerly (libraries choose their algorithms then), the second is captured, and from then on the graph
is replayed. What a graph reads must stay where it is: the owner of a graph drops it when the network changes. Sums over ranks
stay outside: a capture that comes to one ends its graph, and continues in another (`between_graphs`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hgnp.curvature.device import capturing, holding_constants
from hgnp.curvature.validation import has_module_hooks
from hgnp.errors import first_line
from hgnp.state_guards import garbage_collection_off

T = TypeVar("T")
ERROR_MODE = "thread_local"
"""Other threads, such as nccl's, may ask the device while this one captures."""


class CaptureError(Exception):
    """Work that cannot be captured."""


class GraphSequence:
    """What a capture makes: a CUDA graph, or several with the work between them that no graph can hold."""

    def __init__(self, first: torch.cuda.CUDAGraph) -> None:
        self.last = first
        self._before: list[tuple[torch.cuda.CUDAGraph, Callable[[], object]]] = []
        """The graphs before the last, each with the work that follows it."""

    def continue_in(self, graph: torch.cuda.CUDAGraph, *, after: Callable[[], object]) -> None:
        self._before.append((self.last, after))
        self.last = graph

    def replay(self) -> None:
        for graph, work in self._before:
            graph.replay()
            work()
        self.last.replay()


_thread = threading.local()
"""`split`: ends the graph that this thread is capturing, and begins the next."""


def between_graphs(work: Callable[[], object]) -> None:
    """Does work that a CUDA graph cannot hold. During a capture it is done at every replay instead, between two graphs. Side
    streams must have been joined."""
    split = getattr(_thread, "split", None)
    if split is None or not capturing():
        work()
    else:
        split(work)


class CaptureContext:
    """Where graphs are captured: one stream, and one pool of memory that all of them share.

    The pool outlasts its graphs, so that those of the next network, once neurons are removed, need no memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device, threading.get_ident())
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        """A graph that does nothing: with its last graph a pool is given up."""
        self._kept: list[list[object]] = []
        """Constants that its graphs read and caches may evict."""

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

    def capture(self, work: Callable[[], T]) -> tuple[GraphSequence, T]:
        """The graphs of the work, and what it returns: tensors that a replay fills. Nothing is computed yet.

        `torch.cuda.graph` would return all cached memory to the device before every capture, and get it again after it."""
        graphs = GraphSequence(torch.cuda.CUDAGraph())
        torch.clear_autocast_cache()  # it may be gone when the graph runs
        failed: Exception | None = None
        try:
            if memory_is_short(self.device):  # a capture cannot release it
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            with (
                holding_constants() as kept,
                # garbage may hold pinned memory and other graphs, whose release records events on the stream
                garbage_collection_off(),
                torch.cuda.stream(self.stream),
                self._splitting(graphs),
            ):
                self._kept.append(kept)
                self._make_pool()
                self._begin(graphs.last)
                try:
                    made = work()
                except Exception as error:
                    failed = error  # the end of the capture may raise another
                    raise
                finally:
                    graphs.last.capture_end()
        except Exception as error:
            raise CaptureError(first_line(failed or error)) from (failed or error)
        finally:
            failed = None  # or it would hold itself, and all that the work allocated
            torch.clear_autocast_cache()  # copies of parameters that nothing has computed yet
        return graphs, made

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode=ERROR_MODE)

    def _make_pool(self) -> None:
        if self._pool is None:
            self._pool, self._anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            self._begin(self._anchor)
            self._any_kernel()
            self._anchor.capture_end()

    def _any_kernel(self) -> None:
        """PyTorch warns of a graph without any."""
        torch.zeros((), device=self.device)

    @contextlib.contextmanager
    def _splitting(self, graphs: GraphSequence) -> Iterator[None]:
        """`between_graphs` splits this capture."""

        def split(work: Callable[[], object]) -> None:
            graphs.last.capture_end()
            graphs.continue_in(torch.cuda.CUDAGraph(), after=work)
            self._begin(graphs.last)
            self._any_kernel()

        _thread.split = split
        try:
            yield
        finally:
            del _thread.split

    def forget(self, *, release: bool = False) -> None:
        """Once its graphs are gone. Their memory is kept for the next ones, unless it is to be released or memory is short."""
        if self._pool is not None and (release or memory_is_short(self.device)):
            self._pool = self._anchor = None
        self._kept.clear()


def memory_is_short(device: torch.device) -> bool:
    """Whether less of a device's memory is free than this process has taken, which is about what a graph may need."""
    free, _ = torch.cuda.mem_get_info(device)
    return free < torch.cuda.memory_reserved(device)


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """One for all captures of a thread, as libraries keep memory for every stream that they have ever worked on. Its work has
    priority over that of side streams."""
    return torch.cuda.Stream(device, priority=-1)


def shape_key(batch: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Structure, shapes and types, which a graph of work on this batch depends on; None if it has other than tensors on this
    device."""
    leaves, spec = tree_flatten(batch)
    if not all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
        return None
    return str(spec), *((leaf.shape, leaf.dtype) for leaf in leaves)


def fingerprint(*parts: Any) -> tuple[Any, ...]:
    """What graphs of work by a network (and a loss, if it is a module) depend on: where tensors lie, which are trained, the
    numbers of modules (modes, a norm's momentum, a dropout's rate), and whether modules have hooks."""
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    own = [x for module in modules for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    numbers = [
        {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        for module in modules
    ]
    hooks = [has_module_hooks(part) for part in parts if isinstance(part, nn.Module)]
    return [(id(x), x.data_ptr(), x.requires_grad) for x in own], numbers, hooks


def copied_batch(batch: T, net: nn.Module, *, copy: bool = True) -> T:
    """A copy of a batch, images in channels_last if the network's convolutions are. Without `copy`,
    tensors that have the right format are not copied."""
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
    last = any(not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last) for w in weights)

    def place(leaf: Tensor) -> Tensor:
        image = last and leaf.dim() == 4 and leaf.is_floating_point()
        form = torch.channels_last if image else torch.contiguous_format
        return leaf.clone(memory_format=form) if copy else leaf.contiguous(memory_format=form)

    return tree_map(place, batch)


def refill(leaves: list[Tensor], batch: Any) -> None:
    torch._foreach_copy_(leaves, tree_flatten(batch)[0])


class GraphedFunction:
    """A function of a batch, by a network, that changes nothing: from graphs, one for each shape of a batch. What it returns
    is good until the next call from a graph of the same `CaptureContext`, whose memory they share."""

    def __init__(self, function: Callable[[Any], Any], net: nn.Module, capture: CaptureContext) -> None:
        self._function, self._net, self._capture = function, net, capture
        self._warmed_up: set[Any] = set()
        self._graphs: dict[Any, tuple[GraphSequence, Any, Any]] = {}
        self.refused: str | None = None
        """Why it runs eagerly, if it does."""

    def __call__(self, batch: Any) -> Any:
        """Call it within `CaptureContext.running`; the first call may be outside."""
        key = shape_key(batch, self._capture.device)
        if key is None or self.refused is not None:
            return self._function(batch)
        if key not in self._graphs:
            if key not in self._warmed_up:
                self._warmed_up.add(key)
                if has_module_hooks(self._net):
                    self.refused = "a replay calls no module hooks"
                return self._function(copied_batch(batch, self._net, copy=False))
            batch = copied_batch(batch, self._net)
            try:
                graph, made = self._capture.capture(lambda: self._function(batch))
            except CaptureError as error:
                self.refused = str(error)
            if self.refused is not None:  # no longer within `except`: the error holds what its capture took
                return self._function(batch)
            self._graphs[key] = graph, tree_flatten(batch)[0], made
        graph, leaves, made = self._graphs[key]
        refill(leaves, batch)
        graph.replay()
        return made

    def forget(self) -> None:
        self._graphs.clear()
        self._warmed_up.clear()
        self._capture.forget()

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
    """Where graphs are captured: one stream, and one pool of memory that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device, threading.get_ident())
        self._pool: Any = None
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
        """The graphs of the work, and what it returns: tensors that a replay fills. Nothing is computed yet."""
        graphs = GraphSequence(torch.cuda.CUDAGraph())
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        context = torch.cuda.graph(graphs.last, pool=self._pool, stream=self.stream, capture_error_mode=ERROR_MODE)
        torch.clear_autocast_cache()  # it may be gone when the graph runs
        failed: Exception | None = None
        current = torch.cuda.current_stream(self.device)
        try:
            with (
                holding_constants() as kept,
                # garbage may hold pinned memory and other graphs, whose release records events on the stream
                garbage_collection_off(),
                context,
                self._splitting(context, graphs),
            ):
                self._kept.append(kept)
                try:
                    made = work()
                except Exception as error:
                    failed = error  # the end of the capture may raise another
                    raise
        except Exception as error:
            raise CaptureError(first_line(failed or error)) from (failed or error)
        finally:
            failed = None  # or it would hold itself, and all that the work allocated
            torch.cuda.set_stream(current)  # which torch.cuda.graph does not restore where the capture fails
            torch.clear_autocast_cache()  # copies of parameters that nothing has computed yet
        return graphs, made

    @contextlib.contextmanager
    def _splitting(self, context: torch.cuda.graph, graphs: GraphSequence) -> Iterator[None]:
        """`between_graphs` splits this capture. The context ends the graph that it finds last."""

        def split(work: Callable[[], object]) -> None:
            graphs.last.capture_end()
            context.cuda_graph = torch.cuda.CUDAGraph()
            graphs.continue_in(context.cuda_graph, after=work)
            graphs.last.capture_begin(pool=self._pool, capture_error_mode=ERROR_MODE)
            torch.zeros((), device=self.device)  # a kernel: PyTorch warns of a graph without any

        _thread.split = split
        try:
            yield
        finally:
            del _thread.split

    def forget(self) -> None:
        """Once its graphs are gone."""
        self._pool = None  # it is freed with its last graph
        self._kept.clear()


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

"""What depends on the device: the precision of sums, scalars copied to the host asynchronously, and side streams.

In a step that is being captured into a CUDA graph, work on side streams becomes branches of the graph: the small kernels of
many blocks run beside each other and beside the large ones of the main stream. Elsewhere it runs on the current stream.
What a graph reads must stay where it is for as long as the graph is replayed: see `constant`.
"""

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
STREAMS = 12
"""Side streams of a stream, beside the serial one."""
CONSTANTS = 256
"""Tensors that each function caches."""
_holders: dict[int, list[object]] = {}
"""The lists of `holding_constants` that are open, by identity."""
_turns = itertools.count()
"""Which side stream is next."""
P = ParamSpec("P")
R = TypeVar("R")


def capturing() -> bool:
    """Whether what runs now is being recorded into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def upcast(x: Tensor) -> Tensor:
    """Half precision converted to float32, for sums."""
    return x.float() if x.dtype in HALF else x


def flags_to_tensor(flags: Sequence[bool], like: Tensor) -> Tensor:
    """1 or 0 for each flag, (flags,), by kernels: the host would wait for a copy, and a CUDA graph cannot hold one."""
    numbers = like.new_ones(len(flags))
    for n in (n for n, flag in enumerate(flags) if not flag):
        numbers[n].zero_()
    return numbers


def upcast_bmm(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, (B, n, k) and (B, k, m), to float32 if they are of half precision; on a GPU without copies of them."""
    if x.dtype in HALF and x.is_cuda and hasattr(torch.ops.aten.bmm, "dtype"):  # torch 2.8
        product: Tensor = torch.ops.aten.bmm.dtype(x, y.to(x.dtype), torch.float32)
        return product
    return upcast(x) @ upcast(y)


@dataclass(frozen=True)
class HostScalar:
    """A number that is copied from the device to the host asynchronously."""

    number: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, number: Tensor) -> "HostScalar":
        """Starts the copy. In a step that is being captured the number stays on the device."""
        if not number.is_cuda or capturing():
            return cls(number, None)
        host = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(number.device))
        return cls(host, ready)

    def item(self) -> float:
        """Waits for this one number, not for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return float(self.number) if self.number.is_floating_point() else int(self.number)


@contextlib.contextmanager
def holding_constants() -> Iterator[list[object]]:
    """Collects the constants that a capture reads. Its graphs are valid for as long as the list is held."""
    kept: list[object] = []
    _holders[id(kept)] = kept
    try:
        yield kept
    finally:
        del _holders[id(kept)]


def constant(make: Callable[P, R]) -> Callable[P, R]:
    """Caches tensors that depend on the arguments alone. A graph reads them where they are, so that each one that a capture
    reads is held with it (`holding_constants`), whatever the cache evicts. What a capture makes is that graph's own: it is
    computed only when the graph is replayed, and never if the capture fails."""
    made: OrderedDict[tuple[object, ...], R] = OrderedDict()

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (*args, *sorted(kwargs.items()))
        captured, value = capturing(), made.get(key)
        if value is None:
            value = make(*args, **kwargs)
            if not captured:
                made[key] = value
                if len(made) > CONSTANTS:  # sizes change with every removal
                    made.popitem(last=False)
        elif captured:
            for kept in list(_holders.values()):  # those of captures in other threads too, which does no harm
                kept.append(value)
        return value

    return get


class SideStreams:
    """Side streams of the stream that is current now. Whoever forks keeps what they read alive until `join`. `serial` ones are
    one stream: what runs on it follows each other, and never waits for other side streams."""

    def __init__(self, *, serial: bool = False) -> None:
        self._main = torch.cuda.current_stream() if capturing() else None
        self._serial = serial
        self._open: list[torch.cuda.Stream] = []

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is called within runs after all that was called on the main stream so far, beside what follows there."""
        if self._main is None:
            yield
            return
        *streams, last = side_streams_of(self._main)
        turns = (streams[next(_turns) % STREAMS] for _ in streams)
        stream = last if self._serial else next(each for each in turns if each != self._main)
        stream.wait_stream(self._main)
        self._open.append(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What follows on the main stream runs after all side streams."""
        for stream in self._open:
            assert self._main is not None
            self._main.wait_stream(stream)
        self._open = []


STREAM_FAMILIES: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
"""(device, stream) → the side streams that it shares with them."""


def side_streams_of(main: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    """The side streams of the stream that captures, or of one of its side streams. Each thread captures on its own
    stream, and captures must not share streams. The thread's identity would not do: autograd runs backward passes in its own
    threads, which all captures on a device share."""
    key = main.device.index, main.cuda_stream
    if key not in STREAM_FAMILIES:
        streams = [torch.cuda.Stream(main.device) for _ in range(STREAMS + 1)]
        for each in (main, *streams):
            STREAM_FAMILIES[each.device.index, each.cuda_stream] = streams
    return STREAM_FAMILIES[key]

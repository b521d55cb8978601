"""SideStreams of a captured step share no memory that one may write while another reads it.

Without a GPU: streams are stood in for by clocks, and every operation is noted on the one that is current. A stream may get the
memory of a tensor that was made on it as soon as nobody holds the tensor; whoever has used it must be done by then.
"""

import contextlib
import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hgnp
from hgnp.curvature import device


class Stream:
    """Knows how far every stream was at the last point that it waited for."""

    device = SimpleNamespace(index=0)

    def __init__(self, device: Any = None) -> None:
        self.seen: Counter[Stream] = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.seen |= other.seen


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.streams = [Stream()]
        self.alive: dict[int, tuple[StorageWeakRef, Stream, list[tuple[Stream, int, str]]]] = {}
        self.free: dict[Stream, list[tuple[Stream, int, str]]] = defaultdict(list)
        self.used: set[Stream] = set()
        self.wrong: set[str] = set()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key, (storage, home, uses) in list(self.alive.items()):
            if storage.expired():
                self.free[home] += uses
                del self.alive[key]
        out = func(*args, **(kwargs or {}))
        now = self.streams[-1]
        now.seen[now] += 1
        self.used.add(now)
        given, made = (
            [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out)
        )
        here = now, now.seen[now], str(func)
        for storage in given:
            if storage._cdata in self.alive:
                uses = self.alive[storage._cdata][2]
                stream, number, name = uses[0]
                if now.seen[stream] < number:
                    self.wrong.add(f"{func} reads what {name} has not made yet")
                uses.append(here)
        fresh = [
            each for each in made if each._cdata not in self.alive and each._cdata not in {x._cdata for x in given}
        ]
        for storage in fresh:
            self.alive[storage._cdata] = StorageWeakRef(storage), now, [here]
            for stream, number, name in self.free[now]:
                if now.seen[stream] < number:
                    self.wrong.add(f"{func} may write what {name} still uses")
        return out


class Net(nn.Module):
    """More layers than there are streams; one of them may have no part in what comes out."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.aside = nn.Linear(4, 2) if aside else None
        self.convs = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(device.STREAMS + 2)))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(x).mean((2, 3))
        if self.aside is not None:
            self.aside(x)
        return self.out(x)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("choices", [{}, {"kfac_approx": "expand"}, {"flatness": "paper"}], ids=str)
def test_memory_is_not_shared_with_what_still_runs(
    choices: dict[str, str], aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x, y = Net(aside), torch.randn(6, 4, 5, 5), torch.arange(6) % 3
    flat = hgnp.Flatness(net, mu=0.05, bound=-1.0, **choices)  # type: ignore[arg-type]
    flat.backward(x, y)
    watch, streams = Watch(), [Stream() for _ in range(device.STREAMS + 1)]
    cuda = SimpleNamespace(
        current_stream=lambda: watch.streams[-1], stream=watch.on, is_available=lambda: False
    )  # fmt: skip
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "capturing", lambda: True)
    monkeypatch.setattr(device, "side_streams_of", lambda _: streams)
    with watch:
        flat.backward(x, y)
    assert len(watch.used) > 2
    assert not watch.wrong


def test_what_a_capture_reads_is_kept_with_it_whatever_the_cache_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    @device.constant
    def ones(side: int) -> torch.Tensor:
        found = torch.ones(side)
        made.append(weakref.ref(found))
        return found

    for side in (1, 2):
        ones(side)
    with monkeypatch.context() as patch, device.holding_constants() as kept, device.holding_constants() as other:
        patch.setattr(device, "capturing", lambda: True)
        read = ones(2)
        assert kept[0] is other[0] is read
        del read
    for side in range(3, device.CONSTANTS + 3):
        ones(side)
    assert [ref() is not None for ref in made[:3]] == [False, True, True]
    kept.clear()
    other.clear()
    gc.collect()
    assert made[1]() is None
    assert sum(ref() is not None for ref in made) == device.CONSTANTS


def test_what_a_capture_makes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed when that graph is replayed, and never if the capture fails."""
    made: list[int] = []

    @device.constant
    def ones(side: int) -> torch.Tensor:
        made.append(side)
        return torch.ones(side)

    with monkeypatch.context() as patch:
        patch.setattr(device, "capturing", lambda: True)
        assert ones(3) is not ones(3)
    kept = ones(3)
    with monkeypatch.context() as patch:
        patch.setattr(device, "capturing", lambda: True)
        assert ones(3) is kept
    assert ones(3) is kept
    assert made == [3, 3, 3]


def test_each_capturing_stream_has_its_own_side_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where autograd's one thread of a device forks for several captures."""
    numbers = iter(range(1000))

    class Numbered(Stream):
        def __init__(self, device: Any = None) -> None:
            super().__init__()
            self.cuda_stream = next(numbers)

    here = Numbered()
    now = [here]
    used: list[Stream] = []

    @contextlib.contextmanager
    def on(stream: Numbered) -> Iterator[None]:
        used.append(stream)
        now.append(stream)
        yield
        now.pop()

    cuda = SimpleNamespace(current_stream=lambda: now[-1], stream=on, Stream=Numbered)
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "capturing", lambda: True)
    monkeypatch.setattr(device, "STREAM_FAMILIES", {})
    families = []
    for main in (here, Numbered()):
        now[:] = [main]
        used.clear()
        for _ in range(3 * device.STREAMS):
            side = device.SideStreams()
            with side.fork(), device.SideStreams().fork():  # of a side stream
                pass
            side.join()
        families.append(set(used))
    assert len(families[0]) == len(families[1]) == device.STREAMS
    assert not families[0] & families[1]

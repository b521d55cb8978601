"""Ranks on torch.distributed: the only file that calls it.

`join_ranks` finds or creates the process group of a run, `ranks_of` takes one that the caller has. Both return a `Reducer`,
which is all that the rest of hgnp sees. A collective that fails raises `RankError`; `failures_announced` tells the other ranks
why.
"""

import atexit
import contextlib
import gc
import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgnp.curvature.device import capturing, upcast
from hgnp.errors import InputError, InputTypeError, RankError, one_line
from hgnp.execution.graphs import between_graphs
from hgnp.reducer import LOCAL, Reducer
from hgnp.validation import check_net

TIMEOUT = timedelta(minutes=10)
"""Of the groups that hgnp creates: how long a rank waits for another that hangs without dying."""
RANK_ZERO_SECONDS = 2.0  # within which rank 0 reports an error that all ranks have
LAUNCHER = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, besides WORLD_SIZE."""


class ProcessGroupReducer(Reducer):
    """The ranks of a process group. Each call sends one flat buffer per dtype, in the order of the tensors.

    Buffers travel on the device they are on if the group's backend can send them from there. Those of a GPU in a gloo group go
    through the CPU, and those of the CPU in an nccl group through the current GPU.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        pairs = (entry.split(":") for entry in dist.get_backend_config(self.group).split(","))
        self._backends = dict(pairs)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        kinds: dict[torch.dtype, list[int]] = defaultdict(list)
        for n, x in enumerate(tensors):
            kinds[torch.uint8 if x.dtype == torch.bool else upcast(x[:0] if x.dim() else x).dtype].append(n)
        sums: dict[int, Tensor] = {}
        for dtype, numbers in kinds.items():
            flat = torch.cat([tensors[n].detach().reshape(-1).to(dtype) for n in numbers])
            parts = self._all_reduced(flat).split([tensors[n].numel() for n in numbers])
            sums |= {n: _shaped_like(tensors[n], part) for n, part in zip(numbers, parts, strict=True)}
        return [sums[n] for n in range(len(tensors))]

    def broadcast(self, data: bytes) -> bytes:
        (size,) = self._bytes_from_rank_zero(torch.tensor([len(data)])).tolist()
        sent = _as_tensor(data) if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        return self._bytes_from_rank_zero(sent).numpy().tobytes() if size else b""

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [int(size) for size in self._gathered(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        parts = self._gathered(padded) if len(padded) else [padded] * self.ranks
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _all_reduced(self, flat: Tensor) -> Tensor:
        """In place."""
        # the adjoint of a norm's sum runs in a thread of autograd's, where no capture can be split
        assert not (self.sync_norms and capturing()), "synchronised norms must not be captured"

        def reduce() -> None:
            sent = flat.to(self._route(flat.device))
            self._collective(lambda: dist.all_reduce(sent, group=self.group))
            if sent is not flat:
                flat.copy_(sent)

        between_graphs(reduce)
        return flat

    def _bytes_from_rank_zero(self, data: Tensor) -> Tensor:
        sent = data.to(self._route(data.device))
        self._collective(lambda: dist.broadcast(sent, dist.get_global_rank(self.group, 0), group=self.group))
        return sent.cpu()

    def _gathered(self, data: Tensor) -> list[Tensor]:
        sent = data.to(self._route(data.device))
        parts = [torch.empty_like(sent) for _ in range(self.ranks)]
        self._collective(lambda: dist.all_gather(parts, sent, group=self.group))
        return [part.cpu() for part in parts]

    def _route(self, device: torch.device) -> torch.device:
        """The device from which the group's backend sends what is on `device`."""
        backend = self._backends.get(device.type)
        if device.type == "cuda" and backend in (None, "gloo"):
            return torch.device("cpu")
        if device.type == "cpu" and backend is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo and nccl have no class in common; every message is one of the connection
            why = re.sub(r"^\[[^]]*\] ", "", one_line(error)).split(". ")[0][:200]  # without the place in their source
            raise RankError(
                f"a process of the {self.ranks} has died or does not answer, as rank {self.rank} sees it ({why}); resume "
                "the run"
            ) from error


def _shaped_like(x: Tensor, flat: Tensor) -> Tensor:
    """With the dtype and strides of x too: a fused optimizer reads a gradient in the memory order of its parameter."""
    shaped = flat.view(x.shape)
    return shaped if x.dtype == flat.dtype and x.is_contiguous() else torch.empty_like(x).copy_(shaped)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def world_size() -> int:
    """The processes of the default group; before there is one, those that torchrun has started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 1


def initialise() -> None:
    """Creates the process group under torchrun, unless there is one: nccl between GPUs, gloo between CPUs."""
    if world_size() == 1 or (dist.is_available() and dist.is_initialized()):
        return
    missing = [name for name in LAUNCHER if name not in os.environ]
    if missing or not dist.is_available():
        raise InputError(
            f"WORLD_SIZE must be 1 or set by torchrun, got {world_size()} without {', '.join(missing) or 'torch.distributed'}; "
            "start with torchrun --nproc-per-node N"
        )
    local, nccl = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available() and dist.is_nccl_available()
    if nccl and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=TIMEOUT)
    except RuntimeError as error:
        raise RankError(f"the {world_size()} processes do not find each other: {one_line(error)[:200]}") from error
    atexit.register(_leave)
    _created.append(True)


_created: list[bool] = []


def created_group() -> bool:
    """Whether `initialise` created the process group."""
    return bool(_created)


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
    gc.collect()  # cycles hold the group: where its threads end with the interpreter, gloo may abort the process


def world() -> Reducer:
    """All ranks of the default group."""
    return LOCAL if world_size() == 1 else ProcessGroupReducer()


def join_ranks(net: nn.Module) -> tuple[nn.Module, Reducer]:
    """The network, without DistributedDataParallel around it, and the ranks that train it: those of that wrapper, or all."""
    initialise()
    group: Any = None
    if isinstance(net, nn.parallel.DistributedDataParallel):
        if net._comm_hooks:  # there is no API to ask
            raise InputError(
                "net must have no communication hook, got DistributedDataParallel with one, which hgnp would not call as it "
                "sums gradients itself; pass net.module"
            )
        net, group = net.module, net.process_group
    return net, LOCAL if group is None and world_size() == 1 else ranks_of(group or dist.group.WORLD, net)


def ranks_of(group: Any, net: nn.Module | None = None) -> Reducer:
    """The reducer of a process group that the caller has. None is right only for a single process: of several, each
    would train its own network, even one inside DistributedDataParallel, which hgnp bypasses."""
    if isinstance(net, nn.Module):
        check_net(net)
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"group must be a process group where torch.distributed has {dist.get_world_size()} ranks, got None; pass "
                "group=torch.distributed.group.WORLD, and the plain module without DistributedDataParallel"
            )
        return LOCAL
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise InputTypeError(
            f"group must be None or a torch.distributed.ProcessGroup, got {type(group).__name__}; pass "
            "torch.distributed.group.WORLD after init_process_group"
        )
    if dist.get_world_size(group) == 1:
        return LOCAL
    for name, module in () if net is None else net.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"layer {name!r} must be an ordinary BatchNorm on several ranks, got SyncBatchNorm, whose statistics over all "
                "ranks hgnp does not differentiate yet; use nn.BatchNorm, which normalises each rank's samples by themselves"
            )
    return ProcessGroupReducer(group)


def device_of_rank(device: str | torch.device) -> torch.device:
    """`device`; "cuda" without a number is this process's own GPU of several."""
    given = torch.device(device)
    if str(given) != "cuda" or world_size() == 1:
        return given
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    # on every rank of this machine: one that continued would wait for the others
    if processes > torch.cuda.device_count():
        raise InputError(
            f"device must be a GPU for each process, got {torch.cuda.device_count()} for {processes} processes; start fewer "
            "(--nproc-per-node), or use device cpu"
        )
    return torch.device("cuda", local)


# What ranks tell each other of failures

_run_numbers = itertools.count()
_announcements: list["_Announcements"] = []
"""Those of the current run."""
_last: list["_Announcements"] = []
"""Those of the last run."""


class _Announcements:
    """Errors of the ranks, in the store that the group was created with: it outlives a group whose collectives fail."""

    def __init__(self, reducer: Reducer) -> None:
        self.rank, self.ranks = reducer.rank, reducer.ranks
        self._prefix = f"hgnp/{next(_run_numbers)}"
        # there is no API for the default group's store; tests/execution/test_processes.py fails if this moves
        self._store = dist.distributed_c10d._get_default_store()

    def put(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/{self.rank}", one_line(error) or type(error).__name__)

    def of(self, rank: int) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"{self._prefix}/{rank}"]):
                return str(self._store.get(f"{self._prefix}/{rank}").decode())
        return None

    def claim(self) -> bool:
        """Whether this rank is the first to claim; True if the store cannot be read."""
        with contextlib.suppress(RuntimeError):
            return int(self._store.add(f"{self._prefix}/claims", 1)) == 1
        return True


@contextlib.contextmanager
def failures_announced(reducer: Reducer) -> Iterator[None]:
    """Around a run: an error of this rank is announced to the others, and a `RankError` that follows from another's says so.
    Within another such block it does nothing."""
    if reducer.ranks == 1 or _announcements:
        yield
        return
    board = _Announcements(reducer)
    _announcements.append(board)
    try:
        yield
    except RankError as error:
        time.sleep(0.2)  # a rank announces its error before it closes its connections, but that may be seen first
        for rank in range(reducer.ranks):
            if rank != reducer.rank and (text := board.of(rank)) is not None:
                raise RankError(f"rank {rank} failed: {text}") from error
        raise
    except BaseException as error:
        board.put(error)
        raise
    finally:
        _last[:], _announcements[:] = [board], []


def prints_error(error: BaseException) -> bool:
    """Whether this rank is the one that prints the error: of those that all ranks have rank 0, else the rank that failed."""
    rank = int(os.environ.get("RANK", "0"))
    if not _last:
        return rank == 0
    board = _last[0]
    if isinstance(error, RankError):  # another rank's error: that one prints it, unless it died without an error
        return all(board.of(other) is None for other in range(board.ranks)) and board.claim()
    if board.rank == 0:
        return True
    until = time.monotonic() + RANK_ZERO_SECONDS
    while time.monotonic() < until:
        if board.of(0) is not None:
            return False
        time.sleep(0.05)
    return True

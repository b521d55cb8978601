"""The part of the data that each rank of a data-parallel run gets.

A global batch is `loader_batches` batches of the loader, one for each rank of the run when it started. It is split into
contiguous parts of nearly equal size; nothing is padded or repeated. A run that is resumed with other ranks keeps its global
batch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hgnp.errors import InputError
from hgnp.reducer import Reducer


@runtime_checkable
class Splittable(Protocol):
    """A loader that splits itself, such as hgnp's own."""

    def for_rank(self, reducer: Reducer, loader_batches: int, *, every_sample: bool) -> Iterable[Any]:
        """A loader of this rank's parts of global batches. With `every_sample` none is dropped, and a rank may get fewer parts
        than others; otherwise all get equally many."""


def rank_slice(n: int, rank: int, ranks: int) -> slice:
    """A rank's part of n samples: contiguous, the first ranks have one more where they cannot be equal."""
    each, more = divmod(n, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def drops(samples: int, ranks: int, *, every_sample: bool) -> bool:
    """Whether a global batch is left out, as it has too few samples for all ranks to get one."""
    return samples < ranks and not every_sample


def drop_note(name: str, samples: int, ranks: int) -> str:
    return (
        f"{name}: a last batch of {samples} samples is dropped in every epoch, as it is smaller than the {ranks} ranks"
    )


def check_enough(samples: int, name: str, ranks: int) -> None:
    """On every rank alike: one that has no sample would leave the others waiting."""
    if samples < ranks:
        raise InputError(
            f"{name} must have a sample for each of the {ranks} ranks, got {samples}; start fewer processes"
        )


class RankBatches:
    """A batch sampler: this rank's part of every global batch, in the order of rank 0's own batch sampler."""

    def __init__(self, batches: Any, reducer: Reducer, loader_batches: int, name: str, *, every_sample: bool) -> None:
        self._batches, self._reducer, self._loader_batches = batches, reducer, loader_batches
        self._name, self._every_sample = name, every_sample
        self._plain = type(batches) is BatchSampler
        self.note: str | None = None

    def __iter__(self) -> Iterator[list[int]]:
        reducer, ranks, loader_batches = self._reducer, self._reducer.ranks, self._loader_batches
        batches = self._from_rank_zero()
        check_enough(sum(map(len, batches)), self._name, ranks)
        for start in range(0, len(batches), loader_batches):
            group = batches[start : start + loader_batches]
            if self._plain and self._batches.drop_last and len(group) < loader_batches:
                return  # one process with the global batch would drop it too
            joint = np.concatenate(group)
            if drops(len(joint), ranks, every_sample=self._every_sample):
                self.note = drop_note(self._name, len(joint), ranks)
                continue
            if not self._plain and len(group) == ranks:  # batches that belong together, such as those of one length
                own = group[reducer.rank]
            else:
                own = joint[rank_slice(len(joint), reducer.rank, ranks)]
            if len(own):
                yield own.tolist()

    def _from_rank_zero(self) -> list[np.ndarray[Any, Any]]:
        def encoded() -> bytes:
            batches = [np.asarray(batch, dtype=np.int64) for batch in self._batches]
            sizes = np.asarray([len(batch) for batch in batches], dtype=np.int64)
            return np.concatenate([np.asarray([len(batches)]), sizes, *batches]).astype(np.int64).tobytes()

        numbers = np.frombuffer(self._reducer.on_rank_zero(encoded), dtype=np.int64)
        count = int(numbers[0])
        return np.split(numbers[1 + count :], np.cumsum(numbers[1 : 1 + count])[:-1]) if count else []

    def __len__(self) -> int:
        ranks, loader_batches = self._reducer.ranks, self._loader_batches
        if not self._plain:
            return -(-len(self._batches) // loader_batches)
        whole, left = divmod(len(self._batches.sampler), self._batches.batch_size * loader_batches)
        last = left > 0 and not self._batches.drop_last and not drops(left, ranks, every_sample=self._every_sample)
        return whole + last


def for_rank(
    loader: Any, name: str, reducer: Reducer, loader_batches: int, *, every_sample: bool
) -> Iterable[Any] | None:
    """A loader of this rank's parts; None for a list, whose batches are split one by one. InputError for any other loader that
    hgnp cannot split."""
    if isinstance(loader, Splittable):
        return loader.for_rank(reducer, loader_batches, every_sample=every_sample)
    if isinstance(loader, Sequence):
        return None
    sampler = _distributed_sampler(loader)
    if sampler is not None:
        _check_distributed(loader, sampler, name, reducer, every_sample=every_sample)
        own: Iterable[Any] = loader
        return own
    if type(loader) is not DataLoader or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise InputError(
            f"{name} must be a torch DataLoader over a dataset with a length, a list of batches, or a loader with the method "
            f"for_rank, to be split over {reducer.ranks} ranks, got {_described(loader)}"
        )
    batches = RankBatches(loader.batch_sampler, reducer, loader_batches, name, every_sample=every_sample)
    return DataLoader(
        loader.dataset, batch_sampler=batches, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context, prefetch_factor=loader.prefetch_factor,
        pin_memory_device=loader.pin_memory_device,
        generator=loader.generator if reducer.rank == 0 else None,  # seeds of workers differ from rank to rank
    )  # fmt: skip


def check_same_list(batches: Sequence[Any], name: str, reducer: Reducer) -> None:
    """That a list of batches is the same on every rank, by its length and its first batch: it would lose samples otherwise."""
    sha = hashlib.sha256(str(len(batches)).encode())
    for leaf in tree_leaves(batches[0]) if len(batches) else ():
        if isinstance(leaf, Tensor):
            sha.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if len(set(reducer.gather(sha.digest()))) > 1:
        raise InputError(
            f"{name} must be the same list on every rank, as hgnp splits its batches, got different ones; build it from one "
            "seed, or pass a DataLoader"
        )


def _distributed_sampler(loader: Any) -> Any:
    """The loader's own sampler, if that splits the data over ranks already."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(getattr(sampler, "num_replicas", None), int) and isinstance(getattr(sampler, "rank", None), int):
            return sampler
    return None


def _check_distributed(loader: Any, sampler: Any, name: str, reducer: Reducer, *, every_sample: bool) -> None:
    """That a sampler that splits by itself has these ranks, repeats no sample and gives every rank as many batches."""
    if (sampler.num_replicas, sampler.rank) != (reducer.ranks, reducer.rank):
        raise InputError(
            f"{name}: its sampler must have num_replicas={reducer.ranks} and rank={reducer.rank}, got {sampler.num_replicas} "
            f"and {sampler.rank}; omit it, and hgnp splits the data"
        )
    samples = len(getattr(sampler, "dataset", ())) if isinstance(sampler, DistributedSampler) else 0
    if samples % reducer.ranks and (every_sample or not sampler.drop_last):
        what = "drops" if sampler.drop_last else "repeats"
        raise InputError(
            f"{name}: its sampler must give every sample once, got a DistributedSampler that {what} some of the {samples}; "
            "omit it, and hgnp splits the data"
        )
    counts = [json.loads(count) for count in reducer.gather(json.dumps(len(loader)).encode())]
    if len(set(counts)) > 1:
        raise InputError(f"{name} must have as many batches on every rank, got {', '.join(map(str, counts))}")


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):
        return "a DataLoader over an IterableDataset"
    return (
        "a DataLoader with batch_size=None" if loader.batch_sampler is None else f"the subclass {type(loader).__name__}"
    )

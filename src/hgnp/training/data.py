"""Batches: from a loader to inputs and target on the network's device, with checks of both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset

from hgnp.curvature.autodiff.forward import sample_entries, samples_in
from hgnp.curvature.batch_checks import check_labels, describe_shape
from hgnp.curvature.losses import Loss
from hgnp.errors import InputError, InputTypeError, brief
from hgnp.reducer import LOCAL, Reducer
from hgnp.training.split import check_enough, check_same_list, drop_note, drops, for_rank, rank_slice

Unpack = Callable[[Any], tuple[Any, Any]]


def unpack_batch(batch: Any, name: str = "train") -> tuple[Any, Any]:
    """Inputs and target of (x, y), or of a mapping with `labels`: the other entries are the inputs."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise InputError(
                f"{name}: a batch must have the key 'labels', got {', '.join(map(str, batch))}; pass unpack"
            )
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(f"{name}: a batch must be (x, y) or a mapping with 'labels', got {_describe(batch)}; pass unpack")


class Batches:
    """A loader's batches as (inputs, target) on a device. Of several ranks each gets its part of global batches, which are
    `loader_batches` batches of the loader; of a list, one (`split.py`). Validation data lose no sample."""

    def __init__(
        self,
        loader: Any,
        name: str,
        custom_unpack: Unpack | None,
        device: torch.device,
        reducer: Reducer = LOCAL,
        loader_batches: int = 1,
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise InputTypeError(f"{name} must be a DataLoader or a list of batches, got {_describe(loader)}")
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise InputTypeError(
                f"{name} must be a DataLoader or a list of batches, got the dataset {type(loader).__name__}; "
                f"use DataLoader({name}, batch_size=…)"
            )
        # a custom loader may be its own iterator and restart; these cannot
        if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
            raise InputError(
                f"{name} must be a DataLoader or a list of batches, got {_describe(loader)}, which is exhausted after one epoch"
            )
        self.loader, self.name, self.device = loader, name, device
        self._custom_unpack, self._reducer = custom_unpack, reducer
        self.loader_batches = 1 if isinstance(loader, Sequence) else loader_batches
        """Batches of the loader in a global batch."""
        own = None
        if reducer.ranks > 1 or self.loader_batches > 1:
            own = for_rank(loader, name, reducer, self.loader_batches, every_sample=name == "val")
        self.loader_batches = 1 if own is loader else self.loader_batches  # its sampler splits it already
        self._own = loader if own is None else own
        self._slices = reducer.ranks > 1 and own is None
        if self._slices:
            check_same_list(loader, name, reducer)
            check_enough(max((samples_in(self._unpacked(each)[0]) for each in loader), default=0), name, reducer.ranks)
        self._note: str | None = None
        self.length = _length(self._own)
        """Batches per epoch, None of a loader without a length."""
        self.count = self.length
        """The same; of a loader without a length those of the last whole epoch, None during the first."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number = 0
        for batch in self._own:
            pair = self._unpacked(batch)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InputError(f"unpack must return (inputs, target), got {_describe(pair)}")
            if self._slices:
                pair = self._own_samples(*pair)
                if pair is None:
                    continue
            number += 1
            yield self._to_device(pair[0]), self._to_device(pair[1])
        if number == 0:
            raise InputError(f"{self.name} must yield batches in every epoch, as a DataLoader does, got none")
        self.count = number

    @property
    def note(self) -> str | None:
        """What the last epoch dropped, if anything."""
        return self._note or getattr(getattr(self._own, "batch_sampler", self._own), "note", None)

    def _own_samples(self, inputs: Any, target: Any) -> tuple[Any, Any] | None:
        """This rank's part of a batch that every rank has; None if it gets none."""
        n, ranks = samples_in(inputs), self._reducer.ranks
        if not isinstance(target, Tensor) or target.dim() == 0 or len(target) != n:
            raise InputError(
                f"{self.name} must have targets that are tensors with one entry per sample to be split over {ranks} ranks, got "
                f"{describe_shape(target)}; pass a DataLoader"
            )
        if drops(n, ranks, every_sample=self.name == "val"):
            self._note = drop_note(self.name, n, ranks)
            return None
        index = torch.arange(n)[rank_slice(n, self._reducer.rank, ranks)]
        return (select_samples(inputs, index), target[index.to(target.device)]) if len(index) else None

    def _unpacked(self, batch: Any) -> Any:
        if self._custom_unpack is None:
            return unpack_batch(batch, self.name)
        try:
            return self._custom_unpack(batch)
        except Exception as error:
            raise InputError(f"unpack must take the batches of {self.name}, but failed: {brief(error)}") from error

    def _to_device(self, value: Any) -> Any:
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, value)


class Prefetcher:
    """Iterates over batches; `fetch` loads the next one while the device is still computing."""

    def __init__(self, batches: Iterable[tuple[Any, Any]]) -> None:
        self._batches = iter(batches)
        self._next: tuple[Any, Any] | Exception | None = None

    def fetch(self) -> tuple[Any, Any] | None:
        """Load the next batch and return it, or None at the end. An error of the loader is raised when the batch is due."""
        if self._next is None:
            try:
                self._next = next(self._batches)
            except Exception as error:
                self._next = error
        return None if isinstance(self._next, Exception) else self._next

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self.fetch()
            batch, self._next = self._next, None
            if isinstance(batch, StopIteration):
                return
            if isinstance(batch, Exception):
                try:
                    raise batch
                finally:
                    del batch  # it references this frame
            assert batch is not None
            yield batch


def select_samples(inputs: Any, index: Tensor) -> Any:
    """The samples at `index`: of tensors along their first dimension, of lists and tuples with an entry per sample by entry."""
    n, by_entry = samples_in(inputs), sample_entries(inputs) is not None

    def select(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[index.to(part.device)] if part.dim() and part.shape[0] == n else part
        if isinstance(part, tuple | list) and part is not inputs and len(part) == n:
            dictionaries = all(isinstance(entry, dict) for entry in part)  # targets
            if isinstance(part, list) or by_entry or dictionaries:
                return type(part)([part[place] for place in index.tolist()])
        return tree_map(select, part, is_leaf=lambda x: x is not part)

    return select(inputs)


def with_checked_labels(
    batches: Iterable[tuple[Any, Any]], loss: Loss, classes: int | None, name: str
) -> Iterator[tuple[Any, Any]]:
    """The batches; InputError for a class label that the network has no output for."""
    for batch in batches:
        if classes is not None:
            check_labels(loss, batch[1], classes, name)
        yield batch


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader's __len__ fails if its dataset has none
        return None


def _describe(value: Any) -> str:
    return f"{len(value)} parts" if isinstance(value, tuple | list) else type(value).__name__

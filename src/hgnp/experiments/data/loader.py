"""`Loader`: batches augmented on the device, in an order that a saved random state reproduces.

Images stay uint8 until their batch is built; shuffling, flips, crops and normalisation act on whole batches, on the device.
An epoch draws one number from torch's global CPU generator when it starts; order and augmentation follow from that number
alone, on every device. An epoch that neither shuffles nor augments draws none.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.errors import InputError
from hgnp.reducer import LOCAL, Reducer
from hgnp.training.split import check_enough, drop_note, drops, rank_slice

BATCHES_PER_LAUNCH = 16  # built together on a GPU, where launches take longer than kernels


class ImageSource(Protocol):
    """Images of one size with their labels."""

    @property
    def samples(self) -> int: ...

    def batches(self, order: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each tensor of indices, uint8 images (batch, channels, side, side) and labels, on the loader's device."""


class InMemorySource:
    """A dataset in device memory."""

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        self.images, self.labels = images.to(device), labels.to(device)

    @property
    def samples(self) -> int:
        return len(self.labels)

    def batches(self, order: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.cat(list(order)).to(self.labels.device).split([len(index) for index in order]):
            yield self.images[index], self.labels[index]


class Loader:
    """Batches (x, y) of a source: x float32, y int64, on the device. Every iteration is one epoch.

    `mean` and `std` are those of the pixels' values as stored (0 to 255), by channel. `flip` mirrors each image with
    probability ½; `crop` pads each image with that many black pixels and crops it at a random position; `cutout`
    replaces a square of that side around a random pixel of each image by the mean colour, as far as it lies inside the image.
    Without `shuffle` images keep their stored order.

    A shuffled epoch drops a last batch of a single sample (unless `batch` is 1), which BatchNorm cannot process; which
    sample that is changes from epoch to epoch. `drop_last` drops every incomplete batch. `samples` is the number of samples
    per epoch; `batches_per_launch` batches are built together, which changes none of them.

    `for_rank` is the part of a rank: order and augmentation are drawn for all samples, from rank 0's number.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        batch: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        shuffle: bool = False,
        flip: bool = False,
        crop: int = 0,
        cutout: int = 0,
        drop_last: bool = False,
    ) -> None:
        for field, value, least in (("batch", batch, 1), ("crop", crop, 0), ("cutout", cutout, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{field} must be an integer ≥ {least}, got {value!r}")
        self.source, self.batch = source, batch
        self.shuffle, self.flip, self.crop, self.cutout = shuffle, flip, crop, cutout
        deviation = torch.tensor(std, device=device).view(-1, 1, 1)
        self._scale, self._shift = 1 / deviation, -torch.tensor(mean, device=device).view(-1, 1, 1) / deviation
        self.batches_per_launch = (
            BATCHES_PER_LAUNCH if isinstance(source, InMemorySource) and device.type == "cuda" else 1
        )
        self._drop_last, self._reducer, self._every_sample = drop_last, LOCAL, True
        self.note: str | None = None
        """What every epoch drops, as it has too few samples for all ranks."""
        self._count_samples()

    def _count_samples(self) -> None:
        left, ranks = self.source.samples % self.batch, self._reducer.ranks
        too_few = drops(left, ranks, every_sample=self._every_sample)
        if left and too_few and not self._drop_last:
            self.note = drop_note("train", left, ranks)
        self.samples = self.source.samples - (left if self._drop_last or too_few or (self.shuffle and left == 1) else 0)
        if self.samples == 0:
            raise InputError(f"batch must leave at least one batch of {self.source.samples} samples, got {self.batch}")

    def for_rank(self, reducer: Reducer, loader_batches: int, *, every_sample: bool) -> "Loader":
        """The parts of a rank of global batches of `loader_batches` times this loader's batch."""
        check_enough(self.source.samples, "data", reducer.ranks)
        own = copy.copy(self)
        own.batch, own._reducer, own._every_sample = self.batch * loader_batches, reducer, every_sample
        own._count_samples()
        return own

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # drawn here and not with the first batch, so that the epoch starts with iter()
        if self.shuffle or self.flip or self.crop or self.cutout:
            seed = torch.empty((), dtype=torch.int64)
            if self._reducer.rank == 0:
                seed.random_()
            (seed,) = self._reducer.from_rank_zero([seed])
            return self._epoch(torch.Generator().manual_seed(int(seed)))
        return self._epoch(None)

    def _epoch(self, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        total, device, rank = self.samples, self._scale.device, self._reducer.rank
        order = torch.arange(self.source.samples)
        if self.shuffle:
            order = torch.randperm(self.source.samples, generator=generator)
        mirrored = places = centres = None
        if self.flip:
            mirrored = torch.rand(total, generator=generator) < 0.5
        if self.crop:
            places = torch.randint(2 * self.crop + 1, (2, total), generator=generator)
        if self.cutout:
            centres = torch.rand(2, total, generator=generator)  # as fractions of the sides
        parts = [
            each[rank_slice(len(each), rank, self._reducer.ranks)] for each in torch.arange(total).split(self.batch)
        ]
        sizes = [len(each) for each in parts if len(each)]
        own = torch.cat(parts)
        mirrored = None if mirrored is None else mirrored[own].to(device)
        places, centres = (None if each is None else each[:, own].to(device) for each in (places, centres))
        launches = [sum(sizes[n : n + self.batches_per_launch]) for n in range(0, len(sizes), self.batches_per_launch)]
        start = number = 0
        for x, y in self.source.batches(order[own].split(launches)):
            now = slice(start, start := start + len(y))
            if places is not None:
                x = random_crop(x, places[:, now], self.crop)
            if mirrored is not None:
                x = torch.where(mirrored[now].view(-1, 1, 1, 1), x.flip(-1), x)
            x = x.float().mul_(self._scale).add_(self._shift)
            if centres is not None:
                x = cut_out(x, centres[:, now], self.cutout)
            now_sizes = sizes[number : (number := number + self.batches_per_launch)]
            yield from zip(x.split(now_sizes), y.split(now_sizes), strict=True)


def random_crop(x: Tensor, places: Tensor, padding: int) -> Tensor:
    """Each image of `x` (batch, channels, height, width) cropped at its own offset (2, batch) of the zero-padded image."""
    height, width = x.shape[-2:]
    rows = places[0].view(-1, 1) + torch.arange(height, device=x.device)  # (batch, height)
    columns = places[1].view(-1, 1) + torch.arange(width, device=x.device)
    padded = F.pad(x, (padding,) * 4).movedim(1, -1)  # (batch, height, width, channels)
    which = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    # the run chooses the memory format: channels last would spread through a network, and some of its CPU kernels crash
    return padded[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


def cut_out(x: Tensor, centres: Tensor, side: int) -> Tensor:
    """Images of `x` (batch, channels, height, width), in place, with zeros in a square around each image's own pixel, whose row
    and column are fractions (2, batch) of height and width."""

    def inside(fractions: Tensor, size: int) -> Tensor:
        first = (fractions * size).long().view(-1, 1) - side // 2
        position = torch.arange(size, device=x.device)
        return (position >= first) & (position < first + side)  # (batch, size)

    rows, columns = (inside(*each) for each in zip(centres, x.shape[-2:], strict=True))
    return x.masked_fill_((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0.0)


@dataclass(frozen=True)
class Data:
    """Training and validation data of an experiment, and the features that a run records."""

    train: Loader
    val: Loader
    classes: int
    image_side: int
    train_samples: int
    val_samples: int
    about: str
    """One line: the dataset and how it is read."""


def subset_indices(labels: Tensor, limit: int | None) -> Tensor:
    """Indices of `limit` samples, balanced over the classes, always the same ones; None: all."""
    if limit is None:
        return torch.arange(len(labels))
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= len(labels):
        raise InputError(f"limit must be None or an integer from 1 to {len(labels)}, got {limit!r}")
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    mixed = mixed[labels[mixed].argsort(stable=True)]  # class by class
    counts = labels.bincount()
    within = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[mixed]]  # 0, 1, … in each class
    return mixed[within.argsort(stable=True)[:limit]].sort().values

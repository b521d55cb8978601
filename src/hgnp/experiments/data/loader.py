"""`Loader`: batches augmented on the device, in an order that a saved random state reproduces.

Images stay uint8 until their batch is built; shuffling, flips, crops and normalisation act on whole batches, on the device.
An epoch draws one number from torch's global CPU generator when it starts; order and augmentation follow from that number
alone, on every device. An epoch that neither shuffles nor augments draws none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hgnp.errors import InputError

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
    probability ½; `crop` pads each image with that many black pixels and crops it at a random position. Without
    `shuffle` images keep their stored order.

    A shuffled epoch drops a last batch of a single sample (unless `batch` is 1), which BatchNorm cannot process; which
    sample that is changes from epoch to epoch. `drop_last` drops every incomplete batch. `samples` is the number of samples
    per epoch; `batches_per_launch` batches are built together, which changes none of them.
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
        drop_last: bool = False,
    ) -> None:
        for field, value, least in (("batch", batch, 1), ("crop", crop, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{field} must be a whole number ≥ {least}, got {value!r}")
        self.source, self.batch = source, batch
        self.shuffle, self.flip, self.crop = shuffle, flip, crop
        deviation = torch.tensor(std, device=device).view(-1, 1, 1)
        self._scale, self._shift = 1 / deviation, -torch.tensor(mean, device=device).view(-1, 1, 1) / deviation
        self.batches_per_launch = (
            BATCHES_PER_LAUNCH if isinstance(source, InMemorySource) and device.type == "cuda" else 1
        )
        left = source.samples % batch
        self.samples = source.samples - (left if drop_last or (shuffle and left == 1) else 0)
        if self.samples == 0:
            raise InputError(f"batch must leave at least one batch of {source.samples} samples, got {batch}")

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # drawn here and not with the first batch, so that the epoch starts with iter()
        if self.shuffle or self.flip or self.crop:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            return self._epoch(torch.Generator().manual_seed(seed))
        return self._epoch(None)

    def _epoch(self, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        total, device = self.samples, self._scale.device
        order = torch.arange(self.source.samples)
        if self.shuffle:
            order = torch.randperm(self.source.samples, generator=generator)
        mirrored = places = None
        if self.flip:
            mirrored = (torch.rand(total, generator=generator) < 0.5).to(device)
        if self.crop:
            places = torch.randint(2 * self.crop + 1, (2, total), generator=generator).to(device)
        start = 0
        for x, y in self.source.batches(order[:total].split(self.batch * self.batches_per_launch)):
            now = slice(start, start := start + len(y))
            if places is not None:
                x = random_crop(x, places[:, now], self.crop)
            if mirrored is not None:
                x = torch.where(mirrored[now].view(-1, 1, 1, 1), x.flip(-1), x)
            x = x.float().mul_(self._scale).add_(self._shift)
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)


def random_crop(x: Tensor, places: Tensor, padding: int) -> Tensor:
    """Each picture of `x` (batch, channels, height, width) cropped at its own offset (2, batch) of the zero-padded image."""
    height, width = x.shape[-2:]
    rows = places[0].view(-1, 1) + torch.arange(height, device=x.device)  # (batch, height)
    columns = places[1].view(-1, 1) + torch.arange(width, device=x.device)
    padded = F.pad(x, (padding,) * 4).movedim(1, -1)  # (batch, height, width, channels)
    which = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    return padded[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


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
        raise InputError(f"limit must be None or a whole number from 1 to {len(labels)}, got {limit!r}")
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    mixed = mixed[labels[mixed].argsort(stable=True)]  # class by class
    counts = labels.bincount()
    within = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[mixed]]  # 0, 1, … in each class
    return mixed[within.argsort(stable=True)[:limit]].sort().values

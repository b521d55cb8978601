"""Datasets too large for memory: worker processes decode images, batch by batch, during training.

Workers draw no random numbers; the loader does order and augmentation, so an epoch is the same with any number of workers.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hgnp.experiments.data.decode import decode

Batch = tuple[Tensor, Tensor]


class Decoding(Dataset[Batch | OSError]):
    """Batches by their indices. An error is returned: raised in a worker, it would arrive as a page of traceback."""

    def __init__(self, files: Sequence[Path], labels: Tensor, side: int, resize: bool) -> None:
        self.files, self.labels, self.side, self.resize = files, labels, side, resize

    def __getitem__(self, index: Tensor) -> Batch | OSError:
        try:
            pixels = np.stack([decode(self.files[number], self.side, resize=self.resize) for number in index.tolist()])
        except OSError as error:
            return error
        return torch.from_numpy(pixels), self.labels[index]


class StreamingSource:
    def __init__(
        self,
        files: Sequence[Path],
        labels: Tensor,
        side: int,
        device: torch.device,
        workers: int,
        *,
        resize: bool = True,
    ) -> None:
        self.decoding, self.device, self.workers = Decoding(files, labels, side, resize), device, workers

    @property
    def samples(self) -> int:
        return len(self.decoding.files)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Batch]:
        ready: DataLoader[Batch | OSError] = DataLoader(
            self.decoding,
            sampler=order,  # each of its items is a batch of indices
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )
        for batch in ready:
            if isinstance(batch, OSError):
                raise batch
            x, y = batch
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

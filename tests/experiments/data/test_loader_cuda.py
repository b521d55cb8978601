"""A set in a device's memory gives the very batches that one in a CPU's memory gives, without waiting for the device."""

import pytest
import torch

from hgnp.experiments.data import Loader, digits
from hgnp.experiments.data.loader import InMemorySource
from synchronization import no_synchronization


def test_batches_are_those_of_a_cpu(device: torch.device) -> None:
    images, labels = torch.randint(256, (50, 3, 8, 8)).to(torch.uint8), torch.arange(50)
    epochs = []
    for place in (torch.device("cpu"), device):
        loader = Loader(
            InMemorySource(images, labels, place),
            batch=8, mean=(120.0,) * 3, std=(60.0,) * 3, device=place, shuffle=True, flip=True, crop=2,
        )  # fmt: skip
        torch.manual_seed(3)
        epochs.append(list(loader))
    for (x, y), (on_device, there) in zip(*epochs, strict=True):
        assert on_device.device == device
        assert torch.equal(y, there.cpu())
        torch.testing.assert_close(on_device.cpu(), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_does_not_wait_for_the_device() -> None:
    batches = iter(digits(batch=64, device="cuda").train)
    next(batches)
    with no_synchronization():
        assert sum(len(y) for _, y in batches) == 1347 - 64

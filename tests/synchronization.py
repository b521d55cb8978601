"""A block in which the host must not wait for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """An operation in the block that synchronizes with the GPU raises RuntimeError. The debug mode is restored on exit."""
    found = torch.cuda.get_sync_debug_mode()
    try:
        set_sync_debug_mode("error")
        yield
    finally:
        set_sync_debug_mode(found)


def set_sync_debug_mode(mode: int | str) -> None:
    """PyTorch warns once per process that the mode is a prototype, and sets it all the same: as an error, that warning would
    leave the mode set."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)

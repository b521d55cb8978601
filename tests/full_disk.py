"""A full disk: a limit on the size of files gives an error from the same system call, whoever writes."""

import contextlib
import resource
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def full_disk() -> Iterator[Callable[..., None]]:
    """Yields a function that fills the disk: until the end of the block no file can grow beyond so many bytes, and a write that
    would raises OSError (EFBIG). Output must be captured by `capsys`, which writes no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(most: int = 1000) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))

    try:
        yield fill
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""Functions in processes that are forked from this one: they need not import PyTorch again, which takes seconds."""

import io
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


class Forked:
    """`function(*args)` in a child process that leads a process group of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        pipes = [os.pipe(), os.pipe()]
        writing = [end for _, end in pipes]
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end, _ in pipes)
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(writing, function, args))
        self._process.start()
        for end in writing:
            os.close(end)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def interrupt(self) -> None:
        """As Ctrl-C would."""
        os.kill(self._process.pid or 0, signal.SIGINT)

    def kill(self) -> None:
        """With its own children."""
        os.killpg(self._process.pid or 0, signal.SIGKILL)
        self.wait()

    def wait(self) -> tuple[int, str, str]:
        """Exit code, and what it wrote to stdout and stderr and was not read yet."""
        with self.stdout, self.stderr:
            said = self.stdout.read(), self.stderr.read()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        return -1 if code is None else code, *said


def limit_file_size(most: int = 1000) -> None:
    """In a forked process, stands in for a full disk: the same error from the same system call, whoever writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _run(writing: list[int], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    for number, end in enumerate(writing, 1):
        os.dup2(end, number)
        os.close(end)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), encoding="utf-8", line_buffering=True)
        for number in (1, 2)
    )
    function(*args)

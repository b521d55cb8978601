"""Networks timed side by side."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over repeats and the quartiles around it."""

    median: float
    low: float
    high: float
    repeats: int


def side_by_side(
    calls: Sequence[Callable[[], Any]],
    *,
    device: torch.device,
    repeats: int = 15,
    warmup: int = 3,
    budget: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Each call timed `repeats` times after `warmup`, in turns, so that all of them meet the same conditions. Slow calls are
    repeated less once the seconds in `budget` are over, at least 3 times after 1. On a machine that is shared, `clock` may be
    `time.process_time`: the processor's time of this process alone, fit for calls of one thread."""
    seconds: list[list[float]] = [[] for _ in calls]
    start_of_all = time.perf_counter()
    for turn in range(warmup + repeats):
        if turn >= 4 and time.perf_counter() - start_of_all > budget:
            warmup = min(warmup, turn - 3)
            break
        for call, mine in zip(calls, seconds, strict=True):
            _wait(device)
            start = clock()
            call()
            _wait(device)
            mine.append(clock() - start)
    return [_timing(mine[warmup:]) for mine in seconds]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(seconds: Sequence[float]) -> Timing:
    low, median, high = (float(value) * 1e3 for value in np.percentile(seconds, [25, 50, 75]))
    return Timing(median, low, high, len(seconds))

"""Timing of several calls, interleaved."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call: the median over repeats, and the quartiles as `low` and `high`."""

    median: float
    low: float
    high: float
    repeats: int


def time_interleaved(
    calls: Sequence[Callable[[], Any]],
    *,
    device: torch.device,
    repeats: int = 15,
    warmup: int = 3,
    budget: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[Latency]:
    """Time each call `repeats` times after `warmup` calls, alternately, so that all run under the same conditions.

    Slow calls are repeated less often once `budget` seconds are over, but at least 3 times after 1. On a shared machine `clock`
    may be `time.process_time`, the CPU time of this process alone, which suits single-threaded calls."""
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
    return [_latency(mine[warmup:]) for mine in seconds]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _latency(seconds: Sequence[float]) -> Latency:
    low, median, high = (float(value) * 1e3 for value in np.percentile(seconds, [25, 50, 75]))
    return Latency(median, low, high, len(seconds))

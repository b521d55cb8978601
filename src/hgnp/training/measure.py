"""Measurements before and after pruning: sharpness, latency of full and pruned network; features of network and data."""

import copy
import dataclasses
import math
from collections.abc import Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.curvature.autodiff.forward import run, samples_in
from hgnp.curvature.sharpness import sharpness
from hgnp.errors import first_line
from hgnp.result import NetworkStats
from hgnp.state_guards import evaluating
from hgnp.timing import time_interleaved
from hgnp.training.data import select_samples
from hgnp.training.run_state import RunState
from hgnp.training.task import Task

Batch = tuple[Any, Any]
LATENCY_BATCH = 256
LATENCY_SECONDS = 10.0
SHARPNESS_SAMPLES = 128
TIMED_SAMPLES = 8
TOLERANCE = 1e-3  # three digits of an eigenvalue
TIME_SHARE, LEAST_SECONDS = 0.01, 0.25
MIN_LIMIT = 0.5  # seconds; estimates from training time are too high for small networks
NO_TIME = 'it takes more than 1 % of the run\'s time; measure="full" has no time limit'


class NotMeasuredError(Exception):
    """A number is missing; the message says why."""


class Measurements:
    """Measures sharpness and latency, each within the time that `Recipe.measure` allows: with "auto" 1 % of the run's time so
    far, and at least 0.25 s. A number that takes longer is None, with the reason in `NetworkStats.missing`: a slow machine
    leaves numbers out but never changes them.
    """

    def __init__(self, net: nn.Module, task: Task, run_state: RunState, batch: Batch, val_batch: Batch | None) -> None:
        """`batch`: one of the training data; `val_batch`: one of the validation data, if there are any."""
        self._task, self._run, self._inputs = task, run_state, batch[0]
        self._measure = run_state.recipe.measure if task.reducer.rank == 0 else "none"  # one rank measures for all
        self._full, self._copy_error = (None, None) if self._measure == "none" else copy_to_cpu(net)
        inputs, target = val_batch or batch
        self._count = min(samples_in(inputs), SHARPNESS_SAMPLES)
        index, whole = torch.arange(self._count), not isinstance(target, Tensor) or not target.dim()
        self._samples = select_samples(inputs, index), target if whole else select_samples(target, index)

    @property
    def note(self) -> str | None:
        return None if self._copy_error is None else f"latency is not measured, as {self._copy_error}"

    def with_sharpness(self, stats: NetworkStats, net: nn.Module) -> NetworkStats:
        """`stats` with the largest eigenvalue of the Hessian on up to 128 samples."""
        try:
            value, why = self._sharpness(net), None
        except (NotMeasuredError, RuntimeError, ValueError) as error:  # a second derivative is missing, for instance
            value, why = None, first_line(error)
        return _with(stats, "sharpness", value, why)

    def with_latency(
        self, before: NetworkStats, after: NetworkStats, net: nn.Module
    ) -> tuple[NetworkStats, NetworkStats, dict[str, Any] | None]:
        """`before` and `after` with the milliseconds per batch of 256 of the full network and of `net`, timed alternately, and
        how they were timed. The copy of the full network is on the device only while it is timed; then it is released."""
        values: tuple[float | None, float | None] = None, None
        about, why = None, None
        try:
            values, about = self._latencies(net)
        except (NotMeasuredError, RuntimeError, ValueError) as error:  # a batch of 256 does not fit, for instance
            why = first_line(error)
        before, after = (
            _with(stats, "latency_ms", value, why) for stats, value in zip((before, after), values, strict=True)
        )
        return before, after, about

    def _seconds_per_sample(self, net: nn.Module) -> float:
        """Estimated seconds of a training step per sample, three forward passes, before any step has run."""
        count = min(self._count, TIMED_SAMPLES)
        few = select_samples(self._samples[0], torch.arange(count))
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with evaluating(net), torch.no_grad():
            call = partial(run, net, few, buffers=buffers)
            (timing,) = time_interleaved([call], device=self._task.train.device, repeats=1, warmup=1)
        return 3 * timing.median / 1e3 / count

    def _time_limit(self, least: float, net: nn.Module) -> float:
        """The seconds allowed. NotMeasuredError if `least` samples would take longer, estimated from the time of training."""
        measure, history = self._measure, self._run.history
        if measure == "none":
            raise NotMeasuredError('measure is "none"')
        if measure == "full":
            return math.inf
        allowed = max(TIME_SHARE * self._run.seconds, LEAST_SECONDS)
        trained = len(history) * (self._task.train.count or 0) * samples_in(self._inputs)
        pace = sum(row["train_seconds"] for row in history) / trained if trained else self._seconds_per_sample(net)
        if least * pace > max(allowed, MIN_LIMIT):
            raise NotMeasuredError(NO_TIME)
        return allowed

    def _sharpness(self, net: nn.Module) -> float:
        if self._task.loss_needs_training_mode:
            raise NotMeasuredError("the network returns its losses in training mode only")
        seconds = self._time_limit(self._count, net)  # one Hessian-vector product takes longer than a step
        result = sharpness(
            net,
            [self._samples],
            loss=self._task.loss,
            output=self._task.output,
            tolerance=TOLERANCE,
            max_seconds=seconds,
        )
        if result.converged:
            return result.eigenvalues[0]
        if math.isfinite(seconds):
            raise NotMeasuredError(NO_TIME)
        raise NotMeasuredError(f"it has not converged after {result.steps} products with the Hessian")

    def _latencies(self, net: nn.Module) -> tuple[tuple[float, float], dict[str, Any]]:
        seconds = self._time_limit(2 * LATENCY_BATCH / 3, net)  # both networks once; a forward is a third of a step
        if self._full is None:
            raise NotMeasuredError(self._copy_error)
        full, self._full = self._full, None
        device = self._task.train.device
        nets = [full.to(device), net]
        batch = select_samples(self._inputs, torch.arange(LATENCY_BATCH) % samples_in(self._inputs))
        calls = [partial(run, each, batch) for each in nets]
        with evaluating(*nets), torch.inference_mode():
            if math.isfinite(seconds):  # the first turn shows whether four more fit
                first = (
                    sum(timing.median for timing in time_interleaved(calls, device=device, repeats=1, warmup=0)) / 1e3
                )
                if 5 * first > seconds:
                    raise NotMeasuredError(NO_TIME)
                seconds -= first
            timings = time_interleaved(calls, device=device, budget=min(seconds, LATENCY_SECONDS))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        threads, repeats = torch.get_num_threads(), timings[0].repeats
        about = {"batch": LATENCY_BATCH, "threads": threads, "device": name, "repeats": repeats}
        return (timings[0].median, timings[1].median), about


def _with(stats: NetworkStats, name: str, value: float | None, why: str | None) -> NetworkStats:
    changes: dict[str, Any] = {name: value} if why is None else {"missing": {**stats.missing, name: why}}
    return dataclasses.replace(stats, **changes)


def copy_to_cpu(net: nn.Module) -> tuple[nn.Module | None, str | None]:
    """A copy on the CPU to time later; for a network that cannot be copied, None and the reason."""
    try:
        return copy.deepcopy(net).cpu(), None
    except (TypeError, ValueError, RuntimeError, MemoryError, copy.Error) as error:
        # it holds a lock, a pointer or a tensor with a history, or there is no room for two
        return None, f"net cannot be copied: {first_line(error)}"


def input_spec(inputs: Any) -> list[dict[str, Any]] | None:
    """Shape and dtype of each input without its batch dimension; None unless inputs are positional tensors."""
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    if not isinstance(given, tuple | list) or not all(isinstance(x, Tensor) and x.dim() for x in given):
        return None
    return [{"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")} for x in given]


def features(net: nn.Module, inputs: Any, classes: int | None, train: Any, val: Any) -> dict[str, Any]:
    """Features that the paper's hybrid uses; None where one is unknown."""
    convolutions = [module for module in net.modules() if isinstance(module, _ConvNd)]
    kernels = [module.kernel_size[0] for module in convolutions]
    image = isinstance(inputs, Tensor) and inputs.dim() == 4
    return {
        "train_samples": _samples_in_loader(train),
        "val_samples": _samples_in_loader(val),
        "image_side": inputs.shape[-1] if image else None,
        "classes": classes,
        "conv_layers": len(convolutions),
        "linear_layers": sum(isinstance(module, nn.Linear) for module in net.modules()),
        "parameters": sum(p.numel() for p in net.parameters()),
        "mean_kernel": sum(kernels) / len(kernels) if kernels else None,
        "kernels": sum(module.out_channels for module in convolutions),
    }


def _samples_in_loader(loader: Any) -> int | None:
    for counted in (getattr(loader, "samples", None), getattr(loader, "dataset", None)):
        if isinstance(counted, int):
            return counted
        if isinstance(counted, Sized):
            return len(counted)
    return None

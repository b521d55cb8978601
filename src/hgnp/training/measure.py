"""What is measured of a network before and after: its latency beside the full one's, its sharpness, its features."""

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
from hgnp.result import Facts
from hgnp.state_guards import evaluating
from hgnp.timing import side_by_side
from hgnp.training.data import pick
from hgnp.training.plan import Plan
from hgnp.training.task import Task

Batch = tuple[Any, Any]
LATENCY_BATCH = 256
LATENCY_SECONDS = 10.0
SHARPNESS_SAMPLES = 128
PACE_SAMPLES = 8
TOLERANCE = 1e-3  # three digits of an eigenvalue
SHARE, LEAST_SECONDS = 0.01, 0.25
WORTH_A_TRY = 0.5  # seconds; the pace of training overestimates what small networks take
NO_TIME = 'it takes more than 1 % of the run\'s time; measure="full" takes the time that it needs'


class NotMeasuredError(Exception):
    """Why a number is missing."""


class Measurements:
    """Sharpness before and after, and latency, each in the time that `Recipe.measure` allows: with "auto" 1 % of the time that
    the run has taken so far, and at least 0.25 s. What does not fit is None with a reason: a slow machine leaves numbers out
    but never changes them.
    """

    def __init__(self, net: nn.Module, task: Task, plan: Plan, batch: Batch, held_out: Batch | None) -> None:
        """`batch` is one of the training data, `held_out` one of the validation data, if there are such."""
        self._task, self._plan, self._inputs = task, plan, batch[0]
        self._full, self._uncopied = (None, None) if plan.recipe.measure == "none" else copied_to_cpu(net)
        inputs, target = held_out or batch
        self._count = min(samples_in(inputs), SHARPNESS_SAMPLES)
        index, whole = torch.arange(self._count), not isinstance(target, Tensor) or not target.dim()
        self._few = pick(inputs, index), target if whole else pick(target, index)

    @property
    def note(self) -> str | None:
        return None if self._uncopied is None else f"latency is not measured, as {self._uncopied}"

    def with_sharpness(self, facts: Facts, net: nn.Module) -> Facts:
        """The largest eigenvalue of the Hessian on a few samples."""
        try:
            value, why = self._sharpness(net), None
        except (NotMeasuredError, RuntimeError, ValueError) as error:  # a second derivative is missing, for instance
            value, why = None, first_line(error)
        return _with(facts, "sharpness", value, why)

    def with_latency(self, before: Facts, after: Facts, net: nn.Module) -> tuple[Facts, Facts, dict[str, Any] | None]:
        """Milliseconds of a batch of 256 for the full network and for `net`, in turns, and how that was measured. The copy of
        the full network is on the device for that time only, and is gone afterwards."""
        values: tuple[float | None, float | None] = None, None
        about, why = None, None
        try:
            values, about = self._latencies(net)
        except (NotMeasuredError, RuntimeError, ValueError) as error:  # a batch of 256 does not fit, for instance
            why = first_line(error)
        before, after = (
            _with(facts, "latency_ms", value, why) for facts, value in zip((before, after), values, strict=True)
        )
        return before, after, about

    def _pace(self, net: nn.Module) -> float:
        """Seconds a sample of a step, which is three forwards, before there has been one."""
        count = min(self._count, PACE_SAMPLES)
        few = pick(self._few[0], torch.arange(count))
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with evaluating(net), torch.no_grad():
            call = partial(run, net, few, buffers=buffers)
            (timing,) = side_by_side([call], device=self._task.train.device, repeats=1, warmup=1)
        return 3 * timing.median / 1e3 / count

    def _seconds(self, least: float, net: nn.Module) -> float:
        """The time allowed, unless `least` samples at the pace of training take longer: what is not begun takes no time."""
        measure, history = self._plan.recipe.measure, self._plan.history
        if measure == "none":
            raise NotMeasuredError('measure is "none"')
        if measure == "full":
            return math.inf
        allowed = max(SHARE * self._plan.seconds, LEAST_SECONDS)
        trained = len(history) * (self._task.train.count or 0) * samples_in(self._inputs)
        pace = sum(row["train_seconds"] for row in history) / trained if trained else self._pace(net)
        if least * pace > max(allowed, WORTH_A_TRY):
            raise NotMeasuredError(NO_TIME)
        return allowed

    def _sharpness(self, net: nn.Module) -> float:
        seconds = self._seconds(self._count, net)  # a product with the Hessian takes longer than a step
        found = sharpness(
            net, [self._few], loss=self._task.loss, output=self._task.output, tolerance=TOLERANCE, max_seconds=seconds
        )
        if found.converged:
            return found.eigenvalues[0]
        if math.isfinite(seconds):
            raise NotMeasuredError(NO_TIME)
        raise NotMeasuredError(f"it had not converged after {found.steps} products with the Hessian")

    def _latencies(self, net: nn.Module) -> tuple[tuple[float, float], dict[str, Any]]:
        seconds = self._seconds(2 * LATENCY_BATCH / 3, net)  # both networks once; a forward is a third of a step
        if self._full is None:
            raise NotMeasuredError(self._uncopied)
        full, self._full = self._full, None
        device = self._task.train.device
        nets = [full.to(device), net]
        batch = pick(self._inputs, torch.arange(LATENCY_BATCH) % samples_in(self._inputs))
        calls = [partial(run, each, batch) for each in nets]
        with evaluating(*nets), torch.inference_mode():
            if math.isfinite(seconds):  # the first turn decides whether there is time for four more
                first = sum(timing.median for timing in side_by_side(calls, device=device, repeats=1, warmup=0)) / 1e3
                if 5 * first > seconds:
                    raise NotMeasuredError(NO_TIME)
                seconds -= first
            timings = side_by_side(calls, device=device, budget=min(seconds, LATENCY_SECONDS))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        threads, repeats = torch.get_num_threads(), timings[0].repeats
        about = {"batch": LATENCY_BATCH, "threads": threads, "device": name, "repeats": repeats}
        return (timings[0].median, timings[1].median), about


def _with(facts: Facts, name: str, value: float | None, why: str | None) -> Facts:
    changes: dict[str, Any] = {name: value} if why is None else {"missing": {**facts.missing, name: why}}
    return dataclasses.replace(facts, **changes)


def copied_to_cpu(net: nn.Module) -> tuple[nn.Module | None, str | None]:
    """A copy to time later, on the CPU; of a network that cannot be copied none, and why."""
    try:
        return copy.deepcopy(net).cpu(), None
    except (TypeError, ValueError, RuntimeError, MemoryError, copy.Error) as error:
        # it holds a lock, a pointer or a tensor with a history, or there is no room for two
        return None, f"net cannot be copied: {first_line(error)}"


def sample_of(inputs: Any) -> list[dict[str, Any]] | None:
    """Shape and type of one sample's inputs, each without its batch dimension; None unless they are tensors by position."""
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    if not isinstance(given, tuple | list) or not all(isinstance(x, Tensor) and x.dim() for x in given):
        return None
    return [{"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")} for x in given]


def features(net: nn.Module, inputs: Any, classes: int | None, train: Any, val: Any) -> dict[str, Any]:
    """What the paper's hybrid looks at; None where it is not known."""
    convolutions = [module for module in net.modules() if isinstance(module, _ConvNd)]
    kernels = [module.kernel_size[0] for module in convolutions]
    image = isinstance(inputs, Tensor) and inputs.dim() == 4
    return {
        "train_samples": _length(train),
        "val_samples": _length(val),
        "image_side": inputs.shape[-1] if image else None,
        "classes": classes,
        "conv_layers": len(convolutions),
        "linear_layers": sum(isinstance(module, nn.Linear) for module in net.modules()),
        "parameters": sum(p.numel() for p in net.parameters()),
        "mean_kernel": sum(kernels) / len(kernels) if kernels else None,
        "kernels": sum(module.out_channels for module in convolutions),
    }


def _length(loader: Any) -> int | None:
    for counted in (getattr(loader, "samples", None), getattr(loader, "dataset", None)):
        if isinstance(counted, int):
            return counted
        if isinstance(counted, Sized):
            return len(counted)
    return None

"""What is measured of a network before and after: its latency beside the full one's, its sharpness, its features."""

import copy
from collections.abc import Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hgnp.curvature.forward import Output, run, samples_in
from hgnp.curvature.losses import Loss
from hgnp.curvature.sharpness import sharpness
from hgnp.messages import first_line
from hgnp.modes import evaluating
from hgnp.timing import side_by_side
from hgnp.training.batches import pick

LATENCY_BATCH = 256
LATENCY_SECONDS = 10.0
SHARPNESS_SAMPLES = 128


def copied(net: nn.Module) -> tuple[nn.Module | None, str | None]:
    """A copy to time later; of a network that cannot be copied none, and a note that says why."""
    try:
        return copy.deepcopy(net), None
    except (
        TypeError,
        RuntimeError,
        copy.Error,
    ) as error:  # a lock or a file among its attributes, a tensor with a history
        return None, f"latency is not measured, as net cannot be copied: {first_line(error)}"


def latencies(nets: list[nn.Module], inputs: Any, device: torch.device) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of a batch of 256 for each network, in turns, and how that was measured."""
    index = torch.arange(LATENCY_BATCH) % samples_in(inputs)
    batch = pick(inputs, index)

    calls = [partial(run, net, batch) for net in nets]
    with evaluating(*nets), torch.inference_mode():
        timings = side_by_side(calls, device=device, budget=LATENCY_SECONDS)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"batch": LATENCY_BATCH, "threads": torch.get_num_threads(), "device": name, "repeats": timings[0].repeats}
    return [timing.median for timing in timings], about


def top_curvature(net: nn.Module, batch: tuple[Any, Any], loss: Loss, output: Output | None) -> float | None:
    """The largest eigenvalue of the Hessian on a few samples of a batch; None where a second derivative is missing."""
    inputs, target = batch
    n = min(samples_in(inputs), SHARPNESS_SAMPLES)
    few = pick(inputs, torch.arange(n)), pick(target, torch.arange(n)) if isinstance(target, Tensor) else target
    try:
        return sharpness(net, [few], loss=loss, output=output).eigenvalues[0]
    except (RuntimeError, ValueError):
        return None


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

"""Inference times of full, weight-pruned and neuron-pruned networks.

Weight-pruned means, as in the paper: the full-size network with random weights, all but a fraction κ of them zero, on ordinary
dense kernels. Every network is timed in every variant (eager, compiled, half precision …), all alternately within one process
under the same conditions.
"""

import copy
import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hgnp.errors import InputError, brief
from hgnp.io.atomic import write_csv
from hgnp.pruning import Neurons
from hgnp.reporting.variants import DEFAULTS, VARIANTS, PreparedNetwork, Variant, compile_limits, prepare
from hgnp.timing import time_interleaved

BATCHES = {"cpu": 128, "cuda": 2000}
WARMUP = 3
Device = str | torch.device
BenchProgress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class BenchResult:
    """Inference times: one row per network, variant, device and batch size."""

    rows: list[dict[str, Any]]
    """`network`, `variant`, `device`, `batch`; `median_ms`, `low_ms`, `high_ms` (quartiles), `repeats`; `parameters` and `macs`
    (per sample) that the network computes with, `kept`, `accuracy` (as given); `speedup` against the full network in the same
    variant, `speedup_eager` against it in eager mode; `difference` of the output from the same network's in eager mode,
    relative; `first_s`, seconds until the first result, compilation or export included; `reason` why there are no times."""
    about: dict[str, Any]
    """Date, versions, threads and the devices' names."""

    def as_dict(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows}

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        header = list(self.rows[0])
        return write_csv(path, header, [[row[name] for name in header] for row in self.rows])

    def table(self) -> Table:
        columns = ("network", "kept", "variant", "batch", "ms", "quartiles", "speed-up", "against eager", "MMACs")
        several = len({row["device"] for row in self.rows}) > 1
        table = Table(
            title=escape(f"Inference, {', '.join(self.about['devices'].values())}"),
            title_justify="left",
            caption_justify="left",
        )
        for name in (*(["device"] if several else []), *columns):
            table.add_column(name, justify="left" if name in ("network", "variant", "device") else "right")
        for row in self.rows:
            cells = [row["network"], f"{row['kept']:.1%}", row["variant"], str(row["batch"])]
            if row["reason"] is None:
                cells += [f"{row['median_ms']:.2f}", f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"]
                cells += ["" if row[key] is None else f"{row[key]:.2f}×" for key in ("speedup", "speedup_eager")]
            else:
                cells += ["–"] * 4
            cells = [*([row["device"]] if several else []), *cells, f"{row['macs'] / 1e6:.1f}"]
            table.add_row(*map(escape, cells))
        failures = {f"{row['network']}, {row['variant']}, batch {row['batch']}": row["reason"] for row in self.rows}
        table.caption = escape("\n".join(f"{what}: {why}" for what, why in failures.items() if why)) or None
        return table


@dataclass(frozen=True)
class BenchEntry:
    """A network to time against the full one: a pruned module, or the fraction of weights that the full one keeps."""

    label: str
    what: nn.Module | float
    accuracy: float | None = None
    note: str | None = None
    """How the network was made, if it is not a run's own."""


def bench(
    full: nn.Module,
    small: nn.Module,
    sample: Any,
    *,
    batches: int | Sequence[int] | None = None,
    device: Device | Sequence[Device] = "cpu",
    variants: Sequence[Variant] | None = None,
    repeats: int = 15,
    progress: BenchProgress | None = None,
) -> BenchResult:
    """Time `full`, the same network weight-pruned, and `small`, which keeps the same fraction of parameters.

    `sample` is one input without its batch dimension: a tensor, or a tuple of them. `batches` defaults to the paper's: 128 on
    a CPU, 2000 on a GPU. `variants` are "eager", "no_tf32" (GPU), "channels_last", "compile", "bf16", "fp16", "onnx" (CPU);
    by default those that suit the device. A variant that cannot run gives a row with the reason. `progress(label, i, n)` is
    called at every step.
    """
    entries = [
        BenchEntry("weight-pruned", _parameters(small) / _parameters(full)),
        BenchEntry("neuron-pruned", small),
    ]
    return bench_networks(
        full, entries, sample, batches=batches, device=device, variants=variants, repeats=repeats, progress=progress
    )


def bench_networks(
    full: nn.Module,
    entries: Sequence[BenchEntry],
    sample: Any,
    *,
    batches: int | Sequence[int] | None = None,
    device: Device | Sequence[Device] = "cpu",
    variants: Sequence[Variant] | None = None,
    repeats: int = 15,
    progress: BenchProgress | None = None,
) -> BenchResult:
    """Time `full` and any number of pruned networks in one run, such as those that reach the same accuracy.

    The paper's: `[BenchEntry("neuron-pruned", small, 0.92), BenchEntry("weight-pruned", 0.03, 0.92)]`, the first at κ = 14.4 %.
    """
    labels = ["full", *(entry.label for entry in entries)]
    if len(set(labels)) < len(labels):
        raise InputError(f"labels must be distinct and other than 'full', got {labels[1:]}")
    devices = [_device(each) for each in ([device] if isinstance(device, str | torch.device) else device)]
    devices = list(dict.fromkeys(devices))
    places = [(d, _batches(batches, d), _variants(variants, d)) for d in devices]
    if not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats must be an integer ≥ 1, got {repeats!r}")
    samples = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    if not samples or not all(isinstance(each, Tensor) for each in samples):
        raise InputError(f"sample must be a tensor without a batch dimension, or a tuple of tensors, got {sample!r}")

    networks = _networks(full, entries, samples)
    steps = sum(len(chosen) * len(networks) + len(sizes) * (WARMUP + repeats) for _, sizes, chosen in places)
    tick = _ticker(progress, steps)
    rows: list[dict[str, Any]] = []
    with compile_limits():
        for place, sizes, chosen in places:
            runners = _runners(networks, chosen, samples, place, tick)
            for size in sizes:
                rows += _timed(runners, samples, place, size, repeats, tick)
    return BenchResult(rows, conditions(devices))


def weight_pruned(full: nn.Module, kept: float, *, seed: int = 0) -> nn.Module:
    """A copy of `full` with random weights, all but exactly the fraction `kept` of them zero. Biases and norms stay.

    Weights are those of two or more dimensions. The remaining weights are scaled so that activations keep their size: denormal
    numbers would be slow on a CPU.
    """
    if not isinstance(kept, int | float) or not 0 < kept <= 1:
        raise InputError(f"kept must be a fraction in (0, 1], got {kept!r}")
    random = torch.Generator().manual_seed(seed)
    net = copy.deepcopy(full)
    weights = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    total = sum(weight.numel() for weight in weights)
    mask = torch.zeros(total)
    mask[torch.randperm(total, generator=random)[: round(kept * total)]] = 1
    with torch.no_grad():
        for weight, mine in zip(weights, mask.split([weight.numel() for weight in weights]), strict=True):
            inputs = weight[0].numel()
            values = torch.randn(weight.shape, generator=random)
            values[values == 0] = 1
            weight.copy_(values * (2 / (kept * inputs)) ** 0.5 * mine.view(weight.shape))
    return net


@dataclass(frozen=True)
class _Network:
    net: nn.Module
    label: str
    parameters: int
    macs: int
    kept: float
    accuracy: float | None
    note: str | None


@dataclass(frozen=True)
class _Runner:
    """A network in one variant, ready to run, or the reason why it cannot."""

    network: _Network
    net: nn.Module  # on the device, unchanged: the reference for the variant's output
    variant: str
    prepared: PreparedNetwork | None
    reason: str | None
    seconds: float


def _networks(full: nn.Module, entries: Sequence[BenchEntry], samples: Sequence[Tensor]) -> list[_Network]:
    networks: list[_Network] = []
    for entry in [BenchEntry("full", full), *entries]:
        if isinstance(entry.what, nn.Module):
            net = copy.deepcopy(entry.what).cpu().eval()
            count = _parameters(net)
            # two rows: Neurons also traces train mode, in which some norms reject one row
            macs = Neurons(net, _batch(samples, 2, torch.device("cpu"))).macs // 2
            kept = count / _parameters(full)
        else:
            net = weight_pruned(networks[0].net, entry.what)
            count, macs, kept = networks[0].parameters, networks[0].macs, entry.what
        networks.append(_Network(net, entry.label, count, macs, kept, entry.accuracy, entry.note))
    return networks


def _runners(
    networks: Sequence[_Network],
    variants: Sequence[Variant],
    samples: Sequence[Tensor],
    device: torch.device,
    tick: Callable[[str], None],
) -> list[_Runner]:
    nets = [copy.deepcopy(network.net).to(device) for network in networks]
    example = _batch(samples, 2, device)
    runners = []
    for variant in variants:
        for network, net in zip(networks, nets, strict=True):
            tick(f"{network.label}, {variant}, {device}")
            start = time.perf_counter()
            made, reason = None, None
            try:
                made = prepare(variant, net, example)
            except Exception as error:
                reason = _reason(error)
            runners.append(_Runner(network, net, variant, made, reason, time.perf_counter() - start))
    return runners


def _timed(
    runners: Sequence[_Runner],
    samples: Sequence[Tensor],
    device: torch.device,
    size: int,
    repeats: int,
    tick: Callable[[str], None],
) -> list[dict[str, Any]]:
    inputs = _batch(samples, size, device)
    rows = [_row(runner, device, size) for runner in runners]
    # A separate call, whose time is ignored, advances the progress bar outside the timed calls.
    calls: list[Callable[[], Any]] = [lambda: tick(f"batch {size}, {device}")]
    timed = []
    for runner, row in zip(runners, rows, strict=True):
        if runner.prepared is None:
            continue
        try:
            call = _call(runner.prepared, inputs)
            start = time.perf_counter()
            output = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, call())
            row["first_s"] = runner.seconds + time.perf_counter() - start
            row["difference"] = _difference(output, _call(PreparedNetwork(runner.net), inputs)())
        except Exception as error:
            row["reason"] = _reason(error)
        else:
            calls.append(call)
            timed.append(row)
    for row, timing in zip(
        timed, time_interleaved(calls, device=device, repeats=repeats, warmup=WARMUP)[1:], strict=True
    ):
        row |= {"median_ms": timing.median, "low_ms": timing.low, "high_ms": timing.high, "repeats": timing.repeats}
    full = {row["variant"]: row["median_ms"] for row in rows if row["network"] == "full"}
    for row in timed:
        for key, base in (("speedup", full[row["variant"]]), ("speedup_eager", full.get("eager"))):
            row[key] = base / row["median_ms"] if base is not None else None
    return rows


def _row(runner: _Runner, device: torch.device, size: int) -> dict[str, Any]:
    mine = runner.network
    row = {"network": mine.label, "variant": runner.variant, "device": str(device), "batch": size}
    row |= dict.fromkeys(("median_ms", "low_ms", "high_ms", "repeats"))
    row |= {"parameters": mine.parameters, "macs": mine.macs, "kept": mine.kept, "accuracy": mine.accuracy}
    row |= dict.fromkeys(("speedup", "speedup_eager", "difference", "first_s"))
    return row | {"reason": runner.reason, "note": mine.note}


def _call(prepared: PreparedNetwork, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    ready = [prepared.convert(tensor) for tensor in inputs]

    def call() -> Any:
        with torch.inference_mode():
            return prepared.call(*ready)

    return call


def _difference(output: Any, reference: Any) -> float:
    """The largest difference between two outputs, relative to the largest entry of the tensor that it is in."""
    worst = 0.0
    for there, here in zip(tree_leaves(output), tree_leaves(reference), strict=True):
        if isinstance(here, Tensor) and here.numel():
            expected = here.double().cpu()
            away = (there.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
            worst = max(worst, float(away))
    return worst


def _batch(samples: Sequence[Tensor], size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Random rows shaped like the samples; integer inputs repeat the sample, as their range is unknown."""
    random = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(size, *sample.shape, generator=random).to(device, sample.dtype)
        if sample.is_floating_point()
        else sample.expand(size, *sample.shape).clone().to(device)
        for sample in samples
    )


def _device(given: Device) -> torch.device:
    try:
        device = torch.device(given)
    except RuntimeError:
        device = None
    ready = {"cpu": True, "cuda": torch.cuda.is_available()}
    if device is None or not ready.get(device.type, False):
        raise InputError(
            f"device must be {' or '.join(k for k in ready if ready[k])} on this machine, got {str(given)!r}"
        )
    return device


def _batches(given: int | Sequence[int] | None, device: torch.device) -> list[int]:
    sizes = [BATCHES[device.type]] if given is None else [given] if isinstance(given, int) else list(given)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InputError(f"batches must be integers ≥ 1, got {given!r}")
    return list(dict.fromkeys(sizes))


def _variants(given: Sequence[Variant] | None, device: torch.device) -> list[Variant]:
    chosen = list(dict.fromkeys(DEFAULTS[device.type] if given is None else given))
    for name in chosen:
        if name not in VARIANTS:
            raise InputError(f"variants must be among {', '.join(VARIANTS)}, got {name!r}")
    return chosen


def _ticker(progress: BenchProgress | None, steps: int) -> Callable[[str], None]:
    done = itertools.count(1)

    def tick(label: str) -> None:
        if progress is not None:
            progress(label, next(done), steps)

    return tick


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else brief(error)


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def conditions(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Date, versions, threads and devices: what times depend on besides the networks."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("hgnp", "onnxruntime"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "threads": torch.get_num_threads(),
        "devices": {str(device): _device_name(device) for device in devices},
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()

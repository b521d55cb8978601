"""The network and the data of a run, rebuilt from its folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hgnp.errors import InputError
from hgnp.experiments.build import Experiment, extend_import_path, network, prepare
from hgnp.experiments.config import Config, read
from hgnp.io import runs
from hgnp.io.weights import load
from hgnp.pruning import Neurons


def config_of(folder: Path) -> Config:
    runs.read(folder)  # raises for a folder that is not a run
    file = folder / "config.yaml"
    # snapshots share the configuration of their run
    if not file.is_file() and folder.resolve().parent.name == "snapshots":
        file = folder.resolve().parents[1] / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} must have a config.yaml, which defines its network, got none; hgnp run writes one"
        )
    config = read(file)
    extend_import_path(config)
    return config


def pruned(folder: Path, net: nn.Module) -> nn.Module:
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} must be a finished run, got one without model.safetensors; hgnp run … --resume finishes it"
        )
    return load(folder, net)


def networks(folder: Path) -> tuple[nn.Module, nn.Module]:
    """A network of the full size, with random weights, and the pruned one."""
    config = config_of(folder)
    return network(config), pruned(folder, network(config))


def networks_to_time(folder: Path, keep: float | None = None) -> tuple[nn.Module, nn.Module, str | None]:
    """As `networks`, and how the pruned one was made if it does not have the run's weights.

    Its weights are random if the run is finished but its weights were not kept, and for a `keep` other than the run's: latency
    depends on the widths alone. The widths at `keep` are between those of the epochs with the next larger and the next smaller
    κ. Below the run's last κ they continue from there: each layer loses neurons in the proportion in which it lost them before.
    """
    run = runs.read(folder)
    if keep is None and (run.result is None or not run.rows or (folder / "model.safetensors").is_file()):
        return *networks(folder), None
    if not run.rows:
        raise InputError(f"{folder} must have completed an epoch, got none; hgnp run … --resume continues it")
    config, inputs = config_of(folder), sample(folder)
    full, net = network(config), network(config)
    if keep is None:
        return full, cut_to_widths(net, run.rows[-1]["widths"], inputs), "random weights"
    larger = [row for row in run.rows if row["kept"] >= keep]
    smaller = [row for row in run.rows if row["kept"] < keep]
    begin: Mapping[str, int] = (
        min(larger, key=lambda row: row["kept"])["widths"] if larger else run.info["at_start"]["widths"]
    )
    if smaller:
        end, how = max(smaller, key=lambda row: row["kept"])["widths"], "widths of the run at this κ"
        lost = {name: begin[name] - end[name] for name in begin}
    else:
        last, how = run.rows[-1]["kept"], "widths continued from the run's last κ"
        lost = {name: run.info["at_start"]["widths"][name] - begin[name] for name in begin}
        how = f"{how}, {100 * last:.1f} %"
    return full, shrink(net, begin, lost, keep, inputs), f"random weights, {how}"


def cut_to_widths(net: nn.Module, widths: Mapping[str, int], inputs: tuple[Tensor, ...]) -> nn.Module:
    """`net` with the last neurons of each layer removed, down to `widths`. `inputs`: as from `sample`."""
    neurons = Neurons(net, tuple(torch.stack([each, each]) for each in inputs))
    neurons.remove(_beyond(neurons, widths))
    return net


def shrink(
    net: nn.Module, widths: Mapping[str, int], lost: Mapping[str, int], keep: float, inputs: tuple[Tensor, ...]
) -> nn.Module:
    """`net` at `widths` − t · `lost`, with the smallest t ≥ 0 that leaves at most the fraction `keep` of its parameters."""
    neurons = Neurons(net, tuple(torch.stack([each, each]) for each in inputs))

    def cut(t: float) -> dict[str, range]:
        return _beyond(neurons, {name: max(1, round(width - t * lost[name])) for name, width in widths.items()})

    low, high = (
        0.0,
        float(max(widths.values())),
    )  # at the upper end only layers that lost nothing have more than one neuron
    if neurons.preview(cut(high)).kept > keep:
        raise InputError(f"keep must be at least {neurons.preview(cut(high)).kept:.4g} for this network, got {keep:g}")
    if neurons.preview(cut(low)).kept > keep:
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if neurons.preview(cut(middle)).kept <= keep else (middle, high)
        low = high
    neurons.remove(cut(low))
    return net


def _beyond(neurons: Neurons, widths: Mapping[str, int]) -> dict[str, range]:
    """The neurons of each layer beyond its new width."""
    return {layer.name: range(widths.get(layer.name, layer.alive), layer.alive) for layer in neurons.layers}


def sample(folder: Path) -> tuple[Tensor, ...]:
    """Random inputs of one sample, without the batch dimension."""
    known = runs.read(folder).info.get("input")
    if not known:
        raise InputError(
            f"{folder} must be a run of a network with positional tensor inputs, got another; use hgnp from Python"
        )
    return tuple(_random(each["shape"], getattr(torch, each["dtype"])) for each in known)


def _random(shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def experiment(folder: Path, data: str | None, device: str | None) -> Experiment:
    """The run's data and its pruned network."""
    config = config_of(folder)
    if data is not None:
        config = dataclasses.replace(config, data_args={**config.data_args, "folder": data})
    if device is not None:
        config = dataclasses.replace(config, device=device)
    made = prepare(dataclasses.replace(config, weights=None))
    pruned(folder, made.net)
    return made

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
    if (
        not file.is_file() and folder.resolve().parent.name == "snapshots"
    ):  # snapshots share the configuration of their run
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


def networks_to_time(folder: Path) -> tuple[nn.Module, nn.Module, bool]:
    """As `networks`, and whether the pruned one has random weights: it does if the run is finished but its weights were not
    kept. Latency depends on the widths alone."""
    run = runs.read(folder)
    if run.result is None or not run.rows or (folder / "model.safetensors").is_file():
        return *networks(folder), False
    config = config_of(folder)
    return network(config), cut_to_widths(network(config), run.rows[-1]["widths"], sample(folder)), True


def cut_to_widths(net: nn.Module, widths: Mapping[str, int], inputs: tuple[Tensor, ...]) -> nn.Module:
    """`net` with the last neurons of each layer removed, down to `widths`. `inputs`: as from `sample`."""
    neurons = Neurons(net, tuple(torch.stack([each, each]) for each in inputs))
    neurons.remove({layer.name: range(widths.get(layer.name, layer.alive), layer.alive) for layer in neurons.layers})
    return net


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

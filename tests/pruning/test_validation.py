"""Networks and inputs that cannot be pruned are refused by name."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hgnp import Neurons
from pruning_cases import (
    VECTORS,
    prunable_layers,
    three_layers,
)


def test_net_and_example_input_are_checked() -> None:
    with pytest.raises(TypeError, match=r"^net must be an nn.Module, got function$"):
        Neurons(lambda x: x, VECTORS)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^example_input must be a tensor, a tuple or a dict of keyword arguments, got int$"
    ):
        Neurons(three_layers(nn.Linear(6, 7)), 5)
    with pytest.raises(ValueError, match=r"net must run on example_input in eval mode, but failed in 0: "):
        Neurons(three_layers(nn.Linear(6, 7)), VECTORS[:, :3])
    with pytest.raises(ValueError, match=r"failed in 0: inputs and weights must have the same dtype, got torch.float"):
        Neurons(three_layers(nn.Linear(6, 7)), VECTORS.float())
    with pytest.raises(
        ValueError, match=r"^example_input must hold at least one sample, got a tensor of shape \(0, 5\)$"
    ):
        Neurons(three_layers(nn.Linear(6, 7)), VECTORS[:0])


def test_neurons_refuses_wrong_options_layers_and_states() -> None:
    net = three_layers(nn.Linear(6, 7))
    with pytest.raises(TypeError, match=r"^approximate must be True or False, got 'yes'$"):
        Neurons(net, VECTORS, approximate="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Neurons: options must be given by name, got one without; use protect=…$"):
        Neurons(net, VECTORS, ["0"])  # type: ignore[misc]
    neurons = Neurons(net, VECTORS)
    before = str(neurons)
    with pytest.raises(TypeError, match=r"^confirm must be True or False, got 'x'$"):
        neurons.least({}, 1, confirm="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^coupling must be 'coupled' or 'paper', got 'x'$"):
        neurons.gates("x")  # type: ignore[arg-type]
    for read in (neurons.weights, neurons.norm_scale):
        with pytest.raises(ValueError, match=r"^layer must be one with neurons, got '9'; there are 0, 2, 4$"):
            read("9")
    for state in ({}, {"alive": 3}, None):
        with pytest.raises(
            ValueError, match=r"^state must come from state_dict\(\), got one without .*totals, version$"
        ):
            neurons.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^state\['alive'\] must be a tensor with one entry per slot, got 3$"):
        neurons.load_state_dict(neurons.state_dict() | {"alive": 3})
    with pytest.raises(ValueError, match=r"^also\[0\] must be another network than net, .* got net; omit it$"):
        neurons.remove({"0": [0]}, also=[net])
    assert str(neurons) == before


def test_lazy_modules_are_refused_until_initialised() -> None:
    net = nn.Sequential(nn.LazyLinear(6), nn.LazyLinear(2))
    with pytest.raises(
        ValueError, match=r"^0.weight must be initialised, got a lazy module; run one forward pass first$"
    ):
        Neurons(net, torch.zeros(2, 5))
    net(torch.zeros(2, 5))
    assert prunable_layers(net, torch.zeros(2, 5)) == ["0"]


def test_scripted_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(6, 7))
        net = three_layers(scripted)
    with pytest.raises(
        TypeError, match=r"^layer '2' must be a plain module, got a scripted one; pass the original module, and script"
    ):
        Neurons(net, VECTORS)


def test_compiled_modules_are_refused() -> None:
    net = three_layers(nn.Linear(6, 7))
    with pytest.raises(TypeError, match=r"^net must be a plain module, got a compiled one; pass the original module"):
        Neurons(torch.compile(net, backend="eager"), VECTORS)  # type: ignore[arg-type]
    net[2].compile(backend="eager")
    with pytest.raises(TypeError, match=r"^layer '2' must be a plain module, got a compiled one"):
        Neurons(net, VECTORS)


def test_a_class_in_a_package_called_quantized_is_not_taken_for_a_quantised_module() -> None:
    kind = type("Own", (nn.Sequential,), {"__module__": "mycompany.quantized.models"})
    assert Neurons(kind(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(2, 5)).count == 6


def test_quantised_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.nn.quantized.dynamic.Linear(6, 7)
    net = nn.Sequential(nn.Linear(5, 6), quantised)
    with pytest.raises(
        TypeError, match=r"^layer '1' must be a plain module, got a quantised Linear; pass the original"
    ):
        Neurons(net, VECTORS.float())


def test_sparse_parameters_are_refused() -> None:
    net = three_layers(nn.Linear(6, 7))
    net[2].weight = nn.Parameter(net[2].weight.detach().to_sparse())
    with pytest.raises(TypeError, match=r"^2.weight must be a dense tensor, got a sparse one$"):
        Neurons(net, VECTORS)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_wrapped_modules_are_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(three_layers(nn.Linear(6, 7)))
    with pytest.raises(
        TypeError, match=r"^net must be a plain module, got DistributedDataParallel; pass net.module, and to Flatness"
    ):
        Neurons(wrapped, VECTORS)
    with pytest.raises(TypeError, match="net must be a plain module, got DataParallel"):
        Neurons(nn.DataParallel(three_layers(nn.Linear(6, 7))), VECTORS)


@pytest.mark.usefixtures("process_group")
def test_sharded_modules_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    net = three_layers(nn.Linear(6, 7))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match="net must be a plain module, got FSDPModule"):
        Neurons(fully_shard(net, mesh=mesh), VECTORS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(three_layers(nn.Linear(6, 7)), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="net must be a plain module, got FullyShardedDataParallel"):
        Neurons(wrapped, VECTORS)

"""Unusual modules: those that work, and those that are refused by name."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from cases import Net
from hgnp import Neurons
from oracles import masked, run, worst_error

INPUT = torch.randn(4, 5, dtype=torch.double)


def three(middle: nn.Module) -> nn.Sequential:
    """A layer before and a layer after the unusual one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), middle, nn.Tanh(), nn.Linear(7, 2)).double().eval()


def prunable(neurons: Neurons) -> list[str]:
    return [layer.name for layer in neurons.layers]


def check_exact(net: nn.Module, neurons: Neurons, whole: nn.Module, inputs: Any = ((INPUT,), {})) -> None:
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    removed = neurons.remove(neurons.least(scores, neurons.count // 2))
    assert removed
    with torch.no_grad(), masked(whole, removed, inputs):
        expected = run(whole, inputs)
    with torch.no_grad():
        assert worst_error(run(net, inputs), expected) < 1e-10


# Work


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


@pytest.mark.parametrize("norm", [old_weight_norm, parametrizations.weight_norm], ids=["hook", "parametrization"])
def test_weight_norm_works_and_freezes_what_it_reads(norm: Callable[[nn.Module], nn.Module]) -> None:
    """A row's norm is over its columns: rows may go, columns may not."""
    net = three(norm(nn.Linear(6, 7)))
    neurons = Neurons(net, INPUT)
    assert prunable(neurons) == ["2"]
    whole = three(norm(nn.Linear(6, 7)))
    whole.load_state_dict(net.state_dict())
    check_exact(net, neurons, whole)
    assert net[2].out_features == 4
    net(INPUT).sum().backward()


@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["hook", "parametrization"]
)
def test_spectral_norm_works_and_is_frozen(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The norm is over the whole matrix: neither rows nor columns may go."""
    net = three(norm(nn.Linear(6, 7)))
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    neurons = Neurons(net, INPUT)
    assert prunable(neurons) == []
    assert {entry.name for entry in neurons.frozen} == {"0", "2", "4"}
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


def test_frozen_parameters_work() -> None:
    net = three(nn.Linear(6, 7))
    net[0].requires_grad_(False)
    whole = copy.deepcopy(net)
    check_exact(net, Neurons(net, INPUT), whole)
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True, True, True]


def test_unstructured_masks_of_torch_work() -> None:
    net = three(nn.Linear(6, 7))
    prune.l1_unstructured(net[2], "weight", amount=0.3)
    whole = three(nn.Linear(6, 7))
    prune.identity(whole[2], "weight")
    whole.load_state_dict(net.state_dict())
    neurons = Neurons(net, INPUT)
    assert prunable(neurons) == ["0", "2"]
    check_exact(net, neurons, whole)
    assert net[2].weight_mask.shape == net[2].weight_orig.shape == (net[2].out_features, net[2].in_features)


def test_buffers_of_the_users_own_are_cut_along() -> None:
    net = Net(lambda n, x: n.out(n.a(x).tanh() * n.scale), a=nn.Linear(5, 6), out=nn.Linear(6, 2))
    net.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)
    net.double()
    whole = copy.deepcopy(net)
    check_exact(net, Neurons(net, INPUT), whole)
    assert net.scale.shape == (3,)  # type: ignore[union-attr]


def test_a_tensor_that_is_no_buffer_freezes() -> None:
    net = Net(lambda n, x: n.out(n.a(x).tanh() * n.scale), a=nn.Linear(5, 6), out=nn.Linear(6, 2)).double()
    net.scale = torch.linspace(1, 2, 6).double()  # type: ignore[assignment]
    assert prunable(Neurons(net, INPUT)) == []


def test_parameters_in_one_memory_are_frozen() -> None:
    net = three(nn.Linear(6, 7))
    net[4].weight = nn.Parameter(net[2].weight.data[:2, :6].new_zeros(2, 7))
    net[2].bias = nn.Parameter(net[4].weight.data.view(-1)[:7])
    neurons = Neurons(net, INPUT)
    assert any("two tensors in one memory" in entry.reason for entry in neurons.frozen)


def test_unused_layers_are_frozen() -> None:
    net = Net(lambda n, x: n.out(n.a(x)), a=nn.Linear(5, 6), spare=nn.Linear(3, 3), out=nn.Linear(6, 2)).double()
    entry = next(entry for entry in Neurons(net, INPUT).frozen if entry.name == "spare")
    assert entry.reason == "it is not used in the forward"


def test_a_path_that_depends_on_the_data_freezes_everything() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(x if x.sum() > 0 else -x)

    net = Net(forward, a=nn.Linear(5, 6), out=nn.Linear(6, 2)).double()
    neurons = Neurons(net, INPUT)
    assert neurons.count == 0
    assert all("depends on its data" in entry.reason for entry in neurons.frozen)
    assert neurons.least({}, 5).taken == 0


def test_a_path_that_depends_on_the_width_is_noticed_when_it_is_taken() -> None:
    def forward(n: Any, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.out(x.tanh() if x.shape[1] > 5 else x.relu())

    net = Net(forward, a=nn.Linear(5, 12), out=nn.Linear(12, 2)).double()
    neurons = Neurons(net, INPUT)
    neurons.remove({"a": [0, 1, 2]})
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="takes another path"):
        neurons.remove({"a": [0, 1, 2, 3]})
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_dropout_and_the_random_streams_stay_as_they_were() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double().train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    Neurons(net, INPUT).remove({"0": [1]})
    assert torch.equal(torch.rand(3), expected)


def test_a_batch_of_one_is_enough() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
    assert prunable(Neurons(net, INPUT[:1])) == ["0"]


# Refused


def test_only_modules_and_only_inputs_that_a_network_takes() -> None:
    with pytest.raises(TypeError, match=r"net must be an nn.Module, not function"):
        Neurons(lambda x: x, INPUT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"example_input must be a tensor, a tuple or a dict"):
        Neurons(three(nn.Linear(6, 7)), 5)
    with pytest.raises(ValueError, match=r"net\(example_input\) failed in 0 \(eval mode\)"):
        Neurons(three(nn.Linear(6, 7)), INPUT[:, :3])


def test_lazy_modules_are_refused_until_they_have_run() -> None:
    net = nn.Sequential(nn.LazyLinear(6), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0.weight is not initialised yet \(a lazy module\): run one forward first"):
        Neurons(net, torch.zeros(2, 5))
    net(torch.zeros(2, 5))
    assert prunable(Neurons(net, torch.zeros(2, 5))) == ["0"]


def test_scripted_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(6, 7))
        net = three(scripted)
    with pytest.raises(TypeError, match="layer '2' is scripted"):
        Neurons(net, INPUT)


def test_compiled_modules_are_refused() -> None:
    net = three(nn.Linear(6, 7))
    with pytest.raises(TypeError, match=r"net is compiled: prune the module it was made from"):
        Neurons(torch.compile(net, backend="eager"), INPUT)  # type: ignore[arg-type]
    net[2].compile(backend="eager")
    with pytest.raises(TypeError, match="layer '2' is compiled"):
        Neurons(net, INPUT)


def test_quantised_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.nn.quantized.dynamic.Linear(6, 7)
    net = nn.Sequential(nn.Linear(5, 6), quantised)
    with pytest.raises(TypeError, match="layer '1' is quantised"):
        Neurons(net, INPUT.float())


def test_sparse_parameters_are_refused() -> None:
    net = three(nn.Linear(6, 7))
    net[2].weight = nn.Parameter(net[2].weight.detach().to_sparse())
    with pytest.raises(TypeError, match=r"2.weight is sparse"):
        Neurons(net, INPUT)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_wrapped_modules_are_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(three(nn.Linear(6, 7)))
    with pytest.raises(
        TypeError, match=r"net is wrapped in DistributedDataParallel: prune the module inside \(.module\)"
    ):
        Neurons(wrapped, INPUT)
    with pytest.raises(TypeError, match="net is wrapped in DataParallel"):
        Neurons(nn.DataParallel(three(nn.Linear(6, 7))), INPUT)


@pytest.mark.usefixtures("process_group")
def test_sharded_modules_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    net = three(nn.Linear(6, 7))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match=r"0.weight is a .*DTensor.*: only plain tensors can be cut|is wrapped in"):
        Neurons(fully_shard(net, mesh=mesh), INPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(three(nn.Linear(6, 7)), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="net is wrapped in FullyShardedDataParallel"):
        Neurons(wrapped, INPUT)

"""Scores of many batches from CUDA graphs are scores operation by operation, and leave nothing behind."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.flatness import step_and_state
from hgnp.pruning import Scores
from hgnp.scoring import compute_scores
from synchronization import no_synchronization

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.b, self.nb = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c, self.out, self.dropout = nn.Linear(16, 24), nn.Linear(24, 5), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.nb(self.b(x)) + x).mean((2, 3))
        x = F.dropout(x, self.dropout, training=self.dropout > 0)
        return self.out(F.softplus(self.c(x)))


def made(dropout: float = 0.0, device: str = "cuda") -> tuple[Net, hgnp.Neurons, list[tuple[Tensor, Tensor]]]:
    """Batches of two shapes; in every other one of each, inputs are so large that v is in another block."""
    torch.manual_seed(0)
    net = Net(dropout).double().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    sizes = [(n, scale) for _ in range(4) for n in (16, 10) for scale in (0.1, 30.0)]
    data = [(scale * (1 + torch.randn(n, 3, 8, 8).double()), torch.randint(0, 5, (n,))) for n, scale in sizes]
    data = [(x.to(device), y.to(device)) for x, y in data]
    return net, hgnp.Neurons(net, data[0][0][:2]), data


def operation_by_operation(
    neurons: hgnp.Neurons, data: Any, flat: hgnp.Flatness | None = None, criterion: str = "taylor"
) -> Scores:
    flat = hgnp.Flatness(neurons.net, mu=0.0) if flat is None else flat
    return compute_scores(
        neurons, data, *step_and_state(flat), criterion=criterion, mu=None, coupling="coupled", graphs=False
    )


def block_of(flat: hgnp.Flatness, inputs: Tensor, target: Tensor) -> str | None:
    """The block that the batch's own v lies in."""
    step, state = step_and_state(flat)
    step.share(state, inputs, target)
    return step.direction_of(state, inputs, target).name()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every replay of a graph."""
    seen: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        seen.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


@pytest.mark.parametrize("criterion", ["taylor", "taylor_sum"])
@pytest.mark.parametrize(
    "choices",
    [
        {"mu": 0.0},
        {"curvature": "ggn"},
        {"curvature": "hessian"},
        {"flatness": "paper"},
        {"scaling": "scale_invariant", "kfac_approx": "expand", "ranking": "empirical"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_the_same_scores(criterion: str, choices: dict[str, Any], replays: list[Any]) -> None:
    net, neurons, data = made()
    flat = hgnp.Flatness(net, **({"mu": 0.5, "bound": -1.0} | choices))
    net.eval()
    blocks = {(len(y), block_of(flat, x, y)) for x, y in data}
    assert len(blocks) == 4  # v moves from block to block
    expected = operation_by_operation(neurons, data, flat, criterion)
    assert not replays
    found = hgnp.sensitivity(net, neurons, data, flatness=flat, criterion=criterion)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    looks = len(data) - 2 if flat.mu else 0  # one graph for each shape finds v; and one for each shape and block
    assert len(replays) == looks + len(data) - (len(blocks) if flat.mu else 2)


def test_one_batch_is_not_captured(replays: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net, neurons, data = made()
    monkeypatch.setattr(torch.cuda, "graph", None)
    hgnp.sensitivity(net, neurons, data[:1], flatness=hgnp.Flatness(net, mu=0.5))
    hgnp.sensitivity(net, neurons, [data[0], data[2]])
    assert not replays


def test_nothing_waits_for_the_device() -> None:
    net, neurons, data = made()
    expected = operation_by_operation(neurons, data[::4])

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        yield from data[:8:4]
        with no_synchronization():  # all that follow are replayed
            yield from data[8::4]

    found = hgnp.sensitivity(net, neurons, watched())
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_a_forward_that_draws_is_not_captured(replays: list[Any]) -> None:
    net, neurons, data = made(dropout=0.3)
    flat = hgnp.Flatness(net, mu=0.5, bound=-1.0)
    stream = torch.cuda.get_rng_state()
    expected = operation_by_operation(neurons, data, flat)
    found = hgnp.sensitivity(net, neurons, data, flatness=flat)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert not replays
    assert torch.equal(stream, torch.cuda.get_rng_state())


def test_labels_are_sampled_operation_by_operation(replays: list[Any]) -> None:
    net, neurons, data = made()
    flat = hgnp.Flatness(net, mu=0.5, bound=-1.0, fisher_type="mc")
    expected = operation_by_operation(neurons, data, flat)
    found = hgnp.sensitivity(net, neurons, data, flatness=flat)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert not replays


def test_scoring_has_no_side_effects(replays: list[Any]) -> None:
    net, neurons, data = made()
    net.train()
    flat = hgnp.Flatness(net, mu=0.5, bound=-1.0)
    flat.backward(*data[0])

    def state() -> Any:
        pairs = flat.state_dict()["pairs"]
        return net.state_dict(), [p.grad for p in net.parameters()], pairs, torch.cuda.get_rng_state()

    before = torch.utils._pytree.tree_map(torch.clone, state())
    hgnp.sensitivity(net, neurons, data, flatness=flat)
    with pytest.raises(ValueError, match=r"batches must be \(inputs, target\) pairs"):
        hgnp.sensitivity(net, neurons, [*data, None], flatness=flat)  # type: ignore[list-item]
    assert replays
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_no_memory_is_left_behind(mu: float) -> None:
    net, neurons, _ = made()
    flat = hgnp.Flatness(net, mu=mu, bound=-1.0)
    x, y = torch.randn(64, 3, 32, 32, device="cuda").double(), torch.randint(0, 5, (64,), device="cuda")
    for _ in range(12):  # libraries keep a workspace for each stream; branches of a graph take turns with twelve
        hgnp.sensitivity(net, neurons, [(x, y)] * 3, flatness=flat)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hgnp.sensitivity(net, neurons, [(x, y)] * 3, flatness=flat)
    gc.collect()
    assert torch.cuda.max_memory_allocated() - before > 32 * 2**20
    assert torch.cuda.memory_allocated() - before < 4 * 2**20


def test_a_run_equals_one_operation_by_operation(replays: list[Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 3, 8, 8).double()
    y = (x[:, 0].mean((1, 2)) > 0).long()
    data = [(x[i : i + 16].cuda(), y[i : i + 16].cuda()) for i in range(0, 96, 16)]
    widths = []
    for engine in ("auto", "eager"):
        recipe = hgnp.Recipe(
            keep=0.5, warmup_epochs=1, neurons_per_round=10, finetune_epochs=1, lr=0.05, seed=0, execution=engine,
            precision="float32", mu=0.01, bound=0.0, score_batches=5,
        )  # fmt: skip
        replays.clear()
        history = hgnp.prune(made()[0], data, data, recipe=recipe).history
        widths.append([row["widths"] for row in history])
        assert bool(replays) is (engine == "auto")
    assert widths[0] == widths[1]


@pytest.mark.parametrize("autocast", [False, True])
def test_what_cannot_be_captured_is_scored_all_the_same(autocast: bool, replays: list[Any]) -> None:
    net, neurons, data = made()
    net.float()
    data = [(x.float(), y) for x, y in data]

    def waits(z: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(z, target) * (1.0 if target.sum().item() >= 0 else 2.0)

    flat = hgnp.Flatness(net, mu=0.0, loss=waits)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected = operation_by_operation(neurons, data, flat)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = hgnp.sensitivity(net, neurons, data, flatness=flat)
        again = hgnp.sensitivity(net, neurons, data)
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-3)
    assert len(replays) == len(data) - 2
    torch.testing.assert_close(again, expected, rtol=5e-2, atol=5e-3)

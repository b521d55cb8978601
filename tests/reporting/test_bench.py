"""Inference timing: rows, sizes, speed-ups, and reasons for variants that cannot run."""

import copy
import csv
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import hgnp
from hgnp.reporting import bench as module
from hgnp.reporting.bench import BenchEntry, BenchResult, bench, bench_networks, weight_pruned
from hgnp.reporting.variants import prepare, without_tf32


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*(shortcut if stride > 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, stages: int = 2) -> None:
        super().__init__()
        widths = [width, *(width * 2**stage for stage in range(stages))]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            *(Block(widths[stage], widths[stage + 1], 2 if stage else 1) for stage in range(stages))
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


SAMPLE = torch.zeros(3, 16, 16)
VARIANTS = ("eager", "channels_last", "bf16", "onnx")


@pytest.fixture(scope="module")
def nets() -> tuple[ResNet, ResNet]:
    torch.manual_seed(0)
    full = ResNet()
    small = copy.deepcopy(full)
    neurons = hgnp.Neurons(small, torch.zeros(2, 3, 16, 16))
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, neurons.count // 2))
    return full, small


@pytest.fixture(scope="module")
def result(nets: tuple[ResNet, ResNet]) -> BenchResult:
    return bench(*nets, SAMPLE, batches=[2, 7], variants=VARIANTS, repeats=3)


def rows_of(result: BenchResult, **where: Any) -> list[dict[str, Any]]:
    return [row for row in result.rows if all(row[key] == value for key, value in where.items())]


def test_every_network_in_every_variant_has_its_row(nets: tuple[ResNet, ResNet], result: BenchResult) -> None:
    found = [(row["batch"], row["variant"], row["network"]) for row in result.rows]
    networks = ("full", "weight-pruned", "neuron-pruned")
    assert found == [(batch, variant, net) for batch in (2, 7) for variant in VARIANTS for net in networks]
    for row in result.rows:
        assert row["reason"] is None
        assert row["device"] == "cpu"
        assert row["repeats"] == 3
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["first_s"] > 0


def test_sizes_are_those_that_neurons_counts(nets: tuple[ResNet, ResNet], result: BenchResult) -> None:
    one = torch.zeros(1, 3, 16, 16)
    for label, net in zip(("full", "neuron-pruned"), nets, strict=True):
        neurons = hgnp.Neurons(copy.deepcopy(net).eval(), one)
        count = sum(p.numel() for p in net.parameters())
        assert {(row["macs"], row["parameters"]) for row in rows_of(result, network=label)} == {(neurons.macs, count)}
    full, dense = rows_of(result, network="full")[0], rows_of(result, network="weight-pruned")[0]
    assert (dense["macs"], dense["parameters"]) == (full["macs"], full["parameters"])
    kept = sum(p.numel() for p in nets[1].parameters()) / sum(p.numel() for p in nets[0].parameters())
    assert dense["kept"] == rows_of(result, network="neuron-pruned")[0]["kept"] == kept < 0.5
    assert full["kept"] == 1


def test_speed_ups_are_against_the_full_network(result: BenchResult) -> None:
    for row in result.rows:
        same, eager = (
            rows_of(result, network="full", variant=variant, batch=row["batch"])[0]["median_ms"]
            for variant in (row["variant"], "eager")
        )
        assert row["speedup"] == same / row["median_ms"]
        assert row["speedup_eager"] == eager / row["median_ms"]


def test_variants_compute_what_eager_does(result: BenchResult) -> None:
    tolerance = {"eager": 0, "channels_last": 1e-5, "onnx": 1e-5, "bf16": 0.1}
    for row in result.rows:
        assert row["difference"] <= tolerance[row["variant"]]
    assert all(row["difference"] > 1e-5 for row in rows_of(result, variant="bf16"))


@pytest.mark.parametrize("kept", [0.03, 0.144, 1.0])
def test_weight_pruned_keeps_exactly_the_fraction(nets: tuple[ResNet, ResNet], kept: float) -> None:
    full = nets[0]
    net = weight_pruned(full, kept)
    weights = [p for p in net.parameters() if p.dim() > 1]
    total = sum(w.numel() for w in weights)
    assert sum(int(w.count_nonzero()) for w in weights) == round(kept * total)
    assert [p.shape for p in net.parameters()] == [p.shape for p in full.parameters()]
    assert torch.equal(net.head.bias, full.head.bias)
    assert not torch.equal(net.head.weight, full.head.weight)
    # activations keep their size: nothing falls to where arithmetic is slow
    size = net.eval()(torch.randn(8, 3, 16, 16)).abs().max()
    assert 1e-3 < size < 1e3


def test_networks_of_equal_accuracy_in_one_run(nets: tuple[ResNet, ResNet]) -> None:
    full, small = nets
    calls: list[tuple[str, int, int]] = []
    result = bench_networks(
        full,
        [BenchEntry("ours", small, 0.92), BenchEntry("weights", 0.03, 0.92), BenchEntry("weights, more", 0.5)],
        SAMPLE,
        batches=2,
        variants=["eager"],
        repeats=2,
        progress=lambda *call: calls.append(call),
    )
    found = [(row["network"], row["accuracy"]) for row in result.rows]
    assert found == [("full", None), ("ours", 0.92), ("weights", 0.92), ("weights, more", None)]
    assert [row["kept"] for row in result.rows][2:] == [0.03, 0.5]
    assert [i for _, i, _ in calls] == list(range(1, calls[0][2] + 1))


def test_the_smaller_network_is_faster() -> None:
    full, small = ResNet(48, stages=4), ResNet(4, stages=4)
    result = bench(full, small, torch.zeros(3, 32, 32), batches=8, variants=["eager"], repeats=3)
    row = rows_of(result, network="neuron-pruned")[0]
    assert row["macs"] * 100 < rows_of(result, network="full")[0]["macs"]
    assert row["speedup"] > 2


class Picky(nn.Module):
    """Takes any number of rows but five."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise RuntimeError("five rows are too many\nand a long trace")
        return self.layers(x)


def test_a_variant_that_cannot_run_is_a_row_with_the_reason() -> None:
    variants = ["onnx", "channels_last", "eager"]
    result = bench(Picky(6), Picky(3), torch.zeros(4), batches=[3, 5], variants=variants, repeats=1)
    assert len(result.rows) == 18
    for row in rows_of(result, variant="onnx"):
        assert row["reason"].startswith("net ")
        assert row["median_ms"] is row["speedup"] is row["difference"] is None
    assert {r["reason"] for r in rows_of(result, variant="channels_last")} == {
        "net must have 2-d convolutions for variant 'channels_last', got none"
    }
    assert {r["reason"] for r in rows_of(result, variant="eager", batch=5)} == {"RuntimeError: five rows are too many"}
    assert all(row["median_ms"] > 0 for row in rows_of(result, variant="eager", batch=3))
    assert "five rows" in shown(result)


def test_without_tf32_the_flag_is_off_while_the_network_runs() -> None:
    before = torch.backends.cudnn.allow_tf32
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.allow_tf32)
            return x

    without_tf32(Asks())(torch.zeros(1))
    assert (seen, torch.backends.cudnn.allow_tf32) == ([False], before)
    with pytest.raises(ValueError, match="device must be cuda for variant 'no_tf32', got cpu"):
        prepare("no_tf32", Asks(), [torch.zeros(1)])


def test_compiled_networks_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.compile's front end alone, as C++ takes half a minute: each size of network gets a graph of its own."""
    torch.compiler.reset()
    captured: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        captured.append(sum(tensor.numel() for tensor in inputs if isinstance(tensor, nn.Parameter)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    nets = [nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)) for width in range(2, 13)]
    many = [BenchEntry(f"{net[0]}", net) for net in nets[:-1]]  # torch's own limit is 8
    result = bench_networks(nets[-1], many, torch.zeros(4), batches=2, variants=["eager", "compile"], repeats=1)
    assert sorted(captured) == sorted({row["parameters"] for row in result.rows})
    assert {row["reason"] for row in result.rows} == {None}
    assert all(row["difference"] < 1e-5 for row in result.rows)
    first = rows_of(result, network="full", variant="compile")[0]
    assert first["first_s"] * 1e3 > 2 * first["median_ms"]


def test_networks_are_unchanged(nets: tuple[ResNet, ResNet]) -> None:
    full, small = (copy.deepcopy(net) for net in nets)
    full.train()
    small.eval()
    before = [copy.deepcopy(net.state_dict()) for net in (full, small)]
    state = torch.get_rng_state()
    bench(full, small, SAMPLE, batches=2, variants=["eager", "channels_last", "bf16"], repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert full.training
    assert not small.training
    for net, old in zip((full, small), before, strict=True):
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, old[name])
            assert tensor.stride() == old[name].stride()


def test_results_as_json_table_and_csv(result: BenchResult, tmp_path: Path) -> None:
    again = json.loads(json.dumps(result.as_dict()))
    assert again["rows"] == result.rows
    assert again["threads"] == torch.get_num_threads()
    assert again["versions"]["torch"] == torch.__version__
    assert again["devices"]["cpu"]
    with open(result.write_csv(tmp_path / "new" / "bench.csv"), newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["median_ms"]) for row in read] == [row["median_ms"] for row in result.rows]
    text = shown(result)
    assert text.count("neuron-pruned") == 8
    assert f"{result.rows[0]['median_ms']:.2f}" in text


def shown(result: BenchResult) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(result.table())
    return capture.get()


def test_batch_sizes_default_to_the_papers() -> None:
    assert module.BATCHES == {"cpu": 128, "cuda": 2000}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": [0]}, "batches must be integers ≥ 1, got [0]"),
        (
            {"variants": ["fast"]},
            "variants must be among eager, no_tf32, channels_last, compile, bf16, fp16, onnx, got 'fast'",
        ),
        ({"repeats": 0}, "repeats must be an integer ≥ 1, got 0"),
        ({"device": "gpu"}, "on this machine, got 'gpu'"),
        ({"device": ["cpu", "meta"]}, "on this machine, got 'meta'"),
    ],
)
def test_invalid_options_are_refused(nets: tuple[ResNet, ResNet], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bench(*nets, SAMPLE, **options)


def test_invalid_entries_are_refused(nets: tuple[ResNet, ResNet]) -> None:
    with pytest.raises(ValueError, match="labels must be distinct and other than 'full', got"):
        bench_networks(nets[0], [BenchEntry("a", 0.1), BenchEntry("a", 0.2)], SAMPLE)
    with pytest.raises(ValueError, match=r"kept must be a fraction in \(0, 1\], got 1\.5"):
        bench_networks(nets[0], [BenchEntry("a", 1.5)], SAMPLE)
    with pytest.raises(ValueError, match=r"kept must be a fraction in \(0, 1\], got 'half'"):
        bench_networks(nets[0], [BenchEntry("a", "half")], SAMPLE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sample must be a tensor"):
        bench(*nets, "image")

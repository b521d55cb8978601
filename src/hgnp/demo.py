"""The demonstration: neurons leave a network while it trains on scikit-learn's handwritten digits, on a CPU."""

import copy
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hgnp.neurons import Neurons, Scores
from hgnp.storage import load, save

ROUNDS = 8
OUT = Path("runs/demo")


def make_net() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 48), *block(48, 48), nn.MaxPool2d(2), *block(48, 96), *block(96, 96), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(384, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def magnitudes(net: nn.Module, neurons: Neurons) -> Scores:
    """The length of each neuron's weights, relative to its layer: the simplest score there is."""
    scores = {}
    for layer in neurons.layers:
        weight = net.get_submodule(layer.name).get_parameter("weight")
        length = weight.detach().flatten(1).norm(dim=1)
        scores[layer.name] = length / length.norm()
    return scores


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    net.train()
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((net.eval()(x).argmax(1) == y).float().mean())


@torch.no_grad()
def side_by_side(nets: list[nn.Module], x: Tensor, repeats: int = 15) -> list[float]:
    """Median seconds of a forward for each network, measured in turns so that both meet the same conditions."""
    times: list[list[float]] = [[] for _ in nets]
    for _ in range(repeats + 3):
        for net, mine in zip(nets, times, strict=True):
            start = time.perf_counter()
            net.eval()(x)
            mine.append(time.perf_counter() - start)
    return [statistics.median(mine[3:]) for mine in times]


def main() -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train_x, train_y, test_x, test_y = x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    neurons = Neurons(net, train_x[:2])
    print(f"{neurons!r}\n")
    for _ in range(3):
        train(net, optimizer, train_x, train_y)
    full, before, full_accuracy = copy.deepcopy(net), neurons.preview({}), accuracy(net, test_x, test_y)
    print("round  neurons  parameters kept  test accuracy")
    print(f"{0:>5}  {before.neurons:>7}  {before.kept:>15.1%}  {full_accuracy:>13.1%}")
    for number in range(1, ROUNDS + 1):
        neurons.remove(neurons.least(magnitudes(net, neurons), before.neurons // 11), optimizer)
        train(net, optimizer, train_x, train_y)
        print(f"{number:>5}  {neurons.count:>7}  {neurons.kept:>15.1%}  {accuracy(net, test_x, test_y):>13.1%}")
        sys.stdout.flush()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for _ in range(3):
        train(net, optimizer, train_x, train_y)

    file = save(net, OUT)
    again = load(OUT, make_net())
    assert torch.equal(again.eval()(test_x), net.eval()(test_x))
    slow, fast = side_by_side([full, net], test_x[:256])
    after = neurons.preview({})
    print(f"\n{'':<24}{'before':>12}{'after':>12}")
    print(f"{'test accuracy':<24}{full_accuracy:>12.1%}{accuracy(net, test_x, test_y):>12.1%}")
    print(f"{'parameters':<24}{before.parameters:>12,}{after.parameters:>12,}")
    print(f"{'neurons':<24}{before.neurons:>12,}{after.neurons:>12,}")
    print(f"{'MACs a picture':<24}{before.macs // 2:>12,}{after.macs // 2:>12,}")
    print(f"{'ms for 256 pictures':<24}{slow * 1e3:>12.1f}{fast * 1e3:>12.1f}   {slow / fast:.1f} times faster")
    print(f"\nwrote {file} ({file.stat().st_size / 1024:.0f} KiB); a fresh network loaded from it gives equal bits")
    print(f"{time.perf_counter() - start:.0f} s in all")

"""Runs of networks that return their losses in training mode only, and boxes above a threshold in evaluation mode."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from cases import block

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [
    (
        torch.randn(4, 3, 6, 6, generator=GENERATOR).double(),
        [{"boxes": torch.rand(2, 4, generator=GENERATOR).double()} for _ in range(4)],
    )
    for _ in range(2)
]


class Detector(nn.Module):
    """Takes images and targets as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(3, 8), block(8, 8), nn.Dropout(0.5))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, images: Any, targets: Any = None) -> Any:
        boxes = self.head(self.backbone(torch.stack(list(images)))).flatten(2).transpose(1, 2)
        if not self.training:
            return [{"boxes": each[each.sum(1) > 0]} for each in boxes]
        losses = [
            (each[each.sum(1) > each.mean()].mean(0) - target["boxes"].mean(0)).square().mean()
            for each, target in zip(boxes, targets, strict=True)
        ]
        return {"box": torch.stack(losses).mean(), "size": boxes.square().mean()}


def detector() -> Detector:
    torch.manual_seed(0)
    return Detector().double()


def total(losses: dict[str, Tensor], target: Any) -> Tensor:
    return sum(losses.values())  # type: ignore[return-value]


def unpack(batch: Any) -> Any:
    """Images and targets are both inputs: the network computes its losses itself."""
    return batch, batch[1]


def unpack_lists(batch: Any) -> Any:
    """With an entry per image."""
    return (list(batch[0]), batch[1]), batch[1]


def unpack_tuples(batch: Any) -> Any:
    """As `tuple(zip(*samples))` collates them."""
    return (tuple(batch[0]), tuple(batch[1])), batch[1]


class Boxes:
    """How many boxes there are; what it sees is the output in evaluation mode."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, output: Any, target: Any) -> None:
        assert all(set(each) == {"boxes"} for each in output)
        assert len(output) == len(target) == 4
        self.count += sum(len(each["boxes"]) for each in output)

    def compute(self) -> int:
        return self.count

    def reset(self) -> None:
        self.count = 0


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
def test_scores_of_training_losses_equal_closing_gates_by_hand() -> None:
    """∂L/∂γ of one channel against finite differences of the loss with the channel scaled by a hook."""
    net, batch = detector(), BATCHES[0]
    neurons = hgnp.Neurons(net, batch)
    assert [layer.name for layer in neurons.layers] == ["backbone.0.0", "backbone.1.0"]
    scores = hgnp.sensitivity(net, neurons, [(batch, batch[1])], loss=total)
    assert net.training
    for module in net.modules():
        module.train(not isinstance(module, nn.BatchNorm2d | nn.Dropout))

    def loss(layer: int, channel: int, gate: float) -> float:
        scale = torch.ones(8, 1, 1).double()
        scale[channel] = gate
        handle = net.backbone[layer].register_forward_hook(lambda module, args, out: out * scale)  # type: ignore[operator]
        with torch.no_grad():
            value = float(total(net(*batch), None))
        handle.remove()
        return value

    for layer in (0, 1):
        slopes = [abs(loss(layer, channel, 1 + 1e-6) - loss(layer, channel, 1 - 1e-6)) / 2e-6 for channel in range(8)]
        expected = torch.tensor(slopes).double()
        torch.testing.assert_close(scores[f"backbone.{layer}.0"], expected / expected.norm(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("collated", [unpack_lists, unpack_tuples])
def test_images_one_by_one_are_as_many_samples_as_in_a_tensor(collated: Any) -> None:
    """The penalised gradient of images in a list or tuple, of which each has three channels, and of the same in one tensor."""
    found = []
    for each in (unpack, collated):
        net = detector()
        flat = hgnp.Flatness(net, loss=total, bound=-1.0, mu=0.1, refresh_every=1)
        inputs, target = each(BATCHES[0])
        for _ in range(2):
            net.zero_grad()
            torch.manual_seed(1)
            loss = flat.backward(inputs, target)
        found.append([loss, flat.radius, *(p.grad for p in net.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
@pytest.mark.parametrize(("method", "unpack"), [("taylor", unpack_lists), ("hgnp", unpack), ("hgnp", unpack_tuples)])
def test_a_detector_is_trained_and_pruned_with_its_own_losses(method: Any, unpack: Any, tmp_path: Any) -> None:
    net, metric = detector(), Boxes()
    recipe = hgnp.Recipe(
        keep=0.5, method=method, warmup_epochs=1, neurons_per_round=4, finetune_epochs=1, seed=0, measure="none"
    )
    result = hgnp.prune(
        net, BATCHES, BATCHES[:1], recipe=recipe, loss=total, metric=metric, unpack=unpack, verbose=False
    )
    assert result.kept <= 0.5
    assert all(row["val_loss"] > 0 for row in result.history)
    hgnp.save(net, tmp_path)
    again = hgnp.load(tmp_path, Detector().double())
    images = BATCHES[1][0]
    with torch.no_grad():
        expected, got = (copy.deepcopy(each).eval()(images) for each in (net, again))
    assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(expected, got, strict=True))


class StochasticDepth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x[:, :1], 0.5)) * 2 if self.training else x


class Attending(nn.Module):
    """Dropout in attention and recurrent layers, stochastic depth, and dropout by a function."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(4, 6), nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.recurrent, self.depth = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True), StochasticDepth()
        self.hidden, self.last, self.by_function = nn.Linear(6, 5), nn.Linear(5, 3), by_function

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        h = torch.tanh(self.first(x))
        h = h + self.depth(self.recurrent(self.attention(h, h, h)[0])[0])
        if self.by_function:
            h = nn.functional.dropout(h, 0.5, self.training)
        z = self.last(torch.tanh(self.hidden(h.mean(1))))
        return {"loss": nn.functional.cross_entropy(z, target)} if self.training else z.argmax(1)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
@pytest.mark.parametrize("by_function", [False, True])
def test_scores_of_training_losses_repeat_and_have_no_dropout(by_function: bool) -> None:
    torch.manual_seed(0)
    net = Attending(by_function).double()
    x, y = torch.randn(8, 5, 4).double(), torch.arange(8) % 3
    neurons = hgnp.Neurons(net, (x, y))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(hgnp.sensitivity(net, neurons, [((x, y), y)], loss=total)["hidden"])
    first, second = found
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(module.training for module in net.modules())
    if not by_function:  # dropout of the function stays, with a fixed seed
        gamma = torch.ones(5, dtype=torch.double, requires_grad=True)
        net.eval()
        h = torch.tanh(net.first(x))
        h = h + net.recurrent(net.attention(h, h, h)[0])[0]
        z = net.last(torch.tanh(net.hidden(h.mean(1))) * gamma)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), gamma)
        torch.testing.assert_close(first, slope.abs() / slope.norm())


class LossHead(nn.Module):
    """Without parameters; returns the loss in training mode only."""

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, target) if self.training else z.argmax(1)


class WithLossHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last, self.head = nn.Linear(4, 6), nn.Linear(6, 3), LossHead()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.head(self.last(torch.tanh(self.hidden(x))), target)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
def test_a_loss_head_without_parameters_returns_its_loss_for_the_scores() -> None:
    torch.manual_seed(0)
    net = WithLossHead().double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    found = hgnp.sensitivity(net, hgnp.Neurons(net, (x, y)), [((x, y), y)], loss=lambda loss, _: loss)["hidden"]
    gates = torch.ones(6, dtype=torch.double, requires_grad=True)
    loss = nn.functional.cross_entropy(net.last(torch.tanh(net.hidden(x)) * gates), y)
    (expected,) = torch.autograd.grad(loss, gates)
    torch.testing.assert_close(found, expected.abs() / expected.norm())

"""Loss and accuracy over batches of unequal size, against the whole set at once."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hgnp.training import evaluate
from hgnp.training.evaluate import Evaluation


def test_means_are_over_samples_and_labels_that_are_ignored_do_not_count() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.double), torch.arange(7) % 3
    mean, accuracy = Evaluation(net, F.cross_entropy, None, None)([(x[:5], y[:5]), (x[5:], y[5:])])
    assert mean == pytest.approx(F.cross_entropy(net(x), y).item())
    right = net(x).argmax(1) == y
    assert accuracy == pytest.approx(right.double().mean().item())
    _, accuracy = Evaluation(net, partial(F.cross_entropy, ignore_index=1), None, None)(
        [(x[:5], y[:5]), (x[5:], y[5:])]
    )
    assert accuracy == pytest.approx(right[y != 1].double().mean().item())


def test_graphs_are_captured_again_when_the_network_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a replay finds what was found when the graph was made, as it reads the memory of then."""

    captured: list[Any] = []

    class Stand:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def running(self) -> Any:
            return nullcontext()

        def capture(self, work: Callable[[], Any]) -> tuple["Stand", Any]:
            captured.append(self)
            return self, work()

        def replay(self) -> None: ...

        def forget(self) -> None: ...

    monkeypatch.setattr(evaluate, "CaptureContext", Stand)
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.double), torch.arange(7) % 3
    evaluation = Evaluation(net, F.cross_entropy, None, None, graphs=True)
    for captures in (1, 1, 2):
        if captures == 2:
            net.weight.data = torch.randn(3, 4, dtype=torch.double)
        for _ in range(2):
            assert evaluation([(x, y)])[0] == pytest.approx(F.cross_entropy(net(x), y).item())
        assert len(captured) == captures


# The loss of the whole set

W = torch.tensor([0.5, 2.0, 1.3], dtype=torch.double)
SPLITS = (5, 1, 4, 10)  # the second batch has a single sample
N = sum(SPLITS)


def _labels(*, ignored: int = -100) -> torch.Tensor:
    """The second batch and some of the others are ignored."""
    y = torch.arange(N) % 3
    y[5], y[::7] = ignored, ignored
    return y


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _soft() -> torch.Tensor:
    return torch.rand(N, 3, dtype=torch.double, generator=_generator()).softmax(1)


def _bits() -> torch.Tensor:
    return torch.randint(0, 2, (N, 3), generator=_generator()).double()


CASES: dict[str, tuple[Any, torch.Tensor]] = {
    "cross-entropy": (F.cross_entropy, torch.arange(N) % 3),
    "ignored": (F.cross_entropy, _labels()),
    "ignored by choice": (nn.CrossEntropyLoss(ignore_index=1), torch.arange(N) % 3),
    "weighted": (nn.CrossEntropyLoss(weight=W), _labels()),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.2), _labels()),
    "weighted, smoothed": (
        partial(F.cross_entropy, weight=W, label_smoothing=0.3, ignore_index=255),
        _labels(ignored=255),
    ),
    "a weight of zero, smoothed": (
        partial(F.cross_entropy, weight=torch.tensor([0.0, 1.0, 2.0], dtype=torch.double), label_smoothing=0.3),
        torch.cat([torch.zeros(6, dtype=torch.long), torch.arange(N - 6) % 3]),
    ),
    "soft labels": (partial(F.cross_entropy, weight=W, label_smoothing=0.1), _soft()),
    "mse": (F.mse_loss, torch.randn(N, 3, dtype=torch.double, generator=_generator())),
    "bce": (nn.BCEWithLogitsLoss(weight=W, pos_weight=W.flip(0)), _bits()),
    "a function of one's own": (lambda z, y: F.cross_entropy(z, y), torch.arange(N) % 3),
    "a function with weights": (lambda z, y: F.cross_entropy(z, y, weight=W, ignore_index=-1), _labels(ignored=-1)),
    "a sum of two": (lambda z, y: F.cross_entropy(z, y) + 0.4 * F.multi_margin_loss(z, y), torch.arange(N) % 3),
    "a sum of two with weights": (
        lambda z, y: F.cross_entropy(z, y, weight=W) + 0.4 * F.nll_loss(F.log_softmax(2 * z, 1), y, weight=W),
        _labels(),
    ),
    "nll": (lambda z, y: nn.NLLLoss(weight=W)(z.log_softmax(1), y), _labels()),
    "l1": (nn.L1Loss(), torch.randn(N, 3, dtype=torch.double, generator=_generator())),
}


def _split(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(SPLITS), y.split(SPLITS), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_batches_is_that_of_the_whole_set(name: str) -> None:
    loss, target = CASES[name]
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).double(), torch.randn(N, 4, dtype=torch.double)
    found, metric = Evaluation(net, loss, None, None)(_split(x, target))
    assert found == pytest.approx(loss(net(x), target).item(), rel=1e-13)
    if target.is_floating_point():
        assert metric == -found


def test_the_loss_of_dense_labels_is_that_of_the_whole_set() -> None:
    torch.manual_seed(0)
    net, x = nn.Conv2d(2, 3, 1).double(), torch.randn(N, 2, 4, 5, dtype=torch.double)
    y = torch.randint(-1, 3, (N, 4, 5))
    y[5] = -1
    loss = nn.CrossEntropyLoss(weight=W, ignore_index=-1)
    found, accuracy = Evaluation(net, loss, None, None)(_split(x, y))
    assert found == pytest.approx(loss(net(x), y).item(), rel=1e-13)
    right = (net(x).argmax(1) == y)[y != -1]
    assert accuracy == pytest.approx(right.double().mean().item(), rel=1e-13)


def test_half_precision_does_not_overflow() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).half(), 1000 * torch.randn(N, 4).half()
    found, _ = Evaluation(net, F.cross_entropy, None, None)(_split(x, torch.arange(N) % 3))
    assert found == pytest.approx(F.cross_entropy(net(x).double(), torch.arange(N) % 3).item(), rel=1e-5)
    found, _ = Evaluation(net, F.mse_loss, None, None)(_split(x, net(x).flip(0).detach()))
    assert found == pytest.approx(F.mse_loss(net(x).double(), net(x).double().flip(0)).item(), rel=1e-5)


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1), lambda z, y: F.cross_entropy(z, y)]
)
def test_labels_that_are_all_ignored_give_no_loss_and_no_accuracy(loss: Any) -> None:
    evaluation = Evaluation(nn.Linear(4, 3), loss, None, None)
    data = [(torch.randn(2, 4), torch.full((2,), -100))] * 2
    assert evaluation(data) == (None, None)
    assert evaluation.note == "val: every label is ignored, so there is no validation loss"


def test_a_custom_loss_that_is_nan_leaves_a_batch_out_only_if_its_outputs_are_finite() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(N, 4, dtype=torch.double), torch.arange(N) % 3
    y[5] = -100
    evaluation = Evaluation(net, lambda z, y: F.cross_entropy(z, y, reduction="none")[y != -100].mean(), None, None)
    mine = y != -100
    assert evaluation(_split(x, y))[0] == pytest.approx(F.cross_entropy(net(x[mine]), y[mine]).item(), rel=1e-13)
    assert str(evaluation.note).startswith("val: 1 of 4 batches have finite outputs but a NaN loss")
    x[0] = float("nan")
    assert math.isnan(evaluation(_split(x, y))[0] or 0.0)


# Metrics


class Two(nn.Module):
    """Two heads in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


def _both(out: dict[str, torch.Tensor], target: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out["a"], target[0]) + F.cross_entropy(out["b"], target[1])


def test_outputs_and_targets_of_several_tensors_are_concatenated_tensor_by_tensor() -> None:
    torch.manual_seed(0)
    net, x, a, b = Two(), torch.randn(N, 4), torch.arange(N) % 3, torch.arange(N) % 2
    data = [(x, [a, b]) for x, a, b in zip(x.split(SPLITS), a.split(SPLITS), b.split(SPLITS), strict=True)]

    def both_right(out: dict[str, torch.Tensor], target: list[torch.Tensor]) -> torch.Tensor:
        return ((out["a"].argmax(1) == target[0]) & (out["b"].argmax(1) == target[1])).double().mean()

    loss, metric = Evaluation(net, _both, both_right, None)(data)
    assert metric == pytest.approx(float(both_right(net(x), [a, b])))
    assert loss == pytest.approx(_both(net(x), [a, b]).item(), rel=1e-6)


class Right:
    """An accumulator."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def update(self, out: torch.Tensor, target: torch.Tensor) -> None:
        self.right += int((out.argmax(1) == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        return self.right / self.count

    def reset(self) -> None:
        self.right = self.count = 0


def test_an_accumulator_is_updated_batch_by_batch_and_left_empty() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(N, 4), torch.arange(N) % 3
    metric = Right()
    for _ in range(2):
        _, found = Evaluation(net, F.cross_entropy, metric, None)(_split(x, y))
        assert found == pytest.approx((net(x).argmax(1) == y).double().mean().item())
        assert metric.count == 0


@dataclasses.dataclass
class Found:
    """As the outputs of Transformers: some fields may be None."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out = self.a(x)
        boxes = [{"boxes": row.repeat(1 + int(row.argmax()), 1)} for row in out]  # as many as the detector finds
        return {"found": Found(out, (out, 2 * out)), "boxes": boxes, "kind": "linear"}


def test_a_metric_takes_any_structure_of_outputs_and_targets() -> None:
    torch.manual_seed(0)
    net, x, y = Structured(), torch.randn(N, 4), torch.arange(N) % 3
    names = [f"image {index}" for index in range(N)]
    data = [
        (part, {"label": label, "name": [names[int(i)] for i in index]})
        for part, label, index in zip(x.split(SPLITS), y.split(SPLITS), torch.arange(N).split(SPLITS), strict=True)
    ]
    seen = []

    def found(out: dict[str, Any], target: dict[str, Any]) -> float:
        if len(target["label"]) == N:
            seen.append((out, target))
        return float((out["found"].logits.argmax(1) == target["label"]).double().mean())

    _, metric = Evaluation(net, lambda out, target: out["found"].logits.square().mean(), found, None)(data)
    assert metric == pytest.approx((net.a(x).argmax(1) == y).double().mean().item())
    ((out, target),) = seen
    assert isinstance(out["found"], Found)
    torch.testing.assert_close(out["found"].hidden[1], 2 * net.a(x))
    assert (out["found"].loss, out["kind"]) == (None, "linear")
    assert [len(box["boxes"]) for box in out["boxes"]] == (1 + net.a(x).argmax(1)).tolist()
    assert target["name"] == names


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "cannot be joined: RuntimeError: Sizes of tensors must match"),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], "have other keys in each batch"),
        ([(torch.zeros(2), torch.zeros(()))] * 2, "have a tensor whose first dimension does not count samples"),
        ([object(), object()], "have a object"),
        ([[1, 2, 3], [1, 2]], "are a list of another length in each batch"),
        ([torch.zeros(2), None], "have another type in each batch"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused_with_the_reason(outputs: list[Any], why: str) -> None:
    with pytest.raises(
        ValueError, match=f"^metric as a function must take the whole set at once, .*, got outputs that {why}"
    ):
        evaluate.compute_metric(lambda out, target: 0.0, [(out, torch.zeros(2), 2) for out in outputs])


def test_a_metric_has_a_proper_name() -> None:
    def f1(out: Any, target: Any, beta: float = 1.0) -> float:
        return beta

    named = Right()
    named.name = "top-1"  # type: ignore[attr-defined]
    for metric, name in (
        (f1, "f1"), (partial(f1, beta=2.0), "f1"), (lambda out, target: 0.0, "metric"), (Right(), "Right"), (named, "top-1"),
        (Right().compute, "compute"), (None, "accuracy"),
    ):  # fmt: skip
        assert evaluate.metric_name(metric, classes=True) == name  # type: ignore[arg-type]

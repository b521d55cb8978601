"""What is looked at before any training: the metric is tried on a batch, and named after what is computed."""

import copy
import random
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hgnp
from hgnp.progress import LineProgress
from hgnp.train import prune_and_report
from hgnp.training.data import Batches
from hgnp.training.first_batch import check_first_batches
from hgnp.training.task import Task
from train_cases import loaders, made, recipe, stripes


class Tensors(list[Any]):
    """Batches that say how often they were gone through, with a state of their own."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def steps_before(message: str, **given: Any) -> int:
    """Steps that were taken before a run was refused in one line."""
    net, steps = made(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train, val = loaders()
    arguments = {"train": train, "val": val, "recipe": recipe(), "optimizer": optimizer} | given
    with pytest.raises(ValueError, match=message) as caught:
        hgnp.prune(net, arguments.pop("train"), arguments.pop("val"), **arguments)
    assert "\n" not in str(caught.value)
    return len(steps)


def test_a_metric_that_fails_is_refused_before_training() -> None:
    x, y = stripes(60)
    assert not steps_before("but failed on the validation data: TypeError", metric=lambda out: 0.0)
    assert not steps_before("but failed on the validation data: KeyError: 'logits'", metric=lambda o, t: {}["logits"])
    assert not steps_before("metric must return one number, .* got NoneType", metric=lambda out, target: None)
    assert not steps_before(
        "got targets that have a tensor whose first dimension does not count samples; pass output, or a metric with",
        metric=lambda out, target: 0.0,
        train=[(x, y)],
        val=[(x, {"boxes": torch.zeros(3, 4)})],
        loss=lambda out, target: out.square().mean(),
        recipe=recipe(method="taylor"),
    )


def test_a_metric_that_needs_more_than_a_batch_is_tried_on_the_whole_set() -> None:
    """Sorted by class, the first batch has one class alone, which has no ROC curve."""
    x, y = stripes(60)
    order = y.argsort()
    seen = []

    def area(out: Tensor, target: Tensor) -> float:
        seen.append(len(target))
        if len(target.unique()) < 3:
            raise ValueError("only one class")
        return 0.5

    val = [(x[order][:20], y[order][:20]), (x[order][20:], y[order][20:])]
    result = hgnp.prune(made(), loaders()[0], val, recipe=recipe(keep=1.0, warmup_epochs=1), metric=area)
    assert seen[:2] == [20, 60]
    assert {row["metric"] for row in result.history} == {0.5}


class Counting:
    def __init__(self) -> None:
        self.seen = 0

    def update(self, out: Tensor, target: Tensor) -> None:
        self.seen += len(target)
        torch.rand(3), random.random()

    def compute(self) -> float:
        return float(self.seen)

    def reset(self) -> None:
        self.seen = 0


def test_checking_the_first_batches_leaves_no_trace() -> None:
    net, metric = made(), Counting()
    train, val = Tensors([stripes()]), Tensors([stripes(), stripes(seed=4)])
    before = copy.deepcopy(net.state_dict()), torch.get_rng_state(), random.getstate()
    device = torch.device("cpu")
    first = check_first_batches(
        net,
        Task(Batches(train, "train", None, device), Batches(val, "val", None, device), F.cross_entropy, metric, None),
    )
    after = net.state_dict(), torch.get_rng_state(), random.getstate()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert torch.equal(after[1], before[1])
    assert after[2] == before[2]
    assert (train.passes, val.passes, metric.seen, net.training) == (0, 0, 0, True)
    assert (first.metric, first.classes, first.val_classes) == ("Counting", 3, 3)
    result = hgnp.prune(net, train, val, recipe=recipe(keep=1.0, warmup_epochs=1), metric=metric)
    assert result.after.metric == 192.0


@pytest.mark.parametrize(
    ("mixed", "hard", "name"), [(True, True, "accuracy"), (False, False, "-loss"), (True, False, "-loss")]
)
def test_the_metric_is_named_after_what_is_computed(mixed: bool, hard: bool, name: str) -> None:
    x, y = stripes()
    soft = 0.9 * F.one_hot(y, 3).float() + 0.1 / 3
    train, val = [(x, soft if mixed else y)], [(x, y if hard else soft)]
    result = hgnp.prune(made(), train, val, recipe=recipe(keep=1.0, warmup_epochs=2))
    with torch.no_grad():
        out = result.model.eval()(x)
    want = float((out.argmax(1) == y).double().mean()) if hard else -float(F.cross_entropy(out, val[0][1]))
    assert result.metric == name
    assert result.after.metric == pytest.approx(want, rel=1e-5)


def test_validation_labels_are_checked_where_training_labels_are_mixed() -> None:
    x, y = stripes()
    soft = F.one_hot(y, 3).float()
    with pytest.raises(ValueError, match=r"val: labels must be from 0 to 2, .* got 3"):
        hgnp.prune(made(), [(x, soft)], [(x, y), (x, y + 3)], recipe=recipe())


def test_a_network_that_cannot_be_copied_says_that_its_latency_is_not_measured() -> None:
    net = made()
    net.lock = threading.Lock()  # type: ignore[assignment]
    notes: list[str] = []

    class Heard(LineProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    result = prune_and_report(
        net, *loaders(), recipe=recipe(measure="auto", keep=1.0, warmup_epochs=1), progress=Heard()
    )
    assert result.after.latency_ms is None
    assert [
        note for note in notes if note.startswith("latency is not measured, as net cannot be copied: cannot pickle")
    ]

    class Odd(type(net)):  # type: ignore[misc]
        def __deepcopy__(self, memo: Any) -> Any:
            raise KeyError("a bug of one's own")

    with pytest.raises(KeyError, match="of one's own"):
        hgnp.prune(Odd(), *loaders(), recipe=recipe(measure="auto", keep=1.0, warmup_epochs=1))

"""Data-dependent code: values that it reads, caches that it keeps, outputs that count and outputs that do not."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import Net, block
from hgnp import Neurons
from oracles import masked, worst_error
from pruning_cases import IMAGES, VECTORS, assert_pruned_equals_masked, prunable_layers, random_scores, two_layers

INPUTS = (IMAGES,), {}


class Detector(nn.Module):
    """Two levels of features and a head as YOLO has it: it reads `stride`, a plain tensor, keeps the grid of the last shape on
    itself, and returns its features beside the predictions."""

    shape: Any = None
    grid = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(3, 8), block(8, 10)
        self.heads = nn.ModuleList(nn.Sequential(block(width, 6), nn.Conv2d(6, 5, 1)) for width in (8, 10))
        self.stride = torch.tensor([1.0, 2.0])

    def forward(self, x: Tensor) -> Any:
        features = [self.first(x)]
        features.append(self.second(nn.functional.max_pool2d(features[0], 2)))
        raw = torch.cat([head(level).flatten(2) for head, level in zip(self.heads, features, strict=True)], 2)
        if self.training:
            return {"raw": raw, "features": features}
        if self.shape != features[0].shape:
            self.grid = self._grid(features)
            self.shape = features[0].shape
        return raw.sigmoid() * self.grid, {"raw": raw, "features": features}

    def _grid(self, features: list[Tensor]) -> Tensor:
        steps = [
            level.new_full((level.shape[2] * level.shape[3],), stride)
            for level, stride in zip(features, self.stride, strict=True)
        ]
        return torch.cat(steps)


def detector() -> Detector:
    torch.manual_seed(0)
    net = Detector().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def raw(returned: Any) -> Tensor:
    found: Tensor = (returned if isinstance(returned, dict) else returned[1])["raw"]
    return found


@pytest.mark.parametrize("used", ["before", "after"])
def test_a_head_that_reads_a_constant_and_keeps_a_grid_is_pruned_exactly(used: str) -> None:
    """Whether it keeps the grid since before or after it was traced."""
    net = detector()
    if used == "before":
        net(IMAGES)
    whole, neurons = copy.deepcopy(net), Neurons(net, IMAGES)
    if used == "after":
        net(IMAGES)
    assert {entry.name for entry in neurons.frozen} == {"first.0", "second.0", "heads.0.1", "heads.1.1"}
    removed = neurons.remove(neurons.least(random_scores(neurons), 6))
    assert removed.taken == 6
    assert_pruned_equals_masked(net, whole, removed, INPUTS)
    assert neurons.left_out == ()


def test_a_dictionary_of_grids_that_was_filled_after_tracing_changes_nothing() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        if len(x) not in net.cache:
            net.cache[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        return net.out(net.a(x).tanh()) + net.cache[len(x)]  # type: ignore[no-any-return]

    net = two_layers(forward)
    net.cache = {}  # type: ignore[assignment]
    neurons = Neurons(net, VECTORS)
    for _ in range(2):
        net(VECTORS)
        assert neurons.remove(neurons.least(random_scores(neurons), 3)).taken == 3
    assert list(net.cache) == [len(VECTORS)]  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "cached"])
def test_outputs_that_do_not_count_may_lose_channels_and_are_listed(used: bool) -> None:
    """The shape that the grid is kept for has the channels of a feature that may now be pruned."""
    net = detector()
    if used:
        net(IMAGES)
    whole, neurons = copy.deepcopy(net), Neurons(net, IMAGES, outputs=raw)
    assert {entry.name for entry in neurons.frozen} == {"heads.0.1", "heads.1.1"}
    assert [(layer.name, layer.alive) for layer in neurons.left_out] == [("first.0", 8), ("second.0", 10)]
    assert "in outputs that are left out: 18 in first.0, second.0" in str(neurons)
    scores = random_scores(neurons)
    removed = neurons.remove(neurons.least(scores, 15))
    assert removed.taken == 15
    assert {"first.0", "second.0"} <= removed.keys()
    for training in (False, True):
        with torch.no_grad(), masked(whole.train(training), removed, INPUTS):
            expected = whole(IMAGES)
        with torch.no_grad():
            got = net.train(training)(IMAGES)
        assert worst_error(raw(got), raw(expected)) < 1e-12
        if not training:
            assert worst_error(got[0], expected[0]) < 1e-12
    features = net(IMAGES)["features"]
    assert [level.shape[1] for level in features] == [8 - len(removed["first.0"]), 10 - len(removed["second.0"])]


def test_a_forward_function_is_recorded_in_place_of_the_networks_own() -> None:
    def features(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x).tanh())  # type: ignore[no-any-return]

    def forward(net: Any, x: Tensor) -> Tensor:
        h = features(net, x)
        return h[h.sum(1) > 0]  # data decides how many rows are returned

    net = two_layers(forward, b=nn.Linear(12, 7))
    net.features = lambda x: features(net, x)  # type: ignore[assignment]
    for outputs in (features, lambda net, *inputs: features(net, *inputs)):
        neurons = Neurons(net, VECTORS, outputs=outputs)
        assert [layer.name for layer in neurons.layers] == ["a"]
        assert {entry.name: entry.reason for entry in neurons.frozen} == {
            "b": "it is the network's output",
            "out": "it is not used in the forward pass",
        }
    whole = copy.deepcopy(net)
    removed = neurons.remove({"a": [0, 3, 4]})
    assert_pruned_equals_masked(net, whole, removed, ((VECTORS,), {}))
    method = Net(lambda n, x: n.inner(x).nonzero(), inner=two_layers(lambda n, x: n.out(n.a(x).tanh())))
    assert [layer.name for layer in Neurons(method, VECTORS, outputs=method.inner.forward).layers] == ["inner.a"]
    for wrong in (3, lambda: None):
        with pytest.raises(ValueError, match="outputs must be a function"):
            Neurons(net, VECTORS, outputs=wrong)  # type: ignore[arg-type]


def test_a_value_that_is_read_fixes_its_own_entries() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x) * float(net.k) * net.scale
        return net.out(net.b(h.tanh() if bool((net.scale > 0).all()) else h))  # type: ignore[no-any-return]

    net = two_layers(forward, b=nn.Linear(12, 12), scale=nn.Parameter(torch.rand(12) + 1))
    net.register_buffer("k", torch.tensor(1.5).double())
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["b"]
    reasons = {entry.name: entry.reason for entry in neurons.frozen}
    assert reasons["a"] == "its value is read in the network's own forward"
    net.k.fill_(2.5)  # type: ignore[operator, union-attr]
    whole = copy.deepcopy(net)
    removed = neurons.remove(neurons.least({"b": torch.arange(12.0)}, 5))
    assert removed.taken == 5
    assert_pruned_equals_masked(net, whole, removed, ((VECTORS,), {}))


def test_a_value_that_has_changed_is_traced_again() -> None:
    """Channels are moved by as many places as a buffer says."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        return net.out(torch.cat([h, h.roll(int(net.k), 1)], 1) if int(net.k) else torch.cat([h, h], 1))  # type: ignore[no-any-return]

    net = two_layers(forward)
    net.out = nn.Linear(24, 3).double()
    net.register_buffer("k", torch.tensor(0.0))
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["a"]
    net.k.fill_(1)  # type: ignore[operator, union-attr]
    for use in (lambda: neurons.gates(), lambda: neurons.remove({"a": [0]})):
        with pytest.raises(ValueError, match="couples or freezes more neurons than the traced path"):
            use()


def test_a_value_that_the_forward_pass_has_written_is_not_known() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.k += 1
        h = net.a(x)
        return net.out(h if float(net.k) > 3 else -h)  # type: ignore[no-any-return]

    net = two_layers(forward)
    net.register_buffer("k", torch.tensor(0.0))
    neurons = Neurons(net, VECTORS)
    assert neurons.count == 0
    assert float(net.k) == 0  # type: ignore[arg-type]


def test_a_table_of_positions_can_be_read() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        chosen = net.used.nonzero().flatten()
        h = net.a(x).tanh()
        return net.out(h) * float(chosen.sum()) + net.used.tolist()[2]  # type: ignore[no-any-return]

    net = two_layers(forward)
    net.register_buffer("used", torch.tensor([0, 2, 0, 5]))
    assert prunable_layers(net) == ["a"]


class ThresholdingDetector(nn.Module):
    """Returns its losses in training, and in evaluation mode the boxes above a threshold. Targets that make no sense are
    refused, and images are resized to a random choice of one size."""

    def __init__(self, channels_first: bool = True) -> None:
        super().__init__()
        self.channels_first = channels_first
        self.backbone = nn.Sequential(block(3, 8), block(8, 10), nn.Dropout(0.5))
        self.neck, self.head, self.box = block(10, 9), nn.Conv2d(9, 4, 1), nn.Linear(4, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Any:
        if (targets <= 0).any():
            raise ValueError(f"targets must be positive, got {float(targets.min())}")
        if self.training:
            size = [6, 8][int(torch.empty(1).uniform_(0.0, 1.0).item())]
            images = nn.functional.interpolate(images, size)
        features = self.backbone(images)
        boxes = self.head(self.neck(features)).flatten(2).transpose(1, 2)
        if self.training:
            mask = boxes.detach().sum(2) > boxes.detach().mean()
            return {
                "box": (boxes[mask] - targets[0]).square().mean(),
                "last": self.last(self.box(boxes)).square().mean(),
            }
        kept = boxes[boxes.sum(2) > boxes.mean()]
        return [{"boxes": kept, "scores": self.last(self.box(kept)).sigmoid(), "size": features.shape[2:]}]


TARGETS = torch.rand(2, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1)) + 0.5


def test_what_lies_before_a_threshold_is_pruned_exactly() -> None:
    torch.manual_seed(0)
    net = ThresholdingDetector().double().eval()
    whole, neurons = copy.deepcopy(net), Neurons(net, (IMAGES, TARGETS))
    assert [layer.name for layer in neurons.layers] == ["backbone.0.0", "neck.0"]
    reasons = {entry.name: entry.reason for entry in neurons.frozen}
    assert "depends on its data in the network's own forward" in reasons["backbone.1.0"]
    assert "where it is still in use" in reasons["backbone.1.0"]
    assert "before it is used" in reasons["box"]
    removed = neurons.remove(neurons.least(random_scores(neurons), 9))
    assert removed.taken == 9
    inputs = (IMAGES, TARGETS), {}
    assert_pruned_equals_masked(net, whole, removed, inputs)
    results = []
    for each in (net, whole):
        each.train().backbone[2].eval()  # type: ignore[operator, union-attr]
        with torch.no_grad(), masked(each, removed if each is whole else {}, inputs):
            torch.manual_seed(0)
            results.append(each(IMAGES, TARGETS))
    assert worst_error(*results) < 1e-10


def test_a_trial_on_data_freezes_what_differs_after_the_stop() -> None:
    """A layer that was recorded is used again, by its whole width, where nothing is recorded any more."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.out(net.a(x).tanh())
        if y.sum() > -1e9:
            y = y + net.a(x).mean()
        return y  # type: ignore[no-any-return]

    neurons = Neurons(two_layers(forward), VECTORS)
    assert neurons.count == 0
    assert "a trial on the example input" in {entry.name: entry.reason for entry in neurons.frozen}["a"]


@pytest.mark.parametrize("behind", ["layer", "weight", "width", "check"])
def test_a_trial_on_data_takes_both_outcomes_of_a_decision(behind: str) -> None:
    """Behind an outcome that the example does not have, a recorded layer is used by its width; a check refuses its outcome."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.out(net.a(x).tanh())
        if y.sum() > 1e9:
            if behind == "check":
                raise ValueError("too large")
            values = {"layer": net.a(x), "weight": net.a.weight, "width": torch.full((1,), 1.0 / net.a.out_features)}
            y = y + values[behind].mean()
        return y  # type: ignore[no-any-return]

    neurons = Neurons(two_layers(forward), VECTORS)
    assert neurons.count == (12 if behind == "check" else 0)


class Ranking(nn.Module):
    """Returns the best three places of each image. In evaluation mode its signals vanish, as in a deep network that is not
    trained yet: all scores are equal but for rounding."""

    def __init__(self, misused: bool) -> None:
        super().__init__()
        self.a, self.b, self.score, self.misused = block(3, 8), block(8, 6), nn.Conv2d(6, 1, 1, bias=False), misused
        for norm in (self.a[1], self.b[1]):
            norm.running_var.fill_(1e20)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(self.b(self.a(x))).flatten(1)
        if self.training:
            return scores
        best = scores.topk(3, 1).indices
        if best.sum() > -1 and self.misused:  # a number that depends on a width, where nothing is recorded
            return best + scores.mean() * self.a[0].out_channels
        return best


@pytest.mark.parametrize("misused", [False, True])
def test_a_trial_that_tells_nothing_is_repeated_on_conditioned_copies(misused: bool) -> None:
    torch.manual_seed(0)
    neurons = Neurons(Ranking(misused).double().eval(), IMAGES)
    assert neurons.count == (0 if misused else 14)
    reasons = {entry.name: entry.reason for entry in neurons.frozen}
    assert not misused or "a trial on the example input differs in evaluation mode" in reasons["a.0"]


@pytest.mark.parametrize("use", ["never", "rebound", "later", "loop", "handler", "closure", "locals", "elsewhere"])
def test_a_local_variable_counts_as_long_as_it_may_be_read(use: str) -> None:
    """A forward that names its features while it looks at data, and reads them afterwards or does not."""
    kept: list[Any] = []

    def never(net: Any, x: Tensor) -> Tensor:
        features = [net.a(x).tanh()]
        y = net.out(features[0])
        return y[y.sum(1) > -1e9]  # type: ignore[no-any-return]

    def rebound(net: Any, x: Tensor) -> Tensor:
        features: Any = {"a": net.a(x).tanh()}
        features = list(features.values())
        y = net.out(features[0])
        if y.sum() > 1e9:
            raise ValueError("too large")
        return y  # type: ignore[no-any-return]

    def later(net: Any, x: Tensor) -> Tensor:
        features = [net.a(x).tanh()]
        y = net.out(features[0])
        return y[y.sum(1) > -1e9] + features[0].mean()  # type: ignore[no-any-return]

    def loop(net: Any, x: Tensor) -> Tensor:
        feature, y = net.a(x).tanh(), 0
        for _ in range(2):
            y = y + net.out(feature)
            if y.sum() > 1e9:  # type: ignore[attr-defined]
                break
        return y  # type: ignore[return-value]

    def handler(net: Any, x: Tensor) -> Tensor:
        features = (net.a(x).tanh(),)
        y = net.out(features[0])
        try:
            y = y[y.sum(1) > -1e9]
        except ZeroDivisionError:
            y = features[0]
        return y  # type: ignore[no-any-return]

    def closure(net: Any, x: Tensor) -> Tensor:
        features = [net.a(x).tanh()]

        def mean() -> Tensor:
            return features[0].mean()  # type: ignore[no-any-return]

        y = net.out(features[0])
        y = y[y.sum(1) > -1e9]
        return y + 0 * mean()  # type: ignore[no-any-return]

    def local(net: Any, x: Tensor) -> Tensor:
        features = [net.a(x).tanh()]
        y = net.out(features[0])
        y = y[y.sum(1) > -1e9]
        return y + 0 * locals()["features"][0].mean()  # type: ignore[no-any-return]

    def elsewhere(net: Any, x: Tensor) -> Tensor:
        features = [net.a(x).tanh()]
        kept[:] = [features]
        y = net.out(features[0])
        return y[y.sum(1) > -1e9]  # type: ignore[no-any-return]

    forward = {
        "never": never, "rebound": rebound, "later": later, "loop": loop, "handler": handler, "closure": closure,
        "locals": local, "elsewhere": elsewhere,
    }[use]  # fmt: skip
    neurons = Neurons(two_layers(forward), VECTORS)
    assert neurons.count == (12 if use in ("never", "rebound") else 0)
    if use not in ("never", "rebound"):
        assert "where it is still in use" in {entry.name: entry.reason for entry in neurons.frozen}["a"]


def test_a_compiled_function_runs_operator_by_operator() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    gate = torch.compile(lambda h: h.tanh() * h.sigmoid(), backend=backend)

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.out(gate(net.a(x)))
        return y[y.sum(1) > -1e9]  # type: ignore[no-any-return]

    net = two_layers(forward)
    neurons = Neurons(net, VECTORS)
    assert [layer.name for layer in neurons.layers] == ["a"]
    whole = copy.deepcopy(net)
    removed = neurons.remove({"a": [0, 3, 4]})
    neurons.gates()
    assert not compiled
    with torch.compiler.set_stance("force_eager"):
        assert_pruned_equals_masked(net, whole, removed, ((VECTORS,), {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_function_runs_operator_by_operator() -> None:
    def gate(h: Tensor) -> Tensor:
        return h.tanh() * h.sigmoid()

    scripted = torch.jit.script(gate)  # after two calls it runs an optimised graph of its own
    net = two_layers(lambda net, x: net.out(scripted(net.a(x))))
    neurons, whole = Neurons(net, VECTORS), copy.deepcopy(net)
    assert [layer.name for layer in neurons.layers] == ["a"]
    assert_pruned_equals_masked(net, whole, neurons.remove({"a": [0, 3, 4]}), ((VECTORS,), {}))


@pytest.mark.parametrize("choice", ["inputs", "random"])
def test_a_decision_that_changes_the_path_freezes_everything(choice: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        turn = (x > 100).any() if choice == "inputs" else torch.empty(1).uniform_().item() > 0.5
        h = net.a(x).tanh()
        return net.out(h.flip(1) if turn else h)  # type: ignore[no-any-return]

    neurons = Neurons(two_layers(forward), VECTORS)
    assert neurons.count == 0
    assert "depends on its data in the network's own forward (_local_scalar_dense)" in neurons.frozen[0].reason


@pytest.mark.parametrize("why", ["caught", "random"])
def test_what_cannot_be_seen_before_a_stop_freezes_everything(why: str) -> None:
    """An error of tracing that the network's own code catches, or a random number of Python's before the stop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        if why == "random" and random.random() > 2:
            h = h.flip(1)
        y = net.out(h)
        try:
            return y if y.sum() > 0 else -y  # type: ignore[no-any-return]
        except Exception:
            if why == "random":
                raise
            return y  # type: ignore[no-any-return]

    neurons = Neurons(two_layers(forward), VECTORS)
    assert neurons.count == 0
    expected = "Python's or NumPy's random numbers" if why == "random" else "catches the error"
    assert all(expected in entry.reason for entry in neurons.frozen)

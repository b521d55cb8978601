"""On a device that holds no tensors of the CPU all is as on the CPU: what is pruned, scores, gradients, runs and files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import hgnp
from cases import CASES, Net, block
from curvature_cases import CHOICES, convnet, images
from hgnp.scoring import Criterion
from oracles import flat
from pretend_device import CPU, PRETENDED, pretended_device
from pruning_cases import IMAGES, VECTORS, random_scores
from train_cases import StopError, loaders, made, recipe


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with pretended_device():
        yield


def put(device: torch.device, tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def frozen(neurons: hgnp.Neurons) -> dict[str, int]:
    return {f"{each.name}: {each.reason}": each.count for each in neurons.frozen}


def same_on_both(function: Callable[[torch.device], Any]) -> None:
    """What the function returns on the device equals, to the last digit, what it returns on the CPU."""
    found, expected = put(CPU, function(PRETENDED)), put(CPU, function(CPU))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Networks whose code depends on data


class Detector(nn.Module):
    """In training mode losses, in evaluation mode the boxes above a threshold. Its grid is a plain tensor, kept for the last
    shape."""

    grid: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(3, 8), block(8, 10), nn.Dropout(0.5))
        self.head = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor, sizes: Tensor) -> Any:
        boxes = self.head(self.backbone(x)).flatten(2).transpose(1, 2)
        if self.grid is None or len(self.grid) != boxes.shape[1]:
            self.grid = torch.arange(boxes.shape[1], device=x.device)[:, None] / 100
        boxes = boxes + self.grid
        if not self.training:
            return [each[each.sum(1) > 0] for each in boxes]
        losses = [each[each.sum(1) > each.mean()].mean() - size for each, size in zip(boxes, sizes, strict=True)]
        return {"box": torch.stack(losses).square().mean(), "size": boxes.square().mean()}


def detector() -> nn.Module:
    torch.manual_seed(0)
    return Detector().double()


def total(losses: dict[str, Tensor], _: Any) -> Tensor:
    return losses["box"] + losses["size"]


def masked_mean() -> nn.Module:
    """A mean over the samples that are not padding, if any are."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, mask = net.b(net.a(x).tanh()), x.sum(1) > 0
        return net.out(h[mask].mean(0) if bool(mask.any()) else h.mean(0))

    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(5, 12), b=nn.Linear(12, 8), out=nn.Linear(8, 3)).double()


BOXES = IMAGES, torch.tensor([0.2, 0.7]).double()
DATA_DEPENDENT: dict[str, Any] = {"losses and boxes": (detector, BOXES), "a mask": (masked_mean, (VECTORS,))}


@pytest.mark.parametrize(("make", "inputs"), DATA_DEPENDENT.values(), ids=DATA_DEPENDENT)
def test_code_that_depends_on_data_is_tried_on_the_device(make: Any, inputs: Any) -> None:
    """A trial that fails there would freeze everything."""

    def pruned(device: torch.device) -> Any:
        net = make().to(device).eval()
        neurons = hgnp.Neurons(net, put(device, inputs))
        assert neurons.count
        removed = neurons.remove(neurons.least(random_scores(neurons), neurons.count // 3))
        with torch.no_grad():
            return frozen(neurons), dict(removed), flat(net(*put(device, inputs)))

    same_on_both(pruned)


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
def test_a_detector_is_pruned_by_its_losses() -> None:
    def pruned(device: torch.device) -> Any:
        net, batch = detector().to(device), put(device, (BOXES, BOXES[1]))
        neurons, flatness = hgnp.Neurons(net, batch[0]), hgnp.Flatness(net, loss=total, mu=0.1, bound=-1.0)
        torch.manual_seed(1)
        found: list[Any] = [flatness.backward(*batch)]
        for _ in range(2):
            found.append(hgnp.sensitivity(net, neurons, [batch], flatness=flatness))
            neurons.remove(neurons.least(found[-1], 5))
        return found, [p.grad for p in net.parameters()]

    same_on_both(pruned)


def test_a_norm_that_reads_its_number_of_batches_freezes_nothing() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        batches = net.norm.num_batches_tracked + 1
        return net.out(net.norm(net.a(x)).relu()) / torch.stack([batches, batches])

    norm = nn.BatchNorm1d(6, momentum=None)
    net = Net(forward, a=nn.Linear(5, 6), norm=norm, out=nn.Linear(6, 2)).double().to(PRETENDED)
    assert [layer.name for layer in hgnp.Neurons(net, VECTORS.to(PRETENDED)).layers] == ["a"]
    assert norm.num_batches_tracked == 0


# Networks that are moved after Neurons was created


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_neurons_follow_a_network_to_the_device(coupling: Any) -> None:
    case = CASES["residual"]
    x, y = case.inputs()[0][0], torch.tensor([0, 1, 2])

    def pruned(device: torch.device) -> Any:
        net = case.net()
        neurons, found = hgnp.Neurons(net, x), []
        net.to(device)
        for _ in range(3):
            scores = hgnp.sensitivity(net, neurons, put(device, [(x, y)]), coupling=coupling)
            removed = neurons.remove(neurons.least(scores, 5, coupling=coupling))
            assert removed
            found.append((scores, dict(removed)))
        return found

    same_on_both(pruned)


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor")
@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_neurons_follow_a_detector_to_the_device(coupling: Any) -> None:
    def pruned(device: torch.device) -> Any:
        net = detector()
        neurons, found = hgnp.Neurons(net, BOXES), []
        net.to(device)
        for _ in range(2):
            removed = neurons.remove(neurons.least(random_scores(neurons), 4, coupling=coupling))
            assert removed
            scores = hgnp.sensitivity(net, neurons, put(device, [(BOXES, BOXES[1])]), loss=total, coupling=coupling)
            found.append((dict(removed), scores))
        return found, frozen(neurons)

    same_on_both(pruned)


# Scores and gradients


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_scores(coupling: Any) -> None:
    case, weights = CASES["residual"], torch.tensor([1.0, 2.0, 0.5, 1.0]).double()
    x, y = case.inputs()[0][0], torch.tensor([0, 1, 2])

    def scored(device: torch.device) -> Any:
        net = case.net().to(device)
        neurons = hgnp.Neurons(net, x.to(device))
        neurons.remove({"d1.0": [1]})
        loss = nn.CrossEntropyLoss(weights.to(device), label_smoothing=0.1)
        batches = put(device, [(x, y), (x[:2], y[:2]), (x[:1], y[:1])])
        return [
            hgnp.sensitivity(net, neurons, batches, loss=loss, criterion=criterion, coupling=coupling)
            for criterion in get_args(Criterion)
        ]

    same_on_both(scored)


@pytest.mark.parametrize("choices", [*CHOICES.values(), {"direction_over": "network"}], ids=str)
def test_penalised_gradients_and_scores(choices: Any) -> None:
    x, y = images()

    def stepped(device: torch.device) -> Any:
        net, batch = convnet(dropout=0.3).to(device).train(), put(device, (x, y))
        flatness, found = hgnp.Flatness(net, mu=0.1, bound=-1.0, **choices), []
        torch.manual_seed(0)
        for _ in range(3):
            net.zero_grad()
            loss = flatness.backward(*batch)
            found.append([loss, flatness.curvature, *(p.grad.clone() for p in net.parameters())])  # type: ignore[union-attr]
        assert {each.device for each in flatness.direction.values()} == {device}
        neurons = hgnp.Neurons(net.eval(), batch[0])
        return found, hgnp.sensitivity(net, neurons, [batch], flatness=flatness)

    same_on_both(stepped)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize(
    ("norm", "activation"), [("layer", nn.GELU), ("group", nn.Softplus), ("rms", lambda: nn.PReLU().double())]
)
def test_penalised_gradients_of_other_layers(norm: str, activation: Any, curvature: Any) -> None:
    def stepped(device: torch.device) -> Any:
        net = convnet(norm, activation).to(device)
        flatness = hgnp.Flatness(net, mu=0.1, bound=-1.0, curvature=curvature)
        return flatness.backward(*put(device, images())), [p.grad for p in net.parameters()]

    same_on_both(stepped)


def test_sharpness_and_recalibrated_statistics() -> None:
    def measured(device: torch.device) -> Any:
        net, data = convnet().to(device), [put(device, images(24))]
        values = [hgnp.sharpness(net, data, scale_invariant=flag).eigenvalues for flag in (False, True)]
        hgnp.recalibrate(net, data)
        return values, list(net.buffers())

    same_on_both(measured)


# States and files


def test_states_that_were_loaded_onto_the_device() -> None:
    """As torch.load(map_location="cuda") does."""
    net, x = CASES["residual"].net().to(PRETENDED), CASES["residual"].inputs()[0][0].to(PRETENDED)
    y = torch.tensor([0, 1, 2], device=PRETENDED)
    neurons, flatness = hgnp.Neurons(net, x), hgnp.Flatness(net, mu=0.1, fisher_type="mc")
    flatness.backward(x, y)
    neurons.load_state_dict(put(PRETENDED, neurons.state_dict()))
    assert neurons.remove(neurons.least(random_scores(neurons), 4))
    flatness.load_state_dict(put(PRETENDED, flatness.state_dict()))
    flatness.backward(x, y)


def test_a_network_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    net, x = made().to(PRETENDED).eval(), next(iter(loaders()[1]))[0].to(PRETENDED)
    hgnp.Neurons(net, x).remove({"a": [0, 3], "c": [1]})
    hgnp.save(net, tmp_path / "net")
    for device in (PRETENDED, CPU):
        loaded = hgnp.load(tmp_path / "net", made(seed=1).to(device)).eval()
        assert {p.device for p in loaded.parameters()} == {device}
        assert torch.equal(loaded(x.to(device)).cpu(), net(x).cpu())
    assert hgnp.export(net, tmp_path / "net.onnx", x).error < 1e-4
    assert hgnp.export(net, tmp_path / "net.pt2", x.cpu()).error < 1e-4


# Runs


def run(device: torch.device, out: Path | None = None, last: int | None = None, **given: Any) -> hgnp.Result:
    """A run of a network that is on the CPU before, stopped after the epoch `last`."""

    def on_epoch(state: Any) -> None:
        assert {p.device for p in [*state.net.parameters(), *state.optimizer.state]} == {device}
        if state.epoch == last:
            raise StopError

    short = recipe(execution="eager", warmup_epochs=1, finetune_epochs=1, **given)
    return hgnp.prune(
        made(), *loaders(), recipe=short, device=device, out=out, resume=out is not None, on_epoch=on_epoch, verbose=False
    )  # fmt: skip


def trajectory(result: hgnp.Result) -> Any:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in result.history]


RUNS: dict[str, dict[str, Any]] = {
    "hgnp": {"measure": "full"},
    "paper": {"flatness": "paper", "coupling": "paper", "method": "hybrid", "threshold": 0.8},
    "sampled": {"flatness": {"fisher_type": "mc", "direction_from": "this_batch"}},
    "sam": {"method": "sam", "clip_norm": 1.0},
    "snapshots": {"snapshots": (0.6,), "keep": 0.4, "schedule": "cosine"},
}


@pytest.mark.parametrize("given", RUNS.values(), ids=RUNS)
def test_a_resumed_run_is_a_whole_one_on_the_cpu(given: Any, tmp_path: Path) -> None:
    expected = run(CPU, **given)
    with pytest.raises(StopError):
        run(PRETENDED, tmp_path / "run", last=2, **given)
    found = run(PRETENDED, tmp_path / "run", **given)
    assert trajectory(found) == trajectory(expected)
    assert {p.device for p in found.model.parameters()} == {PRETENDED}
    for state in (found.model.state_dict(), hgnp.load(tmp_path / "run", made(seed=1)).state_dict()):
        torch.testing.assert_close(put(CPU, state), expected.model.state_dict(), rtol=0, atol=0)


def test_a_run_is_resumed_on_another_kind_of_device(tmp_path: Path) -> None:
    """Its labels are then drawn anew."""
    with pytest.raises(StopError):
        run(PRETENDED, tmp_path / "run", last=2, **RUNS["sampled"])
    found, expected = run(CPU, tmp_path / "run", **RUNS["sampled"]), run(CPU, **RUNS["sampled"])
    assert trajectory(found)[:2] == trajectory(expected)[:2]
    assert found.kept <= 0.3


def test_the_state_of_an_optimizer_moves_with_its_network() -> None:
    """Also back again, if the run is refused."""
    net, (train, val) = made(), loaders()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, y = next(iter(train))
    F.cross_entropy(net(x), y).backward()
    optimizer.step()

    def devices() -> set[torch.device]:
        return {state["exp_avg"].device for state in optimizer.state.values()}

    mine = recipe(execution="eager")
    with pytest.raises(hgnp.HgnpError, match="scheduler must"):
        hgnp.prune(net, train, val, recipe=mine, optimizer=optimizer, scheduler=lambda _: 3, device=PRETENDED)
    assert devices() == {CPU}
    hgnp.prune(net, train, val, recipe=mine, optimizer=optimizer, device=PRETENDED, verbose=False)
    assert devices() == {PRETENDED}

"""The direction v: which block it points to, how it follows training, and how it survives checkpoints and removals."""

import gc
import io
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import CHOICES, convnet, gradients, images, top_dense
from hgnp import Flatness, Neurons
from hgnp.curvature import direction
from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.factors import find_blocks
from hgnp.flatness import step_and_state


def collector_of(net, x, *, kfac_approx="reduce", keep=False):
    return FactorCollector(find_blocks(net), len(x), kfac_approx=kfac_approx, scale_invariant=False, keep_calls=keep)


# Which block, and how well it is followed


def test_the_block_and_its_direction_belong_to_the_batch_that_was_asked_for():
    """this_batch: the v of this batch; last_batch: of the one before."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))) for _ in range(3)]
    own = []
    for batch in batches:
        net = convnet("group")
        flat = Flatness(net, direction_from="this_batch")
        flat.backward(*batch)
        own.append((flat.block, flat.radius))
    for direction_from, expected in (("this_batch", own), ("last_batch", [own[0], *own[:-1]])):
        flat = Flatness(convnet("group"), direction_from=direction_from)
        for batch, (block, radius) in zip(batches, expected, strict=True):
            flat.backward(*batch)
            assert flat.block == block
            assert flat.radius == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize("kfac_approx", ["reduce", "expand"])
def test_the_block_is_the_one_with_the_largest_score(kfac_approx):
    """By dense eigenvalues, and by per-sample gradients along each v; over some nets the two rankings must part."""
    parted = 0
    for seed in range(6):
        net = convnet("none")
        with torch.no_grad():
            net[0].weight.mul_(0.5)
            net[9].weight.mul_(2.0)
        torch.manual_seed(seed)
        x, y = torch.randn(6, 2, 6, 6).double() + 1, torch.randint(0, 3, (6,))
        flat = Flatness(net, kfac_approx=kfac_approx, ranking="empirical", direction_from="this_batch")
        flat.backward(x, y)
        empirical = flat.block
        collector = collector_of(net, x, kfac_approx=kfac_approx, keep=True)
        with Forward(observer=collector):
            z = net(x)
        collector.collect(F.cross_entropy(z, y), None, 1.0)
        scores, quotients = {}, {}
        for block in find_blocks(net):
            psi, gamma = (top_dense(m[block.name].factor()) for m in (collector.psi, collector.gamma))
            scores[block.name] = (psi.value * gamma.value).max().item()
            quotients[block.name] = collector.empirical(block, psi.vector, gamma.vector).max().item()
        assert empirical == max(quotients, key=quotients.get)
        kfac = Flatness(net, kfac_approx=kfac_approx, direction_from="this_batch")
        kfac.backward(x, y)
        assert kfac.block == max(scores, key=scores.get)
        assert kfac.radius == pytest.approx(max(scores.values()), rel=1e-3)
        parted += kfac.block != empirical
    assert parted


def test_sampled_labels_come_from_the_networks_own_output():
    x, y = images(6)
    net = convnet("batch")
    flat = Flatness(net, fisher_type="mc", direction_from="this_batch")
    flat.backward(x, y)
    collector = collector_of(net, x)
    net.train()
    with Forward(observer=collector):
        z = net(x)
    label = torch.multinomial(z.softmax(1), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    collector.collect(F.cross_entropy(z, label), None, 1.0)
    name = flat.block
    psi, gamma = (top_dense(m[name].factor()) for m in (collector.psi, collector.gamma))
    assert flat.radius == pytest.approx((psi.value * gamma.value).max().item(), rel=1e-3)


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(data.target)


@pytest.mark.parametrize("kfac_approx", ["reduce", "expand"])
def test_the_warm_started_eigenvalue_follows_the_dense_one_in_training(kfac_approx):
    x, y = digits()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    flat = Flatness(net, kfac_approx=kfac_approx)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    errors = []
    for step in range(80):
        index = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        loss = flat.backward(x[index], y[index])
        if step >= 10 and step % 6 == 0:
            collector = collector_of(net, x[index], kfac_approx=kfac_approx)
            before = {k: b.clone() for k, b in net.named_buffers()}
            with Forward(observer=collector):
                out = net(x[index])
            collector.collect(F.cross_entropy(out, y[index]), None, 1.0)
            for k, b in net.named_buffers():
                b.copy_(before[k])
            for name, pair in flat.state_dict()["pairs"].items():
                want = top_dense(collector.psi[name].factor()).value * top_dense(collector.gamma[name].factor()).value
                have = pair["psi.value"] * pair["gamma.value"]
                errors.append((have / want - 1).abs().max().item())
        optimizer.step()
    assert loss < 0.5  # it did train
    errors = torch.tensor(errors)
    assert errors.median() < 0.05
    assert errors.quantile(0.9) < 0.2


# State


@pytest.mark.parametrize("choices", ["default", "sampled", "paper"])
def test_a_loaded_state_continues_as_without_interruption(choices):
    x, y = images(6)
    nets = [convnet("batch"), convnet("batch")]
    flats = [Flatness(net, bound=-1.0, **CHOICES[choices]) for net in nets]
    for flat in flats:
        flat.backward(x, y)
        flat.backward(x, y)
    buffer = io.BytesIO()
    torch.save(flats[0].state_dict(), buffer)
    buffer.seek(0)
    resumed = Flatness(nets[0], bound=-1.0, **CHOICES[choices])
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for net in nets:
        net.zero_grad()
    resumed.backward(x, y)
    flats[1].backward(x, y)
    assert (resumed.radius, resumed.curvature, resumed.block) == (flats[1].radius, flats[1].curvature, flats[1].block)
    for name, g in gradients(nets[0]).items():
        assert torch.equal(g, gradients(nets[1])[name])


def test_a_state_of_another_net_is_refused_by_layer():
    flat = Flatness(convnet("batch"))
    flat.backward(*images(6))
    other = convnet("batch")
    other[0] = nn.Conv2d(2, 8, 3, padding=1).double()
    with pytest.raises(ValueError, match=r"state must have eigenvectors of shapes .* for layer '0', got"):
        Flatness(other).load_state_dict(flat.state_dict())
    with pytest.raises(ValueError, match="state must have eigenpairs of this network's blocks, got one of"):
        Flatness(nn.Linear(2, 2)).load_state_dict(flat.state_dict())


def test_eigenvectors_are_sliced_with_the_neurons():
    """Outputs of a layer, its depthwise follower, the columns of a convolution and of a Linear after a flatten."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Tanh(),
        nn.Conv2d(6, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3),
    ).double()  # fmt: skip
    x, y = images(6)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    before = flat.state_dict()["pairs"]
    keep, keep2 = torch.tensor([0, 2, 5]), torch.tensor([0, 2])
    columns = torch.arange(108).view(3, 36)[keep2].flatten()
    slices = {
        "0.weight": {0: keep}, "0.bias": {0: keep}, "2.weight": {0: keep}, "2.bias": {0: keep},
        "4.weight": {0: keep2, 1: keep}, "4.bias": {0: keep2}, "7.weight": {1: columns},
    }  # fmt: skip
    commit = step_and_state(flat)[1].neurons_removed(types.SimpleNamespace(slices=slices))
    assert flat.state_dict()["pairs"]["0"]["gamma.vector"].shape == (1, 6)  # nothing yet
    for name, cuts in slices.items():
        index, kind = name.split(".")
        p = getattr(net[int(index)], kind)
        for dim, kept in cuts.items():
            p = p.index_select(dim, kept)
        setattr(net[int(index)], kind, nn.Parameter(p.detach()))
    net[2].groups = 3
    commit()
    after = flat.state_dict()["pairs"]

    def unit(v):
        return v / v.norm(dim=-1, keepdim=True)

    torch.testing.assert_close(after["0"]["gamma.vector"], unit(before["0"]["gamma.vector"][:, keep]))
    torch.testing.assert_close(after["0"]["psi.vector"], before["0"]["psi.vector"])
    torch.testing.assert_close(after["2"]["psi.vector"], before["2"]["psi.vector"][keep])
    assert after["2"]["gamma.vector"].shape == (3, 1)
    want = before["4"]["psi.vector"][:, torch.cat([keep, torch.tensor([6])])]
    torch.testing.assert_close(after["4"]["psi.vector"], unit(want))
    torch.testing.assert_close(after["4"]["gamma.vector"], unit(before["4"]["gamma.vector"][:, keep2]))
    want = before["7"]["psi.vector"][:, torch.cat([columns, torch.tensor([108])])]
    torch.testing.assert_close(after["7"]["psi.vector"], unit(want))
    for block in find_blocks(net):
        assert after[block.name]["psi.vector"].shape == block.psi_shape
        assert after[block.name]["gamma.vector"].shape == block.gamma_shape
    flat.backward(x, y)  # and it goes on
    assert flat.curvature > 0


def test_a_net_that_was_changed_from_outside_starts_with_a_new_direction():
    """A layer replaced by a smaller one, and the penalised layer frozen."""
    net = convnet("batch")
    x, y = images(6)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "9"})
    net[9] = nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    flat.backward(x, y)
    assert flat.curvature > 0
    net[int(flat.block.split(".")[0])].requires_grad_(False)
    frozen = flat.block
    flat.backward(x, y)
    assert flat.block != frozen


class SideStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head, self.which = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), "left"

    def forward(self, x):
        return self.head(torch.tanh(getattr(self, self.which)(x)))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_block_that_this_batch_does_not_use_has_no_curvature(curvature):
    torch.manual_seed(0)
    net = SideStreams().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    flat = Flatness(net, bound=-1.0, curvature=curvature)
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "left"})
    net.which = "right"
    net.zero_grad()
    flat.backward(x, y)
    assert flat.block == "left"
    assert flat.curvature == 0
    assert net.left.weight.grad is None
    want = torch.autograd.grad(F.cross_entropy(net(x), y), net.right.weight)[0]
    torch.testing.assert_close(net.right.weight.grad, want, rtol=1e-12, atol=1e-15)
    flat.backward(x, y)
    assert flat.block != "left"


def test_eigenvectors_follow_a_removal_by_themselves() -> None:
    """The loop of the README: nobody tells Flatness, and its vectors are cut with the neurons."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = torch.randn(16, 6, dtype=torch.double), torch.randint(3, (16,))
    neurons, flat = Neurons(net, x), Flatness(net, bound=-1.0)
    for _ in range(3):
        flat.backward(x, y)
    before = flat.state_dict()["pairs"]
    neurons.remove({"0": [1, 5], "2": [0]})
    after = flat.state_dict()["pairs"]
    rows, columns = [0, 2, 3, 4, 6, 7], [0, 2, 3, 4, 6, 7, 8]  # the last column is the bias
    for key, kept in (("gamma", [1, 2, 3, 4, 5, 6]), ("psi", columns)):
        vectors = [
            (before["2"][k], after["2"][k]) for k in before["2"] if k.startswith(key) and before["2"][k].dim() == 2
        ]
        old, new = vectors[0]
        expected = old[:, kept]
        torch.testing.assert_close(new, expected / expected.norm(dim=1, keepdim=True))
    old, new = next(
        (before["0"][k], after["0"][k]) for k in before["0"] if k.startswith("gamma") and before["0"][k].dim() == 2
    )
    torch.testing.assert_close(new, old[:, rows] / old[:, rows].norm(dim=1, keepdim=True))
    flat.backward(x, y)
    del flat
    neurons.remove({"0": [0]})  # nobody listens any more


def test_v_is_kept_between_refreshes() -> None:
    net, every = convnet().train(), 3
    x, y = images()
    flat = Flatness(net, mu=1.0, bound=-1.0, refresh_every=every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    radii = []
    for _ in range(9):
        optimizer.zero_grad()
        flat.backward(x, y)
        optimizer.step()
        radii.append(flat.radius)
    steps = [number for number in range(1, 9) if radii[number] != radii[number - 1]]
    assert steps == [3, 6]  # renewed in the third step for the fourth, and so on
    with pytest.raises(ValueError, match="refresh_every must be 1 with direction_from='this_batch'"):
        Flatness(net, direction_from="this_batch", refresh_every=2)
    with pytest.raises(ValueError, match="refresh_every must be an integer ≥ 1, got 0"):
        Flatness(net, refresh_every=0)


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
@pytest.mark.parametrize("ranking", ["kfac", "empirical"])
def test_a_batch_is_released_after_its_step(ranking, direction_from):
    net = convnet()
    flat = Flatness(net, bound=-1.0, ranking=ranking, direction_from=direction_from)
    x, y = images()
    batch = weakref.ref(x)
    flat.backward(x, y)
    del x
    gc.collect()
    assert batch() is None


def test_v_is_solved_for_before_the_backward_pass_is_over(monkeypatch):
    """Γ is known once the first layer's output has its derivative: the layer's own gradient is still to come."""
    net, (x, y) = convnet(), images()
    flat = Flatness(net, bound=-1.0, direction_from="this_batch")
    flat.backward(x, y)
    net.zero_grad()
    left = []
    solve = direction.top_of_each
    monkeypatch.setattr(
        direction,
        "top_of_each",
        lambda *a, **options: left.append(sum(p.grad is None for p in net.parameters())) or solve(*a, **options),
    )
    flat.backward(x, y)
    assert left == [len(list(net.parameters())), 2]  # Ψ before all of it, Γ with a weight and a bias left

"""Lanczos on the true Hessian, against the dense one."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature_cases import Attention, convnet, images, shaken
from hgnp import HgnpError, sharpness


def dense_hessian(net, batches):
    params = dict(net.named_parameters())
    shapes = {k: p.shape for k, p in params.items()}

    def loss(flat):
        parts = flat.split([s.numel() for s in shapes.values()])
        moved = {k: x.view(s) for (k, s), x in zip(shapes.items(), parts, strict=True)}
        losses = [F.cross_entropy(torch.func.functional_call(net, moved, (x,)), y) * len(x) for x, y in batches]
        return sum(losses) / sum(len(x) for x, _ in batches)

    return torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in params.values()]))


def batches_of(net):
    x, y = images(7)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def test_top_eigenvalues_equal_the_dense_ones_and_nothing_is_left_behind():
    net = convnet("batch", dropout=0.3).train()
    net[1].eval()
    data = batches_of(net)
    buffers = {k: b.clone() for k, b in net.named_buffers()}
    state, modes = torch.get_rng_state(), [m.training for m in net.modules()]
    found = sharpness(net, data, k=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(b, buffers[k]) for k, b in net.named_buffers())
    assert all(p.grad is None for p in net.parameters())
    want = torch.linalg.eigvalsh(dense_hessian(net.eval(), data)).flip(0)[:3]
    assert found.converged
    assert found.steps < 60
    torch.testing.assert_close(torch.tensor(found.eigenvalues, dtype=torch.float64), want, rtol=1e-6, atol=1e-8)
    assert max(found.residuals) <= 1e-4 * found.eigenvalues[0]


@pytest.mark.parametrize(
    "options",
    [{"ignore_index": 1}, {"weight": torch.tensor([0.1, 1.0, 5.0], dtype=torch.double)}],
    ids=["ignored", "weights"],
)
@pytest.mark.parametrize("known", [True, False])
def test_batches_are_weighted_by_the_normaliser_of_the_loss(options, known):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(64, 4, dtype=torch.double)
    y = torch.cat([torch.randint(0, 3, (32,)), torch.ones(30, dtype=torch.long), torch.tensor([0, 2])])
    loss = partial(F.cross_entropy, **options) if known else lambda z, y: F.cross_entropy(z, y, **options)
    joint = sharpness(net, [(x, y)], loss=loss, tolerance=1e-10)
    parts = sharpness(net, [(x[:32], y[:32]), (x[32:62], y[32:62]), (x[62:], y[62:])], loss=loss, tolerance=1e-10)
    assert parts.eigenvalues == pytest.approx(joint.eigenvalues, rel=1e-9)


def test_a_batch_whose_labels_have_no_weight_is_left_out():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loss = partial(F.cross_entropy, weight=torch.tensor([0.0, 1.0, 1.0], dtype=torch.double))
    batch = torch.randn(6, 4).double(), torch.tensor([1, 2, 1, 2, 2, 1])
    weightless = torch.randn(6, 4).double(), torch.zeros(6, dtype=torch.long)
    expected = sharpness(net, [batch], loss=loss).eigenvalues
    assert sharpness(net, [batch, weightless], loss=loss).eigenvalues == pytest.approx(expected)


def test_the_scale_invariant_variant_is_the_scaled_hessian_and_ignores_filter_scales():
    net = convnet("batch").eval()
    data = batches_of(net)
    n = {0: net[0].weight.flatten(1).norm(dim=1), 4: net[4].weight.flatten(1).norm(dim=1), 9: net[9].weight.norm(dim=1)}
    scale = [
        n[int(k.split(".")[0])].detach().view(-1, *[1] * (p.dim() - 1)).expand_as(p).flatten()
        if int(k.split(".")[0]) in n
        else torch.ones(p.numel(), dtype=torch.float64)
        for k, p in net.named_parameters()
    ]
    d = torch.cat(scale)
    want = torch.linalg.eigvalsh(d[:, None] * dense_hessian(net, data) * d)[-1]
    found = sharpness(net, data, scale_invariant=True)
    assert found.eigenvalues[0] == pytest.approx(want.item(), rel=1e-6)
    plain = sharpness(net, data).eigenvalues[0]
    with torch.no_grad():  # a filter and its statistics, rescaled: the same function
        net[0].weight.mul_(0.2)
        net[0].bias.mul_(0.2)
        net[1].running_mean.mul_(0.2)
        net[1].running_var.mul_(0.04).sub_(0.96 * net[1].eps)
    again = sharpness(net, data, scale_invariant=True).eigenvalues[0]
    assert again == pytest.approx(want.item(), rel=1e-6)
    assert abs(sharpness(net, data).eigenvalues[0] / plain - 1) > 0.05


WEIGHT_NORMS = {
    "parametrization": (nn.utils.parametrizations.weight_norm, "0.parametrizations.weight.original{}"),
    "hook": (nn.utils.weight_norm, "0.weight_{}"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("interface", WEIGHT_NORMS)
def test_the_scale_invariant_variant_ignores_both_lengths_of_a_normalised_weight(interface, dim):
    """Those of u, which is normalised, and of g and the bias, whose unit a norm takes out again."""
    torch.manual_seed(0)
    weight_norm, names = WEIGHT_NORMS[interface]
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    net[0] = weight_norm(net[0], dim=dim)
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 3, (40,))
    net(x)
    first, parameters = sharpness(net, [(x, y)], scale_invariant=True, tolerance=1e-8), dict(net.named_parameters())
    g, u = (parameters[names.format(each)] for each in (("g", "v") if interface == "hook" else (0, 1)))
    length = u.flatten().norm() if dim is None else u.norm(dim=1 - dim, keepdim=True)
    w = (g * u / length).detach()
    scales = {id(g): g.abs(), id(u): length, id(net[0].bias): w.norm(dim=1)}
    scales |= {id(net[3].weight): net[3].weight.norm(dim=1, keepdim=True), id(net[3].bias): net[3].weight.norm(dim=1)}
    one = torch.ones((), dtype=torch.float64)
    d = torch.cat([scales.get(id(p), one).expand_as(p).flatten() for p in parameters.values()]).detach()

    def loss(flat):
        parts = flat.split([p.numel() for p in parameters.values()])
        moved = {id(p): part.view_as(p) for p, part in zip(parameters.values(), parts, strict=True)}
        u_, g_ = moved[id(u)], moved[id(g)]
        length = u_.flatten().norm() if dim is None else u_.norm(dim=1 - dim, keepdim=True)
        h = x @ (g_ * u_ / length).mT + moved[id(net[0].bias)]
        norm = net[1]
        h = (h - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
        h = torch.tanh(h * moved[id(norm.weight)] + moved[id(norm.bias)])
        return F.cross_entropy(h @ moved[id(net[3].weight)].mT + moved[id(net[3].bias)], y)

    start = torch.cat([p.detach().flatten() for p in parameters.values()])
    H = torch.autograd.functional.hessian(loss, start)
    assert sharpness(net, [(x, y)], tolerance=1e-8).eigenvalues[0] == pytest.approx(torch.linalg.eigvalsh(H)[-1].item())
    want = torch.linalg.eigvalsh(d[:, None] * H * d)[-1].item()
    assert first.eigenvalues[0] == pytest.approx(want, rel=1e-6)
    with torch.no_grad():
        u.mul_(0.05)
        for each in (g, net[0].bias, net[1].running_mean):
            each.mul_(0.3)
        net[1].running_var.mul_(0.09).sub_(0.91 * net[1].eps)
    assert sharpness(net, [(x, y)], scale_invariant=True, tolerance=1e-8).eigenvalues[0] == pytest.approx(
        want, rel=1e-6
    )


def test_a_normalised_weight_is_as_sharp_as_a_plain_one_at_a_minimum():
    """Without gradient, Hessians of the same function differ by the change of variables alone."""
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 3).double(), torch.randn(20, 4, dtype=torch.float64)
    data = [(x, plain(x).detach())]
    want = sharpness(plain, data, loss=F.mse_loss, k=3, scale_invariant=True, tolerance=1e-9).eigenvalues
    net = nn.utils.parametrizations.weight_norm(plain)
    with torch.no_grad():
        net.parametrizations.weight.original1.mul_(7)
    found = sharpness(net, data, loss=F.mse_loss, k=3, scale_invariant=True, tolerance=1e-9).eigenvalues
    assert found == pytest.approx(want, rel=1e-9)


def test_the_scale_invariant_variant_refuses_other_computed_weights():
    for wrap in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm, nn.utils.parametrizations.orthogonal):
        net = nn.Sequential(wrap(nn.Linear(2, 3)), nn.Linear(3, 2))
        data = [(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))]
        with pytest.raises(HgnpError, match=r"^scale_invariant must be False .*, got True: the weight of layer '0' is"):
            sharpness(net, data, scale_invariant=True)
        for p in net[0].parameters():
            p.requires_grad_(False)
        assert sharpness(net, data, scale_invariant=True).eigenvalues  # a constant has no direction to be measured in


def test_sharpness_of_attention_is_the_dense_hessians():
    torch.manual_seed(0)
    net = shaken(Attention().double())
    data = batches_of(net)
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.linalg.eigvalsh(dense_hessian(net, data))[-1].item()
    assert sharpness(net, data).eigenvalues[0] == pytest.approx(want, rel=1e-6)


def test_one_parameter_is_exact_in_one_step():
    net = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    found = sharpness(net, [(x, torch.zeros(2, 1, dtype=torch.float64))], loss=F.mse_loss)
    assert found.eigenvalues == (pytest.approx(5.0),)
    assert found.steps == 1
    assert found.converged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, []), "net must be an nn.Module, got int"),
        ((nn.Linear(2, 2), 3), r"data must be a list of .inputs, target. pairs or a loader, got int; use \[\(x, y\)\]"),
        ((nn.Linear(2, 2), torch.ones(4, 2)), "data must be a list of .* got Tensor"),
        ((nn.Linear(2, 2), [torch.ones(4, 2)]), r"data must be .inputs, target. pairs, got a Tensor; use \[\(x, y\)\]"),
        (
            (nn.Linear(2, 2), [(torch.ones(4, 3), torch.zeros(4).long())]),
            "net must take batch 0 of data, but its forward failed: ",
        ),
        (
            (nn.Linear(2, 2), [(torch.ones(4, 2), torch.ones(4).long() * 9)]),
            "data: labels must be from 0 to 1, as the network has 2 outputs, got 9",
        ),
        (
            (nn.Linear(2, 2), [(torch.ones(4, 2), None)]),
            r"loss must take batch 0 of data, output of shape \(4, 2\) and target \(NoneType\), but failed: ",
        ),
    ],
)
def test_sharpness_refuses_networks_and_data_that_do_not_fit_in_one_line(arguments, message):
    with pytest.raises(HgnpError, match=f"^{message}") as caught:
        sharpness(*arguments)
    assert "\n" not in str(caught.value)


def test_sharpness_refuses_options_and_data_that_cannot_work():
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="scale_invariant must be True or False, got 'x'"):
        sharpness(net, [], scale_invariant="x")
    with pytest.raises(ValueError, match="generator"):
        sharpness(net, (b for b in []))
    with pytest.raises(ValueError, match="data must have at least one batch"):
        sharpness(net, [])
    for k in (0, -1, 1.5, 2.0, True, "1", None, 7, 99999):
        with pytest.raises(ValueError, match=rf"k must be an integer from 1 to 6 with 6 parameters, got {k!r}"):
            sharpness(net, [], k=k)
    with pytest.raises(ValueError, match="from 1 to 200 with 930 parameters"):
        sharpness(nn.Linear(30, 30), [], k=201)
    x, y = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    for loss in (nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="none")):
        with pytest.raises(ValueError, match=r"loss must have reduction='mean', .* got reduction='(sum|none)'"):
            sharpness(net, [(x, y)], loss=loss)
    with pytest.raises(ValueError, match="loss must be a function or an instance, got the class CrossEntropyLoss"):
        sharpness(net, [(x, y)], loss=nn.CrossEntropyLoss)
    with torch.no_grad(), pytest.raises(ValueError, match="gradients must be enabled"):
        sharpness(net, [(x, y)])
    for scale_invariant in (False, True):
        with pytest.raises(ValueError, match="the Hessian of the loss over data must be finite"):
            sharpness(net, [(x, y), (x * math.nan, y)], scale_invariant=scale_invariant)


def test_a_tolerance_and_a_time_limit_end_it_early():
    net = convnet("batch")
    data = batches_of(net)
    exact, rough = sharpness(net, data, tolerance=1e-8), sharpness(net, data, tolerance=1e-2)
    assert rough.converged
    assert rough.steps < exact.steps
    assert rough.eigenvalues[0] == pytest.approx(exact.eigenvalues[0], rel=1e-2)
    assert abs(rough.eigenvalues[0] - exact.eigenvalues[0]) <= rough.residuals[0]
    first = sharpness(net, data, max_seconds=1e-9)
    assert (first.steps, first.converged) == (1, False)
    for name in ("tolerance", "max_seconds"):
        for value in (0, -1.0, math.nan, True, "1", None):
            with pytest.raises(ValueError, match=rf"{name} must be a number > 0, got {value!r}"):
                sharpness(net, data, **{name: value})


def test_sharpness_leaves_buffers_unchanged():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    net = Counting()
    sharpness(net, [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))])
    assert net.calls == 0


def test_as_many_eigenvalues_as_parameters():
    net = nn.Linear(2, 2).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    found = sharpness(net, [(x, y)], k=6)
    want = torch.linalg.eigvalsh(dense_hessian(net, [(x, y)])).flip(0)[: len(found.eigenvalues)]
    torch.testing.assert_close(torch.tensor(found.eigenvalues, dtype=torch.float64), want, rtol=1e-6, atol=1e-8)


def test_any_callable_may_be_the_loss():
    @dataclass
    class Own:  # which cannot be hashed
        def __call__(self, z, y):
            return F.cross_entropy(z, y)

    net = convnet("batch")
    data = batches_of(net)
    assert sharpness(net, data, loss=Own()).eigenvalues == sharpness(net, data).eigenvalues


def quadratic(eigenvalues):
    """A network and a batch: with MSE the Hessian of its one weight vector has these eigenvalues."""
    size = len(eigenvalues)
    torch.manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    x = (size / 2 * torch.tensor(eigenvalues, dtype=torch.float64)).sqrt()[:, None] * vectors
    return nn.Linear(size, 1, bias=False).double(), [(x, torch.zeros(size, 1, dtype=torch.float64))]


CLUSTERS = {
    "repeated at the top": [3.0] * 3 + [2.0] * 2 + [0.1] * 15,
    "repeated below the top": [3.0, 2.0, 2.0, 2.0, 1.0] + [0.1] * 15,
    "close to each other": [3.0, 3.0 - 1e-9, 3.0 - 2e-9, 2.0, 2.0 - 1e-6] + [0.01 * n for n in range(40)],
    "all the same": [1.0] * 12,
    "a few among many": [5.0] * 4 + [1.0 / (n + 1) for n in range(120)],
    "all zero": [0.0] * 8,
}


@pytest.mark.parametrize("k", [2, 4, 6])
@pytest.mark.parametrize("case", CLUSTERS)
def test_repeated_and_close_eigenvalues_are_found_as_often_as_they_are_there(case, k):
    eigenvalues = CLUSTERS[case]
    net, data = quadratic(eigenvalues)
    found = sharpness(net, data, loss=F.mse_loss, k=k)
    assert found.converged
    assert found.eigenvalues == pytest.approx(sorted(eigenvalues, reverse=True)[:k], rel=1e-6, abs=1e-9)


def test_several_outputs_with_the_same_inputs_have_repeated_eigenvalues():
    """With MSE the Hessian of a Linear layer is I ⊗ Ψ: each eigenvalue as often as there are outputs."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    net = nn.Linear(3, 2, bias=False).double()
    want = torch.linalg.eigvalsh(torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x / 50)).flip(0)
    for k in range(2, 7):  # all of them in the end
        found = sharpness(net, [(x, y)], loss=F.mse_loss, k=k)
        assert found.converged
        assert len(found.eigenvalues) == k
        torch.testing.assert_close(torch.tensor(found.eigenvalues, dtype=torch.float64), want[:k], rtol=1e-9, atol=0)


def test_a_head_that_begins_at_zero_has_repeated_eigenvalues():
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    data = [(torch.randn(50, 3, dtype=torch.float64), torch.randint(0, 4, (50,)))]
    want = torch.linalg.eigvalsh(dense_hessian(net, data)).flip(0)
    for k in (4, 16):
        found = sharpness(net, data, k=k)
        torch.testing.assert_close(torch.tensor(found.eigenvalues, dtype=torch.float64), want[:k], rtol=1e-6, atol=1e-9)


def test_too_little_time_for_repeated_eigenvalues_is_not_called_converged():
    net, data = quadratic(CLUSTERS["repeated at the top"])
    found = sharpness(net, data, loss=F.mse_loss, k=3, max_seconds=1e-9)
    assert (found.steps, found.converged) == (1, False)


def test_one_eigenvalue_takes_one_start():
    """From v, the Krylov space of a Hessian with three eigenvalues has three dimensions."""
    net, data = quadratic([3.0] * 4 + [2.0] * 4 + [1.0] * 4)
    found = sharpness(net, data, loss=F.mse_loss)
    assert (found.steps, found.converged) == (3, True)
    assert found.eigenvalues == (pytest.approx(3.0),)


def test_convergence_of_many_eigenvalues_is_looked_for_now_and_then(monkeypatch):
    """Decomposing T after every product would take longer than the products."""
    decomposed = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda T: decomposed.append(len(T)) or eigh(T))
    net, data = quadratic([float(n) for n in range(1, 61)])
    found = sharpness(net, data, loss=F.mse_loss, k=10)
    assert found.converged
    assert found.eigenvalues == pytest.approx([float(n) for n in range(60, 50, -1)], rel=1e-3)
    assert len(decomposed) <= -(-found.steps // 10) + 1

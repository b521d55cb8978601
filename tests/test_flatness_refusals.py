"""What Flatness refuses, by layer or by option, and what a refusal leaves as it was."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from curvature_cases import convnet, images
from hgnp import Flatness, HgnpError, Neurons, sharpness


class WritesIntoView(nn.Module):
    def forward(self, x):
        parts = x[:, :2]
        x.mul_(2.0)
        return x + F.pad(parts, (0, 3))


def net_with(module):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), module, nn.Linear(5, 3)).double()


def test_what_gauss_newton_cannot_follow_is_refused_by_layer_and_the_hessian_route_takes_it():
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    net = net_with(WritesIntoView())
    other = Flatness(net, curvature="hessian")
    other.backward(x, y)
    flat = Flatness(net, bound=-1.0)
    flat.load_state_dict(other.state_dict() | {"block": "0"})
    with pytest.raises(ValueError, match="layer '1'") as refused:
        flat.backward(x, y)
    assert "curvature='hessian'" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mu": -1.0}, "mu must be a finite number ≥ 0, got -1.0"),
        ({"mu": math.nan}, "mu must be a finite number ≥ 0, got nan"),
        ({"mu": "x"}, "mu must be a finite number ≥ 0, got 'x'"),
        ({"mu": None}, "mu must be a finite number ≥ 0, got None"),
        ({"bound": math.inf}, "bound must be a finite number, got inf"),
        ({"bound": None}, "bound must be a finite number, got None"),
        (
            {"loss": nn.CrossEntropyLoss},
            r"loss must be a function or an instance, got the class CrossEntropyLoss; use CrossEntropyLoss\(\)",
        ),
        ({"loss": "x"}, "loss must be a function, got 'x'"),
        ({"loss": None}, "loss must be a function, got None"),
        ({"output": "logits"}, "output must be a function, got 'logits'"),
        ({"curvature": "kfac"}, "curvature must be one of 'ggn', 'hessian', got 'kfac'"),
        ({"norm": "batch"}, "Flatness: norm was removed: BatchNorm is always .*; omit it"),
        ({"flatness": "mine"}, "flatness must be one of 'default', 'paper', got 'mine'"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='sum'"),
        ({"loss": F.l1_loss, "curvature": "ggn"}, "curvature='hessian'"),
        ({"loss": F.l1_loss, "fisher_type": "mc"}, "fisher_type='empirical'"),
    ],
)
def test_wrong_options_fail_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        Flatness(convnet(), **options)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mu", -1, "mu must be a finite number ≥ 0, got -1"),
        ("mu", "x", "mu must be a finite number ≥ 0, got 'x'"),
        ("bound", math.nan, "bound must be a finite number, got nan"),
    ],
)
def test_wrong_options_fail_when_they_are_set_later(name, value, words):
    flat = Flatness(convnet(), mu=0.5, bound=0.25)
    with pytest.raises(ValueError, match=words):
        setattr(flat, name, value)
    assert (flat.mu, flat.bound) == (0.5, 0.25)


def test_what_is_no_network_or_has_no_block_is_refused():
    with pytest.raises(ValueError, match=r"net must have a Linear or .* got none"):
        Flatness(nn.Sequential(nn.ReLU()))
    with pytest.raises(TypeError, match=r"net must be an nn.Module, got NoneType"):
        Flatness(None)


class Unused(nn.Module):
    """The loss depends on a bare parameter alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(4, 3)), nn.Linear(4, 3)

    def forward(self, x):
        self.unused(x)
        return x @ self.weight


@pytest.mark.parametrize("flatness", ["default", "paper"])
def test_a_loss_without_a_gradient_is_refused(flatness):
    for mu in (0.0, 0.1):
        flat = Flatness(convnet(), mu=mu, loss=lambda out, y: F.cross_entropy(out.detach(), y), flatness=flatness)
        with pytest.raises(HgnpError, match=r"^loss must be differentiable .*, got a value without a gradient"):
            flat.backward(*images())


@pytest.mark.parametrize("flatness", ["default", "paper"])
def test_a_loss_that_depends_on_no_block_is_refused(flatness):
    with pytest.raises(ValueError, match=r"loss must depend on a Linear or .* that net calls, got none; set mu=0"):
        Flatness(Unused(), flatness=flatness).backward(torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning"
)  # PyTorch's own, where it loads its compiler
@pytest.mark.parametrize(("part", "where"), [("", "net"), ("1", "layer '1'")])
def test_a_module_compiled_in_place_is_refused(part, where):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net.get_submodule(part).compile()
    with pytest.raises(TypeError, match=f"^{where} must be a plain module, got a compiled one; pass the original"):
        Flatness(net)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_compiled_function_is_refused_and_a_disabled_one_is_not():
    class Calls(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    net = nn.Sequential(nn.Linear(4, 4), Calls(torch.compile(torch.tanh)), nn.Linear(4, 3))
    for refusing in (Flatness, lambda net: Neurons(net, torch.randn(5, 4))):
        with pytest.raises(TypeError, match="layer '1' must be a plain module, got a compiled one"):
            refusing(net)
    net[1] = Calls(torch.compiler.disable(torch.tanh))
    Flatness(net).backward(torch.randn(5, 4), torch.arange(5) % 3)


def test_a_compiled_function_that_no_module_holds_is_run_operation_by_operation():
    """torchvision compiles its RoI alignment where its C++ operators are missing."""
    compiled, found = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def gate(x):
        return x.tanh() * x.sigmoid()

    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    for function in (gate, torch.compile(gate, backend=backend)):

        class Gate(nn.Module):
            def forward(self, x, function=function):
                return function(x)

        net = net_with(Gate())
        flat = Flatness(net, bound=-1.0, mu=0.1, curvature="hessian", flatness="paper")
        flat.backward(x, y)
        found.append([flat.curvature, *(p.grad for p in net.parameters()), *sharpness(net, [(x, y)]).eigenvalues])
    assert not compiled
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), rtol=1e-9, atol=1e-12)


class Direct(nn.Module):
    def forward(self, x):
        return torch.layer_norm(x, (5,))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_where_neither_route_would_be_right_the_layer_is_named(curvature):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    with pytest.raises(ValueError, match=r"layer '1' must call norms by torch.nn.functional, got torch.layer_norm"):
        Flatness(net_with(Direct()), curvature=curvature).backward(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(TypeError, match="layer '1' must be a plain module, got a scripted one"):
        Flatness(net_with(scripted), curvature=curvature)


def test_a_failed_step_leaves_the_random_stream_and_buffers_alone():
    net = convnet("batch", dropout=0.4)
    net.append(Direct())
    x, y = images()
    state, buffers = torch.get_rng_state(), [b.clone() for b in net.buffers()]
    with pytest.raises(ValueError, match="layer '10'"):
        Flatness(net).backward(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), buffers, strict=True))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_batch_too_small_for_its_norm_is_pytorchs_to_refuse(curvature):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    flat = Flatness(net, curvature=curvature)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "0"})
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        flat.backward(x[:1], y[:1])


@pytest.mark.parametrize("options", [{}, {"mu": 0.0}, {"flatness": "paper"}])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_says_so(options, off):
    x, y = images()
    with off(), pytest.raises(ValueError, match=r"gradients must be enabled, got torch.no_grad\(\)"):
        Flatness(convnet(), **options).backward(x, y)


@pytest.mark.parametrize("options", [{}, {"mu": 0.0}, {"flatness": "paper"}])
def test_a_batch_that_does_not_fit_is_refused_in_one_line(options):
    x, y = images()
    net = convnet("batch")
    wrong = {
        "target: labels must be from 0 to 2, as the network has 3 outputs, got 9": (x, y * 0 + 9),
        "net must take this batch, but its forward failed in 0: ": (x[:, :1], y),
        r"loss must take this batch, output of shape .* and target \(NoneType\), but failed: ": (x, None),
    }
    for message, batch in wrong.items():
        for call in (Flatness(net, **options).backward, Flatness(net, **options).objective):
            with pytest.raises(HgnpError, match=f"^{message}") as caught:
                call(*batch)
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"output must take what net returns, a Tensor, but failed: AttributeError"):
        Flatness(net, output=lambda o: o.logits, **options).backward(x, y)


@pytest.mark.parametrize("scale", ["a", None, True, 0, 0.0, math.nan, torch.ones(2)])
def test_a_scale_must_be_one_number_other_than_zero(scale):
    flat = Flatness(convnet())
    for call in (flat.backward, flat.loss):
        with pytest.raises(ValueError, match=r"^scale must be a number other than 0 or a tensor with one entry, got"):
            call(*images(), scale=scale)


@pytest.mark.parametrize("options", [{}, {"refresh_every": 3}, {"flatness": "paper"}])
def test_an_empty_batch_is_refused_in_every_step(options):
    x, y = images()
    flat = Flatness(convnet(), **options)
    for _ in range(2):
        with pytest.raises(ValueError, match="inputs must hold at least one sample, got an empty batch"):
            flat.backward(x[:0], y[:0])
        flat.backward(x, y)


def test_a_state_of_something_else_is_refused_and_changes_nothing():
    x, y = images()
    flat = Flatness(convnet())
    flat.backward(x, y)
    before = flat.state_dict()
    for state in ({"a": 1}, [], None):
        missing = "age, block, generator, pairs, since_penalty, skipping"
        with pytest.raises(ValueError, match=rf"state must come from state_dict\(\), got one without {missing}$"):
            flat.load_state_dict(state)
    with pytest.raises(ValueError, match="state must have an eigenpair of its block 'x', got none"):
        flat.load_state_dict(before | {"pairs": {}, "block": "x"})
    assert flat.state_dict()["block"] == before["block"]
    assert flat.state_dict()["pairs"].keys() == before["pairs"].keys()


def test_a_checkpointed_part_after_the_penalised_layer_is_refused_in_one_line():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(checkpoint(lambda h: self.middle(h.relu()).relu(), self.first(x), use_reentrant=False))

    net = Checkpointed().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    for curvature in ("ggn", "hessian"):
        flat = Flatness(net, bound=-10.0, curvature=curvature)
        flat.backward(x, y)
        flat.load_state_dict(flat.state_dict() | {"block": "first"})
        if curvature == "hessian":
            flat.backward(x, y)
            continue
        with pytest.raises(
            ValueError, match=r"net must run without activation checkpointing .*use curvature='hessian'"
        ):
            flat.backward(x, y)

"""Running again what is behind a block gives what a second pass gives, or is refused."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from curvature_cases import Twice, begin_step, finish_step, gradients
from hgnp import Flatness
from hgnp.curvature.autodiff.tape import Tape
from hgnp.flatness import step_and_state


class Net(nn.Module):
    """A residual network whose ways of writing in place, drawing or hiding an operation can be chosen."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.na = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c, self.nc = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.na(self.a(x)), inplace=self.way != "plain")
        main, side = self.nb(self.b(x)), self.nc(self.c(x))
        if self.way == "drawn before dropout":
            side = side * torch.rand_like(side)
        if self.way in ("dropout", "drawn and dropout", "drawn before dropout"):
            side = F.dropout(side, 0.4, self.training)
        if self.way in ("drawn", "drawn and dropout"):
            side = side * torch.rand(1)
        if self.way == "drawn and dropout":
            side = F.dropout2d(side, 0.4, self.training)
        if self.way == "hidden":
            side = Twice.apply(side)
        if self.way == "written":
            main += side
        else:
            main = main + side
        return self.out(F.relu(main).mean((2, 3)))


def trained(way: str, block: str, choices: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net(way).double()
    flat = Flatness(net, mu=1.0, bound=-1.0, direction_from="this_batch", **choices)
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    begin_step(flat, x, y, block)
    loss = finish_step(flat, x, y)
    return loss, flat.curvature, gradients(net), dict(net.named_buffers()), torch.rand(1)


told = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="needs PyTorch 2.8, which tells of hooks",
)
REPEATS = {
    "plain": "abc",
    "in place": "abc",
    "written": "ab",
    "dropout": "abc",
    "drawn": "",
    "drawn and dropout": "",
    "drawn before dropout": "",
    "hidden": "",
}


@pytest.mark.parametrize("way_again", ["tangent", "rerun"])
@pytest.mark.parametrize("choices", [{}, {"curvature": "hessian"}, {"scaling": "scale_invariant"}])
@pytest.mark.parametrize("block", ["a", "b", "c", "out"])
@pytest.mark.parametrize("way", REPEATS)
def test_a_replayed_tape_gives_what_a_second_pass_gives(
    way: str, block: str, choices: dict[str, Any], way_again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "hidden" and (block != "out" and not choices.get("curvature")):
        pytest.skip("the tangent is lost in either way, and the block refused")
    if way_again == "tangent" and choices.get("curvature"):
        pytest.skip("only tangents can do with the values of the pass")
    found: list[bool] = []
    tried = getattr(Tape, way_again)

    def watched(self: Tape, *args: Any) -> Tensor | None:
        z: Tensor | None = tried(self, *args)
        found.append(z is not None)
        return z

    for name in ("tangent", "rerun"):
        monkeypatch.setattr(Tape, name, watched if name == way_again else lambda *_: None)
    have = trained(way, block, choices)
    monkeypatch.setattr(Tape, way_again, lambda *_: None)
    want = trained(way, block, choices)
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
    repeats = "abc" if (way, way_again) == ("written", "tangent") else REPEATS[way]
    expected = block in repeats or (block == "out" and way != "hidden")
    assert found == ([] if way.startswith("drawn") else [expected])


@told
def test_norms_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net("plain").double()
    flat = Flatness(net, mu=1.0, bound=-1.0, direction_from="this_batch")
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    begin_step(flat, x, y, "a")

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "native_batch_norm", fail)
    finish_step(flat, x, y)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[f"{name} {args[0].dim()}" if name == "_to_copy" else name] += 1
        return func(*args, **(kwargs or {}))


@told
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_autograd_keeps_is_not_made_again(precision: torch.dtype) -> None:
    """Where a pooling picked, and weights as autocast has them: the tangents cost three convolutions of tangents, no more."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(n, 4, 3, padding=1) for n in (2, 4, 4, 4)]
    layers = [layer for conv in convs[:3] for layer in (conv, nn.ReLU(), nn.MaxPool2d(2))]
    net = nn.Sequential(*layers, convs[3], nn.Flatten(), nn.Linear(4, 3))
    x, y = torch.randn(6, 2, 8, 8), torch.randint(0, 3, (6,))
    flat, other = (
        Flatness(net, mu=1.0, bound=-1.0, direction_from=direction_from)
        for direction_from in ("this_batch", "last_batch")
    )

    def lowered() -> torch.autocast:  # it forgets its casts when it is left
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != torch.float32)

    with lowered():
        begin_step(flat, x, y, "0")
    step, state = step_and_state(flat)
    primal = state.current
    with lowered():
        step.tangents(state, x, y)  # which looks once for what hides a tangent
    state.current = primal
    with lowered(), Operations() as seen:
        step.tangents(state, x, y)
    step.decide(state)
    other.load_state_dict(flat.state_dict())
    with lowered():
        other.backward(x, y)
    assert seen.names["convolution"] == 4  # one of them along the block's own direction
    assert not seen.names["max_pool2d_with_indices"]
    assert seen.names["_to_copy 4"] == (0 if precision == torch.float32 else 2)  # the picture and v
    assert flat.curvature == pytest.approx(other.curvature, rel=1e-6 if precision == torch.float32 else 1e-2)


def test_a_checkpointed_part_is_not_made_again_for_it() -> None:
    """To look at what autograd keeps there would run it anew, once for each layer."""
    torch.manual_seed(0)
    part = nn.Sequential(
        *(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)), nn.MaxPool2d(2), nn.BatchNorm2d(4)
    ).double()
    runs = []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.out = nn.Conv2d(2, 4, 3, padding=1), part, nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda x: runs.append(0) or self.part(x), self.first(x), use_reentrant=False)
            return self.out(x.mean((2, 3)))

    net = Checkpointed().double()
    flat = Flatness(net, mu=1.0, bound=1e9, direction_from="this_batch")
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    flat.backward(x, y)
    runs.clear()
    begin_step(flat, x, y)
    assert len(runs) == 2  # forward, and once more in the backward pass


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_an_inactive_penalty_leaves_the_gradient_of_a_plain_step(curvature: str) -> None:
    torch.manual_seed(0)
    net = Net("in place").double()
    plain = copy.deepcopy(net)
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    flat = Flatness(net, mu=1.0, bound=1e6, direction_from="this_batch", curvature=curvature)
    loss = flat.backward(x, y)
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    assert loss.item() == expected.item()
    assert flat.curvature > 0
    assert step_and_state(flat)[1].current is None
    for have, want in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(have.grad, want.grad)
    for have, want in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(have, want)


class Doubled(torch.autograd.Function):
    """Twice a tensor, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Changed(nn.Module):
    """A network that changes a tensor behind a block in a way that no call returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4, eps=0.1)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        if self.way == "without a gradient":
            with torch.no_grad():
                x[:, :2] = 0.5
        if self.way == "by index":
            x = x * 1
            x[:, :2] = x[:, 2:]
        if self.way == "in a list that grows":
            parts = [x[:, :2]]
            parts.append(torch.tanh(torch.cat(parts, 1)))
            x = torch.cat(parts, 1)
        if self.way == "elsewhere by index":
            other = torch.zeros_like(x)
            other[:, :2] = x[:, 2:]
            x = x + torch.tanh(self.norm(other))
        if self.way == "by its function":
            x = Doubled.apply(x)  # type: ignore[no-untyped-call]
        if self.way == "by its data":
            x.data = x.data * 2
        if self.way == "by its gradient":
            x.register_hook(lambda g: -g)  # type: ignore[no-untyped-call]
        if self.way in ("by an average", "by an average, drawn"):
            assert isinstance(self.average, Tensor)
            self.average.mul_(0.5).add_(x.detach().mean(0))
            x = x - self.average
        if self.way == "by an average, drawn":
            torch.rand(1)
        return self.out(torch.tanh(x))


WAYS = (
    "without a gradient", "by index", "elsewhere by index", "by its function", "by its data", "by its gradient",
    "by an average", "by an average, drawn", "in a list that grows",
)  # fmt: skip


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_that_was_not_seen_is_not_left_out(way: str, curvature: str) -> None:
    """Against the same step in the order that makes one pass along a v that is known."""
    found: list[Any] = []
    for direction_from in ("this_batch", "last_batch"):
        torch.manual_seed(0)
        net = Changed(way).double()
        x, y = torch.randn(6, 3).double(), torch.randint(0, 3, (6,))
        flat = Flatness(net, mu=1.0, bound=-1.0, direction_from=direction_from, curvature=curvature)
        plain = nn.functional.cross_entropy(copy.deepcopy(net)(x), y)
        torch.manual_seed(1)
        begin_step(flat, x, y, "a")
        try:
            loss = finish_step(flat, x, y)
        except Exception:  # the tangent pass has words for some of these, PyTorch for the others
            assert curvature == "ggn"
            found.append("refused")
            continue
        torch.testing.assert_close(loss, plain.detach())
        found.append((flat.curvature, gradients(net), dict(net.named_buffers()), torch.rand(1)))
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_followed_is_refused_by_its_layer() -> None:
    torch.manual_seed(0)
    flat = Flatness(nn.Sequential(Changed("by index")), direction_from="this_batch")
    begin_step(flat, torch.randn(6, 3), torch.zeros(6).long(), "0.a")
    with pytest.raises(ValueError, match="layer '0' must be differentiable by Gauss–Newton, got an indexed assignment"):
        finish_step(flat, torch.randn(6, 3), torch.zeros(6).long())


class Lowered(nn.Module):
    """A network with a precision of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return x.float()


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_a_part_that_runs_in_another_precision(curvature: str) -> None:
    found: list[float] = []
    for direction_from in ("this_batch", "last_batch"):
        torch.manual_seed(0)
        net = Lowered()
        x, y = torch.randn(6, 3), torch.randint(0, 3, (6,))
        flat = Flatness(net, mu=1.0, bound=-1.0, direction_from=direction_from, curvature=curvature)
        begin_step(flat, x, y, "a")
        finish_step(flat, x, y)
        found.append(flat.curvature)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Dropped(nn.Module):
    """With `overwrites`, a value that another branch has read is written to: what depends on layer b alone cannot run again."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop, self.act, self.overwrites = nn.Dropout(0.3), nn.ReLU(inplace=True), overwrites

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        t = self.act(self.drop(self.b(x)) + h)
        return self.out(t + (h.mul_(2.0) if self.overwrites else h))


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_tape_with_dropout_is_kept_only_if_no_block_needs_a_second_pass(overwrites: bool) -> None:
    """A graph cannot draw the same masks in a second pass."""
    torch.manual_seed(0)
    flat = Flatness(Dropped(overwrites=overwrites), bound=-1.0, direction_from="this_batch")
    flat.backward(torch.randn(12, 6), torch.randint(0, 3, (12,)))
    assert step_and_state(flat)[0].passes.can_replay_tape is not overwrites

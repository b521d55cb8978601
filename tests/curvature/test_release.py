"""A step's memory is released with it, not when garbage is collected."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from curvature_cases import convnet, images
from hgnp import Flatness
from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.collector import FactorCollector


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """What was created; no garbage is collected meanwhile."""
    created: list[weakref.ref[Any]] = []

    def noted(kind: type) -> None:
        init = kind.__init__  # type: ignore[misc]

        def begin(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            created.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", begin)

    for kind in (FactorCollector, Forward):
        noted(kind)
    gc.collect()
    gc.disable()
    yield created
    gc.enable()


@pytest.mark.skipif(
    torch.__version__ < "2.8", reason="the Hessian's first choice fails there, and its error holds them"
)
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
@pytest.mark.parametrize("ranking", ["kfac", "empirical"])
def test_a_step_releases_its_graph_and_factors(
    ranking: str, direction_from: str, curvature: str, alive: list[weakref.ref[Any]]
) -> None:
    flat = Flatness(
        convnet(), mu=1.0, bound=-1.0, curvature=curvature, direction_from=direction_from, ranking=ranking
    )  # fmt: skip
    for _ in range(2):
        flat.backward(*images())
    assert alive
    assert [type(each()).__name__ for each in alive if each() is not None] == []


def test_a_loss_that_is_held_holds_no_factors(alive: list[weakref.ref[Any]]) -> None:
    flat = Flatness(convnet(), mu=1.0, bound=-1.0, kfac_approx="expand", ranking="empirical")
    loss = flat.loss(*images())
    loss.backward()
    held = [each() for each in alive if isinstance(each(), FactorCollector)]
    assert all(not (each.psi or each.gamma or each.calls) for each in held if each is not None)
    del held, loss
    assert not any(each() is not None for each in alive)


@pytest.mark.parametrize("kfac_approx", ["reduce", "expand"])
def test_a_step_that_overflows_keeps_its_block(kfac_approx: str) -> None:
    x, y = images()
    net = convnet("none")
    net[0].requires_grad_(False)  # the chosen block is not the first one that can be chosen
    net[4].weight.data.mul_(0.1)
    flat = Flatness(net, mu=1.0, bound=-1.0, kfac_approx=kfac_approx)
    for _ in range(2):
        flat.backward(x, y)
    before = flat.state_dict()
    assert before["block"] == "9"
    flat.backward(x, y, scale=torch.tensor(float("inf")))
    after = flat.state_dict()
    assert after["block"] == "9"
    for name in before["pairs"]:
        assert torch.equal(after["pairs"][name]["group"], before["pairs"][name]["group"])
        torch.testing.assert_close(after["pairs"][name]["gamma.vector"], before["pairs"][name]["gamma.vector"])


def test_a_state_is_loaded_again_after_a_layer_was_frozen() -> None:
    net = convnet("none")
    flat = Flatness(net, mu=1.0, bound=-1.0)
    flat.backward(*images())
    net.get_submodule(str(flat.block)).requires_grad_(False)  # type: ignore[arg-type]
    state = flat.state_dict()
    assert state["block"] is None
    flat.load_state_dict(state)
    flat.backward(*images())
    assert flat.block in state["pairs"]

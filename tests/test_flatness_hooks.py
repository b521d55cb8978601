"""What waits for parameters' gradients sees them once in a step, and whole."""

import pytest
import torch

from curvature_cases import convnet, gradients, images
from hgnp import Flatness, sharpness
from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State
from hgnp.execution.eager import Eager


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bound", [-1.0, 1e6])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_hooks(direction_from: str, curvature: str, bound: float, dropout: float) -> None:
    choices = {"mu": 1.0, "bound": bound, "direction_from": direction_from, "curvature": curvature}
    x, y = images()
    found, seen = [], []
    for hooks in (False, True):
        net = convnet(dropout=dropout)
        if hooks:
            net[0].weight.register_hook(lambda g: 2 * g)
            net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        torch.manual_seed(0)
        Flatness(net, **choices).backward(x, y)  # type: ignore[arg-type]
        found.append((gradients(net), dict(net.named_buffers()), torch.rand(1)))
    (plain, *rest), (have, *others) = found
    torch.testing.assert_close(have, plain | {"0.weight": 2 * plain["0.weight"]}, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(others, rest, rtol=1e-12, atol=0)
    assert len(seen) == 1
    assert torch.equal(seen[0], have["0.weight"])


@pytest.mark.parametrize("call", ["backward", "loss"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_a_hook_on_the_penalised_block(direction_from: str, curvature: str, call: str) -> None:
    """The Hessian differentiates the block's parameters twice more, which no hook is to see."""
    if call == "loss" and direction_from == "this_batch":
        pytest.skip("loss needs the v of the last batch")
    x, y = images()
    seen: list[None] = []
    plain, q, block = None, None, None
    for hooked in (False, True):
        net = convnet("none")
        if hooked:
            assert block is not None
            net.get_submodule(block).weight.register_hook(lambda g: seen.append(None) or 2 * g)  # type: ignore[union-attr]
        flat = Flatness(net, mu=1.0, bound=-1.0, direction_from=direction_from, curvature=curvature)
        if call == "loss":
            flat.loss(x, y).backward()
        else:
            flat.backward(x, y)
        if not hooked:
            plain, q, block = gradients(net), flat.curvature, flat.block
    assert plain is not None
    assert (flat.curvature, flat.block) == (q, block)
    name = f"{block}.weight"
    torch.testing.assert_close(gradients(net), plain | {name: 2 * plain[name]}, rtol=1e-9, atol=1e-12)
    assert len(seen) == 1


def test_hooks_change_neither_sharpness_nor_where_sam_looks() -> None:
    x, y = images()
    found = []
    for hooked in (False, True):
        net = convnet("none")
        if hooked:
            net[0].weight.register_hook(lambda g: 2 * g)
        Eager(SAMStep(net, rho=0.5), State(0.0, 0.0, Direction(net))).backward(x, y)
        grads = gradients(net)
        if hooked:
            grads["0.weight"] /= 2
        found.append((grads, sharpness(net, [(x, y)]).eigenvalues))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)

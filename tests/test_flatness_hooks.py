"""What waits for parameters' gradients sees them once in a step, and whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvature_cases import convnet, gradients, images
from hgnp import Flatness


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_all_of_a_gradient_is_sent_to_other_processes(direction_from: str, alone: None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    shared = nn.parallel.DistributedDataParallel(net)
    sent: list[Tensor] = []

    def send(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    shared.register_comm_hook(None, send)
    flat = Flatness(shared, mu=1.0, bound=-1.0, direction_from=direction_from)
    flat.backward(torch.randn(6, 4).double(), torch.randint(0, 3, (6,)))
    norm = torch.cat(sent).norm()
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in gradients(net).values()]).norm())

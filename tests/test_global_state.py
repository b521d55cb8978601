"""A test that leaves PyTorch's global state changed does not change the tests after it."""

import pytest
import torch

from synchronization import no_synchronization, set_sync_debug_mode


@pytest.mark.parametrize("turn", [1, 2])  # whichever comes second finds what the first one left
def test_each_test_finds_the_defaults(turn: int) -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == 1
    assert torch.is_grad_enabled()
    assert torch.get_deterministic_debug_mode() == 0
    assert not torch.is_autocast_enabled("cpu")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_deterministic_debug_mode("warn")
    torch.set_autocast_enabled("cpu", True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_finds_the_defaults_of_cuda(turn: int) -> None:
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    set_sync_debug_mode("error")
    torch.cuda.set_stream(torch.cuda.Stream())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_synchronizing_raises_inside_the_block_alone() -> None:
    x = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronization():
        x.item()
    assert x.item() == 1

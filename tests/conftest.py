"""One thread per worker, PyTorch's global state restored after each test, and a line that says what the random networks were
made of."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings

from pretend_device import PRETENDED, pretended_device
from synchronization import set_sync_debug_mode

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background would be deaf to it
settings.register_profile("hgnp", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("hgnp")


def sync_debug_mode() -> int:
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


def stream() -> Any:
    """None is the default stream, which cannot be asked for before CUDA is initialised."""
    if not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_stream()
    return None if current == torch.cuda.default_stream() else current


def set_stream(found: Any) -> None:
    torch.cuda.set_stream(torch.cuda.default_stream() if found is None else found)


GLOBAL_STATE: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        for kind in ("cpu", "cuda")
    ),
    (sync_debug_mode, set_sync_debug_mode),
    (stream, set_stream),
]


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """What a test changes of PyTorch's global state is put back, also if it fails halfway: tests pass in any order."""
    found = [get() for get, _ in GLOBAL_STATE]
    yield
    for (get, put), value in zip(GLOBAL_STATE, found, strict=True):
        now = get()
        if (now is None) != (value is None) or now != value:  # a stream compared with None is never unequal
            put(value)


@pytest.fixture(scope="module", params=["pretended", "cuda"] if torch.cuda.is_available() else ["pretended"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device that holds no tensors of the CPU: one on any machine, and a GPU where there is one."""
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    with pretended_device():
        yield PRETENDED


@pytest.fixture(scope="module")
def figures_not_rendered() -> Iterator[None]:
    """Figures are made but not rendered: matplotlib takes longer for that than the small runs that they show.
    tests/reporting/test_figures.py and test_page.py look at real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hgnp.reporting.figures.image", lambda *_: b"<svg xmlns='http://www.w3.org/2000/svg'/>")
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    made: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "made":
                made.update(value)
    if made:
        networks = made.pop("networks")
        parts = ", ".join(f"{name} in {count / networks:.0%}" for name, count in sorted(made.items()))
        terminalreporter.write_line(f"random networks: {networks}; {parts}")

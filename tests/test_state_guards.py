"""State guards that threads share."""

import threading

import torch
from torch import Tensor

from hgnp.state_guards import compiled_functions_run_eagerly


def test_threads_that_overlap_leave_compiled_functions_as_they_were() -> None:
    torch.compiler.reset()
    compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compiled.append(True)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with compiled_functions_run_eagerly:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with compiled_functions_run_eagerly:
        leave.set()
        thread.join()  # the first to enter leaves first
        double(torch.ones(2))
        assert not compiled
    double(torch.ones(2))
    assert compiled

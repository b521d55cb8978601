"""One thread a worker, and a line at the end that says what the random networks were made of."""

import signal
from collections import Counter
from typing import Any

import torch
from hypothesis import settings

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background would be deaf to it
settings.register_profile("hgnp", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("hgnp")


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

"""A training step can be read: it enters few files, and CONTRIBUTING.md lists them in order."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hgnp
from hgnp.training.data import Batches
from hgnp.training.task import Task
from hgnp.training.trainer import Trainer, make_steps

PACKAGE = Path(hgnp.__file__).parent
AUTODIFF = "curvature/autodiff/"
RULES = AUTODIFF + "rules.py"


def entry(file: Path) -> str:
    """What counts as one: a file, `autodiff/`, and the operators' rules in it."""
    name = file.relative_to(PACKAGE).as_posix()
    return AUTODIFF if name.startswith(AUTODIFF) and name != RULES else name


def listed() -> list[str]:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("\n## One training step\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


def test_a_default_step_enters_the_files_that_contributing_lists() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    )  # fmt: skip
    data = [(torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))) for _ in range(16)]
    device = torch.device("cpu")
    recipe = hgnp.Recipe(keep=0.5, bound=0.0)
    step, _, state = make_steps(
        net, Task(Batches(data, "train", None, device), None, F.cross_entropy, None, None), recipe
    )
    epochs = Trainer(step, state, torch.optim.SGD(net.parameters(), lr=0.01), recipe, device)
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            entered.setdefault(entry(file))

    def train(batches: list[Any]) -> Any:
        return epochs.train(
            batches, total=len(batches), epoch=0, rate=None, mu=lambda share: 1e-3, before_step=lambda batch: None,
            after_step=lambda number: False,
            show=lambda *_: None,
        )  # fmt: skip

    train(data[:7])
    before = state.direction.pairs
    sys.setprofile(note)
    try:
        seen = train(data[7:8])
    finally:
        sys.setprofile(None)
    assert len(seen.curvatures) == 1
    assert state.active()
    assert state.direction.pairs is not before  # it refreshed

    found = list(entered)
    assert found == listed()
    assert len(found) <= 13

    sys.setprofile(note)
    try:
        train(data[8:])
    finally:
        sys.setprofile(None)
    assert list(entered) == found, "other steps enter other files"

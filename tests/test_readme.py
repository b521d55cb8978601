"""The README's Python examples run as printed, and its results are those of the runs in results/paper."""

import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.experiments.download import OFFICIAL
from hgnp.experiments.models.digits import DigitsNet
from hgnp.reporting.paper.results import scan

NAME = "vgg16-cifar10-fast"
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def names() -> dict[str, Any]:
    """What the examples take for granted."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:256], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:256])
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    my_net = partial(DigitsNet, width=24)
    net = my_net()
    return {
        "hgnp": hgnp, "net": net, "MyNet": my_net, "train_loader": loader, "val_loader": loader,
        "example_input": x[:2], "batch": (x, y), "epochs": 7, "optimizer": torch.optim.SGD(net.parameters(), lr=0.01),
    }  # fmt: skip


@pytest.mark.parametrize("number", range(3))
def test_an_example_runs_as_printed(
    number: int, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 3
    full = sum(parameter.numel() for parameter in names["net"].parameters())
    exec(examples[number], names)  # noqa: S102  the repository's own text
    left = sum(parameter.numel() for parameter in names["net"].parameters())
    assert left < full
    if number == 0:
        assert left <= 0.10 * full
        assert (tmp_path / "small.onnx").exists()


TABLE = [
    ("cifar10-best", "vgg16-cifar10-best-dense", "taylor", None),
    ("cifar10-best", "vgg16-cifar10-best", "taylor", None),
    ("paper/vgg16-cifar10-fast", "vgg16-cifar10-fast", "hgnp", 0.144),
    ("paper/vgg16-cifar10-fast", "vgg16-cifar10-fast", "taylor", 0.144),
    ("paper/vgg16-cifar10-fast", "vgg16-cifar10-fast", "hgnp", None),
    ("paper/vgg16-cifar10-fast", "vgg16-cifar10-fast", "taylor", None),
    ("paper/vgg16-cifar10", "vgg16-cifar10", "hgnp", None),
    ("paper/resnet18-cifar10-fast", "resnet18-cifar10-fast", "hgnp", None),
    ("paper/resnet18-cifar10-fast", "resnet18-cifar10-fast", "taylor", None),
]
"""The README's rows: a folder under results/, the runs' name, their method, and a snapshot's κ or None for the end."""


def test_the_table_of_results_is_that_of_the_runs() -> None:
    table = README[README.index("| network | preset |") :].splitlines()[2 : 2 + len(TABLE)]
    for row, (folder, name, method, snapshot) in zip(table, TABLE, strict=True):
        files = sorted((ROOT / "results" / folder).glob(f"{name}-{method}-[0-9]/result.json"))
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        ends = [
            run["after"] if snapshot is None else next(end for end in run["snapshots"] if end["asked"] == snapshot)
            for run in runs
        ]
        kept, macs = (
            statistics.mean(100 * end[key] / run["before"][key] for run, end in zip(runs, ends, strict=True))
            for key in ("parameters", "macs")
        )
        metric = [100 * end["metric"] for end in ends]
        accuracy = f"{statistics.mean(metric):.2f}" + (f" ± {statistics.stdev(metric):.2f}" if len(runs) > 1 else "")
        shown = "not pruned" if kept == 100 else {"hgnp": "HGNP", "taylor": "Taylor"}[method]
        assert row.endswith(f"| {shown} | {kept:.1f} % | {macs:.1f} % | {accuracy} % | {len(runs)} |")


def test_the_paper_page_groups_the_runs_as_the_table_does() -> None:
    groups = scan(ROOT / "results" / "paper").groups
    seeds = {
        group.runs[0].method: [run.seed for run in group.runs] for group in groups if group.runs[0].info["name"] == NAME
    }
    assert len(groups) == len({(group.experiment.key, group.title) for group in groups})
    assert seeds == {"hgnp": [0, 1, 2], "taylor": [0, 1, 2]}


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_pages_of_the_datasets_are_linked(name: str) -> None:
    assert OFFICIAL[name].page in README
    assert OFFICIAL[name].page in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")

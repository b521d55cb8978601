"""Epochs are measured and compared as the report says: on a tiny network, on a CPU, where all steps are eager."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hgnp.experiments.presets import preset

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import epoch
from epoch_report import Report, short

FACTS = dict.fromkeys(("steps", "batch", "round", "after", "naive", "precision", "presets"), 0) | {"seconds": 1.0}


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip


def test_every_method_is_measured_against_the_plain_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"IMAGES": 512, "TRIAL": 1, "FEWEST": 3, "AFTER": 3, "NAIVE_STEPS": 2}.items():
        monkeypatch.setattr(epoch, name, few)
    bench = epoch.Bench(torch.device("cpu"), 16, 0.01, Report(tmp_path / "a.md", "# Head", FACTS))
    assert bench.epoch_steps == 32
    bench.epochs(tiny(), "vgg16", 100.0)
    bench.naive(tiny(), "vgg16", 100.0)
    text = (tmp_path / "a.md").read_text()
    assert "failed" not in text
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| vgg16" in line]
    assert [row[3] for row in table[: 2 * len(epoch.METHODS)]] == epoch.METHODS * 2
    plain = bench.known["vgg16", 100.0, "plain", True]
    for number, row in enumerate(table[: 2 * len(epoch.METHODS)]):
        found = bench.known["vgg16", 100.0, row[3], number < len(epoch.METHODS)]
        assert float(row[7]) == pytest.approx(found.epoch / plain.epoch, abs=0.006)
        if row[3] != "Taylor":
            assert found.epoch == found.step * 32
        assert (found.block == "–") is (not row[3].startswith("HGNP"))
    textbook = float(table[2 * len(epoch.METHODS)][3].replace(",", "")) / 1e3
    for row in table[2 * len(epoch.METHODS) + 1 :]:
        ours = bench.known["vgg16", 100.0, row[2], True].step
        assert float(row[4]) == pytest.approx(textbook / ours, abs=1)
    assert (
        f"{bench.known['vgg16', 100.0, 'SAM', True].epoch / plain.epoch:.2f}"
        in list(short(bench.known, epoch.METHODS))[1]
    )


def test_a_failure_is_a_row_and_the_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch, "IMAGES", 64)
    bench = epoch.Bench(torch.device("cpu"), 16, 0.01, Report(tmp_path / "a.md", "# Head", FACTS))
    with bench.going_on("Naive", "vgg16", "100 %"):
        raise RuntimeError("out of memory")
    assert "| vgg16 | 100 % | failed: out of memory" in (tmp_path / "a.md").read_text()


@pytest.mark.parametrize("name", epoch.NETS)
def test_the_presets_penalty_is_the_presets(name: str) -> None:
    recipe = preset(epoch.NETS[name][1]).recipe
    found = epoch.options(name, "HGNP, preset")
    assert (found["mu"], found["refresh_every"]) == (recipe["mu"], recipe.get("refresh_every", 1))
    assert all((epoch.options(name, method)["bound"] > 0) == method.endswith("inactive") for method in epoch.HGNP)
    if isinstance(recipe["flatness"], str):
        assert found["flatness"] == recipe["flatness"]
    else:
        assert {"flatness": "default", **recipe["flatness"]}.items() <= found.items()


def test_networks_are_cut_to_size() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 600), nn.ReLU(), nn.Linear(600, 10))
    full = sum(p.numel() for p in net.parameters())
    kept = {
        k: sum(p.numel() for p in n.parameters()) / full
        for k, n in epoch.cut(net, torch.zeros(2, 3, 32, 32), [40, 100])
    }
    assert kept[100] == 1
    assert 0 < kept[40] <= 0.4

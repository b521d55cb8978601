"""Another library's pruner in hgnp's training, and what networks stand, on digits; a stand-in is the library."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hgnp
from hgnp.experiments.overrides import resolve_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import results
import rivals
import robustness

SETTINGS = [
    "model_args.width=4", "data_args.batch=256", "data_args.limit=512", "recipe.warmup_epochs=1", "recipe.finetune_epochs=1",
    "recipe.method=taylor", "recipe.measure=none", "seed=1",
]  # fmt: skip


def remove(net: nn.Module, example: torch.Tensor, round_to: int, count: int) -> None:
    """Instead of the library: removes so many neurons, the first of each layer first."""
    neurons = hgnp.Neurons(net, example)
    neurons.remove(neurons.least({layer.name: torch.arange(layer.alive) for layer in neurons.layers}, count))


def test_a_rivals_networks_are_fine_tuned_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve_config("demo", data=None, method=None, settings=SETTINGS, seed=1, device="cpu")
    monkeypatch.setattr(rivals, "configuration", lambda *given: config)
    monkeypatch.setattr(rivals, "remove", remove)
    given: Any = argparse.Namespace(out=tmp_path / "results" / "cifar10-rivals", data=None, device="cpu", set=[])
    rivals.run([0.8], 1, given)
    rivals.run([0.8], 1, given)
    assert capsys.readouterr().out.splitlines()[-1] == "seed 1: known"
    (entry,) = results.entries(tmp_path / "results")
    (point,) = entry.points
    assert (entry.method, entry.seed, point.asked) == ("torch-pruning", 1, 0.8)
    assert 0.77 < point.kept <= 0.8  # a whole round would leave less
    assert point.macs < entry.full
    assert point.epochs == 3  # warm-up, a round, fine-tuning
    found = robustness.folders(sorted(given.out.iterdir()))
    assert len(found) == 1
    monkeypatch.setattr(robustness, "CUTS", (0.5,))
    monkeypatch.setattr(sys, "argv", ["robustness.py", str(found[0])])
    robustness.main()
    whole = json.loads((found[0] / "robustness.json").read_text())
    assert (whole["method"], whole["kept_asked"], whole["seed"]) == ("torch-pruning", 0.8, 1)
    facts = whole["accuracy"]
    assert list(facts)[:3] == ["clean", "noise 1", "noise 2"]
    assert {"4-bit", "4-bit, recalibrated", "cut to 50%", "cut to 50%, recalibrated"} <= facts.keys()
    assert all(0 <= value <= 1 for value in facts.values())
    assert facts["clean"] == pytest.approx(
        json.loads((found[0] / "result.json").read_text())["after"]["metric"], abs=5e-3
    )
    text, _ = results.page(tmp_path / "results", tmp_path / "results.md", "x")
    assert "| study | network | seeds | clean | noise 1 |" in text
    assert "| cifar10-rivals | demo, torch-pruning, κ 80 % | 1 |" in text


def test_runs_without_weights_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("a", "a/snapshots/0.1", "b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "result.json").touch()
    (tmp_path / "a" / "model.safetensors").touch()
    assert robustness.folders(sorted(tmp_path.iterdir())) == [tmp_path / "a"]
    named = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [str(tmp_path / "a" / "snapshots" / "0.1"), str(tmp_path / "b")]


def test_corruptions_do_what_they_say() -> None:
    x = torch.rand(4, 3, 8, 8, dtype=torch.double) * 255
    torch.testing.assert_close(robustness.contrast(x, 0.4, 255).std(dim=(1, 2, 3)), 0.4 * x.std(dim=(1, 2, 3)))
    flat = torch.full((1, 3, 8, 8), 7.0, dtype=torch.double)
    torch.testing.assert_close(robustness.blur(flat, 1.2, 255), flat)
    spot = torch.zeros(1, 1, 9, 9, dtype=torch.double)
    spot[0, 0, 4, 4] = 1
    blurred = robustness.blur(spot, 0.7, 255)[0, 0]
    assert blurred.sum().item() == pytest.approx(1)
    assert (blurred[4, 5] / blurred[4, 4]).item() == pytest.approx(torch.exp(torch.tensor(-0.5 / 0.49)).item())
    small = robustness.pixelate(x, 0.5, 255)
    torch.testing.assert_close(small[..., ::2, ::2], small[..., 1::2, 1::2])
    torch.testing.assert_close(small[..., ::2, ::2], torch.nn.functional.avg_pool2d(x, 2))
    noisy = robustness.noise(torch.full((64, 3, 8, 8), 128.0), 0.06, 255)
    assert (noisy - 128).std().item() == pytest.approx(0.06 * 255, rel=0.02)
    assert torch.equal(noisy, robustness.noise(torch.full((64, 3, 8, 8), 128.0), 0.06, 255))


def test_four_bits_are_fifteen_levels_per_filter() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 2))
    before = net[0].weight.detach().clone()
    robustness.quantize(net)
    for old, new in zip(before, net[0].weight, strict=True):
        step = old.abs().max() / 7
        assert (new - old).abs().max() <= step / 2 * 1.001
        torch.testing.assert_close(new / step, (new / step).round(), atol=1e-4, rtol=0)

"""A run whose cost is measured is the run that it would be otherwise, in one part or in several."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hgnp
from hgnp.experiments.build import prepare
from hgnp.experiments.models import DigitsNet
from hgnp.experiments.overrides import resolve_config
from hgnp.progress import SilentProgress

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import paper_run

SETTINGS = [
    "model_args.width=4", "data_args.batch=256", "recipe.warmup_epochs=1", "recipe.neurons_per_round=8", "recipe.keep=0.4",
    "recipe.finetune_epochs=1", "recipe.bound=0", "recipe.schedule=constant",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs_of_both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """The folder of an ordinary run, that of one with its costs, stopped after the first epoch, and how often it was called."""
    ordinary, costly = (tmp_path_factory.mktemp("runs") / name for name in ("ordinary", "costly"))
    experiment = prepare(resolve_config("demo", data=None, method=None, settings=SETTINGS, seed=3, device="cpu"))
    experiment.run(out=ordinary, resume=False, progress=SilentProgress())
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = ["demo", "--seed", "3", "--device", "cpu", "--out", str(costly), *settings]
    paper_run.main([*command, "--minutes", "0"])
    assert len(rows(costly)) == 1
    assert not (costly / "result.json").exists()
    paper_run.main(command)
    paper_run.main(command)  # is done, and only tells again
    return ordinary, costly, 2


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_measuring_changes_nothing(runs_of_both: tuple[Path, Path, int]) -> None:
    ordinary, costly, _ = runs_of_both
    first, second = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(each)] for each in (ordinary, costly)
    )
    assert first == second
    nets = [hgnp.load(each, DigitsNet(width=4)).state_dict() for each in (ordinary, costly)]
    torch.testing.assert_close(nets[0], nets[1], rtol=0, atol=0)


def test_the_report_adds_up(runs_of_both: tuple[Path, Path, int]) -> None:
    _, folder, parts = runs_of_both
    report, costs = (json.loads((folder / name).read_text()) for name in ("report.json", "costs.json"))
    result, found = json.loads((folder / "result.json").read_text()), rows(folder)
    assert report["parts"] == result["parts"] == parts
    assert report["epochs"] == len(found)
    assert report["score"] == result["after"]["metric"]
    assert report["kept"] == result["target"]["got"]
    assert len(costs["plain"]) == len({tuple(row["widths"].values()) for row in found}) > 2
    assert sorted(map(int, costs["checkpoints"])) == list(range(len(found)))

    whole, phases = report["training"]["all"], [report["training"][phase] for phase in ("warmup", "prune", "finetune")]
    assert [phase["epochs"] for phase in phases] == [1, len(found) - 2, 1]
    assert whole["seconds"] == pytest.approx(sum(row["train_seconds"] for row in found))
    plain = sum(costs["plain"][",".join(map(str, row["widths"].values()))] for row in found)
    assert whole["ratio"] == pytest.approx(whole["seconds"] / plain)
    assert plain == pytest.approx(sum(phase["plain"] for phase in phases))
    assert whole["active penalty"] == pytest.approx(sum(row["active"] for row in found) / len(found))
    assert sum(report["blocks"].values()) == pytest.approx(1)
    seconds = report["seconds"]
    assert seconds.pop("wall") == pytest.approx(sum(seconds.values()))
    assert seconds["steps"] + seconds["rounds and validation"] == pytest.approx(result["seconds"])
    assert min(seconds.values()) > 0
    assert f"| whole run | {len(found)} |" in (folder / "report.md").read_text()


def test_a_refused_run_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper_run.main(["demo", "--out", str(tmp_path / "a"), "--set", "recipe.kepp=1"])
    assert "recipe: key must be a known one, got 'kepp'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="keep"):
        paper_run.main(["demo", "--device", "cpu", "--out", str(tmp_path / "a"), "--set", "recipe.keep=1e-6"])
    assert not (tmp_path / "a").exists()

"""Fine-tuned snapshots in pages, tables and figures."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hgnp.io.runs import read
from hgnp.reporting import comparison_charts
from hgnp.reporting.compare import compare_runs
from hgnp.reporting.publish import compare, report
from hgnp.reporting.run_charts import SNAPSHOTS, against_kept
from run_cases import START, write_run

pytestmark = pytest.mark.usefixtures("figures_not_rendered")


def with_snapshots(folder: Path, points: dict[float, tuple[float, float | None]], **given: Any) -> Path:
    """A run whose snapshots have asked → (kept, metric)."""
    write_run(folder, snapshots=tuple(points), **given)
    result = json.loads((folder / "result.json").read_text())
    result["snapshots"] = [
        {
            "asked": asked, "got": kept, "kept": kept, "metric": metric, "val_loss": 0.4, "parameters": round(START * kept),
            "neurons": 77, "macs": 4321, "epoch": 7, "epochs": 4, "path": f"snapshots/{asked}",
        }
        for asked, (kept, metric) in points.items()
    ]  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_report_shows_snapshots(tmp_path: Path) -> None:
    folder = with_snapshots(tmp_path / "run", {0.5: (0.42, 0.9125), 0.45: (0.42, 0.9125), 0.2: (0.19, 0.8875)})
    run = read(folder)
    assert run.snapshot_points() == ((0.42, 0.9125), (0.19, 0.8875))
    chart = against_kept(run)
    series = chart.series[1]  # type: ignore[union-attr]
    assert (series.label, series.x, series.y, series.line) == (SNAPSHOTS, (0.42, 0.19), (0.9125, 0.8875), False)
    page = report([folder], tmp_path / "page").read_text(encoding="utf-8")
    assert "<h3>Fine-tuned snapshots</h3>" in page
    for text in ("snapshots/0.45", "<td>91.25</td>", "<td>420,000</td>", "<td>4,321</td>", '"mode": "markers"'):
        assert text in page.replace(' class="number"', ""), text
    with open(tmp_path / "page" / "figures" / "metric_against_kept.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["series"] == SNAPSHOTS]
    assert [float(row["accuracy"]) for row in rows] == [0.9125, 0.8875]
    plain = report([write_run(tmp_path / "plain")], tmp_path / "other").read_text(encoding="utf-8")
    assert "<h3>Fine-tuned snapshots</h3>" not in plain


def test_snapshots_of_seeds_are_means(tmp_path: Path) -> None:
    folders = [
        with_snapshots(tmp_path / "a", {0.5: (0.44, 0.90), 0.2: (0.18, 0.80)}),
        with_snapshots(tmp_path / "b", {0.5: (0.46, 0.94)}, seed=1),
        write_run(tmp_path / "c", seed=2),
        write_run(tmp_path / "t", method="taylor"),
    ]
    experiment = compare(folders, tmp_path / "out").experiments[0]
    ours, taylor = experiment.groups
    assert len(ours.runs) == 3, "runs that differ in their snapshots are repeats of each other"
    assert taylor.snapshots == ()
    large, small = ours.snapshots
    assert (large.asked, large.count, small.asked, small.count) == (0.5, 2, 0.2, 1)
    assert (large.kept, large.mean) == (pytest.approx(0.45), pytest.approx(0.92))
    assert large.spread == pytest.approx(0.04 / 2**0.5)
    assert small.spread is None
    chart = comparison_charts.against_kept(experiment)
    assert chart is not None
    assert chart.series[-1].label == f"hgnp, {SNAPSHOTS}"
    with open(tmp_path / "out" / "snapshots.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], float(row["asked"]), float(row["mean"])) for row in rows] == [
        ("hgnp", 0.5, pytest.approx(0.92)), ("hgnp", 0.2, pytest.approx(0.8)),
    ]  # fmt: skip
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "Fine-tuned snapshots, mean ± standard deviation over seeds" in page
    assert "92.00 ± 2.83" in page
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert stored["experiments"][0]["groups"][0]["snapshots"][1] == {
        "asked": 0.2, "kept": 0.18, "mean": 0.8, "spread": None, "count": 1,
    }  # fmt: skip


def test_snapshots_without_a_metric_are_no_points(tmp_path: Path) -> None:
    run = read(with_snapshots(tmp_path / "run", {0.5: (0.44, None)}, accuracy=None))
    assert run.snapshot_points() == ()
    assert compare_runs([run]).experiments[0].groups[0].snapshots == ()


@pytest.mark.parametrize("rows", [{}, [3], [{"asked": 0.5, "kept": "x", "metric": 1.0}], [{"asked": 0.5, "kept": 0.4}]])
def test_a_damaged_result_is_refused(tmp_path: Path, rows: Any) -> None:
    folder = write_run(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"snapshots": rows or {"a": 1}}))
    with pytest.raises(ValueError, match=r"result.json: .* the file is damaged"):
        read(folder)

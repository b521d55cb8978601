"""The page of results: its statistics against closed forms and scipy, and what it says of runs that are there or missing."""

import json
import math
import sys
from pathlib import Path

import pytest
from scipy import stats

from run_cases import write_run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import results


def test_a_paired_interval_is_that_of_the_t_test() -> None:
    ours, others = {0: 0.935, 1: 0.941, 2: 0.938, 7: 0.5}, {0: 0.93, 1: 0.932, 2: 0.935, 9: 0.1}
    found = results.paired(ours, others)
    assert found is not None
    test = stats.ttest_rel([0.935, 0.941, 0.938], [0.93, 0.932, 0.935])
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(test.pvalue)
    # 0.005, 0.009, 0.003: s = 0.00305505, t(0.975, 2) = 4.302653
    assert found.high - found.mean == pytest.approx(4.302653 * 0.00305505 / math.sqrt(3), rel=1e-5)
    assert results.paired({0: 0.9}, {0: 0.8}) is None
    assert results.t_interval([0.1, 0.1]) == results.Interval(0.1, 0.1, 0.1, 0.0)


def test_holm_steps_down_and_never_decreases() -> None:
    # statsmodels.stats.multitest.multipletests([0.01, 0.04, 0.03, 0.005], method="holm")
    assert results.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert results.holm([0.02, math.nan, math.nan]) == pytest.approx([0.06, 1.0, 1.0])
    assert results.holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_method_beats_a_number_only_with_the_test_error_included() -> None:
    values = [0.9400, 0.9401, 0.9399]
    found = results.with_test_error(values)
    assert found is not None
    seeds = 4.302653 * 0.0001 / math.sqrt(3)
    assert found.high - found.mean == pytest.approx(
        math.hypot(seeds, 1.959964 * math.sqrt(0.94 * 0.06 / 10_000)), rel=1e-4
    )
    assert results.verdict(values, 0.9340) == "beats it"
    assert results.verdict(values, 0.9360) == "undecided"  # beyond the seeds' own interval
    assert results.verdict(values, 0.9460) == "is below it"
    assert results.verdict([0.94], 0.5) == "too few seeds"


def test_accuracy_at_equal_macs_lies_between_a_methods_own_networks() -> None:
    points = [results.Point(0.1, 0.1, 100, 400, 0.94, 9), results.Point(0.05, 0.05, 50, 100, 0.90, 9)]
    assert results.at_macs(points, 200) == pytest.approx(0.92)  # halfway in the logarithm
    assert results.at_macs(points, 100) == pytest.approx(0.90)
    assert results.at_macs(points, 99) is None


def test_the_page_has_each_seed_and_names_what_is_missing(tmp_path: Path) -> None:
    best = tmp_path / "results" / "cifar10-best"
    for seed in range(3):
        write_run(best / f"vgg-{seed}", name=results.VGG, method="taylor", seed=seed, keep=0.05,
                  accuracy=lambda kept, seed=seed: 0.94 + 0.001 * seed)  # fmt: skip
        write_run(best / f"narrow-{seed}", name=f"{results.VGG}-narrow", method="taylor", seed=seed, keep=1.0,
                  accuracy=lambda kept, seed=seed: 0.93 + 0.0005 * seed)  # fmt: skip
    rival = write_run(tmp_path / "results" / "cifar10-rivals" / "torch", name=results.VGG, method="taylor", keep=1.0)
    (rival / "rival.json").write_text(
        json.dumps(
            {"method": "torch-pruning", "asked": 0.05, "full_macs": 10**9, "full_parameters": 2 * 10**7, "epochs": 27}
        )
    )
    text, drawn = results.page(tmp_path / "results", tmp_path / "results.md", "python benchmarks/results.py")
    assert "| primary: VGG-16 pruned to κ 5 % over a uniformly narrowed one | +1.05 | +0.93 to +1.17 |" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {results.VGG}, taylor, κ 5 %"))
    assert "| 0, 1, 2 | 94.00, 94.10, 94.20 | 94.10 | 0.10 | 5.00 | 50,000 | 1.5 M | 5.0 | 16 |" in row
    otov2 = next(line for line in text.splitlines() if line.startswith("| OTOv2 | VGG-16-BN | mixup | scratch | 300"))
    assert otov2.endswith("| 93.27 | beats it |")
    assert f"{results.VGG}: 94.10 %, 95 % interval 93.58 to 94.62 %, the test set's error included." in text
    assert "| ResNet-18 pruned to κ 5 % over a uniformly narrowed one | not run, or fewer than two seeds" in text
    assert f"| {results.VGG}, torch-pruning, κ 5 % | 0 |" in text
    assert "| 43 |" in text  # 16 epochs after the 27 of the other library's rounds
    assert "Not run yet: `python benchmarks/robustness.py" in text
    others = ["vgg16-cifar10-best-dense", *(f"resnet18-cifar10-best{kind}" for kind in ("", "-dense", "-narrow"))]
    assert (
        f"Not run yet: {'; '.join(f'{name}, taylor (seed 0, 1, 2)' for name in others)}. `hgnp study cifar10-best"
        in text
    )
    assert {series.label for series in drawn[0].series} >= {"VGG-16, others", "ResNet-18, others"}


def test_rounds_and_validation_have_the_time_that_training_steps_leave(tmp_path: Path) -> None:
    for seed, share in enumerate((0.75, 0.9)):
        folder = write_run(
            tmp_path / "results" / "cifar10-best" / f"{seed}", name=results.VGG, method="taylor", seed=seed
        )
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"seconds": 2.0 + row["epoch"], "train_seconds": share * (2.0 + row["epoch"])} for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, _ = results.page(tmp_path / "results", tmp_path / "results.md", "python benchmarks/results.py")
    assert f"| cifar10-best | {results.VGG}, taylor | 2 | 10.0–25.0 |" in text


def test_runs_from_before_a_preset_changed_keep_their_row_and_enter_no_comparison(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "results" / "cifar10-best-no-cutout" / f"vgg-{seed}", name=results.VGG, method="taylor", seed=seed,
                  keep=0.05, accuracy=lambda kept, seed=seed: 0.94 + 0.001 * seed)  # fmt: skip
    text, drawn = results.page(tmp_path / "results", tmp_path / "results.md", "python benchmarks/results.py")
    own = text.split("## Our recipes")[1].split("## ")[0]
    assert f"| {results.VGG} (without cutout), taylor, κ 5 % | 0, 1 | 94.00, 94.10 |" in own
    assert "Not run yet: `hgnp study cifar10-best" in own
    assert "## The paper's schedule" not in text
    otov2 = next(line for line in text.splitlines() if line.startswith("| OTOv2 | VGG-16-BN | mixup | scratch | 300"))
    assert otov2.endswith("| 93.27 | not run |")
    assert "vgg16-best (without cutout), taylor" in {series.label for series in drawn[0].series}


def test_runs_on_other_data_are_left_out_and_two_runs_of_one_seed_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "results"
    flowers = write_run(root / "paper" / "flowers", name="alexnet", method="hgnp", keep=0.05)
    (flowers / "config.yaml").write_text("data: flowers102\n")
    assert results.entries(root) == []
    for ablation in ("a", "b"):
        write_run(root / "paper" / ablation, name=results.VGG, method="hgnp", keep=0.05)
    with pytest.raises(ValueError, match=r"two runs of paper, vgg16-cifar10-best, hgnp, 0\.05 have seed 0"):
        results.grouped(results.entries(root))


def test_robustness_of_one_method_in_two_studies_has_two_rows(tmp_path: Path) -> None:
    places = {"cifar10-best/a": 0.9, "cifar10-rivals/a": 0.8, "cifar10-rivals/b/snapshots/0.05": 0.6}
    for place, clean in places.items():
        facts = {"network": results.VGG, "method": "taylor", "kept_asked": 0.05, "accuracy": {"clean": clean}}
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "robustness.json").write_text(json.dumps(facts))
    text, _ = results.page(tmp_path, tmp_path / "results.md", "")
    assert f"| cifar10-best | {results.VGG}, taylor, κ 5 % | 1 | 90.0 |" in text
    assert f"| cifar10-rivals | {results.VGG}, taylor, κ 5 % | 2 | 70.0 |" in text


def test_a_narrowed_network_has_the_share_of_the_network_that_was_narrowed(tmp_path: Path) -> None:
    best = tmp_path / "cifar10-best"
    write_run(best / "vgg", name=results.VGG, method="taylor", keep=0.05)
    narrow = write_run(best / "narrow", name=f"{results.VGG}-narrow", method="taylor", keep=1.0)
    for file, key in (("run.json", "at_start"), ("result.json", "after")):
        facts = json.loads((narrow / file).read_text())
        facts[key] |= {"macs": 6_000_000, "parameters": 200_000}
        (narrow / file).write_text(json.dumps(facts))
    text, drawn = results.page(tmp_path, tmp_path / "results.md", "")
    assert next(line for line in text.splitlines() if line.startswith(f"| {results.VGG}-narrow, taylor")).endswith(
        "| 20.00 | 200,000 | 6.0 M | 20.0 | 16 |"
    )
    shown = [next(each for each in chart.series if each.label == "vgg16-best-narrow, taylor") for chart in drawn]
    assert [list(each.x) for each in shown] == [[0.2], [0.2]]


def test_one_method_in_two_studies_has_two_lines_in_the_figures(tmp_path: Path) -> None:
    for study in ("cifar10-best", "cifar10-rivals"):
        write_run(tmp_path / study / "vgg", name=results.VGG, method="taylor", keep=0.05)
    _, drawn = results.page(tmp_path, tmp_path / "results.md", "")
    lines = {each.label: len(each.x) for each in drawn[0].series if "others" not in each.label}
    assert lines == {"vgg16-best, taylor": 1, "vgg16-best (one schedule), taylor": 1}


def test_trainings_of_the_penalty_s_diagnostics_are_not_among_the_results(tmp_path: Path) -> None:
    for variant in ("a", "b"):
        write_run(tmp_path / "flatness_penalty_small" / variant, name=results.VGG, method="hgnp", keep=1.0)
    assert results.entries(tmp_path) == []
    assert results._time_beside_steps(tmp_path) == []


@pytest.mark.parametrize(("place", "holdout"), [("cifar10-best", 5000), ("holdout", 0)])
def test_accuracies_on_other_images_than_the_page_says_are_refused(tmp_path: Path, place: str, holdout: int) -> None:
    folder = write_run(tmp_path / place / "vgg", name=results.VGG, method="taylor", keep=0.05)
    (folder / "config.yaml").write_text(f"data: cifar10\ndata_args: {{holdout: {holdout}}}\n")
    with pytest.raises(
        ValueError, match=f"vgg must lie in a folder named holdout if and only if .* got holdout={holdout}"
    ):
        results.entries(tmp_path)


def test_held_out_accuracies_are_not_among_those_of_the_test_set(tmp_path: Path) -> None:
    for setting in ("long", "short"):
        write_run(tmp_path / "results" / "holdout" / setting, name=results.VGG, method="taylor", keep=0.05)
    text, drawn = results.page(tmp_path / "results", tmp_path / "results.md", "python benchmarks/results.py")
    before, after = text.split("## Choices between settings")
    for setting in ("long", "short"):
        assert f"| {results.VGG} ({setting}), taylor, κ 5 % |" in after
        assert f"({setting})" not in before
    assert {series.label for series in drawn[0].series} == {"VGG-16, others", "ResNet-18, others"}


def test_the_penalty_s_records_become_paired_ratios(tmp_path: Path) -> None:
    def run(metric: float, training: float, evaluation: float) -> dict[str, float]:
        return {"metric": metric, "training": training, "evaluation": evaluation}

    facts = {
        "a": {}, "d": {"mu=0": 2.0, "sam": 4.0, "network-0.03-every-4": 3.0},
        "c mu=0 0": run(0.90, 4.0, 50.0), "c mu=0 1": run(0.92, 8.0, 50.0),
        "c network-0.03-every-4 0": run(0.91, 2.0, 40.0), "c network-0.03-every-4 1": run(0.92, 4.0, 40.0),
        "c sam 0": run(0.90, 2.0, 25.0),
    }  # fmt: skip
    file = tmp_path / "flatness_penalty" / "records.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({name: value}) + "\n" for name, value in facts.items()))
    page, _ = results.page(tmp_path, tmp_path / "results.md", "")
    # t(0.975, 1) = 12.7062; differences of 1 and 0 points: half-width 12.7062 * 0.7071 / sqrt(2)
    assert (
        "| network-0.03-every-4 | 2 | 0.50 (0.50 to 0.50) | 0.80 (0.80 to 0.80) | +0.50 (-5.85 to +6.85) | 1.50 | 0.75 |"
        in page
    )
    assert "| sam | 1 | 0.50 | 0.50 | – | 2.00 | 1.00 |" in page

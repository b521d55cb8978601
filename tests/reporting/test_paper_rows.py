"""The paper's rows with numbers from runs whose curves are straight lines, computed by hand."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

from hgnp.reporting.paper import verdict
from hgnp.reporting.paper.report import conclusion, paper_report
from hgnp.reporting.paper.results import scan
from hgnp.reporting.paper.rows import PaperRow
from hgnp.reporting.paper.verdict import Measured
from paper_cases import write_bench, write_paper_run


def rows(folder: Path, section: str, what: str) -> list[PaperRow]:
    return [row for row in paper_report(scan(folder)).rows if row.claim.section == section and what in row.claim.what]


def row(folder: Path, section: str, what: str, experiment: str = "AlexNet / Flowers-102") -> PaperRow:
    (found,) = [each for each in rows(folder, section, what) if each.claim.experiment.title == experiment]
    return found


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """HGNP 80 % at every κ, Taylor from 80 % at κ = 1 down to 67 % at 0.35, on a line."""
    write_paper_run(tmp_path / "h", "alexnet-flowers", accuracy=lambda k: 0.8)
    write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor", accuracy=lambda k: 0.6 + 0.2 * k)
    return tmp_path


def test_accuracies_and_gaps_are_those_of_the_curves(lines: Path) -> None:
    found = row(lines, "accuracy", "Taylor's accuracy at κ = 50 %")
    assert found.ours == pytest.approx(70.0)
    assert found.text == "70.00 %, on the curve"
    assert found.verdict == verdict.Verdict("undecided", "one seed")
    found = row(lines, "accuracy", "HGNP's accuracy at κ = 35 %")
    assert found.text == "80.00 %, fine-tuned"
    found = row(lines, "accuracy", "HGNP over Taylor at κ = 35 %")
    assert found.ours == pytest.approx(100 * (0.8 / 0.67 - 1))
    assert found.verdict == verdict.Verdict("undecided", "one seed")
    found = row(lines, "accuracy", "around κ = 91 %")
    assert found.ours == pytest.approx(100)
    assert found.verdict == verdict.Verdict("undecided", "one seed")


def test_a_curve_that_is_ahead_everywhere_agrees_and_one_that_is_behind_somewhere_differs(tmp_path: Path) -> None:
    for seed in range(2):
        write_paper_run(tmp_path / f"h{seed}", "alexnet-flowers", seed=seed, accuracy=lambda k: 1.1 * k)
        write_paper_run(tmp_path / f"t{seed}", "alexnet-flowers", method="taylor", seed=seed, accuracy=lambda k: k)
    assert row(tmp_path, "accuracy", "around κ = 91 %").verdict.word == "agrees"
    for seed in range(2):
        shutil.rmtree(tmp_path / f"h{seed}")
        shutil.rmtree(tmp_path / f"t{seed}")
        write_paper_run(tmp_path / f"h{seed}", "alexnet-flowers", seed=seed, accuracy=lambda k: 0.8)
        write_paper_run(
            tmp_path / f"t{seed}", "alexnet-flowers", method="taylor", seed=seed, accuracy=lambda k: 0.6 + 0.4 * k
        )
    found = row(tmp_path, "accuracy", "around κ = 91 %")
    assert found.ours == pytest.approx(100 * (0.5 - 0.35) / (0.91 - 0.35))
    assert found.verdict.word == "differs"
    assert "crossings: 50.0 %" in found.text


def test_methods_on_networks_of_other_sizes_are_not_compared(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers")
    taylor = write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor")
    info = json.loads((taylor / "run.json").read_text())
    info["features"]["parameters"] //= 2
    (taylor / "run.json").write_text(json.dumps(info))
    assert row(tmp_path, "areas", "HGNP over Taylor").ours is None


def test_areas_and_the_hybrid_are_integrals(lines: Path) -> None:
    def taylor(low: float, high: float) -> float:
        return 0.6 * (high - low) + 0.1 * (high**2 - low**2)

    area = taylor(0.35, 1)
    found = row(lines, "areas", "HGNP over Taylor")
    assert found.ours == pytest.approx(100 * (0.8 * 0.65 / area - 1))
    assert found.verdict == verdict.Verdict("undecided", "one seed")
    found = row(lines, "areas", "at the paper's threshold κ = 91 %")
    assert found.ours == pytest.approx(100 * ((0.8 * (0.91 - 0.35) + taylor(0.91, 1)) / area - 1))
    threshold = row(lines, "areas", "hybrid's threshold κ")
    assert threshold.ours == pytest.approx(44.8, abs=0.05)  # from the other three alone
    assert threshold.verdict.word == ""
    found = row(lines, "areas", "fitted on the paper's other experiments")
    assert threshold.ours is not None
    cut = threshold.ours / 100
    assert found.ours == pytest.approx(100 * ((0.8 * (cut - 0.35) + taylor(cut, 1)) / area - 1))


def test_the_threshold_of_runs_on_other_data_is_not_fitted_on_their_own_experiment(tmp_path: Path) -> None:
    for method in ("hgnp", "taylor"):
        folder = write_paper_run(tmp_path / method, "vgg16-cifar10", method=method, changes=["data_args.holdout=5000"])
        info = json.loads((folder / "run.json").read_text())
        info["features"] |= {"train_samples": 45_000, "val_samples": 5000}
        (folder / "run.json").write_text(json.dumps(info))
    threshold = row(tmp_path, "areas", "hybrid's threshold κ", "VGG-16 / CIFAR-10")
    assert threshold.ours == pytest.approx(75.6, abs=0.05)  # the mean of the other three, as the Lasso selects nothing


@pytest.mark.parametrize("change", ["data_args.holdout=5000", "model_args.width=0.42"])
def test_methods_on_other_data_or_networks_are_not_compared(change: str, tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "resnet18-cifar10")
    taylor = write_paper_run(tmp_path / "t", "resnet18-cifar10", method="taylor", changes=[change])
    info = json.loads((taylor / "run.json").read_text())
    info["features"] |= (
        {"parameters": 2_000_000} if "width" in change else {"train_samples": 45_000, "val_samples": 5000}
    )
    (taylor / "run.json").write_text(json.dumps(info))
    assert row(tmp_path, "areas", "HGNP over Taylor", "ResNet-18 / CIFAR-10").verdict.word == "not run"
    assert row(tmp_path, "training", "Taylor, to κ", "ResNet-18 / CIFAR-10").ours is not None


def test_seeds_give_a_standard_deviation_and_decide(tmp_path: Path) -> None:
    for seed, off in enumerate((-0.01, 0.0, 0.01)):
        write_paper_run(tmp_path / f"h{seed}", "alexnet-flowers", seed=seed, accuracy=lambda k, o=off: 0.785 + o)
        write_paper_run(
            tmp_path / f"t{seed}",
            "alexnet-flowers",
            method="taylor",
            seed=seed,
            accuracy=lambda k: 0.785 * (1 + 0.0092),
        )
    found = row(tmp_path, "accuracy", "HGNP's accuracy at κ = 50 %")
    assert (found.ours, found.spread) == (pytest.approx(78.5), pytest.approx(1.0))
    assert found.verdict.word == "agrees"  # 78.9
    found = row(tmp_path, "accuracy", "HGNP's accuracy at κ = 35 %")
    assert found.verdict == verdict.Verdict("differs", "3.0 standard deviations apart")  # 75.5
    found = row(tmp_path, "areas", "HGNP over Taylor")
    assert found.ours == pytest.approx(100 * (1 / 1.0092 - 1))
    assert found.spread == pytest.approx(100 * 0.01 / (0.785 * 1.0092))
    assert found.verdict == verdict.Verdict("undecided", "smaller than its standard deviation")


def test_unfinished_runs_leave_verdicts_undecided(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers", epochs=9)
    write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor")
    found = row(tmp_path, "areas", "HGNP over Taylor")
    assert found.verdict == verdict.Verdict("undecided", "unfinished")
    assert "unfinished" in found.runs
    assert row(tmp_path, "training", "HGNP, to κ = 35.1 %").verdict.word == "not run"


def test_fine_tuned_snapshots_are_preferred_to_the_curve(tmp_path: Path) -> None:
    write_paper_run(
        tmp_path / "h", "vgg16-cifar10", accuracy=lambda k: 0.5, snapshots=[(0.3, 0.29, 0.94), (0.1, 0.098, 0.915)]
    )
    vgg = "VGG-16 / CIFAR-10"
    found = row(tmp_path, "accuracy", "HGNP's accuracy at κ = 10 %", vgg)
    assert found.text == "91.50 %, fine-tuned"
    found = row(tmp_path, "equal", "fine-tuned", vgg)
    assert found.ours == pytest.approx(100 * (0.098 + (0.29 - 0.098) * (0.92 - 0.915) / (0.94 - 0.915)))
    assert found.verdict == verdict.Verdict("undecided", "one seed")
    found = row(tmp_path, "equal", "on the curve", vgg)
    assert (found.text, found.verdict) == ("at no κ", verdict.ONE_SEED)
    write_paper_run(tmp_path / "h1", "vgg16-cifar10", seed=1, accuracy=lambda k: 0.5)
    found = row(tmp_path, "equal", "on the curve", vgg)
    assert (found.text, found.verdict.word) == ("at no κ", "differs")


def test_a_difference_of_fine_tuned_networks_is_preferred_to_that_of_the_curves(tmp_path: Path) -> None:
    """Of the networks whose accuracies the page states, by seed."""
    for seed, (ours, theirs) in enumerate([(0.92, 0.90), (0.88, 0.88)]):
        write_paper_run(
            tmp_path / f"h{seed}", "vgg16-cifar10", seed=seed, accuracy=lambda k: 0.5, snapshots=[(0.05, 0.0499, ours)]
        )
        write_paper_run(
            tmp_path / f"t{seed}", "vgg16-cifar10", method="taylor", seed=seed, accuracy=lambda k: 0.5,
            changes=["recipe.finetune_epochs=20"], snapshots=[(0.05, 0.0498, theirs)],
        )  # fmt: skip
    found = row(tmp_path, "accuracy", "HGNP over Taylor at κ = 5 %", "VGG-16 / CIFAR-10")
    each = [100 * (0.92 / 0.90 - 1), 0.0]
    assert (found.ours, found.spread) == (pytest.approx(100 * (0.90 / 0.89 - 1)), pytest.approx(statistics.stdev(each)))
    assert found.text.endswith("%, fine-tuned")
    (tmp_path / "t0" / "result.json").unlink()  # Taylor's other seed alone
    shutil.rmtree(tmp_path / "t1")
    found = row(tmp_path, "accuracy", "HGNP over Taylor at κ = 5 %", "VGG-16 / CIFAR-10")
    assert found.text == "+0.00 %, on the curve"


def test_a_smaller_network_that_is_good_enough_differs_for_the_better(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "vgg16-cifar10", accuracy=lambda k: 0.93)
    found = row(tmp_path, "equal", "on the curve", "VGG-16 / CIFAR-10")
    assert found.text == "at most 4.50 %, where the runs end"
    assert found.verdict == verdict.Verdict("differs", "at a smaller κ")


def test_ablations_are_compared_with_full_hgnp_below_58_percent(tmp_path: Path) -> None:
    parts = {
        "": lambda k: 0.8, "-no-training-penalty": lambda k: 0.7, "-no-scoring-penalty": lambda k: 0.8 + (0.5 - k) / 10,
    }  # fmt: skip
    for name, accuracy in parts.items():
        for seed in range(2):
            folder = tmp_path / f"run{name}-{seed}"
            write_paper_run(folder, "alexnet-flowers", of=f"alexnet-flowers{name}", seed=seed, accuracy=accuracy)
    assert row(tmp_path, "ablation", "no training penalty").verdict.word == "agrees"
    found = row(tmp_path, "ablation", "no scoring penalty")
    assert found.ours == pytest.approx(100 * (0.58 - 0.5) / (0.58 - 0.35))
    assert found.verdict.word == "differs"


def test_an_ablation_of_another_penalty_is_not_compared(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers")
    write_paper_run(tmp_path / "a", "alexnet-flowers", of="alexnet-flowers-no-training-penalty-fast")
    assert row(tmp_path, "ablation", "no training penalty").verdict.word == "not run"


def test_an_ablation_names_the_deviations_of_both_and_needs_the_same_data(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers")
    for name, start, samples in (("training", "random weights", 2040), ("scoring", None, 1000)):
        folder = write_paper_run(
            tmp_path / name, "alexnet-flowers", of=f"alexnet-flowers-no-{name}-penalty", start=start
        )
        info = json.loads((folder / "run.json").read_text())
        info["features"]["train_samples"] = samples
        (folder / "run.json").write_text(json.dumps(info))
    found = row(tmp_path, "ablation", "no training penalty")
    assert found.deviations == ("NVIDIA H200", "HGNP with the penalty in scores only: random start")
    assert row(tmp_path, "ablation", "no scoring penalty").verdict.word == "not run"


def test_a_ratio_of_times_names_the_deviations_of_both_methods(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "resnet18-birds")
    write_paper_run(tmp_path / "t", "resnet18-birds", method="taylor", own_schedule=False)
    other = write_paper_run(tmp_path / "u", "resnet18-birds", method="taylor", own_schedule=False, seed=1, device="cpu")
    found = row(tmp_path, "training", "HGNP's time / Taylor's", "ResNet-18 / Birds")
    assert found.deviations == ("NVIDIA H200", "Taylor: learning rate 0.001")
    shutil.rmtree(tmp_path / "t")
    info = json.loads((other / "run.json").read_text())
    info |= {"device": "NVIDIA H200", "features": info["features"] | {"train_samples": 1000}}
    (other / "run.json").write_text(json.dumps(info))
    assert rows(tmp_path, "training", "HGNP's time / Taylor's") == []


def test_training_times_name_the_hardware_and_are_not_judged(tmp_path: Path) -> None:
    hgnp = write_paper_run(tmp_path / "h", "alexnet-flowers", train_seconds=30.0)
    write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor", train_seconds=12.0)
    lines = [json.loads(line) for line in (hgnp / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["seconds"] for line in lines)
    found = row(tmp_path, "training", "HGNP, to κ = 35.1 %")
    assert found.claim.text == "57.3 h on 1 × Tesla K80"
    assert found.ours == pytest.approx(seconds / 3600)
    assert found.text == f"{seconds:,.0f} s (2 min {seconds - 120:02.0f} s) on NVIDIA H200; 16 epochs to κ = 35.0 %"
    assert found.verdict.word == ""
    found = row(tmp_path, "training", "HGNP's time / Taylor's")
    assert found.claim.paper == pytest.approx(57.3 / 3.8)
    assert (found.ours, found.verdict.word) == (pytest.approx(1.0), "differs")
    assert row(tmp_path, "training", "HGNP's step / plain step").ours == pytest.approx(2.5)


def test_times_on_different_hardware_are_not_divided(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers")
    write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor", device="cpu")
    assert rows(tmp_path, "training", "HGNP's time / Taylor's") == []


def test_times_of_the_seeds_on_the_same_hardware_are_divided(tmp_path: Path) -> None:
    for seed, device in enumerate(["NVIDIA H200", "cpu"]):
        write_paper_run(tmp_path / f"t{seed}", "alexnet-flowers", method="taylor", device=device, seed=seed)
    write_paper_run(tmp_path / "h", "alexnet-flowers", train_seconds=30.0)
    found = row(tmp_path, "training", "HGNP's step / plain step")
    assert found.ours == pytest.approx(3.0)
    assert found.runs.endswith("(1 seed)")


def test_only_methods_that_are_missing_are_to_be_run(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers")
    commands = {each.command for each in rows(tmp_path, "areas", "") if each.claim.experiment.key == "alexnet-flowers"}
    assert commands == {"hgnp study alexnet-flowers --data DIR --methods taylor --set weights=FILE.safetensors"}
    commands = {each.command for each in rows(tmp_path, "areas", "") if each.claim.experiment.key == "vgg16-cifar10"}
    assert commands == {"hgnp study vgg16-cifar10 --data DIR"}


def test_inference_is_matched_by_network_device_and_kept(tmp_path: Path) -> None:
    times = {
        ("full", 1.0): 30.0,
        ("weight-pruned", 0.045): 33.0,
        ("neuron-pruned", 0.0448): 10.0,
        ("neuron-pruned", 0.2): 1.0,
    }
    write_bench(tmp_path / "bench.json", "resnet18-cifar10", times)
    write_bench(tmp_path / "bench-old.json", "resnet18-cifar10", {("full", 1.0): 99.0}, date="2026-01-01")
    write_bench(tmp_path / "bench-small.json", "resnet18-cifar10", {("full", 1.0): 7.0}, device="cpu", batch=16)
    r18 = "ResNet-18 / CIFAR-10"
    found = row(tmp_path, "inference", "full, κ = 100 %, GPU", r18)
    assert (found.claim.paper, found.ours) == (192, 30.0)
    found = row(tmp_path, "inference", "neuron-pruned, κ = 4.5 %, GPU", r18)
    assert (found.ours, found.text) == (10.0, "10 ms on NVIDIA H200")
    found = row(tmp_path, "inference", "full, κ = 100 %, CPU", r18)
    assert (found.ours, found.deviations) == (7.0, ("Some CPU", "batch 16"))
    found = row(tmp_path, "inference", "time of weight-pruned at κ = 4.5 % / of neuron-pruned at κ = 4.5 %, GPU", r18)
    assert (found.claim.paper, found.ours) == (pytest.approx(206 / 90), pytest.approx(3.3))
    assert found.verdict.word == "agrees in direction"
    found = row(tmp_path, "inference", "neuron-pruned, κ = 30.4 %, GPU, batch 5,000")
    assert found.verdict.word == "not run"
    assert found.command == "hgnp bench RUN --keep 0.304 --device cuda --batch 5000"


def test_times_name_threads_and_how_the_network_was_made(tmp_path: Path) -> None:
    times = {("full", 1.0): 40.0, ("neuron-pruned", 0.045): 20.0}
    file = write_bench(tmp_path / "bench.json", "vgg16-cifar10", times, device="cpu", batch=128)
    content = json.loads(file.read_text()) | {"threads": 16}
    content["rows"][1]["note"] = "random weights"
    file.write_text(json.dumps(content))
    found = row(tmp_path, "inference", "full, κ = 100 %, CPU", "VGG-16 / CIFAR-10")
    assert found.deviations == ("Some CPU, 16 threads",)
    found = row(tmp_path, "inference", "neuron-pruned, κ = 4.5 %, CPU", "VGG-16 / CIFAR-10")
    assert found.deviations == ("Some CPU, 16 threads", "random weights")


def test_the_spread_between_points_is_that_of_the_interpolated_curves(tmp_path: Path) -> None:
    """Two curves that cross between their points: 70 and 90 % at one, 90 and 70 % at the next, so 80 % each in the middle."""
    for seed, (low, high) in enumerate([(0.7, 0.9), (0.9, 0.7)]):
        folder = write_paper_run(tmp_path / f"{seed}", "vgg16-cifar10", seed=seed)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        changed = [line | {"metric": low if line["kept"] < 0.1 else high} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    kept = sorted({line["kept"] for line in lines})
    below, above = max(k for k in kept if k < 0.1), min(k for k in kept if k > 0.1)
    share = (0.1 - below) / (above - below)
    values = [100 * (low + share * (high - low)) for low, high in [(0.7, 0.9), (0.9, 0.7)]]
    found = row(tmp_path, "accuracy", "HGNP's accuracy at κ = 10 %", "VGG-16 / CIFAR-10")
    assert found.spread == pytest.approx(statistics.stdev(values))


def test_a_speedup_takes_both_times_from_one_file_and_names_another_kept(tmp_path: Path) -> None:
    times = {("full", 1.0): 40.0, ("weight-pruned", 0.03): 44.0, ("neuron-pruned", 0.134): 20.0}
    write_bench(tmp_path / "a" / "bench.json", "vgg16-cifar10", {("full", 1.0): 30.0, ("neuron-pruned", 0.045): 10.0})
    write_bench(tmp_path / "b" / "bench.json", "vgg16-cifar10", times, date="2026-11-17T12:00:00+00:00")
    vgg = "VGG-16 / CIFAR-10"
    assert row(tmp_path, "inference", "time of full / of neuron-pruned at κ = 4.5 %, GPU", vgg).ours == pytest.approx(
        3.0
    )
    found = row(tmp_path, "equal", "neuron-pruned, κ = 14.4 %, GPU", vgg)
    assert (found.ours, found.deviations) == (20.0, ("NVIDIA H200", "κ = 13.40 %"))


def test_a_slower_network_differs(tmp_path: Path) -> None:
    write_bench(
        tmp_path / "bench.json", "alexnet-flowers", {("full", 1.0): 9.0, ("neuron-pruned", 0.304): 10.0}, batch=5000
    )
    found = row(tmp_path, "inference", "time of full / of neuron-pruned at κ = 30.4 %, GPU")
    assert (found.ours, found.verdict.word) == (pytest.approx(0.9), "differs")


def test_runs_without_epochs_or_validation_data_give_no_rows(tmp_path: Path) -> None:
    """As when metrics.jsonl was not copied along."""
    (write_paper_run(tmp_path / "h", "vgg16-cifar10") / "metrics.jsonl").unlink()
    blind = write_paper_run(tmp_path / "t", "vgg16-cifar10", method="taylor")
    lines = [json.loads(line) | {"metric": None} for line in (blind / "metrics.jsonl").read_text().splitlines()]
    (blind / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = {each.verdict.word for each in paper_report(scan(tmp_path)).rows if each.claim.section != "training"}
    assert judged == {"not run"}
    assert row(tmp_path, "training", "HGNP, to κ", "VGG-16 / CIFAR-10").verdict.word == "not run"
    assert row(tmp_path, "training", "Taylor, to κ", "VGG-16 / CIFAR-10").ours is not None


@pytest.mark.parametrize(
    ("told", "word"),
    [
        (verdict.value(1.0, Measured(1.4, 0.5)), "agrees"),
        (verdict.value(1.0, Measured(1.6, 0.5)), "differs"),
        (verdict.value(1.0, Measured(1.0)), "undecided"),
        (verdict.value(1.0, Measured(2.0, 0.0)), "differs"),
        (verdict.signed(-0.3, Measured(0.1, 0.5)), "agrees"),
        (verdict.signed(5.0, Measured(0.1, 0.5)), "undecided"),
        (verdict.signed(5.0, Measured(0.1, 0.05)), "agrees in direction"),
        (verdict.signed(5.0, Measured(-0.1, 0.05)), "differs"),
        (verdict.signed(5.0, Measured(4.9)), "undecided"),
        (verdict.bound(8.0, Measured(8.1, 0.5)), "agrees"),
        (verdict.bound(8.0, Measured(7.9, 0.5)), "differs"),
        (verdict.bound(8.0, Measured(8.1)), "undecided"),
        (verdict.ratio(0.9, 0.5), "agrees in direction"),
        (verdict.ratio(1.1, 0.5), "differs"),
        (verdict.ahead(1.0, 2), "agrees"),
        (verdict.ahead(0.99, 2), "differs"),
        (verdict.ahead(1.0, 1), "undecided"),
    ],
)
def test_verdicts_follow_the_rule(told: verdict.Verdict, word: str) -> None:
    assert told.word == word


def test_a_conclusion_is_that_of_the_nearest_group_that_decides(tmp_path: Path) -> None:
    """One literal seed leaves a number undecided; three seeds of the fast preset decide it."""
    write_paper_run(tmp_path / "literal", "vgg16-cifar10", accuracy=lambda k: 0.5)

    def concluded() -> PaperRow:
        (found,) = [each for each in paper_report(scan(tmp_path)).concluding if "HGNP's accuracy" in each.claim.what and
                    each.claim.experiment.key == "vgg16-cifar10"]  # fmt: skip
        return found

    assert concluded().ours == pytest.approx(50)
    assert concluded().verdict.word == "undecided"
    for seed in range(3):
        write_paper_run(
            tmp_path / f"fast{seed}", "vgg16-cifar10", of="vgg16-cifar10-fast", seed=seed,
            accuracy=lambda k, seed=seed: 0.8 + 0.01 * seed,
        )  # fmt: skip
    found = concluded()
    assert (found.ours, found.verdict.word) == (pytest.approx(81), "differs")
    assert conclusion(found).endswith("Runs: HGNP, fast penalty (3 seeds).")
    counted = paper_report(scan(tmp_path)).counts["accuracy"]
    assert counted["differs"] == sum(each.verdict.word == "differs" for each in paper_report(scan(tmp_path)).concluding)

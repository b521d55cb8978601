"""The composed hybrid of an experiment: the origin of its threshold, its gain, and how it differs from a run that switches."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hgnp.io.runs import read
from hgnp.reporting.compare import ComparedExperiment, Comparison, compare_runs
from hgnp.reporting.composed import Choice
from hgnp.reporting.hybrid import PAPER, PAPERS_CHOICE, fit
from hgnp.reporting.publish import compare
from run_cases import FEATURES, write_run

pytestmark = pytest.mark.usefixtures("figures_not_rendered")

FLOWERS, CIFAR_RESNET, BIRDS, CIFAR_VGG = PAPER


def gentle(kept: float) -> float:
    return 0.86 - 0.2 * (1 - kept)


def steep(kept: float) -> float:
    return 0.9 - 0.3 * (1 - kept)  # meets gentle at κ = 0.6


def folders(folder: Path, **options: Any) -> list[Path]:
    return [
        write_run(folder / "hgnp", accuracy=gentle, **options),
        write_run(folder / "taylor", method="taylor", accuracy=steep, **options),
    ]


def compared(folder: Path, threshold: Choice = "fit", **options: Any) -> Comparison:
    return compare_runs([read(each) for each in folders(folder, **options)], threshold=threshold)


def hybrid_of(experiment: ComparedExperiment) -> Any:
    assert experiment.composed_hybrid is not None
    return experiment.composed_hybrid


def gain(threshold: float) -> float:
    """Of the area over Taylor's, in percent, over κ from 0.1 to 1."""

    def area(level: float, slope: float, low: float, high: float) -> float:
        return (high - low) * (level - slope * (1 - (low + high) / 2))

    switched = area(0.86, 0.2, 0.1, threshold) + area(0.9, 0.3, threshold, 1.0)
    return 100 * (switched / area(0.9, 0.3, 0.1, 1.0) - 1)


@pytest.mark.parametrize(
    ("own", "threshold"), [(FLOWERS, 0.448), (BIRDS, 0.907), (CIFAR_RESNET, 0.756), (CIFAR_VGG, 0.756)]
)
def test_an_experiment_of_the_paper_is_predicted_without_its_own_sample(
    own: Any, threshold: float, tmp_path: Path
) -> None:
    """Also where the network has a bias more and pictures are of another size; Flowers and Birds were 0.773 and 0.709."""
    measured = own.features | {"parameters": own.features["parameters"] + 64, "image_side": 96}
    comparison = compared(tmp_path, features=measured)
    composed = hybrid_of(comparison.experiments[0])
    assert composed.threshold == pytest.approx(threshold, abs=5e-4)
    assert composed.source == "fit"
    assert composed.samples == tuple(sample.name for sample in PAPER if sample is not own)
    assert composed.left_out == (own.name,)
    assert composed.over_taylor == pytest.approx(gain(composed.threshold))
    told = " ".join(composed.sentences)
    assert f"Left out, as this is that experiment: {own.name}." in told
    assert all(name in told for name in composed.samples)
    assert ("It extrapolates: train_samples is 2040 here and 5994 to 50000 there." in told) == (own is FLOWERS)
    assert own in comparison.model.samples  # which is for datasets that are new


def test_two_studies_of_one_experiment_are_not_fitted_on_each_other(tmp_path: Path) -> None:
    one, two = ({**FEATURES, "parameters": number} for number in (12_000_000, 12_000_064))
    other = {**FEATURES, "classes": 60}
    paths = [folders(tmp_path / str(f["parameters"] + f["classes"]), features=f) for f in (one, two, other)]
    first, _, third = compare_runs([read(path) for pair in paths for path in pair]).experiments
    assert len(hybrid_of(first).samples) == len(PAPER) + 1
    assert len(hybrid_of(first).left_out) == 1
    assert len(hybrid_of(third).samples) == len(PAPER) + 2
    assert hybrid_of(third).left_out == ()


@pytest.mark.parametrize("own", PAPER)
def test_the_paper_s_own_thresholds(own: Any, tmp_path: Path) -> None:
    comparison = compared(tmp_path, "paper", features=dict(own.features))
    composed = hybrid_of(comparison.experiments[0])
    formula = 134.005 - 0.40476 * own.features["classes"] - 8.4315e-4 * own.features["train_samples"]
    assert composed.threshold == pytest.approx(formula / 100, abs=1e-5)
    assert composed.threshold == pytest.approx(own.threshold, abs=1e-9)
    told = " ".join(composed.sentences)
    assert "from two features: 134.005 − 0.40476 · classes − 0.00084315 · train_samples" in told
    assert "3 distinct inputs, for 3 coefficients: any thresholds would fit exactly" in told
    assert f"This experiment is one of them ({own.name}), so its threshold is not a prediction." in told
    assert comparison.model == fit(features=PAPERS_CHOICE)


def test_the_paper_s_formula_is_clipped_and_does_not_extrapolate(tmp_path: Path) -> None:
    between = compared(tmp_path / "a", "paper", features={**FEATURES, "classes": 20, "train_samples": 2040})
    assert hybrid_of(between.experiments[0]).threshold == 1.0  # the formula says 124 %
    imagenet = {**FEATURES, "classes": 1000, "train_samples": 1_281_167}  # and −1351 %
    composed = hybrid_of(compared(tmp_path / "b", "paper", features=imagenet).experiments[0])
    assert composed.threshold is None
    assert "classes must be from 10 to 200, which past experiments cover, got 1000" in composed.sentences[0]
    assert composed.over_taylor is None


def test_a_threshold_can_be_given(tmp_path: Path) -> None:
    experiment = compared(tmp_path, 0.37).experiments[0]
    composed = hybrid_of(experiment)
    assert (composed.threshold, composed.source, composed.samples, composed.caveats) == (0.37, "given", (), ())
    assert composed.over_taylor == pytest.approx(gain(0.37))
    assert [experiment.composed_at(kept) for kept in (0.2, 0.37, 0.371, 1.0)] == pytest.approx(
        [gentle(0.2), gentle(0.37), steep(0.371), steep(1.0)]
    )
    for wrong in (48, -0.1, float("nan"), True, "lasso"):
        with pytest.raises(ValueError, match="threshold must be 'fit', 'paper' or a κ from 0 to 1, got"):
            compare_runs([read(tmp_path / "hgnp")], threshold=wrong)  # type: ignore[arg-type]


def test_a_run_that_switches_is_a_separate_group(tmp_path: Path) -> None:
    real = write_run(tmp_path / "real", method="hybrid", threshold=0.5, accuracy=lambda kept: gentle(kept) + 0.01)
    comparison = compare([*folders(tmp_path), real], tmp_path / "out", threshold=0.6)
    (experiment,) = comparison.experiments
    assert [group.label for group in experiment.groups] == ["hgnp", "taylor", "hybrid, threshold=0.5"]
    assert {pair.label for pair in experiment.pairs} == {"hgnp", "hybrid, threshold=0.5"}
    composed = hybrid_of(experiment)
    assert (composed.hgnp, composed.taylor, composed.threshold) == ("hgnp", "taylor", 0.6)
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8") as file:
        rows = {row["group"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["hgnp", "taylor", "hybrid, threshold=0.5", "hybrid (composed)"]
    own, composed = rows["hybrid, threshold=0.5"], rows["hybrid (composed)"]
    assert (own["method"], own["threshold"], own["threshold_source"]) == ("hybrid", "0.5", "recipe")
    assert (composed["method"], composed["threshold"], composed["threshold_source"]) == (
        "hybrid (composed)",
        "0.6",
        "given",
    )
    assert float(composed["gain_over_taylor_percent"]) == pytest.approx(gain(0.6)) == float(composed["gain_percent"])
    assert float(own["gain_over_taylor_percent"]) == pytest.approx(float(own["gain_percent"]))
    assert rows["taylor"]["gain_over_taylor_percent"] == ""
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())["experiments"][0]["composed_hybrid"]
    assert stored["over_taylor"] == pytest.approx(gain(0.6))
    assert (stored["threshold"], stored["source"]) == (0.6, "given")
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "hybrid (composed), κ ≤ 60.0%" in page
    assert "hybrid, threshold=0.5" in page


def test_gains_are_against_the_baseline_and_against_taylor(tmp_path: Path) -> None:
    compare(folders(tmp_path), tmp_path / "out", baseline="hgnp", threshold=0.6)
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8") as file:
        *_, composed = csv.DictReader(file)
    assert float(composed["gain_over_taylor_percent"]) == pytest.approx(gain(0.6))
    hgnp = gain(1.0)  # over Taylor
    assert float(composed["gain_percent"]) == pytest.approx(100 * ((100 + gain(0.6)) / (100 + hgnp) - 1))


@pytest.mark.parametrize("choice", ["fit", "paper"])
def test_the_page_says_which_samples_were_used(choice: Choice, tmp_path: Path) -> None:
    compare(folders(tmp_path, features=dict(BIRDS.features)), tmp_path / "out", threshold=choice)
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    said = {
        "fit": "on 3 other experiments: AlexNet / Flowers-102 (paper), ResNet-18 / CIFAR-10 (paper), "
        "VGG-16-BN / CIFAR-10 (paper). Left out, as this is that experiment: ResNet-18 / Birds (paper).",
        "paper": "from two features: 134.005 − 0.40476 · classes",
    }
    assert {each for each, words in said.items() if words in page} == {choice}
    assert ("A Lasso predicts the threshold" in page) == (choice == "fit")

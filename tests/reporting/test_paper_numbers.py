"""The paper's numbers as transcribed, against its tables typed a second time, row by row, as its source has them."""

import pytest

from hgnp.experiments.presets import preset
from hgnp.recipe import Recipe
from hgnp.reporting import hybrid
from hgnp.reporting.paper.reported import BY_KEY, EQUAL, EXPERIMENTS, INFERENCE, LEAVES_OPEN

TIMES = """
alexnet-flowers & Tesla K80 & 35.1 & 57.3 & 3.8
resnet18-cifar10 & GeForce RTX 2080 & 4.5 & 121.0 & 10.7
vgg16-cifar10 & GeForce RTX 2080 & 4.5 & 115.1 & 12.7
resnet18-birds & GeForce RTX 2080 & 5.0 & 129.9 & 27.3
"""
INFERENCE_ROWS = """
Table 2 & alexnet-flowers & GPU:Tesla K80 & 100.0 & 100.0 & 5000 & 913
Table 2 & alexnet-flowers & GPU:Tesla K80 & & 30.4 & 5000 & 808
Table 2 & alexnet-flowers & GPU:Tesla K80 & 30.4 & & 5000 & 570
Table 2 & resnet18-cifar10 & CPU:3.4 GHz Intel Core i5 & 100.0 & 100.0 & 128 & 3437
Table 2 & resnet18-cifar10 & CPU:3.4 GHz Intel Core i5 & 4.5 & & 128 & 1013
Table 2 & resnet18-cifar10 & CPU:3.4 GHz Intel Core i5 & & 4.5 & 128 & 2402
Table 2 & resnet18-cifar10 & GPU:GeForce RTX 2080 & 100.0 & 100.0 & 2000 & 192
Table 2 & resnet18-cifar10 & GPU:GeForce RTX 2080 & & 4.5 & 2000 & 206
Table 2 & resnet18-cifar10 & GPU:GeForce RTX 2080 & 4.5 & & 2000 & 90
Table 2 & vgg16-cifar10 & CPU:3.4 GHz Intel Core i5 & 100.0 & 100.0 & 128 & 2251
Table 2 & vgg16-cifar10 & CPU:3.4 GHz Intel Core i5 & 4.5 & & 128 & 482
Table 2 & vgg16-cifar10 & CPU:3.4 GHz Intel Core i5 & & 4.5 & 128 & 1709
Table 2 & vgg16-cifar10 & GPU:GeForce RTX 2080 & 100.0 & 100.0 & 2000 & 132
Table 2 & vgg16-cifar10 & GPU:GeForce RTX 2080 & & 4.5 & 2000 & 187
Table 2 & vgg16-cifar10 & GPU:GeForce RTX 2080 & 4.5 & & 2000 & 39
Table 3 & vgg16-cifar10 & CPU:3.4 GHz Intel Core i5 & 14.4 & & 128 & 1414
Table 3 & vgg16-cifar10 & CPU:3.4 GHz Intel Core i5 & & 3 & 128 & 1605
Table 3 & vgg16-cifar10 & GPU:GeForce RTX 2080 & 14.4 & & 2000 & 102
Table 3 & vgg16-cifar10 & GPU:GeForce RTX 2080 & & 3 & 2000 & 184
"""
AREAS = """
alexnet-flowers & 9.33 & 9.20 & 91.0
resnet18-birds & 0.08 & -0.29 & 48.0
vgg16-cifar10 & 1.63 & 1.59 & 87.8
resnet18-cifar10 & 0.47 & 0.42 & 87.8
"""


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("&")] for line in table.strip().splitlines()]


def test_the_papers_training_times() -> None:
    for key, hardware, kept, hgnp, taylor in cells(TIMES):
        row = BY_KEY[key].training
        assert (row.hardware, row.kept) == (hardware, float(kept))
        assert row.hours == {"hgnp": float(hgnp), "taylor": float(taylor)}
    gpus = {key: experiment.training.gpus for key, experiment in BY_KEY.items()}
    assert gpus == {
        "alexnet-flowers": {"hgnp": 1, "taylor": 3},
        "resnet18-cifar10": {"hgnp": 4, "taylor": 1},
        "vgg16-cifar10": {"hgnp": 4, "taylor": 1},
        "resnet18-birds": {"hgnp": 5, "taylor": 1},
    }


def test_the_papers_inference_times() -> None:
    expected = set()
    for table, key, where, neurons, weights, batch, ms in cells(INFERENCE_ROWS):
        device, hardware = where.split(":")
        kind = "full" if neurons and weights else "neuron-pruned" if neurons else "weight-pruned"
        kept = float(neurons or weights)
        expected.add((table, key, {"CPU": "cpu", "GPU": "cuda"}[device], hardware, kind, kept, int(batch), float(ms)))
    found = {(r.table, r.experiment, r.device, r.hardware, r.network, r.kept, r.batch, r.ms) for r in INFERENCE}
    assert found == expected
    assert (EQUAL.accuracy, EQUAL.neurons, EQUAL.weights) == (92.0, 14.4, 3.0)


def test_the_papers_areas_and_thresholds() -> None:
    for key, hybrids, hgnp, threshold in cells(AREAS):
        row = BY_KEY[key].areas
        assert (row.hybrid, row.hgnp, row.threshold) == (float(hybrids), float(hgnp), float(threshold))
    known = [100 * sample.threshold for sample in hybrid.PAPER]
    assert known == pytest.approx([experiment.areas.threshold for experiment in EXPERIMENTS])


def test_the_accuracies_of_the_papers_text() -> None:
    named = {key: {(a.method, a.kept): a.value for a in each.accuracies} for key, each in BY_KEY.items()}
    assert named["alexnet-flowers"] == {
        ("hgnp", 50): 78.9, ("taylor", 50): 71.1, ("hgnp", 40): 77.0, ("taylor", 40): 60,
        ("hgnp", 35): 75.5, ("taylor", 35): 34,
    }  # fmt: skip
    assert named["vgg16-cifar10"] == {("hgnp", 10): 91.4, ("taylor", 10): 87.3}
    assert named["resnet18-birds"] == {
        ("hgnp", 100): 70.5, ("taylor", 100): 70.5, ("hgnp", 5): 51.9, ("taylor", 5): 49.0,
    }  # fmt: skip
    assert {key: [(g.kept, g.value) for g in each.gaps] for key, each in BY_KEY.items()} == {
        "alexnet-flowers": [(35, 120)], "resnet18-cifar10": [], "resnet18-birds": [(5, 6)], "vgg16-cifar10": [(5, 8)],
    }  # fmt: skip
    assert [each.ahead[0].kept for each in EXPERIMENTS] == [91, 85, 14, 90]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.key)
@pytest.mark.parametrize("method", ["hgnp", "taylor"])
def test_the_presets_are_the_papers_settings(experiment, method) -> None:  # type: ignore[no-untyped-def]
    """Both were transcribed by themselves."""
    config = preset(experiment.key)
    recipe = Recipe.from_dict(config.with_method(method).recipe).resolved().as_dict()
    stated = {name: value for name, value in experiment.recipe(method).items() if value is not LEAVES_OPEN}
    assert {name: recipe[name] for name in stated} == stated
    assert (config.model, config.data) == (experiment.model, experiment.data)
    assert config.data_args["batch"] == experiment.data_args["batch"]
    sample = hybrid.PAPER[EXPERIMENTS.index(experiment)]
    assert {name: sample.features[name] for name in experiment.features} == experiment.features

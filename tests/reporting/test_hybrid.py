"""The hybrid's regression: the paper's samples counted, its two-feature fit reproduced, extrapolation refused."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from hgnp.experiments.models import VGG16, AlexNet, ResNet18
from hgnp.reporting.hybrid import (
    FEATURES,
    PAPER,
    PAPERS_CHOICE,
    Sample,
    fit,
    fit_without,
    limitations,
    recommend,
    same_experiment,
)
from hgnp.training.measure import features


def _alexnet(classes: int) -> nn.Module:
    sizes = [(3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]
    linear = [nn.Linear(256 * 6 * 6, 4096), nn.Linear(4096, 4096), nn.Linear(4096, classes)]
    return nn.ModuleList([*(nn.Conv2d(i, o, k) for i, o, k in sizes), *linear])


def _resnet18(classes: int, stem: int) -> nn.Module:
    def conv(inside: int, outside: int, side: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, side, bias=False), nn.BatchNorm2d(outside)]

    layers, inside = conv(3, 64, stem), 64
    for width in (64, 128, 256, 512):
        layers += [*conv(inside, width, 3), *conv(width, width, 3), *conv(width, width, 3), *conv(width, width, 3)]
        layers += conv(inside, width, 1) if inside != width else []
        inside = width
    return nn.ModuleList([*layers, nn.Linear(512, classes)])


def _vgg16_bn(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    inside = 3
    for width in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        layers += [nn.Conv2d(inside, width, 3), nn.BatchNorm2d(width)]
        inside = width
    return nn.ModuleList([*layers, nn.Linear(512, classes)])


@pytest.mark.parametrize("number", range(4))
def test_the_papers_architectures_are_counted(number: int) -> None:
    with torch.device("meta"):
        net = [_alexnet(102), _resnet18(10, 3), _resnet18(200, 7), _vgg16_bn(10)][number]
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    known = PAPER[number].features
    assert known["conv_layers"] == len(convolutions)
    assert known["linear_layers"] == sum(isinstance(module, nn.Linear) for module in net.modules())
    assert known["parameters"] == sum(parameter.numel() for parameter in net.parameters())
    assert known["mean_kernel"] == pytest.approx(np.mean([module.kernel_size[0] for module in convolutions]))
    assert known["kernels"] == sum(module.out_channels for module in convolutions)


def test_least_squares_on_the_papers_two_features_gives_its_row() -> None:
    model = fit(features=PAPERS_CHOICE)
    assert 100 * model.intercept == pytest.approx(134.005, abs=1e-3)
    assert 100 * model.coefficients["classes"] == pytest.approx(-0.40476, abs=1e-5)
    assert 100 * model.coefficients["train_samples"] == pytest.approx(-8.4315e-4, abs=1e-7)
    assert [model.predict(sample.features) for sample in PAPER] == pytest.approx([0.910, 0.878, 0.480, 0.878], abs=1e-9)
    shuffled = [dataclasses.replace(s, threshold=t) for s, t in zip(PAPER, (0.1, 0.7, 0.9, 0.7), strict=True)]
    assert [fit(shuffled, features=PAPERS_CHOICE).predict(s.features) for s in PAPER] == pytest.approx(
        [0.1, 0.7, 0.9, 0.7]
    )


def test_the_lasso_is_the_same_every_time_and_shows_its_path() -> None:
    model = fit()
    assert model == fit()
    assert tuple(model.coefficients) == ("classes",)
    assert model.coefficients["classes"] < 0
    assert model.path[0].features == ()
    assert model.path[1].features == ("classes",)
    assert all("train_samples" not in step.features for step in model.path)
    penalties = [step.penalty for step in model.path]
    assert penalties == sorted(penalties, reverse=True)


def _line(count: int) -> list[Sample]:
    """Thresholds that follow image_side alone; the other features are noise."""
    random = np.random.default_rng(0)
    samples = []
    for number in range(count):
        features = dict(zip(FEATURES, random.uniform(1, 100, len(FEATURES)), strict=True))
        features["image_side"] = 32.0 + 10 * number
        samples.append(Sample(f"own {number}", features, 0.2 + 0.03 * number))
    return samples


def test_the_lasso_finds_what_thresholds_follow_and_knows_its_error() -> None:
    model = fit(_line(12))
    standard = {
        name: slope * np.std([s.features[name] for s in model.samples]) for name, slope in model.coefficients.items()
    }
    assert max(standard, key=lambda name: abs(standard[name])) == "image_side"
    assert model.coefficients["image_side"] == pytest.approx(0.003, rel=0.1)
    assert model.error < 0.2 * model.error_of_mean
    assert not any("show no benefit" in sentence for sentence in limitations(model))


def test_the_error_of_the_mean_is_that_of_leaving_one_out() -> None:
    thresholds = np.array([sample.threshold for sample in PAPER])
    others = (thresholds.sum() - thresholds) / 3
    assert fit().error_of_mean == pytest.approx(np.sqrt(np.mean((thresholds - others) ** 2)))


@pytest.mark.parametrize("number", [0, 2])
def test_an_excluded_experiment_is_predicted_from_the_others(number: int) -> None:
    """With two distinct inputs left every feature says the same, so the Lasso takes one: soft thresholding in closed form."""
    own, rest = PAPER[number], [sample for other, sample in enumerate(PAPER) if other != number]
    model = fit_without(own.features, PAPER)
    (name,) = model.coefficients
    x = np.array([sample.features[name] for sample in rest], dtype=float)
    y = np.array([sample.threshold for sample in rest])
    z = (x - x.mean()) / x.std()
    covariance = (z * (y - y.mean())).mean()
    assert model.penalty is not None
    slope = np.sign(covariance) * (abs(covariance) - model.penalty)
    predicted = y.mean() + slope * (own.features[name] - x.mean()) / x.std()
    assert model.predict(own.features) == pytest.approx(predicted, abs=1e-5)
    assert predicted == pytest.approx({0: 0.448, 2: 0.907}[number], abs=5e-4)
    assert fit().predict(own.features) == pytest.approx({0: 0.773, 2: 0.709}[number], abs=5e-4)
    assert (model.samples, model.left_out) == (tuple(rest), (own,))
    assert model.error > 0  # of three samples
    with pytest.raises(ValueError, match=r"which past experiments cover, got 1e[+]06"):
        model.predict({**own.features, name: 1e6})


def test_the_presets_are_known_to_be_the_paper_s_experiments() -> None:
    nets = [AlexNet(102), ResNet18(10, stem="cifar"), ResNet18(200, stem="imagenet"), VGG16(10, form="cifar")]
    for net, sample in zip(nets, PAPER, strict=True):
        data = {name: sample.features[name] for name in ("train_samples", "val_samples", "classes")}
        counted = features(net, None, classes=None, train=None, val=None) | data
        assert [same_experiment(counted, each.features) for each in PAPER] == [each is sample for each in PAPER]
        assert not same_experiment(counted | {"classes": 11}, sample.features)
        assert not same_experiment(counted | {"classes": None}, sample.features | {"classes": None})


def test_predictions_are_clipped() -> None:
    model = dataclasses.replace(fit(features=PAPERS_CHOICE), intercept=3.0)
    assert model.predict(PAPER[0].features) == 1.0
    assert dataclasses.replace(model, intercept=-3.0).predict(PAPER[0].features) == 0.0


def test_extrapolation_is_refused_with_the_range() -> None:
    imagenet = {"classes": 1000, "train_samples": 1_281_167}
    for model in (fit(), fit(features=PAPERS_CHOICE)):
        with pytest.raises(ValueError, match="classes must be from 10 to 200, which past experiments cover, got 1000"):
            model.predict(imagenet)
    with pytest.raises(ValueError, match="classes must be known to predict the threshold, got none"):
        fit().predict({"classes": None})


def test_a_point_within_every_range_may_lie_outside_the_samples_hull() -> None:
    model = fit(features=PAPERS_CHOICE)
    assert model.surrounded({"classes": 100, "train_samples": 20_000})
    assert not model.surrounded({"classes": 190, "train_samples": 45_000})
    assert 0 <= model.predict({"classes": 190, "train_samples": 45_000}) <= 1


def test_limitations_count_samples_and_coefficients() -> None:
    first, second, *_ = limitations(fit())
    assert first.startswith("4 experiments, 4 of them the paper's; in the features used (classes) they have 3 distinct")
    assert "error is 33 points" in second
    assert "that of the mean of the other thresholds is 24" in second
    assert "show no benefit" in second
    assert "any thresholds would fit exactly" in limitations(fit(features=PAPERS_CHOICE))[0]


def test_recommendations_state_their_uncertainty() -> None:
    advice = recommend({"classes": 100, "train_samples": 50_000})
    assert advice.threshold == pytest.approx(fit().predict({"classes": 100}))
    assert "± 33 points" in " ".join(advice.sentences)
    refused = recommend({"classes": 1000})
    assert refused.threshold is None
    assert refused.reason is not None
    assert "run both" in " ".join(refused.sentences)
    own = Sample("mine", {**PAPER[0].features, "classes": 1000}, 0.3)
    assert recommend({**PAPER[0].features, "classes": 900}, fit([*PAPER, *[own] * 4])).threshold is not None
    by_the_paper = recommend({"classes": 100, "train_samples": 20_000}, fit(features=PAPERS_CHOICE))
    assert by_the_paper.threshold == pytest.approx((134.005 - 40.476 - 16.863) / 100, abs=1e-5)


def test_unusable_samples_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="samples must be at least 3 experiments, got 2"):
        fit(PAPER[:2])
    with pytest.raises(ValueError, match="sample 'mine' must have every feature, got classes, mean_kernel not known"):
        fit((*PAPER, Sample("mine", {**PAPER[0].features, "classes": None, "mean_kernel": None}, 0.5)))  # type: ignore[dict-item]
    same = [dataclasses.replace(sample, threshold=0.5) for sample in PAPER]
    assert fit(same).predict({}) == 0.5
    assert any("for every dataset" in sentence for sentence in limitations(fit(same)))

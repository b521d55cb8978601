"""How runs are sorted into the paper's experiments, and what is said to deviate, from their own files."""

import json
from pathlib import Path

import pytest

from hgnp.reporting.paper.results import PaperGroup, scan
from paper_cases import write_bench, write_paper_run
from run_cases import write_run


def only(folder: Path) -> PaperGroup:
    (group,) = scan(folder).groups
    return group


def told(group: PaperGroup, aspect: str) -> list[str]:
    return [each.text for each in group.deviations if each.aspect == aspect and not each.open]


def left_open(group: PaperGroup) -> str:
    return "; ".join(each.text for each in group.deviations if each.open)


@pytest.mark.parametrize("experiment", ["alexnet-flowers", "resnet18-cifar10", "resnet18-birds", "vgg16-cifar10"])
@pytest.mark.parametrize("method", [None, "taylor"])
def test_a_literal_run_deviates_in_hardware_alone(experiment: str, method: str | None, tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", experiment, method=method)
    group = only(tmp_path)
    assert (group.experiment.key, group.variant) == (experiment, method or "hgnp")
    assert (group.penalty, group.schedule) == ("" if method else "literal", "the paper's")
    assert {each.aspect for each in group.deviations if not each.open} == {"hardware"}


def test_the_fast_penalty_is_listed_choice_by_choice(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "vgg16-cifar10", of="vgg16-cifar10-fast")
    group = only(tmp_path)
    assert group.penalty == "fast"
    assert told(group, "penalty") == [
        "fast penalty: Gauss–Newton in place of the Hessian, along the previous batch's v, Γ from C (from L "
        "it would depend on itself), v refreshed every 8 steps, skipped while the penalty is inactive"
    ]
    assert told(group, "hardware") == ["NVIDIA H200; the paper: 4 × GeForce RTX 2080 for HGNP"]
    assert "learning-rate schedule: steps over the whole run (left open by the paper)" in left_open(group)
    assert "1 seed (the paper does not say how many)" in left_open(group)


def test_taylor_with_hgnps_schedule_is_a_deviation(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "vgg16-cifar10", method="taylor", own_schedule=False)
    group = only(tmp_path)
    assert group.schedule == "HGNP's"
    assert told(group, "schedule") == ["HGNP's schedule: E2 5 instead of 1, N 100 instead of 1, E1 50 instead of 200"]
    assert told(group, "penalty") == []


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("random weights", ["random weights instead of ImageNet's weights but for classifier.6"]),
        (
            "10 of 16 tensors from a.safetensors; at random: classifier.1, classifier.4, classifier.6",
            [
                "10 of 16 tensors from a.safetensors; at random: classifier.1, classifier.4, classifier.6; "
                "the paper: ImageNet's weights but for classifier.6"
            ],
        ),
        ("14 of 16 tensors from a.safetensors; at random: classifier.6; not used: classifier.6", []),
        (
            "weights saved by hgnp in a.safetensors",
            ["weights saved by hgnp in a.safetensors; the paper: ImageNet's weights but for classifier.6"],
        ),
        (
            "the pruned network in a.safetensors",
            ["weights saved by hgnp in a.safetensors; the paper: ImageNet's weights but for classifier.6"],
        ),
    ],
)
def test_a_start_other_than_the_papers_is_a_deviation(start: str, words: list[str], tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "alexnet-flowers", start=start)
    assert told(only(tmp_path), "start") == words


def test_changed_data_and_settings_are_deviations(tmp_path: Path) -> None:
    changes = ["data_args.batch=64", "data_args.flip=true", "data_args.resize=true", "recipe.mu=0.01", "recipe.lr=0.005",
               "recipe.finetune_epochs=3", "recipe.coupling=coupled"]  # fmt: skip
    folder = write_paper_run(tmp_path / "run", "resnet18-birds", changes=changes)
    info = json.loads((folder / "run.json").read_text())
    info["features"]["train_samples"] = 1000
    (folder / "run.json").write_text(json.dumps(info))
    group = only(tmp_path)
    assert told(group, "data") == [
        "training samples: 1,000 instead of 5,994",
        "mini-batches of 64 instead of 32",
        "random flips, which the paper does not state",
        "images resized, which the paper does not state",
    ]
    assert told(group, "schedule") == [
        "other schedule: E3 3 instead of 20",
        "μ 0.01 instead of 0.001",
        "learning rate 0.005 instead of 0.001",
        "coupling coupled instead of paper",
    ]
    assert group.schedule == "other"


def test_a_network_of_another_size_is_a_deviation(tmp_path: Path) -> None:
    folder = write_paper_run(tmp_path / "run", "vgg16-cifar10", changes=["model_args.width=0.42"])
    info = json.loads((folder / "run.json").read_text())
    info["features"]["parameters"] = 2_600_000
    (folder / "run.json").write_text(json.dumps(info))
    assert told(only(tmp_path), "network") == ["2,600,000 parameters instead of 14,728,266"]


def test_accumulated_and_joint_batches_count_as_the_optimizers(tmp_path: Path) -> None:
    folder = write_paper_run(tmp_path / "run", "resnet18-birds", changes=["accumulate=2"])
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "ranks": 8}))
    assert told(only(tmp_path), "data") == ["mini-batches of 512 instead of 32"]
    assert told(only(tmp_path), "hardware") == ["8 × NVIDIA H200; the paper: 5 × GeForce RTX 2080 for HGNP"]


@pytest.mark.parametrize("of", ["alexnet-flowers", "alexnet-flowers-no-training-penalty"])
def test_another_weight_of_the_penalty_in_the_scores_is_a_deviation(of: str, tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "alexnet-flowers", of=of, changes=["recipe.score_mu=0.1"])
    assert told(only(tmp_path), "schedule") == ["μ of the scores 0.1 instead of 0.001"]


def test_image_preprocessing_that_the_paper_leaves_open_is_stated(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "resnet18-birds")
    assert "a central crop of 160 px (position left open by the paper)" in left_open(only(tmp_path))


@pytest.mark.parametrize("which", ["no training penalty", "no scoring penalty"])
def test_ablations_are_recognised_and_do_not_deviate_in_mu(which: str, tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "alexnet-flowers", of=f"alexnet-flowers-{which.replace(' ', '-')}")
    group = only(tmp_path)
    assert group.variant == which
    assert told(group, "schedule") == []


def test_seeds_are_one_group_and_snapshots_are_not_separate_runs(tmp_path: Path) -> None:
    for seed in range(3):
        write_paper_run(
            tmp_path / "deep" / "er" / str(seed), "vgg16-cifar10", seed=seed, epochs=7 if seed == 2 else None
        )
    write_paper_run(tmp_path / "deep" / "er" / "0" / "snapshots" / "0.144", "vgg16-cifar10")
    group = only(tmp_path)
    assert [run.seed for run in group.runs] == [0, 1]
    assert [run.seed for run in group.unfinished] == [2]
    assert group.title == "HGNP, literal penalty (2 seeds)"


def test_networks_of_other_widths_are_separate_groups(tmp_path: Path) -> None:
    for name, width in (("full", 1.0), ("narrow", 0.42)):
        write_paper_run(tmp_path / name, "vgg16-cifar10", changes=[f"model_args.width={width}"])
    assert [[run.title for run in group.runs] for group in scan(tmp_path).groups] == [["full"], ["narrow"]]


def test_other_experiments_are_listed_and_runs_without_configuration_are_recognised_by_classes(tmp_path: Path) -> None:
    write_run(tmp_path / "digits")
    write_run(tmp_path / "plain", model="VGG16", name=None, features={"classes": 10})
    found = scan(tmp_path)
    assert [run.title for run in found.others] == ["digits"]
    assert [group.experiment.key for group in found.groups] == ["vgg16-cifar10"]


def test_a_bench_file_belongs_to_its_run_or_to_the_experiment_of_its_size(tmp_path: Path) -> None:
    write_paper_run(tmp_path / "run", "vgg16-cifar10")
    write_bench(tmp_path / "run" / "snapshots" / "0.1" / "bench.json", "alexnet-flowers", {("full", 1.0): 1.0})
    write_bench(tmp_path / "bench-2.json", "resnet18-cifar10", {("full", 1.0): 2.0})
    keys = {timing.row["median_ms"]: timing.experiment.key for timing in scan(tmp_path).timings}
    assert keys == {1.0: "vgg16-cifar10", 2.0: "resnet18-cifar10"}


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be a folder with runs below it"):
        scan(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"must hold runs or bench\.json files, got none"):
        scan(tmp_path)
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bench\.json must be written by hgnp bench"):
        scan(tmp_path)
    (tmp_path / "bench.json").write_text('{"rows": [{}], "devices": {}}')
    with pytest.raises(ValueError, match=r"bench\.json: a row must have network"):
        scan(tmp_path)
    (tmp_path / "bench.json").unlink()
    folder = write_paper_run(tmp_path / "run", "vgg16-cifar10")
    info = json.loads((folder / "run.json").read_text())
    info["recipe"]["flatness"] = {"kfac_approx": "all"}
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"recipe\.flatness\.kfac_approx must be one of 'reduce', 'expand', got 'all'"):
        scan(tmp_path)

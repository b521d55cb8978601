"""Comparisons of runs with known curves: areas, gains, crossings and the hybrid."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hgnp.experiments.config import Config
from hgnp.io.runs import Run, read
from hgnp.reporting.compare import Comparison, compare_runs
from hgnp.reporting.hybrid import PAPER
from hgnp.reporting.page.comparison_page import comparison_view
from hgnp.reporting.publish import compare, report
from run_cases import FEATURES, write_run

pytestmark = pytest.mark.usefixtures("figures_not_rendered")


def gentle(kept: float) -> float:
    return 0.86 - 0.2 * (1 - kept)


def steep(kept: float) -> float:
    return 0.9 - 0.3 * (1 - kept)  # meets gentle at κ = 0.6


def both(folder: Path, **options: object) -> Comparison:
    runs = [
        read(write_run(folder / "hgnp", accuracy=gentle, **options)),  # type: ignore[arg-type]
        read(write_run(folder / "taylor", method="taylor", accuracy=steep, **options)),  # type: ignore[arg-type]
    ]
    return compare_runs(runs)


def test_lines_give_their_closed_forms(tmp_path: Path) -> None:
    (experiment,) = both(tmp_path).experiments
    assert experiment.range == pytest.approx((0.1, 1.0))
    assert experiment.baseline == "taylor"
    areas = {group.label: group.area for group in experiment.groups}
    ours, theirs = 0.9 * (0.86 - 0.2 * 0.45), 0.9 * (0.9 - 0.3 * 0.45)
    assert areas == pytest.approx({"hgnp": ours, "taylor": theirs})
    assert experiment.groups[0].mean_metric == pytest.approx(0.86 - 0.2 * 0.45)
    (pair,) = experiment.pairs
    assert pair.gain == pytest.approx(100 * (ours / theirs - 1))
    (crossing,) = pair.crossings
    assert crossing.kept == pytest.approx(0.6)
    assert crossing.ahead_below
    for kept, relative in zip(pair.kept, pair.relative, strict=True):
        assert relative == pytest.approx(100 * (gentle(kept) / steep(kept) - 1))


def test_the_hybrid_switches_where_it_should(tmp_path: Path) -> None:
    comparison = both(tmp_path)
    composed = comparison.experiments[0].composed_hybrid
    assert composed is not None
    assert composed.hindsight == pytest.approx(0.6)
    above = 0.4 * (0.9 - 0.3 * 0.2)
    below = 0.5 * (0.86 - 0.2 * 0.65)
    theirs = 0.9 * (0.9 - 0.3 * 0.45)
    assert composed.hindsight_over_taylor == pytest.approx(100 * ((above + below) / theirs - 1))
    assert composed.hindsight_over_hgnp is not None
    assert composed.hindsight_over_hgnp > 0
    assert composed.threshold is not None
    assert composed.over_taylor is not None
    assert composed.over_taylor < composed.hindsight_over_taylor
    assert [sample.threshold for sample in comparison.model.samples] == pytest.approx([0.91, 0.878, 0.48, 0.878, 0.6])


def test_a_study_is_predicted_from_the_others_alone(tmp_path: Path) -> None:
    from hgnp.reporting.hybrid import fit

    composed = both(tmp_path).experiments[0].composed_hybrid
    assert composed is not None
    assert composed.threshold == fit(PAPER).predict(FEATURES)


def test_outside_the_range_the_prediction_is_refused(tmp_path: Path) -> None:
    composed = both(tmp_path, features={**FEATURES, "classes": 1000}).experiments[0].composed_hybrid
    assert composed is not None
    assert composed.threshold is None
    assert composed.reason is not None
    assert "classes must be from 10 to 200" in composed.reason
    assert composed.hindsight == pytest.approx(0.6)


def test_runs_without_features_are_no_sample_and_a_note_says_so(tmp_path: Path) -> None:
    comparison = both(tmp_path, features={**FEATURES, "image_side": None})
    assert comparison.model.samples == PAPER
    assert any("image_side not known" in note for note in comparison.experiments[0].notes)


def test_seeds_become_mean_and_spread(tmp_path: Path) -> None:
    for seed, shift in enumerate((-0.01, 0.0, 0.01)):
        write_run(tmp_path / str(seed), seed=seed, accuracy=lambda kept, shift=shift: gentle(kept) + shift)
    (experiment,) = compare_runs([read(tmp_path / str(seed)) for seed in range(3)]).experiments
    (group,) = experiment.groups
    assert group.seeds == (0, 1, 2)
    assert group.curve is not None
    assert group.curve.spread == pytest.approx((0.01,) * len(group.curve.kept))
    assert group.curve.at(0.5) == pytest.approx(gentle(0.5))
    assert (group.final, group.final_spread) == pytest.approx((gentle(0.1), 0.01))
    assert experiment.pairs == ()
    assert experiment.composed_hybrid is None


def test_groups_of_one_method_are_labelled_by_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / f"mu{mu}", mu=mu)) for mu in (0.0, 0.01)]
    runs.append(read(write_run(tmp_path / "l1", method="l1")))
    (experiment,) = compare_runs(runs).experiments
    assert [group.label for group in experiment.groups] == ["hgnp, mu=0.0", "hgnp, mu=0.01", "l1"]
    assert experiment.baseline == "hgnp, mu=0.0"
    assert compare_runs(runs, baseline="l1").experiments[0].baseline == "l1"
    assert compare_runs(runs, baseline="hgnp, mu=0.01").experiments[0].baseline == "hgnp, mu=0.01"
    floors = [{"a.long.name": 8, "b.long.name": last} for last in (4, 12)]
    both = [read(write_run(tmp_path / f"floor{n}", floor=floor)) for n, floor in enumerate(floors)]
    whole = [f"hgnp, floor={floor}" for floor in floors]
    assert [group.label for group in compare_runs(both).experiments[0].groups] == whole
    plain = read(write_run(tmp_path / "plain"))
    labels = [group.label for group in compare_runs([plain, both[0]]).experiments[0].groups]
    assert labels == ["hgnp, floor=1", "hgnp, floor={'a.long.name': 8, 'b.long.na…"]
    with pytest.raises(ValueError, match=r"baseline must be hgnp, mu=0\.0 or hgnp, mu=0\.01 or l1, got 'l3'"):
        compare_runs(runs, baseline="l3")


def configured(folder: Path, seed: int = 0, **settings: Any) -> Run:
    """A run of the command."""
    write_run(folder, seed=seed)
    values = {"model": "nets:Small", "data": "sets:mine", "recipe": {"keep": 0.1}, "seed": seed, **settings}
    Config.from_dict(values, where="test", name=folder.name).write(folder / "config.yaml")
    return read(folder)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"optimizer": "torch.optim:AdamW"}, "optimizer=torch.optim:AdamW"),
        ({"optimizer": "x:y", "optimizer_args": {"lr": 0.1}}, "optimizer=x:y, optimizer_args.lr=0.1"),
        ({"scheduler": "x:y"}, "scheduler=x:y"),
        ({"data_args": {"batch": 32}}, "data_args.batch=32"),
        ({"protect": ["features.0"]}, "protect=['features.0']"),
        ({"loss": "x:y"}, "loss=x:y"),
        ({"weights": "w.safetensors"}, "weights=w.safetensors"),
    ],
)
def test_runs_with_other_settings_are_not_seeds_of_one_group(
    tmp_path: Path, settings: dict[str, Any], label: str
) -> None:
    runs = [configured(tmp_path / "a"), configured(tmp_path / "b", 1), configured(tmp_path / "c", 2, **settings)]
    (experiment,) = compare_runs(runs).experiments
    assert [(group.label, group.seeds) for group in experiment.groups] == [("hgnp", (0, 1)), (f"hgnp, {label}", (2,))]


def test_how_often_a_run_is_observed_does_not_separate_groups(tmp_path: Path) -> None:
    observed: list[dict[str, Any]] = [{}, {"validate_every": 5}, {"checkpoint_every": 20, "measure": "none"}]
    runs = [read(write_run(tmp_path / str(seed), seed=seed, **each)) for seed, each in enumerate(observed)]
    (experiment,) = compare_runs(runs).experiments
    assert [group.seeds for group in experiment.groups] == [(0, 1, 2)]


def test_folder_and_name_do_not_separate_groups(tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [
        {"device": "cpu", "name": "a", "data_args": {"folder": "/x"}},
        {"device": "cuda", "about": "again", "import_from": "/y", "data_args": {"folder": "/y"}},
    ]
    runs = [configured(tmp_path / str(seed), seed, **place) for seed, place in enumerate(places)]
    (experiment,) = compare_runs(runs).experiments
    assert [(group.label, group.seeds) for group in experiment.groups] == [("hgnp", (0, 1))]


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({"data": "sets:other"}, "data=sets:other"),
        ({"model": "nets2:Small"}, "model=nets2:Small"),
        ({"model_args": {"dropout": 0.5}}, "model_args.dropout=0.5"),
    ],
)
def test_another_network_or_data_set_of_the_same_size_is_another_experiment(
    tmp_path: Path, settings: dict[str, Any], title: str
) -> None:
    experiments = compare_runs([configured(tmp_path / "a"), configured(tmp_path / "b", 1, **settings)]).experiments
    assert [[group.seeds for group in experiment.groups] for experiment in experiments] == [[(0,)], [(1,)]]
    assert experiments[1].title == f"demo / nets.Small, {title}"


def test_runs_of_prune_are_grouped_by_recipe(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / "a", name=None)), configured(tmp_path / "b", 1)]
    (tmp_path / "a" / "config.yaml").write_text("my own: true")
    (experiment,) = compare_runs(runs).experiments
    assert [(group.label, group.seeds) for group in experiment.groups] == [("hgnp", (0, 1))]


def test_equal_recipes_are_one_group_however_they_are_written(tmp_path: Path) -> None:
    """An older hgnp had fewer fields; a choice of the flatness penalty may be named or be the default."""
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    older = json.loads((folders[1] / "run.json").read_text())
    del older["recipe"]["scheduler_interval"], older["recipe"]["nesterov"]
    (folders[1] / "run.json").write_text(json.dumps(older))
    named = json.loads((folders[2] / "run.json").read_text())
    named["recipe"]["flatness"] = {"flatness": "default", "curvature": "ggn"}
    (folders[2] / "run.json").write_text(json.dumps(named))
    (experiment,) = compare_runs([read(folder) for folder in folders]).experiments
    assert [(group.label, group.seeds) for group in experiment.groups] == [("hgnp", (0, 1, 2))]


def test_groups_are_labelled_by_the_choices_of_the_flatness_penalty(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / f"{name}", flatness=name)) for name in ("default", {"curvature": "hessian"})]
    (experiment,) = compare_runs(runs).experiments
    assert [group.label for group in experiment.groups] == [f"hgnp, flatness.curvature={c}" for c in ("ggn", "hessian")]


def test_a_recipe_that_is_not_valid_is_refused_by_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"recipe": info["recipe"] | {"execution": "measured"}}))
    with pytest.raises(ValueError, match=r"run\.json: recipe\.execution must be 'auto' or 'eager', got 'measured'"):
        compare_runs([read(folder)])


def test_a_setting_that_is_not_set_is_not_named(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / f"mu{mu}", score_mu=mu)) for mu in (0.0, None)]
    (experiment,) = compare_runs(runs, baseline="hgnp").experiments
    assert [group.label for group in experiment.groups] == ["hgnp, score_mu=0.0", "hgnp"]
    assert experiment.baseline == "hgnp"


def test_only_the_common_range_of_kept_is_compared(tmp_path: Path) -> None:
    full = read(write_run(tmp_path / "full", accuracy=gentle))
    half = read(write_run(tmp_path / "half", method="taylor", accuracy=steep, epochs=7))
    blind = read(write_run(tmp_path / "blind", method="l1", accuracy=None))
    (experiment,) = compare_runs([full, half, blind]).experiments
    assert experiment.range == pytest.approx((0.6, 1.0))
    assert any("blind is left out" in note for note in experiment.notes)
    assert any("half is unfinished" in note and "over the κ it reached" in note for note in experiment.notes)
    assert {group.label: group.curve is None for group in experiment.groups} == {
        "hgnp": False,
        "taylor": False,
        "l1": True,
    }
    (experiment,) = compare_runs([blind]).experiments
    assert experiment.range is None
    assert any("No range of κ" in note for note in experiment.notes)


def test_other_data_is_another_experiment(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / "a")), read(write_run(tmp_path / "b", features={**FEATURES, "classes": 7}))]
    assert len(compare_runs(runs).experiments) == 2


def test_no_crossing_is_no_sample(tmp_path: Path) -> None:
    runs = [read(write_run(tmp_path / "h", accuracy=lambda k: steep(k) + 0.01))]
    runs.append(read(write_run(tmp_path / "t", method="taylor", accuracy=steep)))
    comparison = compare_runs(runs)
    assert comparison.experiments[0].pairs[0].crossings == ()
    composed = comparison.experiments[0].composed_hybrid
    assert composed is not None
    assert composed.hindsight is None
    assert comparison.model.samples == PAPER


def test_compare_writes_tables_that_hold_the_numbers(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "h", accuracy=gentle), write_run(tmp_path / "=t", method="taylor", accuracy=steep)]
    comparison = compare(folders, tmp_path / "out")
    experiment = comparison.experiments[0]
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [run["folder"] for run in stored["runs"]] == ["../h", "../=t"]
    assert stored["experiments"][0]["pairs"][0]["crossings"][0]["kept"] == pytest.approx(0.6)
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert experiment.composed_hybrid is not None
    assert [float(row["area"]) for row in rows] == [
        *(group.area for group in experiment.groups),
        experiment.composed_hybrid.area,
    ]
    assert float(rows[0]["crossings"]) == pytest.approx(0.6)
    with open(tmp_path / "out" / "curves.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(experiment.pairs[0].kept)
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {f"relative_difference.{kind}" for kind in ("png", "svg", "csv")} <= names
    assert not list((tmp_path / "out").glob(".*"))


def test_training_times_name_the_hardware(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"h{seed}", seed=seed) for seed in range(2)]
    info = json.loads((folders[1] / "run.json").read_text())
    (folders[1] / "run.json").write_text(json.dumps({**info, "device": "NVIDIA H200", "shared_by": 3}))
    named = "NVIDIA H200 shared by 3 runs; cpu, 2 threads"
    assert compare(folders, tmp_path / "out").experiments[0].groups[0].hardware == named
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8") as file:
        assert [row["hardware"] for row in csv.DictReader(file)] == [named]
    page = (tmp_path / "out" / "page.html").read_text()
    assert "hardware" in page
    assert named in page


def test_rows_of_the_summary_are_as_long_as_its_header(tmp_path: Path) -> None:
    """That of the composed hybrid too, which was trained on nothing."""
    runs = [read(write_run(tmp_path / "h", accuracy=gentle))]
    runs.append(read(write_run(tmp_path / "t", method="taylor", accuracy=steep)))
    experiment = comparison_view(compare_runs(runs))["experiments"][0]
    assert len(experiment["summary"]) == 3
    assert {len(row) for row in experiment["summary"]} == {len(experiment["summary_header"])}


def test_compare_refuses_bad_folders_in_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"folders must be distinct, got .* twice"):
        compare([folder, tmp_path / "." / "run"], tmp_path / "out")
    with pytest.raises(ValueError, match="folders must name at least one run, got none"):
        compare([], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"must be a run folder of .*, got no such folder"):
        compare([tmp_path / "nowhere"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_page_of_a_run_is_not_overwritten(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    for folder in (a, b):
        (folder / "page.html").write_text("its own")
    calls = (lambda: report([a], b), lambda: report([a, b], a), lambda: compare([a, b], a), lambda: compare([a], a))
    for call in calls:
        with pytest.raises(ValueError, match=r"out must not be the folder of a run, got .*[ab]; choose another"):
            call()
        assert (a / "page.html").read_text() == (b / "page.html").read_text() == "its own"
    assert report([a], tmp_path / "b" / ".." / "a").read_text(encoding="utf-8") != "its own"

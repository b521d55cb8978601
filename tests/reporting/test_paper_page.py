"""The page of `hgnp paper`: every number of the paper, with ours, deviations, and commands for those not run."""

import csv
import itertools
import json
import re
from pathlib import Path

import pytest

from hgnp.reporting.paper.reported import EXPERIMENTS, INFERENCE
from hgnp.reporting.publish import paper
from pages import Page
from paper_cases import write_everything, write_paper_run


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_everything(tmp_path_factory.mktemp("everything"))
    paper(folder)
    return folder / "page"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Almost nothing is run."""
    folder = tmp_path_factory.mktemp("one")
    write_paper_run(folder / "<b>run</b>", "resnet18-birds", epochs=5, start="<script>alert(1)</script>")
    paper(folder, folder / "there")
    return folder / "there"


def test_every_number_of_the_paper_is_on_the_page(everything: Path, one: Path) -> None:
    for page in (Page(everything / "page.html"), Page(one / "page.html")):
        text = page.text
        for experiment in EXPERIMENTS:
            areas, training = experiment.areas, experiment.training
            for gain in (areas.hybrid, areas.hgnp):
                assert f"{gain:+.2f} %".replace("-", "−") in text
            assert f"{areas.threshold:.1f} %" in text
            for method, hours in training.hours.items():
                assert f"{hours:g} h on {training.gpus[method]} × {training.hardware}" in text
            assert f"to κ = {training.kept:g} %" in text
            for stated in experiment.accuracies:
                assert f"accuracy at κ = {stated.kept:g} %" in text
                assert f"{stated.value:.1f} %" in text
            for gap in experiment.gaps:
                assert f"+{gap.value:g} %" in text
            for claim in experiment.ahead:
                assert f"κ < {claim.kept:g} %" in text
        for row in INFERENCE:
            assert f"{row.network}, κ = {row.kept:g} %" in text
            assert f"batch {row.batch:,}" in text
            assert f"{row.ms:g} ms on {row.hardware}" in text
        for number in ("14.4 %", "92 %", "κ < 58 %"):
            assert number in text


def test_numbers_that_are_not_run_have_their_command(one: Path) -> None:
    text = Page(one / "page.html").text
    for experiment in EXPERIMENTS:
        assert f"hgnp study {experiment.key} --data DIR" in text
    assert "hgnp bench RUN --keep 0.304 --device cuda --batch 5000" in text
    assert "hgnp bench RUN/snapshots/0.144 --weights 0.03 --device cpu" in text
    assert "hgnp study alexnet-flowers --data DIR --methods hgnp,no-training-penalty" in text
    assert "Not run: Taylor." in text
    assert "unfinished: the last complete epoch is 4 (prune)" in text


def test_the_page_lists_deviations_next_to_the_runs(everything: Path) -> None:
    text = Page(everything / "page.html").text
    assert "HGNP, fast penalty (3 seeds) against Taylor, HGNP's schedule (3 seeds)" in text
    assert "Gauss–Newton in place of the Hessian, along the previous batch's v" in text
    assert "10 of 16 tensors from features.safetensors; at random: classifier.1, classifier.4, classifier.6" in text
    assert "pretrained convolutions only · NVIDIA H200" in text
    assert "random weights instead of ImageNet's weights but for fc" in text
    assert "HGNP, literal penalty (unfinished)" in text
    assert "literal-0 is unfinished: the last complete epoch is 6 (prune)" in text


def test_text_in_the_table_of_runs_wraps_so_that_no_column_is_cut_off(everything: Path) -> None:
    source = (everything / "page.html").read_text(encoding="utf-8")
    assert "<td>HGNP with the penalty in scores only</td>" in source
    assert "<td>finished</td>" in source
    assert '<td class="number">finished</td>' not in source


def test_conclusions_are_counted_once_per_number_of_the_paper(everything: Path) -> None:
    found = json.loads((everything / "paper.json").read_text())
    verdicts: dict[tuple[str, str, str], str] = {}
    for row in found["rows"]:
        number = row["section"], row["experiment"], row["what"]
        if verdicts.get(number, "undecided") == "undecided" and row["verdict"] != "undecided":
            verdicts[number] = row["verdict"]  # the first that decides
        verdicts.setdefault(number, row["verdict"])
    page, lines = Page(everything / "page.html"), 0
    for kind, counts in found["counts"].items():
        words = [
            word for key, word in verdicts.items() if word and (key[0] in ("training", "inference")) == (kind == "time")
        ]
        assert counts == {word: words.count(word) for word in counts}
        assert sum(counts.values()) == len(words) > 0
        assert f"On {kind}: " + " ".join(f"{count} {word}" for word, count in counts.items()) in page.text
        lines += sum(counts[word] for word in counts if word != "not run")
    rules = 6
    assert sum(tag == "li" for tag, _ in page.tags) == lines + rules


def test_tables_and_figures_are_written_next_to_the_page(everything: Path) -> None:
    with (everything / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    (area,) = [
        row for row in rows if row["experiment"] == "ResNet-18 / CIFAR-10" and row["what"] == "HGNP over Taylor, area"
    ]
    assert float(area["paper"]) == 0.42
    assert area["verdict"] == "undecided"
    drawn = [f"{key}-accuracy" for key in ("alexnet-flowers", "resnet18-cifar10", "resnet18-birds", "vgg16-cifar10")]
    drawn += [f"{key}-relative" for key in ("alexnet-flowers", "resnet18-cifar10", "vgg16-cifar10")]
    expected = {f"{name}.{kind}" for name in (*drawn, "ablation") for kind in ("png", "svg", "csv")}
    assert {file.name for file in (everything / "figures").iterdir()} == expected


def test_charts_show_our_curves_and_the_papers_points(everything: Path) -> None:
    charts = {
        chart["config"]["toImageButtonOptions"]["filename"]: chart for chart in Page(everything / "page.html").charts
    }
    series = {trace.get("name"): trace for trace in charts["alexnet-flowers-relative"]["data"]}
    assert series["paper"]["x"] == [0.35, 0.4, 0.5]
    expected = [100 * (75.5 / 34 - 1), 100 * (77 / 60 - 1), 100 * (78.9 / 71.1 - 1)]
    assert series["paper"]["y"] == pytest.approx(expected)
    (ours,) = [trace for name, trace in series.items() if name != "paper"]
    lowest = ours["x"].index(min(ours["x"]))
    assert ours["y"][lowest] == pytest.approx(100 * ((0.80 - 0.06 * 0.65**2) / (0.81 - 0.7 * 0.65**3) - 1))
    names = [trace["name"] for trace in charts["ablation"]["data"]]
    assert [name.partition(",")[0] for name in names] == [
        "HGNP",
        "HGNP with the penalty in scores only",
        "HGNP with the penalty in training only",
    ]


def test_the_ablation_is_drawn_without_taylor(tmp_path: Path) -> None:
    """As long as Taylor was not run: over full HGNP."""
    accuracies = {None: lambda k: 0.8, "no-training-penalty": lambda k: 0.6, "no-scoring-penalty": lambda k: 0.84}
    for name, accuracy in accuracies.items():
        of = "-".join(part for part in ("alexnet-flowers", name, "fast") if part)
        write_paper_run(tmp_path / of, "alexnet-flowers", of=of, accuracy=accuracy)
    paper(tmp_path, tmp_path / "page")
    charts = {c["config"]["toImageButtonOptions"]["filename"]: c for c in Page(tmp_path / "page" / "page.html").charts}
    drawn = {trace["name"].partition(",")[0]: trace["y"] for trace in charts["ablation"]["data"]}
    assert drawn.keys() == {"HGNP with the penalty in scores only", "HGNP with the penalty in training only"}
    assert drawn["HGNP with the penalty in scores only"] == pytest.approx([-25.0] * 10)
    assert drawn["HGNP with the penalty in training only"] == pytest.approx([5.0] * 10)
    assert "HGNP's ablations over full HGNP" in Page(tmp_path / "page" / "page.html").text
    assert (tmp_path / "page" / "figures" / "ablation.svg").is_file()


def test_the_page_is_self_contained_and_escapes_names(everything: Path, one: Path) -> None:
    for folder in (everything, one):
        page = Page(folder / "page.html")
        assert page.bytes < 2**20
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        assert not any(tag == "b" for tag, _ in page.tags)
        assert "alert(1)" not in page.scripts
        for _, attributes in page.tags:
            assert (attributes.get("src") or "data:").startswith("data:")


def test_folders_are_relative_to_the_results(everything: Path) -> None:
    text = (everything / "paper.json").read_text()
    assert str(everything.parent) not in text
    assert "vgg/hgnp-0" in text

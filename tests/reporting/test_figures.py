"""Charts hold the run's numbers; files are valid images."""

import csv
import io
import itertools
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from hgnp.io.runs import Run, read
from hgnp.reporting import figures, run_charts
from hgnp.reporting.charts import Axis, Chart, Heatmap, MissingChart, ReferenceLine, Series, short_names
from run_cases import FINETUNE, LAYERS, ROUNDS, WARMUP, straight, write_run

EPOCHS = WARMUP + ROUNDS + FINETUNE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read(write_run(tmp_path_factory.mktemp("runs") / "run"))


def test_a_finished_run_has_every_chart(run: Run) -> None:
    keys = [figure.key for figure in run_charts.all_charts(run) if not isinstance(figure, MissingChart)]
    assert keys == [
        "metric_against_kept", "metric_over_epochs", "loss_over_epochs", "widths_before_after", "layer_widths",
        "radius_curvature", "penalised_blocks", "seconds",
    ]  # fmt: skip


def test_charts_without_data_give_the_reason(tmp_path: Path) -> None:
    flat = read(write_run(tmp_path / "mu0", mu=0.0))
    for chart in (run_charts.radius_and_curvature, run_charts.penalised_blocks):
        absent = chart(flat)
        assert isinstance(absent, MissingChart)
        assert "no flatness penalty" in absent.reason
    blind = read(write_run(tmp_path / "blind", accuracy=None))
    for chart in (run_charts.against_kept, run_charts.over_epochs):
        absent = chart(blind)
        assert isinstance(absent, MissingChart)
        assert "no validation data" in absent.reason
    empty = read(write_run(tmp_path / "empty", epochs=0))
    assert all(isinstance(figure, MissingChart) for figure in run_charts.all_charts(empty))


def test_shares_of_widths_and_of_steps(run: Run) -> None:
    heat = run_charts.widths_over_time(run)
    assert isinstance(heat, Heatmap)
    assert heat.names == tuple(LAYERS)
    assert heat.shares[0][0] == 1.0
    assert heat.shares[0][-1] == pytest.approx(0.5)
    assert heat.notes[0][-1] == "32 of 64 neurons"
    blocks = run_charts.penalised_blocks(run)
    assert isinstance(blocks, Heatmap)
    assert blocks.names == tuple(LAYERS)
    assert [row[0] for row in blocks.shares] == [0.75, 0.0, 0.0, 0.25]


def test_charts_mark_the_phases_of_a_run(run: Run) -> None:
    chart = run_charts.over_epochs(run)
    assert isinstance(chart, Chart)
    assert [(mark.value, mark.label) for mark in chart.marks] == [
        (WARMUP - 0.5, "pruning"),
        (WARMUP + ROUNDS - 0.5, "fine-tuning"),
    ]
    time = run_charts.time(run)
    assert isinstance(time, Chart)
    assert [len(series.x) for series in time.series] == [WARMUP, ROUNDS, FINETUNE]


def test_a_metric_that_is_no_percentage_stays_as_it_is(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", metric="psnr", accuracy=lambda kept: 30 * kept))
    chart = run_charts.over_epochs(run)
    assert isinstance(chart, Chart)
    assert [series.label for series in chart.series] == ["psnr"]
    assert not chart.y.percent


def test_negative_curvature_is_not_put_on_a_log_axis(run: Run) -> None:
    chart = run_charts.radius_and_curvature(run)
    assert isinstance(chart, Chart)
    assert chart.y.log
    below = Run(run.folder, run.info, ({**run.rows[0], "curvature": -0.5}, *run.rows[1:]), run.result)
    chart = run_charts.radius_and_curvature(below)
    assert isinstance(chart, Chart)
    assert not chart.y.log


def test_png_svg_and_csv_are_written(run: Run, tmp_path: Path) -> None:
    chart, heat = run_charts.against_kept(run), run_charts.widths_over_time(run)
    assert not isinstance(chart, MissingChart)
    assert not isinstance(heat, MissingChart)
    written = figures.save([chart, heat], tmp_path)
    assert len(written) == 6
    with Image.open(tmp_path / "metric_against_kept.png") as picture:
        assert picture.size == (1280, 760)
        assert len(picture.getcolors(1_000_000) or []) > 20
    text = " ".join(ElementTree.parse(tmp_path / "metric_against_kept.svg").getroot().itertext())
    assert "parameters kept, κ (%)" in text
    with open(tmp_path / "metric_against_kept.csv", encoding="utf-8") as file:
        points = [(float(kept), float(value)) for _, kept, value in list(csv.reader(file))[1:]]
    assert len(points) == 1 + ROUNDS
    assert all(value == pytest.approx(straight(kept)) for kept, value in points)
    with open(tmp_path / "layer_widths.csv", encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 1 + len(LAYERS) * EPOCHS


def test_long_labels_leave_the_axes_their_width(run: Run) -> None:
    chart = run_charts.against_kept(run)
    assert isinstance(chart, Chart)
    (one,) = chart.series
    for many, label in (
        (2, "taylor, floor={" + "'features.7': 88, " * 9 + "}"),
        (8, "HGNP with the penalty in scores only"),
    ):
        canvas = figures.draw(replace(chart, series=tuple(replace(one, label=f"{label} {n}") for n in range(many))))
        figures.image(canvas, "png")
        (axes,) = canvas.axes
        assert axes.get_position().width > 0.8
        assert axes.get_window_extent().height > 0.6 * 3.8 * canvas.dpi
        (legend,) = canvas.legends
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
        assert legend.get_window_extent().width < canvas.bbox.width


def test_the_same_figure_is_the_same_file(run: Run) -> None:
    chart = run_charts.time(run)
    assert not isinstance(chart, MissingChart)
    for kind in ("svg", "png"):
        assert figures.image(figures.draw(chart), kind) == figures.image(figures.draw(chart), kind)


def test_outcome_draws_finished_and_empty_runs(run: Run, tmp_path: Path) -> None:
    with Image.open(figures.save_outcome(run, tmp_path / "outcome.png")) as picture:
        assert picture.size == (1600, 720)
        assert picture.convert("RGBA").getpixel((2, 2)) == (255, 255, 255, 255)  # on a dark page too
    words = " ".join(ElementTree.fromstring(figures.image(figures.outcome(run), "svg")).itertext())
    assert "accuracy was 90.00% before the first removal and is 72.00% at the end" in " ".join(words.split())
    assert {"512", "128"} <= set(words.split())  # the layers' widths, at the start
    empty = read(write_run(tmp_path / "empty", epochs=0))
    image = figures.image(figures.outcome(empty), "svg")
    assert b"no epoch is complete" in image
    with pytest.raises(ValueError, match=r"file must end in \.png or \.svg, got"):
        figures.save_outcome(run, tmp_path / "outcome.gif")


def test_ticks_are_short_and_still_tell_layers_apart() -> None:
    assert short_names(["net.layer1.conv", "net.layer2.conv"]) == ["layer1.conv", "layer2.conv"]
    assert short_names(["net.features.0", "net.features.3"]) == ["features.0", "features.3"]
    assert short_names(["features.0"]) == ["features.0"]
    assert short_names(["a", "a.b"]) == ["a", "a.b"]
    assert short_names(["x." + "y" * 30 + ".conv1", "z.conv2"]) == ["…" + "y" * 11 + ".conv1", "z.conv2"]
    same_end = ["first." + "y" * 20, "second." + "y" * 20]
    assert short_names(same_end) == same_end


def test_dollar_signs_in_names_are_not_read_as_mathematics(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", metric="$score_$"))
    chart = run_charts.against_kept(run)
    assert not isinstance(chart, MissingChart)
    svg = ElementTree.parse(io.BytesIO(figures.image(figures.draw(chart), "svg")))
    assert "$score_$" in " ".join(svg.getroot().itertext())


def test_labels_of_marks_do_not_overlap_and_baselines_are_in_the_legend() -> None:
    marks = (
        ReferenceLine(0.0, "taylor", vertical=False), ReferenceLine(0.06, "6.0%"), ReferenceLine(0.255, "25.5%"),
        ReferenceLine(0.218, "21.8%"), ReferenceLine(0.7, "70.0%"),
    )  # fmt: skip
    series = (Series("hgnp", (1.0, 0.5, 0.05), (0.0, 1.0, -1.0)),)
    canvas = figures.draw(Chart("key", "title", "alt", run_charts.KEPT, Axis("y"), series, marks))
    FigureCanvasAgg(canvas).draw()
    (axes,) = canvas.axes
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.x0)
    assert len(boxes) == 4
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[-1].x1 < canvas.bbox.x1
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["hgnp", "taylor"]
    early = figures.draw(
        Chart("key", "t", "alt", Axis("epoch"), Axis("y"), series, (ReferenceLine(0.5, "fine-tuning"),))
    )
    assert early.axes[0].texts[0].get_ha() == "left"  # with half of the axes to its right

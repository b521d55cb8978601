"""The page as a file: whole, self-contained, and deaf to what stands in names."""

import base64
import gzip
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hgnp.io.runs import read
from hgnp.reporting.charts import Axis, Chart, ReferenceLine, Series
from hgnp.reporting.compare import compare_runs
from hgnp.reporting.page import plots
from hgnp.reporting.page.comparison_page import write_comparison
from hgnp.reporting.page.run_page import write_report
from hgnp.reporting.publish import report
from pages import Page
from run_cases import write_run

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("pages")
    whole = read(write_run(folder / "whole", flatness={"curvature": "hessian"}))
    odd = [write_run(folder / "half", epochs=6), write_run(folder / "blind", mu=0.0, accuracy=None)]
    taylor = write_run(folder / "taylor", method="taylor", accuracy=lambda kept: 0.95 - 0.4 * (1 - kept))
    files = {
        "whole": write_report([whole], folder / "whole.html"),
        "odd": write_report([read(one) for one in odd], folder / "odd.html"),
        "comparison": write_comparison(compare_runs([whole, read(taylor)]), folder / "comparison.html"),
    }
    return {name: Page(file) for name, file in files.items()}


def test_the_page_loads_nothing_from_the_network(pages: dict[str, Page]) -> None:
    for page in pages.values():
        for _, attributes in page.tags:
            for name in ("src", "href", "srcset", "action", "data"):
                assert (attributes.get(name) or "data:").startswith(("data:", "#"))
        policy = next(
            a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy is not None
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert any(tag == "meta" and a.get("name") == "viewport" for tag, a in page.tags)


def test_plotly_is_embedded_once_and_each_chart_has_image_and_table(pages: dict[str, Page]) -> None:
    for name, count in (("whole", 8), ("comparison", 3)):
        page = pages[name]
        assert page.scripts.count(plots.library()) == 1
        assert [set(chart) for chart in page.charts] == [{"data", "layout", "config"}] * count
        pictures = [a for tag, a in page.tags if tag == "img"]
        assert len(pictures) == count
        for picture in pictures:
            assert picture["alt"]
            assert base64.b64decode((picture["src"] or "").partition(",")[2]).startswith(b"<?xml")
        assert sum(tag == "details" for tag, _ in page.tags) == count
        labelled = [a for tag, a in page.tags if a.get("role") == "img" and tag == "div"]
        assert all(a["aria-label"] for a in labelled)
        assert len(labelled) == count


def test_plotly_is_the_published_file_and_a_page_stays_below_a_megabyte(pages: dict[str, Page]) -> None:
    """plotly.js-cartesian-dist-min 4.1.1 from npm, byte for byte."""
    source = gzip.decompress(base64.b64decode(plots.library()))
    assert source.startswith(b"/**\n* plotly.js (cartesian - minified) v4.1.1\n")
    assert hashlib.sha256(source).hexdigest() == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    assert all(page.bytes < 2**20 for page in pages.values())


def test_reference_lines_and_gaps_are_at_their_values(tmp_path: Path) -> None:
    """A label's place on a log axis is a logarithm, a line's is not; a number that is not finite is a gap."""
    made = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    rows[3]["radius"] = math.nan
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report([read(made)], tmp_path / "page.html"))
    (chart,) = [chart for chart in page.charts if chart["layout"]["yaxis"].get("type") == "log"]
    assert chart["data"][0]["y"][3] is None
    assert chart["data"][0]["y"][2] == rows[2]["radius"]
    (line,) = [shape for shape in chart["layout"]["shapes"] if shape.get("xref") == "paper"]
    (label,) = [text for text in chart["layout"]["annotations"] if text["text"] == "bound B"]
    assert (line["y0"], line["y1"]) == (0.5, 0.5)
    assert label["y"] == pytest.approx(math.log10(0.5))


def test_a_label_near_the_right_edge_is_left_of_its_line() -> None:
    series = (Series("one", (0.05, 0.5, 1.0), (0.1, 0.2, 0.3)),)
    marks = (ReferenceLine(0.9, "early"), ReferenceLine(0.14, "late"))
    for axis, anchors in ((Axis("κ", reverse=True), ["left", "right"]), (Axis("κ"), ["right", "left"])):
        made = plots.plot(Chart("key", "title", "alt", axis, Axis("y"), series, marks), "id")
        (text,) = re.findall(r'<script type="application/json">(.*)</script>', made)
        assert [label["xanchor"] for label in json.loads(text)["layout"]["annotations"]] == anchors


def test_heading_levels_are_not_skipped(pages: dict[str, Page]) -> None:
    for page in pages.values():
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels.count(1) == 1
        assert levels[0] == 1
    levels = [int(tag[1]) for tag, _ in pages["odd"].tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_report_states_the_outcome(pages: dict[str, Page]) -> None:
    text = pages["whole"].text
    assert "finished" in text
    outcome = "accuracy was 90.00% before the first removal and is 72.00% at the end"
    assert f"nets.Small was pruned to 10.0% of its parameters; its {outcome}" in text
    assert "4.0 times as fast" in text
    assert "−18.00 points" in text
    assert "1,000,000 100,000 × 0.1" in text
    assert "Latency: batch 64, 2 threads, cpu." in text
    assert "curvature: hessian" in text
    assert "neurons_per_round" in text


def test_pages_of_unfinished_and_unusual_runs_state_what_is_missing(pages: dict[str, Page]) -> None:
    text = pages["odd"].text
    assert "unfinished: the last complete epoch is 5 (prune)" in text
    assert "nets.Small has 70.0% of its parameters left so far." in text
    assert "no flatness penalty" in text
    assert "no validation data" in text
    assert sum(a.get("class") == "state open" for _, a in pages["odd"].tags) == 1


def test_a_comparison_page_states_results_and_limitations(pages: dict[str, Page]) -> None:
    text = pages["comparison"].text
    # 0.9 − 0.2(1 − κ) = 0.95 − 0.4(1 − κ) at κ = 0.75
    assert "Below κ = 75.0% hgnp is ahead of taylor." in text
    assert "4 of them the paper's" in text
    assert "three distinct inputs for three coefficients" in text
    assert "AlexNet / Flowers-102 (paper) 91.0" in text
    assert "In hindsight HGNP is ahead below κ = 75.0%" in text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def test_a_comparison_without_both_methods_has_no_section_on_the_hybrid(tmp_path: Path) -> None:
    both = [read(write_run(tmp_path / method, method=method)) for method in ("l1", "taylor")]
    text = Page(write_comparison(compare_runs(both), tmp_path / "page.html")).text
    assert "Summary over" in text
    assert "threshold" not in text


def test_curves_that_cross_often_are_summarised_without_labels_on_the_chart(tmp_path: Path) -> None:
    crossing = [read(write_run(tmp_path / "h", accuracy=lambda kept: 0.9 + 0.01 * math.cos(30 * kept)))]
    crossing.append(read(write_run(tmp_path / "t", method="taylor", accuracy=lambda kept: 0.9)))
    page = Page(write_comparison(compare_runs(crossing), tmp_path / "page.html"))
    assert re.search(r"hgnp and taylor cross \d times\.", page.text)
    before, found, _ = page.text.partition("Summary over")
    assert found
    assert "Below κ" not in before
    assert re.search(r"\d, the lowest at \d+\.\d%", page.text)
    (difference,) = [
        chart for chart in page.charts if chart["config"]["toImageButtonOptions"]["filename"] == "relative_difference"
    ]
    assert len(difference["layout"]["shapes"]) == 1  # the baseline, and no crossings


def test_kept_falls_from_left_to_right(pages: dict[str, Page]) -> None:
    (chart,) = [c for c in pages["whole"].charts if c["layout"]["xaxis"]["title"]["text"] == "parameters kept, κ"]
    assert chart["layout"]["xaxis"]["range"] == pytest.approx([1.018, 0.082])


def test_names_from_runs_are_escaped(tmp_path: Path) -> None:
    def folder(name: str, method: str) -> Path:
        made = write_run(tmp_path / name, method=method, name=EVIL, model=EVIL, metric=EVIL)
        file = made / "metrics.jsonl"
        file.write_text(file.read_text().replace("features.0", "<b onclick=x>$1$"))
        made = made.rename(tmp_path / f"{name}<img src=x onerror=alert(1)>")
        (made / "run.json").write_text(
            (made / "run.json").read_text().replace('"start": "random"', f'"start": "{EVIL}"')
        )
        return made

    runs = [read(folder("h", "hgnp")), read(folder("t", "taylor"))]
    for file in (
        write_report(runs[:1], tmp_path / "r.html"),
        write_comparison(compare_runs(runs), tmp_path / "c.html"),
    ):
        page = Page(file)
        assert EVIL in page.text
        assert not any("onerror" in a or "onclick" in a for _, a in page.tags)
        assert not any(script.strip() == "alert(1)" for script in page.scripts)
        assert page.charts
        for text in _texts(page.charts):
            assert "<script" not in text
            assert "<b onclick" not in text
        assert not any("<script" in script or "<b onclick" in script for script in page.scripts)


def test_report_writes_into_the_run_or_the_given_folder(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", epochs=0), write_run(tmp_path / "two", epochs=1, mu=0.0, accuracy=None)
    assert report([one]) == one / "page.html"
    assert (one / "figures" / "outcome.png").is_file()
    assert report([one, two], tmp_path / "out") == tmp_path / "out" / "page.html"
    assert (tmp_path / "out" / "figures" / "2-two" / "seconds.svg").is_file()
    with pytest.raises(ValueError, match="out must be a folder for the page of 2 runs, got none"):
        report([one, two])

"""The pages in a real browser: no errors, every chart drawn, nothing asked of the network, right on a phone and in print."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hgnp.io.runs import read
from hgnp.reporting.compare import compare_runs
from hgnp.reporting.page.comparison_page import write_comparison
from hgnp.reporting.page.paper_page import write_paper
from hgnp.reporting.page.run_page import write_report
from hgnp.reporting.paper.report import paper_report
from hgnp.reporting.paper.results import scan
from paper_cases import write_everything
from run_cases import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000",
]  # fmt: skip
CHARTS = {
    "report": 8,
    "comparison": 3,
    "paper": 8,
}  # the paper's: four pairs of which one has no Taylor, and the ablation


def browse(file: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what the console said."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hgnp = read(write_run(folder / "hgnp <i>x</i>"))
    taylor = read(write_run(folder / "taylor", method="taylor", accuracy=lambda kept: 0.95 - 0.4 * (1 - kept)))
    return {
        "report": write_report([hgnp], folder / "report.html"),
        "comparison": write_comparison(compare_runs([hgnp, taylor]), folder / "comparison.html"),
        "paper": write_paper(paper_report(scan(write_everything(folder / "everything"))), folder / "paper.html"),
    }


def test_errors_and_requests_would_be_seen(pages: dict[str, Path], tmp_path: Path) -> None:
    """The page's own policy forbids requests, and the browser says so in its console when one is tried."""
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', pages["report"].read_text(encoding="utf-8"))
    assert policy is not None
    asking = "<img src='https://example.org/a.png'><script>fetch('https://example.org/b')</script>"
    page = tmp_path / "broken.html"
    page.write_text(f"<head>{policy[0]}</head>{asking}<script>console.error('oh'); missing()</script>")
    _, console = browse(page, tmp_path, "--dump-dom")
    for said in ("a.png", "example.org/b", '"oh"', "missing is not defined"):
        assert any(said in line for line in console), said


@pytest.mark.parametrize("name", ["report", "comparison", "paper"])
def test_charts_are_drawn_without_errors_and_without_network(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    document, console = browse(pages[name], tmp_path, "--dump-dom", "--window-size=1280,900")
    assert console == []
    charts = document.split('class="plot js-plotly-plot"')[1:]
    assert len(charts) == CHARTS[name]
    for chart in charts:
        assert 'class="main-svg"' in chart
        assert re.search(r'class="(trace scatter|trace bars|hm)', chart)
        width = re.search(r'class="main-svg"[^>]*width="([\d.]+)"', chart)
        assert width is not None
        assert 900 < float(width[1]) < 1000


def test_a_browser_that_cannot_unpack_plotly_shows_static_images(pages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "old.html"
    text = (
        pages["report"]
        .read_text(encoding="utf-8")
        .replace("<head>", "<head><script>delete DecompressionStream</script>")
    )
    page.write_text(text, encoding="utf-8")
    document, console = browse(page, tmp_path, "--dump-dom")
    assert '<body class="still">' in document
    assert "js-plotly-plot" not in document
    assert len(console) == 1
    assert "DecompressionStream is not defined" in console[0]


def test_on_a_phone_nothing_is_wider_than_the_screen(pages: dict[str, Path], tmp_path: Path) -> None:
    frames = "".join(
        f'<iframe src="{page.as_uri()}" style="width:390px;height:800px;border:0"></iframe>' for page in pages.values()
    )
    wide, drawn = (
        "frames[n].document.documentElement.scrollWidth",
        "frames[n].document.querySelectorAll('.main-svg').length",
    )
    measure = f"[0, 1, 2].map(n => {wide} + '/' + {drawn})"
    phone = tmp_path / "phone.html"
    phone.write_text(
        f"<title>not measured</title>{frames}<script>onload = () => setTimeout(() => document.title = {measure}, 3000)</script>"
    )
    document, console = browse(phone, tmp_path, "--dump-dom", "--allow-file-access-from-files")
    assert console == []
    found = re.search(r"<title>(.*)</title>", document)
    assert found is not None
    (report, charts), (comparison, _), (paper, _) = (part.split("/") for part in found[1].split(","))
    assert int(charts) >= CHARTS["report"]
    assert (report, comparison, paper) == ("390", "390", "390")


def test_in_print_every_chart_is_an_image(pages: dict[str, Path], tmp_path: Path) -> None:
    pdf = tmp_path / "page.pdf"
    browse(pages["report"], tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF")
    if (pdftotext := shutil.which("pdftotext")) is None:
        pytest.skip("no pdftotext on PATH to read the printed page")
    text = subprocess.run([pdftotext, pdf, "-"], capture_output=True, text=True, check=True).stdout
    assert text.count("\f") <= 7
    for words in (
        "parameters kept, κ (%)",
        "mean loss",
        "radius, curvature",
        "share of steps (%)",
        "seconds per epoch",
        "bound B",
    ):
        assert words in text
    assert "Data table" not in text

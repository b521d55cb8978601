"""The reports under benchmarks/: tables with their command and date, and few findings."""

import re
import textwrap
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REPORTS = sorted(file for file in BENCHMARKS.glob("*.md") if file.stem != "README")


def test_the_index_lists_every_report() -> None:
    index = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [report.name for report in REPORTS if f"]({report.name})" not in index] == []


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_report_has_tables_a_command_a_date_and_at_most_ten_lines_of_findings(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert re.search(r"^\|[-:| ]+\|$", text, re.MULTILINE)
    assert re.search(r"\b(python benchmarks/|hgnp )\w+", text)
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", text)
    items = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    findings = [line for item in items if not item.startswith("- *") for line in textwrap.wrap(item, 130)]  # *legend*
    assert len(findings) <= 10

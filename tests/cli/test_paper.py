"""`hgnp paper`."""

import json
from pathlib import Path

import pytest

from command import call
from paper_cases import write_paper_run


def test_paper_writes_a_page_and_tells_what_agrees_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_paper_run(tmp_path / "h", "alexnet-flowers", accuracy=lambda k: 0.8)
    write_paper_run(tmp_path / "t", "alexnet-flowers", method="taylor", accuracy=lambda k: 0.6 + 0.2 * k)
    assert call("paper", str(tmp_path)) == 0
    said = capsys.readouterr().out
    area = 100 * (0.8 * 0.65 / (0.6 * 0.65 + 0.1 * (1 - 0.35**2)) - 1)
    assert f"HGNP over Taylor, area. Paper: +9.20 %; ours: +{area:.2f} %" in said
    line = next(line for line in said.splitlines() if "HGNP over Taylor, area." in line)
    assert "; undecided (one seed). Runs: HGNP, literal penalty (1 seed) against Taylor (1 seed)." in line
    assert "not run: hgnp study vgg16-cifar10 --data DIR" in said
    assert str(tmp_path / "page" / "page.html") in said
    assert (tmp_path / "page" / "page.html").is_file()


def test_paper_as_json_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_paper_run(tmp_path / "runs" / "h", "vgg16-cifar10")
    assert call("paper", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["group"] for group in found["groups"]] == ["HGNP, literal penalty (1 seed)"]
    assert found["groups"][0]["runs"] == ["h"]
    assert not (tmp_path / "runs" / "page").exists()
    assert json.loads((tmp_path / "out" / "paper.json").read_text())["counts"] == found["counts"]
    assert call("paper", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--json") == 0  # it may be made again


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "run as out"])
def test_the_paper_command_refuses_bad_folders_in_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, more = tmp_path / "results", []
    if what == "empty":
        folder.mkdir()
    elif what == "file":
        folder.write_text("")
    elif what == "run as out":
        more = ["--out", str(write_paper_run(folder / "h", "vgg16-cifar10"))]
    assert call("paper", str(folder), *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("hgnp: ")

"""Reading run folders: which points make the curve, and one line for each thing that can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from hgnp.io.runs import read
from run_cases import FINETUNE, ROUNDS, WARMUP, straight, write_run


def test_curve_has_the_last_epoch_of_each_level_and_ends_fine_tuned(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    points = run.curve()
    assert len(run.rows) == WARMUP + ROUNDS + FINETUNE
    assert len(points) == 1 + ROUNDS
    for kept, metric in points:
        assert metric == pytest.approx(straight(kept), abs=1e-12)
    assert [kept for kept, _ in points] == sorted((kept for kept, _ in points), reverse=True)
    assert run.rows[WARMUP + ROUNDS]["metric"] < points[-1][1] == run.rows[-1]["metric"]
    assert run.state == "finished"


def test_unfinished_runs_report_their_last_epoch(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "half", epochs=WARMUP + 2))
    assert run.result is None
    assert run.state == f"unfinished: the last complete epoch is {WARMUP + 1} (prune)"
    assert len(run.curve()) == 3
    assert read(write_run(tmp_path / "none", epochs=0)).state == "unfinished: no epoch is complete"
    (tmp_path / "none" / "metrics.jsonl").unlink()
    assert read(tmp_path / "none").rows == ()


def test_early_stop_and_missed_target_are_states(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for change, state in (
        ({"stopped": "on_epoch"}, "stopped early: on_epoch"),
        ({"reached": False}, "target was not reached"),
    ):
        result = json.loads((folder / "result.json").read_text()) | {"stopped": None, "reached": True} | change
        (folder / "result.json").write_text(json.dumps(result))
        assert state in read(folder).state


def test_without_validation_there_is_no_curve(tmp_path: Path) -> None:
    assert read(write_run(tmp_path / "run", accuracy=None)).curve() == ()


def test_numbers_that_are_not_finite_are_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1)
    lines = (folder / "metrics.jsonl").read_text().replace('"loss": 2.2', '"loss": NaN')
    (folder / "metrics.jsonl").write_text(lines)
    assert read(folder).rows[0]["loss"] is None


def _damage(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "run.json",
            '"format": 1',
            '"format": 2',
            r"run\.json: format must be at most 1, got 2, which a newer hgnp wrote; upgrade hgnp",
        ),
        ("run.json", '"format": 1', '"format": "x"', r"format must be an integer, got 'x'"),
        ("run.json", '"method": "hgnp"', '"method": 3', r"run\.json: method must be a string, got 3; the file"),
        ("run.json", "{", "", r"run\.json must be JSON, got text that is not \(.*\); it is damaged"),
        ("metrics.jsonl", '"epoch": 1,', '"epoch": 1', r"metrics\.jsonl line 2 must be JSON"),
        (
            "metrics.jsonl",
            '"epoch": 1,',
            '"epoch": 0,',
            r"metrics\.jsonl line 2: epoch must be above 0, the epoch of the line before, got 0",
        ),
        ("metrics.jsonl", '"kept": 1.0', '"kept": null', r"metrics\.jsonl line 1: kept must be present"),
        ("metrics.jsonl", '"kept": 1.0', '"kept": "all"', r"line 1: kept must be a number, got 'all'"),
        ("metrics.jsonl", '"phase": "warmup"', '"phase": 1', r"line 1: phase must be a string, got 1"),
        ("metrics.jsonl", '"widths": {', '"widths": 3, "x": {', r"line 1: widths must be an object, got 3"),
        ("result.json", "{", "[1]\n", r"result\.json must be JSON, got text that is not"),
        ("result.json", "{", "3\n", r"result\.json must be JSON"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    folder = write_run(tmp_path / "run")
    _damage(folder, file, old, new)
    with pytest.raises(ValueError, match=message) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"v_every": 8}, "recipe: v_every is now called refresh_every; rename it"),
        ({"multiple": 8}, "recipe: multiple is now called round_to; rename it"),
        ({"flatness": {"labels": "mc"}}, "recipe.flatness: labels is now called fisher_type; rename it"),
        ({"flatness": {"norm": "frozen"}}, "recipe.flatness: norm was removed: .*; omit it"),
    ],
)
def test_former_names_of_options_are_refused_with_the_new_name(
    old: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"recipe": info["recipe"] | old}))
    with pytest.raises(ValueError, match=rf"run\.json: {message}"):
        read(folder)


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be text in UTF-8, got invalid start byte at byte 0"):
        read(folder)


def test_other_folders_are_not_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got one without run\.json"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="got no such folder"):
        read(tmp_path / "nowhere")

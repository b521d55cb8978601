"""The end of a run in words and figures."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from hgnp.cli.table import print_result, rows, summary_line

RESULT: dict[str, Any] = {
    "reached": False, "target": {"kind": "macs", "asked": 0.1, "got": 0.25}, "stopped": "no more neurons could be removed",
    "epochs": 12, "metric": "psnr", "seconds": 75.0, "parts": 3,
    "latency": {"batch": 64, "threads": 1, "device": "NVIDIA H200"},
    "before": {"metric": 31.25, "parameters": 1000, "neurons": 40, "macs": 5000, "latency_ms": 2.0, "sharpness": None,
               "missing": {"sharpness": "there was [no] time"}},
    "after": {"metric": 30.0, "parameters": 500, "neurons": 10, "macs": 1250, "latency_ms": 2.5, "sharpness": None,
              "missing": {"sharpness": "there was [no] time"}},
}  # fmt: skip


def test_rows_of_the_table_leave_out_what_was_not_measured() -> None:
    assert rows(RESULT) == [
        ("psnr", "31.25", "30", "96.0%"),
        ("parameters", "1,000", "500", "50.0%"),
        ("neurons", "40", "10", "25.0%"),
        ("MACs", "5,000", "1,250", "25.0%"),
        ("ms (batch 64, NVIDIA H200)", "2.00", "2.50", "125.0%"),
    ]


def test_a_speedup_is_a_ratio_of_times() -> None:
    faster = RESULT | {"after": {**RESULT["after"], "latency_ms": 0.35}}
    assert rows(faster)[-1][1:] == ("2.00", "0.35", "17.5% (5.7× as fast)")


def test_a_target_that_was_missed_is_said() -> None:
    assert summary_line(RESULT) == (
        "target NOT reached (no more neurons could be removed): 25.00% of the MACs kept, 10.00% requested; "
        "12 epochs, 1 min 15 s, resumed 2 times"
    )


def test_a_narrow_terminal_gets_all_of_it_and_only_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    stream = io.StringIO()
    print_result(
        RESULT,
        out=tmp_path,
        console=Console(file=stream, force_terminal=True, width=80, color_system=None),
    )
    shown = stream.getvalue()
    assert all(cell in shown for row in rows(RESULT) for cell in row)
    assert f"{tmp_path / 'model.safetensors'}  (the pruned network" in shown
    assert "page.html" not in shown
    assert "not measured: sharpness before, sharpness after: there was [no] time\n" in shown

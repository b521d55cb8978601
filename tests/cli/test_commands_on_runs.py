"""`hgnp compare`, `bench`, `report`, `export` and `sharpness` on real runs of a few seconds."""

import errno
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import hgnp
from command import call
from hgnp.experiments.data import digits
from hgnp.experiments.models import DigitsNet
from run_cases import write_run

QUICK = [
    "--set", "model_args.width=8", "--set", "data_args.batch=256", "--set", "recipe.warmup_epochs=1", "--set",
    "recipe.neurons_per_round=16", "--set", "recipe.finetune_epochs=1", "--set", "recipe.keep=0.4", "--device", "cpu",
]  # fmt: skip


SHORT = ["--batch", "8", "--device", "cpu", "--variant", "eager", "--repeats", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("hgnp", "taylor"):
        assert call("run", *QUICK, "--method", method, "--out", str(folder / method)) == 0
    return folder


def small(runs: Path) -> torch.nn.Module:
    return hgnp.load(runs / "hgnp", DigitsNet(width=8)).eval()


@pytest.mark.parametrize("command", ["report", "compare", "paper", "bench", "export"])
def test_a_run_with_a_former_name_of_an_option_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(Path("old") / "run")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"recipe": info["recipe"] | {"rest_closed": True}}))
    given = ["old"] if command == "paper" else [str(folder)]
    assert call(command, *given, *(["small.onnx"] if command == "export" else [])) == 2
    assert capsys.readouterr().err == (
        f"hgnp: {folder / 'run.json'}: recipe: rest_closed is now called skip_inactive; rename it\n"
    )


def test_compare(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--new", "classes=10", "--new", "train_samples=1347"]
    assert call("compare", str(runs / "hgnp"), str(runs / "taylor"), "--out", "c", *given, "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    (experiment,) = found["experiments"]
    assert experiment["baseline"] == "taylor"
    assert {group["method"] for group in experiment["groups"]} == {"hgnp", "taylor"}
    assert found["recommendation"]["sentences"]
    assert "area gain" in said.err
    assert {"page.html", "summary.csv", "curves.csv", "comparison.json", "figures"} <= {
        p.name for p in Path("c").iterdir()
    }
    assert call("compare", str(runs / "hgnp"), "--new", "clases=10") == 2
    assert "got 'clases=10'; did you mean classes" in capsys.readouterr().err
    assert call("compare", str(runs / "hgnp"), "--new", "classes") == 2
    assert capsys.readouterr().err == "hgnp: --new must be FEATURE=NUMBER, such as classes=10, got 'classes'\n"
    for value in ("[1]", "true", "null", "NaN", "1e999", ""):
        assert call("compare", str(runs / "hgnp"), "--out", "d", "--new", f"classes={value}") == 2
        assert f"--new classes must be a finite number, got {value!r}" in capsys.readouterr().err
    for value in ("48", "lasso", "nan"):
        assert call("compare", str(runs / "hgnp"), "--out", "d", "--threshold", value) == 2
        assert "threshold must be 'fit', 'paper' or a κ from 0 to 1, got" in capsys.readouterr().err
    assert not Path("d").exists()


def test_compare_shows_the_composed_hybrid_and_the_run_that_switches(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ["--method", "hybrid", "--set", "recipe.threshold=0.8", "--out", "hybrid"]
    assert call("run", *QUICK, *mine) == 0
    folders = [str(runs / "hgnp"), str(runs / "taylor"), "hybrid"]
    capsys.readouterr()
    assert call("compare", *folders, "--out", "c", "--threshold", "0.48", "--json") == 0
    said = capsys.readouterr()
    (experiment,) = json.loads(said.out.splitlines()[-1])["experiments"]
    assert [group["label"] for group in experiment["groups"]] == ["hgnp", "taylor", "hybrid, threshold=0.8"]
    assert (experiment["composed_hybrid"]["threshold"], experiment["composed_hybrid"]["source"]) == (0.48, "given")
    row = next(line for line in said.err.splitlines() if line.startswith("hybrid (composed), κ ≤ 48.0%"))
    assert f"{experiment['composed_hybrid']['over_taylor']:+.2f} %" in row
    assert any(line.startswith("hybrid, threshold=0.8 ") for line in said.err.splitlines())
    assert "The threshold was set by the user." in said.err
    assert call("compare", *folders, "--out", "c", "--threshold", "paper", "--json") == 0
    said = capsys.readouterr()
    (experiment,) = json.loads(said.out.splitlines()[-1])["experiments"]
    assert (
        experiment["composed_hybrid"]["threshold"] is None
    )  # fewer training samples than the paper's experiments have
    assert "No threshold is predicted: train_samples must be from 2040 to 50000, " in said.err
    assert "hybrid (composed)" not in said.err
    assert "134.005 − 0.40476 · classes" in said.err


def test_report_of_several_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(runs / "hgnp"), str(runs / "taylor"), "--out", "r") == 0
    assert Path("r/page.html").stat().st_size > 10_000
    assert list(Path("r/figures").rglob("*.svg"))
    capsys.readouterr()
    assert call("report", str(runs / "hgnp"), "--out", "r", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"page": "r/page.html", "figures": "r/figures"}
    assert "r/page.html" in said.err
    assert call("report", str(runs)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_export(runs: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", str(runs / "hgnp"), f"small.{suffix}", "--json") == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert (made["path"], made["bytes"]) == (f"small.{suffix}", Path(f"small.{suffix}").stat().st_size)
    assert made["error"] < 1e-4
    assert f"small.{suffix}" in said.err
    x = next(iter(digits(batch=7).val))[0]
    expected = small(runs)(x).detach()
    if suffix == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession("small.onnx")
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    else:
        found = torch.export.load("small.pt2").module()(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_sharpness(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sharpness", str(runs / "hgnp"), "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    batch = next(iter(digits(batch=256).val))
    expected = hgnp.sharpness(small(runs), [batch]).eigenvalues[0]
    assert found["plain"]["eigenvalues"][0] == pytest.approx(expected, rel=1e-3)
    assert found["scale-invariant"]["eigenvalues"][0] > 0


def test_bench(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SHORT, "--weights", "0.1", "--json"]
    assert call("bench", str(runs / "hgnp"), str(runs / "taylor"), *arguments) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["network"] for row in rows] == ["full", "neuron-pruned, hgnp", "neuron-pruned, taylor", "weight-pruned"]
    assert all(row["median_ms"] > 0 for row in rows)
    result = json.loads((runs / "hgnp" / "result.json").read_text())
    assert rows[1]["parameters"] == result["after"]["parameters"]
    assert rows[1]["macs"] == result["after"]["macs"]
    assert rows[3]["kept"] == pytest.approx(0.1)
    assert (runs / "hgnp" / "bench.csv").is_file()


def test_bench_of_several_runs_has_a_weight_pruned_network_for_each(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("bench", str(runs / "hgnp"), str(runs / "taylor"), *SHORT, "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["network"] for row in rows[1:]] == [
        f"{kind}-pruned, {method}" for method in ("hgnp", "taylor") for kind in ("weight", "neuron")
    ]
    assert rows[1]["kept"] == pytest.approx(rows[2]["kept"], abs=1e-3)
    shutil.copytree(runs / "hgnp", "[/again]/hgnp")  # the same name: told apart by their paths
    fractions = ["--weights", "0.1", "--weights", "0.2", "--json"]
    assert call("bench", str(runs / "hgnp"), "[/again]/hgnp", *SHORT, *fractions) == 0
    said = capsys.readouterr()
    assert "neuron-pruned, [/again]/hgnp" in said.err
    rows = json.loads(said.out.splitlines()[-1])["rows"]
    assert [row["network"] for row in rows[2:]] == [
        "neuron-pruned, [/again]/hgnp",
        "weight-pruned, 0.1",
        "weight-pruned, 0.2",
    ]


def test_bench_of_a_run_without_weights_times_its_widths(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "hgnp", tmp_path / "kept")
    (tmp_path / "kept" / "model.safetensors").unlink()
    assert call("bench", str(tmp_path / "kept"), *SHORT, "--json") == 0
    said = capsys.readouterr()
    assert "kept has no model.safetensors: timed with random weights at its widths" in said.err
    result = json.loads((runs / "hgnp" / "result.json").read_text())
    row = json.loads(said.out.splitlines()[-1])["rows"][-1]
    assert (row["parameters"], row["macs"]) == (result["after"]["parameters"], result["after"]["macs"])


@pytest.mark.parametrize("keep", [0.6, 0.2])
def test_bench_times_a_run_at_another_kept(
    keep: float, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the run's epochs, and below its last κ, where the widths continue in the run's proportions."""
    kept = tmp_path / "kept"
    shutil.copytree(runs / "hgnp", kept)
    rows = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]["kept"]
    assert 0.2 < last < 0.6
    assert call("bench", str(kept), "--keep", str(keep), *SHORT, "--json") == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][-1]
    assert row["network"] == "neuron-pruned"
    assert keep - 0.1 < row["kept"] <= keep
    assert row["accuracy"] is None
    expected = (
        "widths of the run at this κ" if keep > last else f"widths continued from the run's last κ, {100 * last:.1f} %"
    )
    assert row["note"] == f"random weights, {expected}"


def test_bench_at_a_kept_that_the_network_cannot_have(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", str(runs / "hgnp"), "--keep", "2", *SHORT) == 2
    assert capsys.readouterr().err == "hgnp: --keep must be a fraction > 0 and ≤ 1, got 2\n"
    assert call("bench", str(runs / "hgnp"), "--keep", "0.000001", *SHORT) == 2
    assert "keep must be at least" in capsys.readouterr().err


def test_bench_of_a_run_given_twice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", str(runs / "hgnp"), str(runs / "taylor" / ".." / "hgnp"), *SHORT) == 2
    assert "runs must differ, got" in capsys.readouterr().err
    twice = ["--variant", "eager", "--weights", "0.5", "--weights", "0.5", "--batch", "8"]
    assert call("bench", str(runs / "hgnp"), *SHORT, *twice, "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["network"] for row in rows] == ["full", "neuron-pruned", "weight-pruned"]
    assert rows[0]["speedup"] == 1


def test_what_bench_found_is_shown_if_it_cannot_be_written(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("hgnp.io.atomic.write_json", read_only)
    assert call("bench", str(runs / "hgnp"), *SHORT, "--json") == 2
    said = capsys.readouterr()
    assert len(json.loads(said.out.splitlines()[-1])["rows"]) == 3
    assert "Read-only" in said.err


def test_bench_of_runs_of_different_networks_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wider = [*QUICK, "--set", "model_args.width=12", "--out", "wider"]
    assert call("run", *wider) == 0
    capsys.readouterr()
    assert call("bench", str(runs / "hgnp"), "wider", *SHORT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wider" in line
    assert "network" in line
    shutil.copytree(runs / "taylor", "dearer")  # as many parameters, but not the same work
    info = json.loads(Path("dearer/run.json").read_text())
    info["at_start"]["macs"] *= 2
    Path("dearer/run.json").write_text(json.dumps(info))
    assert call("bench", str(runs / "hgnp"), "dearer", *SHORT) == 2
    assert "runs must start from one network, got dearer" in capsys.readouterr().err


def test_without_onnx_a_line_says_what_to_install(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    assert call("export", str(runs / "hgnp"), "small.onnx") == 2
    assert "pip install 'hgnp[onnx]'" in capsys.readouterr().err
    short = [argument if argument != "eager" else "onnx" for argument in SHORT]
    assert call("bench", str(runs / "hgnp"), *short) == 0
    assert "hgnp[onnx]" in capsys.readouterr().out


def test_runs_that_are_not_finished_or_not_there(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "sharpness"):
        assert call(command, "nowhere") == 2
    assert call("export", "nowhere", "x.onnx") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("nowhere" in line for line in lines)

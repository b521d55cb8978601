"""`hgnp run` around a run: what is run, where it goes, what is printed. The run itself is a stand-in."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from stand_in import Prune

from hgnp.cli import app


@pytest.fixture
def prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prune:
    module = ModuleType("hgnp.train")
    module.prune = stand_in = Prune()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hgnp.train", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return stand_in


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    return int(ended.value.code or 0)


def test_the_demo_needs_no_argument_and_can_be_run_twice(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run") == 0
    shown = capsys.readouterr().out
    assert "epoch   0 prune     loss 0.2500  accuracy 98.50%  kept 50.0%" in shown
    table = {line.split("  ")[1]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert table["accuracy"][1:] == ["99.00%", "98.50%", "99.5%"]
    assert table["parameters"][1:] == ["260,682", "1,000", "0.4%"]
    assert table["ms (batch 256, 2 threads)"][-5:] == ["8.00", "2.00", "25.0%", "(4.0×", "faster)"]
    assert table["sharpness"][1:] == ["2", "–"]
    assert "target reached: 9.81% of the parameters are left, 10.00% were asked for; 1 epoch, 1 s" in shown
    assert f"{Path('runs/demo/config.yaml')}" in shown
    assert "model.safetensors" not in shown  # files that are not there are not announced
    assert call("run") == 0
    assert [str(each["out"]) for each in prune.calls] == ["runs/demo", "runs/demo-2"]


def test_options_reach_the_run_and_its_configuration(prune: Prune) -> None:
    code = call(
        "run", "demo", "--out", "x", "--method", "taylor", "--set", "recipe.mu=1e-2", "--set", "data_args.batch=32",
        "--set", "model_args.width=8", "--seed", "5", "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    given = prune.calls[0]
    recipe = given["recipe"]
    assert (recipe.method, recipe.mu, recipe.seed, given["device"], given["resume"]) == (
        "taylor",
        0.01,
        5,
        "cpu",
        False,
    )
    assert given["net"].features[0].out_channels == 8
    assert len(next(iter(given["train"]))[0]) == 32
    written = yaml.safe_load(Path("x/config.yaml").read_text())
    assert (written["recipe"]["mu"], written["seed"], written["device"]) == (0.01, 5, "cpu")


def test_the_configuration_of_a_run_runs_it_again(prune: Prune) -> None:
    call("run", "--seed", "5", "--set", "model_args.width=8", "--out", "x")
    call("run", "x/config.yaml", "--out", "y")
    first, again = prune.calls
    assert first["recipe"] == again["recipe"]
    assert all((a == b).all() for a, b in zip(first["net"].parameters(), again["net"].parameters(), strict=True))
    documents = [yaml.safe_load(Path(f"{each}/config.yaml").read_text()) for each in "xy"]
    assert documents[1].pop("import_from")
    assert documents[0] == documents[1]


def test_a_method_gets_a_folder_of_its_own(prune: Prune) -> None:
    call("run", "--method", "l1")
    assert str(prune.calls[0]["out"]) == "runs/demo-l1"


def test_json_is_the_last_line_of_stdout_and_the_rest_goes_to_stderr(
    prune: Prune, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", "--json") == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content.pop("out") == "runs/demo"
    assert content == json.loads(Path("runs/demo/result.json").read_text())
    assert "epoch   0" in err
    assert "target reached" in err


def test_a_folder_with_a_run_is_not_overwritten(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    call("run", "--out", "x")
    assert call("run", "--out", "x", "--seed", "9") == 2
    assert (
        capsys.readouterr().err == "hgnp: --out: x holds a run; --resume goes on with it, another folder starts anew\n"
    )
    assert yaml.safe_load(Path("x/config.yaml").read_text())["seed"] == 0
    assert len(prune.calls) == 1


def test_resume_goes_on_with_the_last_run_of_that_name(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--resume") == 0
    assert "there is no run in runs/demo yet: starting one" in capsys.readouterr().out
    call("run")
    assert call("run", "--resume") == 0
    assert [str(each["out"]) for each in prune.calls] == ["runs/demo", "runs/demo-2", "runs/demo-2"]
    assert prune.calls[-1]["resume"] is True
    assert "there is no run" not in capsys.readouterr().out


def test_resume_with_something_else_is_refused(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    call("run", "--out", "x")
    assert call("run", "--out", "x", "--resume", "--set", "recipe.mu=3") == 2
    assert "hgnp: recipe.mu: 3 was given; the run in x was made with 0.001" in capsys.readouterr().err
    assert call("run", "--out", "x", "--resume", "--set", "model_args.width=9") == 2
    assert "hgnp: model_args.width: 9 was given; the run in x was made with None" in capsys.readouterr().err
    assert call("run", "--out", "x", "--resume", "--device", "cpu") == 0


def test_an_interrupted_run_says_how_to_go_on(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    prune.fail = KeyboardInterrupt()
    assert call("run", "--out", "a b", "--set", "recipe.mu=0.5") == 130
    command = "hgnp run 'a b/config.yaml' --out 'a b' --resume"
    assert f"hgnp: interrupted; {command} goes on after the last whole epoch\n" in capsys.readouterr().err
    prune.fail = None
    assert call("run", "a b/config.yaml", "--out", "a b", "--resume") == 0
    assert prune.calls[-1]["recipe"] == prune.calls[0]["recipe"]


def test_a_full_disk_is_a_run_that_stopped(prune: Prune, capsys: pytest.CaptureFixture[str]) -> None:
    prune.fail = OSError(28, "No space left on device", "runs/x")
    assert call("run") == 1
    assert capsys.readouterr().err.startswith("hgnp: the disk is full: [Errno 28]")


def test_a_bug_shows_its_traceback(prune: Prune) -> None:
    prune.fail = ValueError("deep inside something else")
    with pytest.raises(ValueError, match="deep inside"):
        app(["run"])

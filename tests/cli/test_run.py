"""`hgnp run` around a run: what is run, where it goes, what is printed. Every run is real, on a network of four channels."""

import errno
import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml

import hgnp
from command import call
from full_disk import full_disk
from hgnp.cli import app
from hgnp.cli.run import default_folder
from hgnp.experiments.build import Experiment
from hgnp.experiments.config import Config, read
from hgnp.experiments.models import DigitsNet
from hgnp.progress import LineProgress

TINY = [
    "--set", "model_args.width=4", "--set", "data_args.batch=512", "--set", "recipe.warmup_epochs=0", "--set",
    "recipe.neurons_per_round=60", "--set", "recipe.finetune_epochs=0", "--set", "recipe.keep=0.5", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole") / "x"
    assert call("run", *TINY, "--out", str(folder)) == 0
    return folder


@pytest.fixture
def finished(whole: Path) -> Path:
    """A finished run as x."""
    return Path(shutil.copytree(whole, "x"))


def test_a_run_is_shown_and_can_be_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY) == 0
    shown = capsys.readouterr().out
    result = json.loads(Path("runs/demo/result.json").read_text())
    before, after = result["before"], result["after"]
    assert "demo: hgnp, 1,182 parameters, 24 neurons, cpu, from random weights, in runs/demo\n" in shown
    assert (
        f"epoch   0 prune     loss {json.loads(Path('runs/demo/metrics.jsonl').read_text())['loss']:.4f}  acc" in shown
    )
    table = {line.split("  ")[1]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert table["accuracy"][1:3] == [f"{before['metric']:.2%}", f"{after['metric']:.2%}"]
    assert table["parameters"][1:3] == ["1,182", f"{after['parameters']:,}"]
    assert f"target reached: {result['target']['got']:.2%} of the parameters kept, 50.00% requested; 1" in shown
    for name in ("config.yaml", "page.html", "model.safetensors"):
        assert f"  runs/demo/{name}  (" in shown
        assert Path("runs/demo", name).is_file()
    assert call("run", *TINY) == 0
    assert sorted(each.name for each in Path("runs").iterdir()) == ["demo", "demo-2"]
    nets = [hgnp.load(f"runs/{each}", DigitsNet(width=4)).state_dict() for each in ("demo", "demo-2")]
    torch.testing.assert_close(nets[0], nets[1], rtol=0, atol=0)


def test_options_reach_the_run_and_its_configuration() -> None:
    code = call("run", "demo", *TINY, "--out", "x", "--method", "taylor", "--set", "recipe.mu=1e-2", "--seed", "5")
    assert code == 0
    info = json.loads(Path("x/run.json").read_text())
    assert (info["method"], info["recipe"]["mu"], info["seed"], info["device"]) == ("taylor", 0.01, 5, "cpu")
    assert set(info["at_start"]["widths"].values()) == {4, 8}
    written = yaml.safe_load(Path("x/config.yaml").read_text())
    assert (written["recipe"]["mu"], written["seed"], written["device"]) == (0.01, 5, "cpu")


def test_the_configuration_of_a_run_runs_it_again(finished: Path) -> None:
    assert finished == Path("x")
    assert call("run", "x/config.yaml", "--out", "y") == 0
    nets = [hgnp.load(each, DigitsNet(width=4)).state_dict() for each in "xy"]
    torch.testing.assert_close(nets[0], nets[1], rtol=0, atol=0)
    documents = [yaml.safe_load(Path(f"{each}/config.yaml").read_text()) for each in "xy"]
    assert documents[1].pop("import_from")
    assert documents[0] == documents[1]


def test_json_is_the_last_line_of_stdout_and_the_rest_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY, "--method", "l1", "--json") == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content.pop("out") == "runs/demo-l1"  # a method gets a folder of its own
    assert content == json.loads(Path("runs/demo-l1/result.json").read_text())
    assert "epoch   0" in err
    assert "target reached" in err


@pytest.mark.usefixtures("finished")
def test_a_run_resumes_only_with_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    files = {file: file.read_bytes() for file in Path("x").iterdir()}
    for arguments, message in {
        (
            "--seed",
            "9",
        ): "--out must be a folder without a run, got x; add --resume to resume its run, or choose another folder",
        ("--resume", "--set", "recipe.mu=3"): "recipe.mu must be 0.001 to resume the run in x, got 3",
        ("--resume", "--set", "model_args.width=9"): "model_args.width must be 4 to resume the run in x, got 9",
    }.items():
        assert call("run", *TINY, "--out", "x", *arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"hgnp: {message}")
        assert err.count("\n") == 1
    assert {file: file.read_bytes() for file in Path("x").iterdir()} == files
    Path("x/config.yaml").write_text("{}")
    assert call("run", *TINY, "--out", "x", "--resume") == 2
    assert capsys.readouterr().err.startswith("hgnp: x/config.yaml: model must be an import path")
    Path("x/config.yaml").write_bytes(files[Path("x/config.yaml")])


def test_resume_takes_the_last_run_of_that_name(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY, "--resume") == 0
    assert "runs/demo has no run to resume; starting a new one" in capsys.readouterr().out
    shutil.copytree(whole, "runs/demo-2")
    Path("runs/demo/result.json").rename("moved.json")  # were it taken up, the first one would be finished again
    capsys.readouterr()
    assert call("run", *TINY, "--resume") == 0
    assert "runs/demo-2/result.json" in capsys.readouterr().out
    assert not Path("runs/demo/result.json").exists()


def test_a_gap_in_the_numbering_hides_no_run() -> None:
    assert default_folder("demo", resume=True) == default_folder("demo", resume=False) == Path("runs/demo")
    for folder in ("demo-2", "demo-4", "demo-11", "demo-l1", "demo-l1-12", "demo-013", "demons-14"):
        Path("runs", folder).mkdir(parents=True)
        Path("runs", folder, "run.json").touch()
    Path("runs/demo-12").mkdir()
    assert default_folder("demo", resume=True) == Path("runs/demo-11")
    assert default_folder("demo", resume=False) == Path("runs/demo-12")  # it is empty
    Path("runs/demo-12/mine").touch()
    assert default_folder("demo", resume=True) == Path("runs/demo-11")
    assert default_folder("demo", resume=False) == Path("runs/demo-13")
    assert default_folder("demo-l1", resume=True) == Path("runs/demo-l1-12")


def test_an_interrupted_run_prints_the_command_to_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineProgress, "epoch", lambda *_: signal.raise_signal(signal.SIGINT))  # Ctrl-C
    assert call("run", *TINY, "--set", "recipe.warmup_epochs=1000", "--out", "a b") == 130
    command = "hgnp run 'a b/config.yaml' --out 'a b' --resume"
    assert capsys.readouterr().err == f"\nhgnp: interrupted; {command} resumes after the last checkpoint\n"
    assert len(Path("a b/metrics.jsonl").read_text().splitlines()) >= 1


def test_a_full_disk_is_a_run_that_stopped_and_can_be_resumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk() as fill, monkeypatch.context() as patch:
        patch.setattr(LineProgress, "epoch", lambda *_: fill())
        assert call("run", *TINY, "--set", "recipe.finetune_epochs=1", "--out", "x") == 1
    err = capsys.readouterr().err
    assert err.startswith("hgnp: x could not be written (")
    assert err.endswith("; the last good checkpoint is x/checkpoint.safetensors\n")
    assert call("run", "x/config.yaml", "--out", "x", "--resume") == 0
    assert "2 epochs" in capsys.readouterr().out


def test_a_bug_in_the_user_s_code_shows_its_traceback() -> None:
    code = """calls = []

def metric(out, target):
    calls.append(1)
    return 0.5 if len(calls) == 1 else int('deep inside something else')
"""
    Path("mine.py").write_text(code)
    with pytest.raises(ValueError, match="deep inside"):
        app(["run", *TINY, "--set", "metric=mine:metric"])


def test_files_of_the_user_s_own_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("presets", "demo") == 0
    mine = f"# mine, with a comment\n{capsys.readouterr().out}"
    Path("config.yaml").write_text(mine)
    assert call("run", "config.yaml", *TINY, "--out", ".") == 2
    assert capsys.readouterr().err == (
        "hgnp: --out must be a folder without config.yaml, got ., where it would be overwritten; choose another\n"
    )
    assert [file.name for file in Path().iterdir()] == ["config.yaml"]
    assert Path("config.yaml").read_text() == mine
    assert call("run", *TINY, "--out", "x" * 300) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_refused_run_leaves_the_configuration_that_was_there(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(r"keep: [\d.]+", "keep: 0.001", (finished / "config.yaml").read_text())
    Path("y").mkdir()
    mine = Path("y/config.yaml")
    mine.write_text(text)
    mine.write_text(read(mine).text())  # as a run would write it
    assert call("run", "y/config.yaml", "--out", "y") == 2
    assert "keep must be at least" in capsys.readouterr().err
    assert "keep: 0.001" in mine.read_text()
    assert call("run", "y/config.yaml", "--out", "z") == 2
    assert not Path("z").exists()


def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Config, path: Path) -> None:
        path.parent.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Config, "write", full)
    assert call("run", *TINY, "--out", "x") == 1
    assert "the disk is full" in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_finished_run_is_shown_even_if_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hgnp.cli.run.write_page", full)
    assert call("run", *TINY, "--out", "x", "--json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["reached"] is True
    assert "hgnp: the disk is full: the run is finished, but x/page.html could not be written" in said.err
    assert call("run", *TINY, "--out", "x", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reached"] is True
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(Experiment, "run", None)  # it would write
    assert call("run", *TINY, "--out", "x", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reached"] is True


@pytest.mark.parametrize("text", ['{"a":', '{"a": 1}'])
def test_a_finished_run_whose_result_is_damaged_says_so(
    text: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "result.json").write_text(text)
    assert call("run", *TINY, "--out", "x", "--resume") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "result.json must be " in line


@pytest.mark.usefixtures("finished")
def test_what_a_terminal_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="ascii", write_through=True))
    assert call("bench", "x", "--batch", "2", "--repeats", "1", "--variant", "eager", "--device", "cpu") == 0
    assert b"1.00?" in said.getvalue()
    assert Path("x/bench.json").is_file()


@pytest.mark.parametrize(
    ("setting", "code", "line"),
    [
        ("unpack=failing:unpack", "def unpack(a, b):\n    pass\n", "unpack must take the batches of train, but failed"),
        ("output=nope", "", "output must take what net returns, a Tensor, but failed"),
        (
            "data=failing:data",
            "def data(**given):\n    open('nowhere.csv')\n",
            "data: data must find its files, but failed: FileNotFoundError",
        ),
        ("device=meta", "", "device must be one that PyTorch can use here, got meta"),
    ],
)
def test_what_fails_in_the_user_s_functions_is_named(
    setting: str, code: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("failing.py").write_text(code)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    rest = [] if setting.startswith("data") else TINY
    arguments = [argument for argument in rest if "device" not in setting or argument not in ("--device", "cpu")]
    assert call("run", *arguments, "--set", setting, "--out", "x") == 2
    said = capsys.readouterr().err
    assert f"hgnp: {line}" in said
    assert not Path("x").exists()


def test_the_page_of_a_resumed_run_is_rewritten(finished: Path) -> None:
    (finished / "result.json").unlink()
    assert call("report", "x") == 0
    unfinished = Path("x/page.html").read_text()
    assert "unfinished: the last complete epoch is 0" in unfinished
    assert call("run", *TINY, "--out", "x", "--resume") == 0
    assert "unfinished: the last complete epoch is 0" not in Path("x/page.html").read_text()

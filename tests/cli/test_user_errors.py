"""What a user can get wrong ends in one line and an exit code; a bug in a user's own code shows its traceback."""

import errno
import sys
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  its first import writes a file

from command import call
from full_disk import full_disk
from hgnp.cli import app
from hgnp.cli.run import was_interrupted

CONFIG = """
model: DigitsNet
model_args: {width: 4}
data: digits
data_args: {batch: 512}
recipe: {keep: 0.5, warmup_epochs: 0, finetune_epochs: 0, neurons_per_round: 60}
device: cpu
"""


@pytest.fixture(autouse=True)
def _configuration(_in_a_folder_of_its_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("ok.yaml").write_text(CONFIG)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("hgnp: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("command", ["run", "study"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "bad.yaml must be YAML, got text that is not"),
        (b"\xff\xfe", "bad.yaml must be text in UTF-8, got invalid start byte at byte 0"),
        (b"", "got None"),
        (b"a: &a [*a]", "bad.yaml must have no alias inside its own anchor"),
        (b"a: 1", "bad.yaml: key must be a known one, got 'a'"),
        (b"[" * 60, "bad.yaml must expand to at most 50 levels"),
    ],
)
def test_bad_yaml(command: str, content: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_bytes(content)
    assert call(command, "bad.yaml") == 2
    assert message in one_line(capsys)


def test_a_study_whose_folder_cannot_exist(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text('out: "a\\0b"\nnetworks: demo\nmethods: hgnp\n')
    assert call("study", "bad.yaml") == 2
    assert "out must be the path of a folder" in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere.yaml"],
        ["run", "ok.yaml", "--set", "weights=nowhere.safetensors"],
        ["study", "nowhere.yaml"],
        ["study", "demo", "--data", "nowhere"],
        ["weights", "nowhere.pth", "out.safetensors"],
        ["report", "nowhere"],
        ["compare", "nowhere"],
        ["paper", "nowhere"],
        ["bench", "nowhere"],
        ["export", "nowhere", "out.onnx"],
        ["sharpness", "nowhere"],
    ],
    ids=" ".join,
)
def test_a_missing_file(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) == 2
    assert "nowhere" in one_line(capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["ok.yaml"]


@pytest.mark.parametrize(
    "setting",
    ["=1", "recipe", "recipe.mu=[", "recipe.mu=abc", "nope=1", "recipe=3", "model_args.width=-1", "model_args.depth=1",
     "data_args.batch=0", "weights=3", "weights=ok.yaml", "protect=[nope]", "seed=1.5", "loss_args={a: 1}", "output=nope",
     "metric=nowhere:x", "metric=os:nowhere", "metric=os:sep", "device=abacus", "recipe.flatness=magic"],
)  # fmt: skip
def test_a_bad_setting(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "ok.yaml", "--out", "x", "--set", setting) == 2
    one_line(capsys)
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise TypeError('mine')", "mine"),
        ("raise ValueError('two\\nlines')", "two lines"),
        ("raise RuntimeError('mine')", "mine"),
        ("open('nowhere.bin')", "FileNotFoundError"),
        ("return None", "NoneType"),
    ],
)
def test_a_model_factory_that_refuses_its_arguments(
    body: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(f"def net(width):\n    {body}\n")
    assert call("run", "ok.yaml", "--set", "model=mine:net") == 2
    line = one_line(capsys)
    assert line.startswith("hgnp: model")
    assert message in line


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def net(width):\n    return {}['a']\n", KeyError),
        ("def net(width):\n    return 1 / 0\n", ZeroDivisionError),
        ("def net(width):\n    import nowhere\n", ModuleNotFoundError),
        ("1 / 0\n", ZeroDivisionError),
        ("from os import nowhere\n", ImportError),
    ],
)
def test_a_bug_in_a_model_factory_shows_its_traceback(code: str, error: type[Exception]) -> None:
    Path("mine.py").write_text(code)
    with pytest.raises(error):
        app(["run", "ok.yaml", "--set", "model=mine:net"])


@pytest.mark.parametrize(
    ("code", "message"),
    [("import nowhere\n", "got mine, which needs nowhere; install it"), ("def (\n", "mine.py line 1: ")],
)
def test_a_module_that_cannot_be_imported(code: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(code)
    assert call("run", "ok.yaml", "--set", "model=mine:net") == 2
    assert message in one_line(capsys)


def test_ctrl_c_before_the_run_starts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import signal\ndef net(width):\n    signal.raise_signal(signal.SIGINT)\n")
    assert call("run", "ok.yaml", "--set", "model=mine:net") == 130
    assert capsys.readouterr() == ("", "")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "code"), [("ENOSPC", 1), ("EDQUOT", 1), ("EIO", 1), ("EROFS", 2), ("EACCES", 2), ("ENAMETOOLONG", 2)]
)
def test_an_error_of_the_file_system(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    number = getattr(errno, name)
    train = f"class Train:\n    def __iter__(self):\n        raise OSError({number}, 'as found')\n"
    Path("mine.py").write_text(f"{train}def data(batch):\n    return Train(), None\n")
    assert call("run", "ok.yaml", "--set", "data=mine:data") == code
    line = one_line(capsys)
    assert "as found" in line
    assert "[Errno" not in line
    assert ("the disk is full" in line) == (name in ("ENOSPC", "EDQUOT"))


def test_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk() as fill:
        fill(10)
        assert call("run", "ok.yaml", "--out", "x") == 1
    one_line(capsys)
    assert not Path("x").exists()


@pytest.mark.parametrize("arguments", [["--out", ""], ["--out="], ["--data", ""]])
def test_an_empty_argument_is_not_the_current_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path().iterdir())
    assert call("run", "ok.yaml", *arguments) == 2
    assert f"{arguments[0].strip('=')} must not be empty, got ''" in one_line(capsys)
    assert set(Path().iterdir()) == before


def test_a_folder_that_cannot_be_created_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "ok.yaml", "--out", "ok.yaml/x") == 2
    assert one_line(capsys) == "hgnp: ok.yaml/x/config.yaml: Not a directory\n"


def test_an_error_that_follows_from_ctrl_c_is_an_interruption() -> None:
    error = RuntimeError("trying to pop from empty mode stack")
    assert not was_interrupted(error)
    error.__context__ = KeyboardInterrupt()
    assert was_interrupted(error)


def test_a_network_that_pytorch_differentiates_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        """
import torch

class net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features, self.prototypes = torch.nn.LazyLinear(width), torch.nn.Parameter(torch.randn(10, width))
        self(torch.zeros(1, 1, 8, 8))

    def forward(self, x):
        return -torch.cdist(self.features(x.flatten(1)), self.prototypes, compute_mode="donot_use_mm_for_euclid_dist")
"""
    )
    assert call("run", "ok.yaml", "--set", "model=mine:net", "--set", "recipe.keep=1", "--out", "run") == 2
    assert "got cdist, which has no forward derivative in PyTorch; nor has it what" in one_line(capsys)
    assert not Path("run").exists()

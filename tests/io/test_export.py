"""An exported network computes what the network does, at any batch size, or there is no file."""

import builtins
import copy
import dataclasses
import errno
import importlib.util
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from cases import CASES, conv
from full_disk import full_disk
from hgnp.io.export import OPSET, Exported, export

SUFFIXES = ("onnx", "pt2")


def make(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(conv(3, width), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 4))
    net[1].running_var.uniform_(0.5, 2)
    return net


def outputs(result: Exported, *inputs: Tensor) -> list[Tensor]:
    """What the file computes, by nothing of ours."""
    if result.kind == "torch.export":
        output = torch.export.load(result.path).module()(*inputs)
        return list(output) if isinstance(output, tuple) else [output]
    session = onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])
    feed = {entry.name: tensor.numpy() for entry, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["residual", "lstm"])
def test_a_pruned_network_runs_elsewhere_at_any_batch_size(name: str, suffix: str, tmp_path: Path) -> None:
    net = CASES[name].net().float()
    (x,), _ = CASES[name].inputs()
    x = x.float()
    neurons = hgnp.Neurons(net, x)
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, neurons.count // 2))
    assert neurons.kept < 1
    result = export(net, tmp_path / f"small.{suffix}", x)
    net.eval()
    for rows in (1, 2, 3, 11):
        inputs = torch.randn(rows, *x.shape[1:])
        torch.testing.assert_close(outputs(result, inputs)[0], net(inputs).detach(), rtol=1e-4, atol=1e-5)
    assert result.error < 1e-5
    assert result.bytes == result.path.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == [f"small.{suffix}"]


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    result = export(make(), tmp_path / "new" / "net.onnx", torch.zeros(1, 3, 8, 8))
    model = onnx.load(result.path)
    onnx.checker.check_model(model)
    assert (result.kind, result.opset) == ("onnx", OPSET)
    assert {entry.version for entry in model.opset_import if entry.domain == ""} == {OPSET}
    shapes = [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input]
    assert shapes == [["batch", 3, 8, 8]]
    assert 0 < result.difference < 1e-4
    again = export(make(), str(tmp_path / "net.pt2"), torch.zeros(1, 3, 8, 8))
    assert (again.kind, again.opset, again.error) == ("torch.export", None, 0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)
        self.table = nn.Embedding(9, 3)

    def forward(self, a: Tensor, b: Tensor, words: Tensor, *, negate: bool = False) -> tuple[Tensor, Tensor]:
        y = self.a(a) - self.b(b) + self.table(words).sum(1)
        return (-y if negate else y), a.mean(1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_several_inputs_share_a_dynamic_batch_without_warnings(suffix: str, tmp_path: Path) -> None:
    net, words = Two(), torch.tensor([[1, 8]])
    result = export(net, tmp_path / f"two.{suffix}", (torch.randn(1, 4), torch.randn(1, 5), words))
    inputs = torch.randn(6, 4), torch.randn(6, 5), words.expand(6, 2).contiguous()
    for there, here in zip(outputs(result, *inputs), net(*inputs), strict=True):
        torch.testing.assert_close(there, here)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_keywords_in_any_order(suffix: str, tmp_path: Path) -> None:
    net = Two()
    example = {"negate": True, "words": torch.tensor([[1, 8]]), "b": torch.randn(1, 5), "a": torch.randn(1, 4)}
    result = export(net, tmp_path / f"two.{suffix}", example)
    a, b, words = torch.randn(6, 4), torch.randn(6, 5), torch.randint(9, (6, 2))
    expected = net(a, b, words, negate=True)
    if suffix == "onnx":
        got = outputs(result, a, b, words)
    else:
        got = torch.export.load(result.path).module()(a=a, b=b, words=words, negate=True)
    for there, here in zip(got, expected, strict=True):
        torch.testing.assert_close(there, here)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_network_is_unchanged(suffix: str, tmp_path: Path) -> None:
    net = make().train()
    net[1].eval()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    state = torch.get_rng_state()
    export(net, tmp_path / f"net.{suffix}", torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net.modules()] == modes
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_example_is_unchanged_if_the_network_writes_into_it(tmp_path: Path) -> None:
    example = -torch.ones(2, 4)
    export(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)), tmp_path / "net.pt2", example)
    assert torch.equal(example, -torch.ones(2, 4))


class Fixed(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 2), rows

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(self.rows, -1))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, True)


class Loose(nn.Linear):
    def forward(self, **inputs: Tensor) -> Tensor:
        return super().forward(inputs["x"])


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> int:
        return len(super().forward(x))


def test_a_constant_example_is_checked_with_other_numbers(tmp_path: Path) -> None:
    """On zeros, whatever is dropped, the output is zero."""
    with pytest.raises(ValueError, match="must equal net to"):
        export(Noisy(4, 50, bias=False), tmp_path / "net.pt2", torch.zeros(2, 4))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_static_batch_on_request(suffix: str, tmp_path: Path) -> None:
    """For a forward that fixes the number of rows, and for inputs through **keywords."""
    net, x = Fixed(4), torch.randn(4, 4)
    result = export(net, tmp_path / f"fixed.{suffix}", x, dynamic_batch=False)
    inputs = torch.randn(4, 4)
    torch.testing.assert_close(outputs(result, inputs)[0], net(inputs).detach())
    with pytest.raises(Exception, match=r"index: 0|size\(\)\[0\] == 4|to be equal to 4"):
        outputs(result, torch.randn(5, 4))
    if suffix == "pt2":
        assert export(Loose(4, 2), tmp_path / "loose.pt2", {"x": x}, dynamic_batch=False).error < 1e-6
        with pytest.raises(ValueError, match="must equal net to"):
            export(Noisy(4, 50), tmp_path / "noisy.pt2", x, dynamic_batch=False)
    else:
        shape = onnx.load(result.path).graph.input[0].type.tensor_type.shape.dim
        assert [d.dim_param or d.dim_value for d in shape] == [4, 4]


class Cache:
    """As a key/value cache: torch.export does not know its type."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclasses.dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None
    hidden: tuple[Tensor, ...]
    cache: Cache


class Detector(nn.Module):
    """Several outputs in a class of its own, and anchors that it keeps as long as the input's shape does not change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind
        self.shape: torch.Size | None = None

    def forward(self, x: Tensor) -> Any:
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.arange(3.0)
        y = self.layer(x)
        found = Answer(y + self.anchors, None, (y, x.mean(1)), Cache(y))
        return (
            found if self.kind == "dataclass" else (found.logits, {"hidden": list(found.hidden), "cache": found.cache})
        )


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch.export refuses networks that assign tensors to themselves")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dataclass", ["logits", "hidden_0", "hidden_1"]),
        ("tuple", ["output_0", "output_1_hidden_0", "output_1_hidden_1"]),
    ],
)
def test_several_outputs_have_names_and_caches_are_left_out(kind: str, names: list[str], tmp_path: Path) -> None:
    net = Detector(kind)
    result = export(net, tmp_path / "net.onnx", torch.randn(2, 4))
    assert [output.name for output in onnx.load(result.path).graph.output] == names
    x = torch.randn(5, 4)
    y = net.layer(x).detach()
    expected = [y + torch.arange(3.0), y, x.mean(1)][: len(names)]
    for there, here in zip(outputs(result, x), expected, strict=True):
        torch.testing.assert_close(there, here)
    if kind == "dataclass":
        loaded = torch.export.load(export(net, tmp_path / "net.pt2", torch.randn(2, 4)).path).module()(x)
        assert list(loaded) == ["logits", "hidden"]
        torch.testing.assert_close(loaded["hidden"][1], x.mean(1))
        assert isinstance(net(x), Answer)  # the network itself is as it was


WRONG: dict[str, tuple[nn.Module, Any, str]] = {
    "fixed at two": (Fixed(2), torch.randn(2, 4), "net must accept any batch size, got a forward that fixes"),
    "fixed at four": (Fixed(4), torch.randn(4, 4), "net must accept any batch size, got a forward that fixes"),
    "noisy": (
        Noisy(4, 50),
        torch.randn(2, 4),
        r"must equal net to 1e-04, got a relative difference of \d\.\de\S\d+ .*; not written",
    ),
    "loose": (Loose(4, 2), {"x": torch.randn(2, 4)}, r"Loose\.forward must name its inputs, got x through \*\*inputs"),
    "silent": (Silent(4, 2), torch.randn(2, 4), "net must return at least one tensor"),
    "shape": (nn.Linear(4, 2), torch.randn(2, 5), "net must run on example_input, but failed: RuntimeError: mat1"),
    "missing": (
        Two(),
        torch.randn(2, 4),
        r"must match the signature of Two\.forward, got another: missing a required argument: 'b'",
    ),
    "scalar": (nn.Linear(4, 2), torch.tensor(1.0), "example_input must have a tensor with a batch dimension"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_exported_leaves_no_file(name: str, suffix: str, tmp_path: Path) -> None:
    net, example, message = WRONG[name]
    old = tmp_path / f"net.{suffix}"
    old.write_text("as it was")
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message) as caught:
        export(net, old, example)
    assert "\n" not in str(caught.value)
    assert old.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.usefixtures("capsys")
def test_a_full_disk_is_said_to_be_full(suffix: str, tmp_path: Path) -> None:
    with full_disk() as fill:
        fill()
        with pytest.raises(OSError, match="too large") as raised:
            export(nn.Linear(90, 9), tmp_path / f"net.{suffix}", torch.zeros(2, 90))
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_other_names_and_number_formats(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^path must be a string or a path, got NoneType$"):
        export(make(), None, torch.zeros(1, 3, 8, 8))
    with pytest.raises(TypeError, match=r"^dynamic_batch must be True or False, got 'no'$"):
        export(make(), tmp_path / "net.pt2", torch.zeros(1, 3, 8, 8), dynamic_batch="no")
    with pytest.raises(ValueError, match=r"path must end in \.onnx or \.pt2, got '.*net\.pth'"):
        export(make(), tmp_path / "net.pth", torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"got weight; call net\.float\(\) first"):
        export(nn.Linear(4, 2).bfloat16(), tmp_path / "net.onnx", torch.zeros(1, 4).bfloat16())
    assert export(nn.Linear(4, 2).bfloat16(), tmp_path / "net.pt2", torch.zeros(1, 4).bfloat16()).error == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_place_that_cannot_be_is_refused_at_once(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"net.{suffix}").mkdir()
    (tmp_path / "file").touch()
    for name, message in {
        f"net.{suffix}": rf"^path must be a file, got the folder '\S*/net\.{suffix}'$",
        f"file/net.{suffix}": r"^path must be below folders, got the file '\S*/file' among them; choose another path$",
        f".{suffix}": rf"^path must have a name before \.{suffix}, got '\S*\.{suffix}'; for example net\.{suffix}$",
    }.items():
        with pytest.raises(ValueError, match=message):
            export(WRONG["shape"][0], tmp_path / name, WRONG["shape"][1])  # which would be refused later


def test_without_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else there(name))
    with pytest.raises(ModuleNotFoundError, match=r"ONNX export needs onnxruntime; pip install 'hgnp\[onnx\]'"):
        export(make(), tmp_path / "net.onnx", torch.zeros(1, 3, 8, 8))


def test_without_onnxscript_the_older_exporter_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "onnxscript":
            raise ModuleNotFoundError("No module named 'onnxscript'")
        return there(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    net = make()
    result = export(net, tmp_path / "net.onnx", torch.zeros(2, 3, 8, 8))
    assert onnx.load(result.path).producer_name == "pytorch"
    inputs = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(outputs(result, inputs)[0], net.eval()(inputs).detach(), rtol=1e-4, atol=1e-5)

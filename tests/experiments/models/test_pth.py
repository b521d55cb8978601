"""`torch.save`'s files read without unpickling: the tensors are those of torch.load, hostile files run nothing."""

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hgnp.cli import app
from hgnp.experiments.models import ResNet18, load_weights
from hgnp.experiments.models.pth import MAGIC, PROTOCOL, read_state_dict

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(state: object, file: Path, *, zipped: bool) -> Path:
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    return file


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())
        assert found[name].is_contiguous()


@FORMATS
def test_every_kind_of_tensor_equals_what_was_saved(zipped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, cube = torch.randn(40), torch.randn(2, 3, 4, 5)
    state = OrderedDict(
        weight=torch.randn(3, 4),
        half=torch.randn(5).half(),
        brain=torch.randn(5).bfloat16(),
        double=torch.randn(2, 2, dtype=torch.float64),
        steps=torch.tensor(2**40),
        small=torch.tensor([-1, 5], dtype=torch.int8),
        mask=torch.tensor([True, False, True]),
        empty=torch.zeros(0, 3),
        part=base[7:19].view(3, 4),
        whole=base,
        transposed=base[:12].view(3, 4).t(),
        every_other=base[1::2],
        last=cube.contiguous(memory_format=torch.channels_last),
        parameter=nn.Parameter(torch.randn(3)),
    )
    file = save(state, tmp_path / "net.pth", zipped=zipped)
    found = read_state_dict(file)
    same(found, state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}) == len(state) - 1
    same(read_state_dict(save(dict(state), file, zipped=zipped)), state)


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = ResNet18(30, stem="imagenet").state_dict()
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            tensor.normal_()
    return state


@FORMATS
def test_the_command_makes_a_file_that_a_preset_starts_from(
    zipped: bool, published: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = save(published, tmp_path / "resnet18.pth", zipped=zipped), tmp_path / "resnet18.safetensors"
    with pytest.raises(SystemExit) as ended:
        app(["weights", str(file), str(out)])
    assert not ended.value.code
    size = sum(tensor.nbytes for tensor in published.values())
    assert capsys.readouterr().out.startswith(f"{out}: 122 tensors, {size:,} bytes, from resnet18.pth (SHA-256 ")
    net = ResNet18(10, stem="imagenet")
    before = {name: net.state_dict()[name].clone() for name in ("fc.weight", "fc.bias")}
    assert load_weights(net, out).fresh == tuple(before)  # all but the last layer
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before.get(name, published[name])), name


def test_a_converted_file_says_where_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = (
        save({"a": torch.ones(3)}, tmp_path / "net-0a1b2c3d.pth", zipped=True),
        tmp_path / "new" / "net.safetensors",
    )
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    for name, as_named in ((file.name, False), (f"net-{sha256[:8]}.pth", True)):  # torchvision's names have such digits
        file = file.rename(tmp_path / name)
        with pytest.raises(SystemExit):
            app(["weights", str(file), str(out), "--json"])
        said = capsys.readouterr()
        assert said.err.endswith(f"(SHA-256 {sha256}{', matches its file name' if as_named else ''})\n")
        assert json.loads(said.out) == {
            "path": str(out), "source": name, "sha256": sha256, "tensors": 1, "bytes": 12, "as_named": as_named
        }  # fmt: skip
        with safe_open(out, framework="pt") as opened:
            metadata = opened.metadata()
        assert (metadata["source"], metadata["source_sha256"]) == (name, sha256)


class Stored:
    """A storage in a pickle of the old format."""

    def __init__(self, numbers: Tensor, view: tuple[str, int, int] | None) -> None:
        self.numbers, self.view = numbers, view


class Called:
    """An object that pickles as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def old_file(state: object) -> bytes:
    """What PyTorch wrote before 0.4, whose ways of describing tensors and parameters today's torch.save does not have."""
    written: dict[str, Tensor] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            if not isinstance(found, Stored):
                return None
            key = str(id(found.numbers))
            written[key] = found.numbers
            return "storage", torch.FloatStorage, key, "cpu", len(found.numbers), found.view

    stream = io.BytesIO()
    for value in (MAGIC, PROTOCOL, {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"int": 4}}):
        pickle.dump(value, stream, 2)
    Pickler(stream, 2).dump(state)
    pickle.dump(list(written), stream, 2)
    for numbers in written.values():
        stream.write(struct.pack("<q", len(numbers)) + numbers.numpy().tobytes())
    return stream.getvalue()


def test_files_of_pytorch_before_0_4(tmp_path: Path) -> None:
    numbers = torch.randn(20)
    whole, view = Stored(numbers, None), Stored(numbers, ("view", 4, 10))
    rebuild = torch._utils._rebuild_tensor
    state = OrderedDict(
        old=Called(rebuild, (whole, 3, (2, 4), (4, 1))),
        view=Called(rebuild, (view, 1, (3, 2), (2, 1))),
        parameter=Called(
            torch._utils._rebuild_parameter, (Called(rebuild, (whole, 0, (5,), (1,))), True, OrderedDict())
        ),
    )
    state["variable"] = Called(nn.Parameter, (state["view"],))
    file = tmp_path / "old.pth"
    file.write_bytes(old_file(state))
    expected = {
        "old": numbers[3:11].view(2, 4),
        "view": numbers[5:11].view(3, 2),
        "parameter": numbers[:5],
        "variable": numbers[5:11].view(3, 2),
    }
    same(read_state_dict(file), expected)
    same(torch.load(file, weights_only=True), expected)  # the bytes made here are what PyTorch reads
    # Python 2 gave an OrderedDict its pairs as an argument
    file.write_bytes(old_file(Called(OrderedDict, ([[name, value] for name, value in state.items()],))))
    same(read_state_dict(file), expected)
    same(torch.load(file, weights_only=True), expected)


class Exploit:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo ran > {self.file}",)


@pytest.mark.parametrize("smuggle", [lambda e: e, lambda e: {"a": torch.ones(2), "b": e}, lambda e: {"a": [e]}])
@FORMATS
def test_hostile_pickles_run_nothing(zipped: bool, smuggle: Callable[[Any], Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file = save(smuggle(Exploit(trace)), tmp_path / "bad.pth", zipped=zipped)
    torch.load(file, weights_only=False)  # the payload works
    assert trace.read_text() == "ran\n"
    trace.unlink()
    with pytest.raises(
        ValueError,
        match=r"bad.pth must be a .*, got another pickle: it names 'posix.system', which no .*; nothing in it was run",
    ):
        read_state_dict(file)
    assert not trace.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_bare_pickles_are_refused(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(Exploit(tmp_path / "trace"), protocol))
    with pytest.raises(
        ValueError,
        match=r"bare.pth must be a .*, got (another pickle: .*; nothing in it was run|a damaged or another file)",
    ):
        read_state_dict(tmp_path / "bare.pth")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"epoch": 3, "a": torch.ones(1)}, "'epoch' is a value of type int, not a tensor"),
        ({"state_dict": {"a": torch.ones(1)}}, "'state_dict' is a value of type dict, not a tensor"),
        ([torch.ones(1)], "it holds a value of type list, not a state dict"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "it names 'torch.ComplexFloatStorage'"),
        (nn.Linear(2, 2), "it names 'torch.nn.modules.linear.Linear'"),
        ({("a", "b"): torch.ones(1)}, "a key of a mapping is not a string"),
        ({"a": torch.ones(1).expand(1000)}, "'a' reaches beyond its storage of 1 entries"),
        ({}, "it has no tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(state: Any, reason: str, tmp_path: Path) -> None:
    for zipped in (True, False):
        file = save(state, tmp_path / "net.pth", zipped=zipped)
        with pytest.raises(ValueError, match=r"net.pth must be a file of PyTorch weights, got ") as caught:
            read_state_dict(file)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (15, (6,), (1,)),
        (0, (3, 4), (9, 1)),
        (-1, (3,), (1,)),
        (0, (3,), (-1,)),
        (0, (2, 2), (1,)),
        (0, (2**62, 4), (0, 0)),
    ],
)
def test_tensors_stay_within_their_storage(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = Called(torch._utils._rebuild_tensor, (Stored(torch.randn(20), None), offset, size, stride))
    (tmp_path / "net.pth").write_bytes(old_file({"a": tensor}))
    with pytest.raises(ValueError, match=r"'a' (reaches beyond its storage of 20 entries|has no valid size)"):
        read_state_dict(tmp_path / "net.pth")


def test_many_views_of_one_storage_are_bounded(tmp_path: Path) -> None:
    base = torch.randn(10_000)
    file = save({str(number): base[:] for number in range(100)}, tmp_path / "net.pth", zipped=True)
    with pytest.raises(ValueError, match=r"its tensors would take 4,000,000 bytes, the file has"):
        read_state_dict(file)


@FORMATS
def test_damage_anywhere_is_one_line(zipped: bool, tmp_path: Path) -> None:
    file = save({"a": torch.randn(30), "b": torch.arange(9)}, tmp_path / "net.pth", zipped=zipped)
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 17):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"net.pth must be a .*, got (a damaged or another file|another pickle)"):
            read_state_dict(file)
    said = []
    for place in range(0, len(whole), 11):  # a changed byte is refused or changes numbers, and nothing else
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read_state_dict(file)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(line.startswith(f"{file} must be a file of PyTorch weights, got ") and "\n" not in line for line in said)


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    file = save({"a": torch.zeros(100_000)}, tmp_path / "net.pth", zipped=True)
    with zipfile.ZipFile(file) as plain, zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as packed:
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    with pytest.raises(
        ValueError, match=r"small.pth must be a .*, got a damaged or another file \(record .* is compressed\)"
    ):
        read_state_dict(tmp_path / "small.pth")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gone.pth", "out.safetensors"], "file must be an existing .pth file of weights, got "),
        (["net.pth", "out.pth"], "OUT must end in .safetensors, got"),
        (["text.pth", "out.safetensors"], "text.pth must be a file of PyTorch weights, got a damaged or another file"),
    ],
)
def test_the_weights_command_refuses_bad_files_in_one_line_with_exit_code_2(
    names: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"a": torch.ones(1)}, tmp_path / "net.pth", zipped=True)
    (tmp_path / "text.pth").write_text("<html>not found</html>")
    with pytest.raises(SystemExit) as ended:
        app(["weights", *(str(tmp_path / name) for name in names)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()

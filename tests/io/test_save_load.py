"""What is saved comes back bit for bit; what does not fit, is damaged or hostile changes nothing."""

import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hgnp
from cases import CASES, Case, Net, conv
from oracles import flat, run


def pruned(case: Case) -> nn.Module:
    net = case.net()
    args, kwargs = case.inputs()
    neurons = hgnp.Neurons(net, args or kwargs, approximate=case.approximate)
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, neurons.count // 2))
    return net


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_outputs_are_bit_equal(case: Case, tmp_path: Path) -> None:
    net = pruned(case).eval()
    hgnp.save(net, tmp_path / "small")
    fresh = case.net(seed=7).eval()
    assert hgnp.load(tmp_path / "small", fresh) is fresh
    inputs = case.inputs()
    with torch.no_grad():
        assert torch.equal(flat(run(net, inputs)), flat(run(fresh, inputs)))
    assert repr(fresh) == repr(net)
    flat(run(fresh.train(), inputs)).sum().backward()


def make(width: int = 6) -> nn.Sequential:
    return nn.Sequential(conv(3, width), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 4))


@pytest.fixture
def small(tmp_path: Path) -> tuple[nn.Sequential, Path]:
    net = make()
    hgnp.Neurons(net, torch.zeros(2, 3, 8, 8)).remove({"0": [1, 3]})
    return net, hgnp.save(net, tmp_path / "small.safetensors")


def test_a_file_or_a_folder(tmp_path: Path) -> None:
    assert hgnp.save(make(), tmp_path / "a" / "b") == tmp_path / "a" / "b" / "model.safetensors"
    assert hgnp.save(make(), str(tmp_path / "c.safetensors")) == tmp_path / "c.safetensors"
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["model.safetensors"]
    hgnp.load(tmp_path / "a" / "b", make())
    hgnp.load(tmp_path / "c.safetensors", make())


def test_others_can_read_the_file(small: tuple[nn.Sequential, Path]) -> None:
    net, file = small
    tensors = load_file(file)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in net.state_dict().items()}


def test_dtype_memory_format_and_buffers_that_are_not_saved_by_torch(tmp_path: Path) -> None:
    def build() -> nn.Module:
        net = Net(lambda n, x: n.b(n.a(x) * n.scale.view(1, -1, 1, 1)), a=conv(3, 6), b=conv(6, 2))
        net.register_buffer("scale", torch.rand(6), persistent=False)
        return net

    net = build().to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    hgnp.Neurons(net, torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16)).remove({"a": [0, 5]})
    hgnp.save(net, tmp_path)
    again = hgnp.load(tmp_path, build())
    assert torch.equal(again.scale, net.scale)  # type: ignore[arg-type]
    assert again.a.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]
    x = torch.randn(1, 3, 8, 8, dtype=torch.bfloat16)
    assert torch.equal(again(x), net(x))


def test_requires_grad_and_mode_are_those_of_the_fresh_network(small: tuple[nn.Sequential, Path]) -> None:
    fresh = make().eval()
    fresh[0].requires_grad_(False)
    identities = [id(t) for t in [*fresh.parameters(), *fresh.buffers()]]
    hgnp.load(small[1], fresh)
    assert not fresh.training
    assert [p.requires_grad for p in fresh.parameters()] == [False, False, True, True, True, True]
    assert identities == [id(t) for t in [*fresh.parameters(), *fresh.buffers()]]


@pytest.mark.parametrize("name", ["residual", "tied_weights", "lstm"])
def test_a_network_on_meta_is_filled_on_the_cpu(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    net = pruned(case).eval()
    hgnp.save(net, tmp_path)
    with torch.device("meta"):
        fresh = case.net(seed=7).eval()
    assert all(tensor.is_meta for tensor in fresh.state_dict().values())
    next(fresh.parameters()).requires_grad_(False)
    assert hgnp.load(tmp_path, fresh) is fresh
    assert not next(fresh.parameters()).requires_grad
    assert [name for name, _ in fresh.named_parameters()] == [name for name, _ in net.named_parameters()]
    with torch.no_grad():
        assert torch.equal(flat(run(net, case.inputs())), flat(run(fresh, case.inputs())))
    flat(run(fresh.train(), case.inputs())).sum().backward()


def test_numbers_that_no_file_has(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = torch.ones(2)

    hgnp.save(Scaled(), tmp_path)
    with torch.device("meta"):
        net = Scaled()
    with pytest.raises(ValueError, match=r"scale of layer '' must be a buffer to be loaded onto meta"):
        hgnp.load(tmp_path, net)
    assert net.weight.is_meta
    with pytest.raises(ValueError, match=r"^weight must be on a device with data, got meta"):
        hgnp.save(net, tmp_path)


def test_a_network_that_was_never_pruned(tmp_path: Path) -> None:
    net = make()
    hgnp.save(net, tmp_path)
    assert torch.equal(hgnp.load(tmp_path, make())[0].weight, net[0].weight)


# What does not fit


class Renamed(nn.Sequential):
    pass


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        (lambda: Renamed(*make()), "net must be a Sequential, got Renamed"),
        (
            lambda: nn.Sequential(*make()[:2], nn.GELU(), *make()[3:]),
            "layer '2' must be GELU as in net, got ReLU in the file",
        ),
        (lambda: nn.Sequential(*make(), nn.ReLU()), "layer '5' must be ReLU as in net, got none in the file"),
        (
            lambda: make(3),
            r"0.weight must have a shape of at most \(3, 3, 3, 3\) as in net, got \(4, 3, 3, 3\) in the file; pass a fresh",
        ),
        (
            lambda: nn.Sequential(conv(3, 6, bias=False), *make()[1:]),
            "0.bias must be in net and in the file, got it only in the file",
        ),
    ],
)
def test_another_class_is_refused(small: tuple[nn.Sequential, Path], fresh: Any, message: str) -> None:
    refused(small[1], fresh(), message)


def refused(file: Path, net: nn.Module, message: str, kind: type[Exception] = ValueError) -> None:
    before = copy.deepcopy(net)
    with pytest.raises(kind, match=message) as caught:
        hgnp.load(file, net)
    assert "\n" not in str(caught.value)
    assert repr(net) == repr(before)
    for (name, tensor), old in zip(net.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(tensor, old), name


def test_loading_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path / "nothing",
        make(),
        "path must be a file or folder that hgnp.save wrote, got .*, which does not exist",
        FileNotFoundError,
    )


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^path must be a string or a path, got NoneType$"):
        hgnp.load(None, make())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^path must be a string or a path, got NoneType$"):
        hgnp.save(make(), None)  # type: ignore[arg-type]


def test_a_compiled_network_is_refused_without_advice_on_pruning(small: tuple[nn.Sequential, Path]) -> None:
    compiled: Any = torch.compile(make(), backend="eager")
    for call in (lambda: hgnp.load(small[1], compiled), lambda: hgnp.save(compiled, small[1])):
        with pytest.raises(TypeError, match="net must be a plain module, got a compiled one; pass the original module"):
            call()


def test_the_dtype_is_that_of_the_file(small: tuple[nn.Sequential, Path]) -> None:
    loaded = hgnp.load(small[1], make().double())
    assert {p.dtype for p in loaded.parameters()} == {p.dtype for p in small[0].parameters()}


def test_a_truncated_file(small: tuple[nn.Sequential, Path]) -> None:
    _, file = small
    whole = file.read_bytes()
    for size in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:size])
        refused(file, make(), "must be a safetensors file, but cannot be read")


def test_an_altered_file(small: tuple[nn.Sequential, Path]) -> None:
    """Whichever byte is changed, it is noticed."""
    _, file = small
    whole = file.read_bytes()
    for place in [*range(8, len(whole), 97), len(whole) - 1]:
        altered = bytearray(whole)
        altered[place] ^= 1
        file.write_bytes(bytes(altered))
        refused(file, make(), "damaged|must be a safetensors file|must be written by hgnp.save")


def rewrite(file: Path, change: Any) -> None:
    """A hostile file: well-formed, with the right checksum."""
    from safetensors import safe_open

    from hgnp.io.weights import digest

    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["hgnp"])
    tensors = load_file(file)
    about.pop("sha256")
    change(about, tensors)
    about["sha256"] = digest(tensors, about)
    save_file(tensors, file, {"hgnp": json.dumps(about)})


def grow(about: Any, tensors: dict[str, Tensor]) -> None:
    tensors["1.weight"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, tensors: about.update(format=2), "format must be at most 1, got 2, which a newer hgnp wrote"),
        (lambda about, tensors: about.update(format="1"), "its metadata must describe a network"),
        (lambda about, tensors: about.update(modules=[]), "its metadata must describe a network"),
        (lambda about, tensors: about.pop("class"), "its metadata must describe a network"),
        (
            lambda about, tensors: about["modules"]["0"][1].update(groups=0),
            "layer '0' must have at least the widths of the file",
        ),
        (
            lambda about, tensors: about["modules"]["0"][1].update(groups=True),
            "layer '0' must have at least the widths of the file",
        ),
        (
            lambda about, tensors: about["modules"]["0"][1].update(out_channels=5),
            "layer '0' of the file must have the widths of its tensors",
        ),
        (
            lambda about, tensors: about["modules"]["0"][1].update(forward=1),
            "layer '0' must have at least the widths of the file",
        ),
        (
            lambda about, tensors: about["modules"]["4"][1].update(in_features="x"),
            "layer '4' must have at least the widths of the file",
        ),
        (
            lambda about, tensors: tensors.update({"0.bias": tensors["0.bias"].int()}),
            "0.bias must have dtype torch.float32 as in net, got torch.int32 in the file",
        ),
        (grow, r"1.weight must have a shape of at most \(6,\) as in net, got \(7,\) in the file"),
        (
            lambda about, tensors: tensors.update(extra=torch.zeros(2)),
            "extra must be in net and in the file, got it only in the file",
        ),
        (lambda about, tensors: tensors.pop("0.bias"), "0.bias must be in net and in the file, got it only in net"),
    ],
)
def test_a_hostile_file(small: tuple[nn.Sequential, Path], change: Any, message: str) -> None:
    rewrite(small[1], change)
    refused(small[1], make(), message)


def test_tensors_that_do_not_fit_each_other(small: tuple[nn.Sequential, Path]) -> None:
    def change(about: Any, tensors: dict[str, Tensor]) -> None:
        tensors["1.bias"] = tensors["1.bias"][:2]

    rewrite(small[1], change)
    refused(small[1], make(), "1.bias must have 4 entries, the width of its layer, got 2")


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    save_file(make().state_dict(), tmp_path / "other.safetensors")
    refused(tmp_path / "other.safetensors", make(), "it must be written by hgnp.save")
    (tmp_path / "header.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    refused(tmp_path / "header.safetensors", make(), "must be a safetensors file, but cannot be read")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    bomb = tmp_path / "model.safetensors"
    torch.save({"x": Bomb(tmp_path / "boom")}, bomb)
    refused(tmp_path, make(), "must be a safetensors file, but cannot be read")
    assert not (tmp_path / "boom").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# Writing


def test_writing_is_all_or_nothing(small: tuple[nn.Sequential, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    net, file = small
    before = file.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        hgnp.save(net, file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("name", ["file", "file/inside", "file/inside/net.safetensors"])
def test_a_file_where_a_folder_is_wanted(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("as it was")
    with pytest.raises(
        ValueError, match=r"^path must be below folders, got the file '\S*/file' among them; choose another path$"
    ):
        hgnp.save(make(), tmp_path / name)
    assert (tmp_path / "file").read_text() == "as it was"


def test_a_folder_where_a_file_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"^path must be a file, got the folder '\S*/net.safetensors'$"):
        hgnp.save(make(), tmp_path / "net.safetensors")


def test_state_that_needs_pickle_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"anything": 1}

    with pytest.raises(TypeError, match=r"layer '0' \(Extra\) must have no extra state"):
        hgnp.save(nn.Sequential(Extra(2, 2)), tmp_path)


def test_two_tensors_in_one_memory(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].bias = nn.Parameter(net[0].bias.data)
    hgnp.save(net, tmp_path)
    again = hgnp.load(tmp_path, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert torch.equal(again[1].bias, net[1].bias)


def test_complex_parameters_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"weight must have a dtype that safetensors supports, got torch.complex128"):
        hgnp.save(nn.Linear(2, 2, dtype=torch.complex128), tmp_path)

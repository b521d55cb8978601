"""Weights that fit are taken, the others said; pickles are not read."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hgnp.experiments.models import ResNet18, load_weights


@pytest.fixture
def published() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    net = ResNet18(10)
    net(torch.randn(4, 3, 32, 32))  # running statistics that are not those of a new network
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_a_whole_file(published: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(published, tmp_path / "all.safetensors")
    torch.manual_seed(2)
    net = ResNet18(10)
    loaded = load_weights(net, tmp_path / "all.safetensors")
    assert all(torch.equal(tensor, published[name]) for name, tensor in net.state_dict().items())
    assert (loaded.fresh, loaded.unused) == ((), ())
    assert loaded.about == "102 of 102 tensors from all.safetensors"


def test_what_does_not_fit_stays_and_is_said(published: dict[str, torch.Tensor], tmp_path: Path) -> None:
    half = {name: t.half() if t.is_floating_point() else t for name, t in published.items()}
    without = {name: t for name, t in half.items() if not name.startswith(("layer4", "bn1"))}
    save_file(without | {"head.weight": torch.zeros(3)}, tmp_path / "part.safetensors")
    net = ResNet18(200)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    loaded = load_weights(net, str(tmp_path / "part.safetensors"))
    assert {name.split(".")[0] for name in loaded.fresh} == {"bn1", "layer4", "fc"}
    assert loaded.unused == ("fc.bias", "fc.weight", "head.weight")
    for name, tensor in net.state_dict().items():
        if name in loaded.loaded:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, published[name].half().float())
        elif name in loaded.fresh:
            assert torch.equal(tensor, before[name])
    assert loaded.about.startswith("71 of 102 tensors from part.safetensors; at random: bn1, layer4.0.conv1")
    assert loaded.about.endswith("; not used: fc, head")


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    class Exploit:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(tmp_path / "ran"), "w")

    for name in ("net.pt", "net.pth", "net.bin", "net.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Exploit()))
        with pytest.raises(ValueError, match=name) as caught:
            load_weights(ResNet18(10), tmp_path / name)
        assert "\n" not in str(caught.value)
        converts = f"hgnp weights {name} net.safetensors` converts it"
        assert (converts in str(caught.value)) == (not name.endswith(".safetensors"))
    assert not (tmp_path / "ran").exists()


def test_weights_without_a_tensor_of_the_network_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ValueError, match=r"must have tensors of ResNet18 \(conv1, bn1, .*\), got 1 that do not fit \(a\)"
    ):
        load_weights(ResNet18(10), tmp_path / "other.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"weights must be an existing .safetensors file, got .*gone.safetensors"
    ):
        load_weights(ResNet18(10), tmp_path / "gone.safetensors")

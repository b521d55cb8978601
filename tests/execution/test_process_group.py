"""Which GPU a process of several has."""

import pytest
import torch

import hgnp
from hgnp.execution.process_group import device_of_rank


@pytest.mark.parametrize("local", [0, 1])
def test_every_process_is_refused_if_there_are_fewer_gpus(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": local}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(hgnp.HgnpError, match="a GPU for each process, got 1 for 2 processes; start fewer"):
        device_of_rank("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_rank("cuda") == torch.device("cuda", local)
    assert device_of_rank("cpu") == torch.device("cpu")

"""Whole runs and own loops on processes that torch.distributed joins are those of one process with the joint batch."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hgnp
from hgnp.reducer import Reducer
from process_cases import FOR_GRAPHS, NAMES, launch, network, own_loop, run_case, torchrun_command

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What two processes saw. In the end one of them dies."""
    return launch(2, folder, ["equal_runs", "stood_in_run", "documented", "refusals", "details", "command", "failures"])


@pytest.fixture(scope="module")
def three(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return launch(3, folder, ["equal_runs", "resumed"], torchrun=True)


@pytest.fixture(scope="module")
def joint() -> dict[Any, Any]:
    """The runs of one process."""
    return {}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in NAMES.items() for name in names])
def test_a_run_is_that_of_the_joint_batch(
    name: str, ranks: int, two: list[Any], three: list[Any], joint: dict[Any, Any]
) -> None:
    """Through warm-up, pruning and fine-tuning, with unequal last batches. With batch norms, one process normalises the parts
    of its batch by themselves."""
    key = name, ranks if name == "norm" else 0
    if key not in joint:
        joint[key] = run_case(name, ranks)
    want = joint[key]
    for rank in two if ranks == 2 else three:
        torch.testing.assert_close(rank["equal_runs"][name], want, **CLOSE)
        if name == "taylor":  # read back from the folder of the finished run
            torch.testing.assert_close(rank["equal_runs"]["loaded"]["weights"], want["weights"], **CLOSE)


@pytest.mark.parametrize("name", ["default", "paper", "sam"])
def test_a_run_from_graphs_is_that_of_the_joint_batch(name: str, two: list[Any]) -> None:
    want = run_case(name, 1, samples=FOR_GRAPHS)
    for rank in two:
        torch.testing.assert_close(rank["stood_in_run"][name], want, **CLOSE)
        assert rank["stood_in_run"][f"{name}: replays"] > 0


def test_a_custom_loop_equals_that_of_the_joint_batch(two: list[Any], three: list[Any]) -> None:
    want = own_loop()
    for ranks in (two, three):
        for rank in ranks:
            for name in ("losses", "scores", "weights"):
                torch.testing.assert_close(rank["equal_runs"]["own loop"][name], want[name], **CLOSE)
            torch.testing.assert_close(
                rank["equal_runs"]["own loop"]["random"], ranks[0]["equal_runs"]["own loop"]["random"], rtol=0, atol=0
            )


REFUSED = {
    "no group": "InputError: group must be a process group where torch.distributed has 2 ranks, got None; pass group=",
    "inside DDP": "InputError: group must be a process group where torch.distributed has 2 ranks, got None; pass group=",
    "DDP": "InputTypeError: net must be a plain module, got DistributedDataParallel; pass net.module, and to Flatness",
    "DataParallel": "InputTypeError: net must be a plain module, got DataParallel; pass net.module, and start one process",
    "SyncBatchNorm": "InputError: layer 'na' must be an ordinary BatchNorm on several ranks, got SyncBatchNorm",
    "loss": "InputError: group must be None for loss()",
    "nested": "InputTypeError: layer '0' must be a plain module, got DistributedDataParallel",
    "hook": "InputError: net must have no communication hook, got DistributedDataParallel with one",
    "stream": "InputError: train must be a torch DataLoader over a dataset with a length",
    "generator": "InputError: train must be a torch DataLoader over a dataset with a length",
    "padded": "InputError: train: its sampler must give every sample once, got a DistributedSampler that repeats some",
    "lists": "InputError: train must be the same list on every rank",
    "shapes": "InputError: net must be the same network on every rank, got other shapes on rank 1",
    "few": "InputError: val must have a sample for each of the 2 ranks, got 1",
}


def test_what_ranks_cannot_do_is_refused_on_all_of_them(two: list[Any]) -> None:
    for rank in two:
        for name, line in REFUSED.items():
            assert rank["refusals"][name].startswith(line), name
        assert rank["refusals"].keys() == REFUSED.keys()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_sharded_networks_are_refused_by_name() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(hgnp.HgnpError, match="net must be a plain module, got FSDPModule; pass the network before"):
            hgnp.Flatness(fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh))
        whole = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(hgnp.HgnpError, match="net must be a plain module, got FullyShardedDataParallel; pass the"):
            hgnp.Flatness(whole)
        split = nn.Sequential(nn.Linear(2, 2))
        dist.tensor.parallel.parallelize_module(split, mesh, {"0": dist.tensor.parallel.ColwiseParallel()})
        with pytest.raises(
            hgnp.HgnpError, match=r"0\.weight must be a plain tensor, got a DTensor of tensor parallelism"
        ):
            hgnp.Flatness(split)
    finally:
        dist.destroy_process_group()


def test_ranks_differ_where_they_should_and_nowhere_else(two: list[Any]) -> None:
    first, second = (rank["details"] for rank in two)
    assert len(first["drawn"]) == len(second["drawn"])  # one rank's on_step has stopped both
    assert first["stopped"] == second["stopped"] == "on_step stopped the run in epoch 1, step 0"
    assert not set(first["drawn"]) & set(second["drawn"])
    assert len(set(second["drawn"])) == len(second["drawn"])  # nor do they repeat from epoch to epoch
    torch.testing.assert_close(first["buffers"], second["buffers"], rtol=0, atol=0)
    assert (
        "train: a last batch of 1 samples is dropped in every epoch, as it is smaller than the 2 ranks\n"
        in first["lines"]
    )
    assert first["lines"].count("dropped") == 1
    assert second["lines"] == ""  # rank 0 shows progress
    assert first["strides"][0] == first["strides"][1]
    torch.testing.assert_close(first["summed"], first["own"] + second["own"])


def test_the_script_of_the_docs_runs_on_two_ranks(two: list[Any], folder: Path) -> None:
    first, second = (rank["documented"] for rank in two)
    assert first["reached"]
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert (folder / "small").exists()
    assert json.loads((folder / "runs" / "digits" / "run.json").read_text())["ranks"] == 2


def test_the_command_refuses_with_one_voice(two: list[Any]) -> None:
    first, second = (rank["command"]["found"] for rank in two)
    assert second == [[2, "", ""], [2, "", ""]]
    assert [code for code, _, _ in first] == [2, 2]
    assert first[0][2].startswith("hgnp: ")
    assert first[1][2].startswith("hgnp: --out must be a folder without a run, got ")
    assert [len(errors.splitlines()) for _, _, errors in first] == [1, 1]


def test_a_rank_that_fails_hangs_or_dies_ends_the_others(two: list[Any], folder: Path) -> None:
    first, second = (rank["failures"] for rank in two)
    line = "train: labels must be from 0 to 2, as the network has 3 outputs, got 7"
    assert second["error"] == f"InputError: {line}"
    assert first["error"] == f"RankError: rank 1 failed: {line}"
    for name in ("hang", "death"):
        assert first[name].startswith("RankError: a process of the 2 has died or does not answer, as rank 0 sees it (")
        assert len(first[name].splitlines()) == 1
    assert first["until death"] < 60
    assert two[0]["codes"] == [0, 9]
    assert (folder / "resumed" / "checkpoint.safetensors").exists()


def test_a_loss_that_diverges_on_one_rank_ends_all(two: list[Any], joint: dict[Any, Any]) -> None:
    want = joint.get(("default", 0)) or run_case("default", 1)
    for rank, place in zip(two, ("the last good checkpoint is ", "rank 0 names the last good checkpoint"), strict=True):
        line = rank["failures"]["diverged"]
        assert line.startswith(f"DivergedError: the loss is nan in epoch 2, batch 1; {place}")
        assert len(line.splitlines()) == 1
        torch.testing.assert_close(rank["failures"]["after divergence"], want, **CLOSE)
    assert two[0]["failures"]["seconds"] < 60


def test_a_run_resumes_with_another_number_of_ranks(three: list[Any], joint: dict[Any, Any], folder: Path) -> None:
    want = joint.get(("default", 0)) or run_case("default", 1)
    for rank in three:
        torch.testing.assert_close(rank["resumed"], want, **CLOSE)
    torch.testing.assert_close(
        run_case("default", 1, out=folder / "resumed", resume=True)["weights"], want["weights"], **CLOSE
    )


class OtherSelection(Reducer):
    """One of two ranks, of which the other would remove other neurons."""

    ranks = 2

    def gather(self, data: bytes) -> list[bytes]:
        return [data, bytes(32) if len(data) == 32 else data]  # a hash


@pytest.mark.filterwarnings(
    "ignore:the first dimension of some tensor is not the sample"
)  # the other rank does not say
def test_nothing_is_cut_if_ranks_would_remove_different_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(1)
    monkeypatch.setattr("hgnp.train.join_ranks", lambda net: (net, OtherSelection()))
    monkeypatch.setattr("hgnp.train.failures_announced", lambda _: nullcontext())
    with pytest.raises(hgnp.HgnpError, match="ranks must remove the same neurons from the same network"):
        run_case("default", 1, wrap=lambda _: net)
    assert [p.shape for p in net.parameters()] == [p.shape for p in network(1).parameters()]


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_a_single_process_needs_no_group(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    flat = hgnp.Flatness(nn.Linear(2, 2))
    assert math.isfinite(float(flat.backward(torch.ones(2, 2), torch.tensor([0, 1]))))


def test_a_number_of_processes_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"^WORLD_SIZE must be 1 or set by torchrun, got 2 without RANK"):
        run_case("sam", 1)


def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    done = torchrun_command(tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("page.html") == done.stdout.count("epoch   0") == 1  # rank 0 alone speaks
    assert json.loads((tmp_path / "tiny" / "run.json").read_text())["ranks"] == 2
    assert (tmp_path / "tiny" / "page.html").exists()

"""`hgnp.prune` refuses to run in several processes: each would remove different neurons."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hgnp
from train_cases import loaders, made, recipe

ONE = "hgnp.prune must run in one process, got a world size of 2"
GROUP = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
import hgnp
from train_cases import loaders, made, recipe
dist.init_process_group("gloo", init_method="file://{file}", rank=int(sys.argv[1]), world_size=2)
net = made()
for given in (net, torch.nn.parallel.DistributedDataParallel(net)):
    try:
        hgnp.prune(given, *loaders(), recipe=recipe())
    except ValueError as error:
        print(error)
assert net.a.out_channels == 12
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_of_two_processes_is_refused(tmp_path: Path) -> None:
    code = GROUP.format(tests=str(Path(__file__).parent), file=tmp_path / "meeting")
    alone = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], env=alone, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        said = process.communicate(timeout=120)[0].splitlines()
        assert process.returncode == 0
        assert len(said) == 2
        assert said[0].startswith(ONE)
        assert said[1].startswith(
            "net must be a plain module, got one wrapped in DistributedDataParallel; give net.module"
        )


def test_a_torchrun_process_is_refused_before_a_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=ONE):
        hgnp.prune(made(), *loaders(), recipe=recipe())
    for alone in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        hgnp.prune(made(), *loaders(), recipe=recipe(keep=1.0, warmup_epochs=1, method="taylor"))


def test_the_command_exits_with_code_2_and_writes_nothing(tmp_path: Path) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-m", "hgnp", "run", "--out", "x"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"hgnp: {ONE}")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())

"""The runs behind the results: what is missing, in which order it runs, and what is kept when the time is over."""

import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import reproduce


def task(name: str, code: str = "", minutes: float = 0.0, *, urgent: bool = False) -> reproduce.Task:
    return reproduce.Task(name, ("-c", code), minutes, lambda: False, urgent)


def run(
    tmp_path: Path, *tasks: reproduce.Task, jobs: int = 1, minutes: float = 5.0, beside: int = 1
) -> reproduce.Runner:
    runner = reproduce.Runner(tasks, jobs, tmp_path / "logs", minutes, beside)
    runner.run(lambda: None)
    return runner


def writes(file: Path) -> Callable[[str], str]:
    return lambda name: f"open({str(file)!r}, 'a').write('{name} ')"


def test_urgent_tasks_run_first_and_robustness_last(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = writes(order)
    names = (reproduce.LAST, False), ("a", False), ("long", True), ("b", False)
    run(tmp_path, *(task(name, code(name), urgent=urgent) for name, urgent in names))
    assert order.read_text().split() == ["long", "a", "b", reproduce.LAST]


@pytest.mark.parametrize("beside", [0, 1])
def test_urgent_tasks_run_one_after_the_other_with_few_beside_them(tmp_path: Path, beside: int) -> None:
    running = tmp_path / "running"
    running.mkdir()
    counts = tmp_path / "counts"
    code = f"""
import os, time
here = os.path.join({str(running)!r}, NAME)
open(here, "w").close()
for _ in range(10):
    time.sleep(0.05)
    found = os.listdir({str(running)!r})
    open({str(counts)!r}, "a").write(" ".join(found) + "\\n")
os.remove(here)
"""
    tasks = [task(name, code.replace("NAME", repr(name)), urgent=name in "AB") for name in "ABcdefg"]
    run(tmp_path, *tasks, jobs=4, beside=beside)
    seen = [set(line.split()) for line in counts.read_text().splitlines()]
    assert not any({"A", "B"} <= names for names in seen)
    assert max(len(names) for names in seen if names & {"A", "B"}) == 1 + beside
    assert max(map(len, seen)) > 1 + beside


def test_only_what_fits_the_time_left_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "order"
    code = writes(order)
    run(tmp_path, task("too long", code("long"), minutes=30), task("short", code("short"), minutes=1), minutes=2)
    assert order.read_text().split() == ["short"]
    assert "too long: not started, takes about 30 minutes" in capsys.readouterr().out


def test_robustness_does_not_wait_for_runs_that_take_all_the_time(tmp_path: Path) -> None:
    order = tmp_path / "order"
    waits = task("waits", "import time; time.sleep(60)")
    last = task(reproduce.LAST, writes(order)(reproduce.LAST), minutes=0.02)
    start = time.monotonic()
    run(tmp_path, waits, last, jobs=2, minutes=0.1)  # 6 s
    assert order.read_text().split() == [reproduce.LAST]
    assert time.monotonic() - start < 30


def test_a_failed_task_is_named_and_the_others_run(tmp_path: Path) -> None:
    order = tmp_path / "order"
    runner = run(tmp_path, task("bad", "raise SystemExit(3)"), task("good", writes(order)("good")))
    assert runner.failed == ["bad"]
    assert order.read_text() == "good "


def test_an_archive_has_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "study" / "net-0"
    folder.mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "bench-cuda.json", "model.safetensors", "checkpoint.safetensors"):
        (folder / name).write_text(name)
    reproduce.archive(tmp_path / "results", tmp_path / "kept.tar.gz")
    with tarfile.open(tmp_path / "kept.tar.gz") as made:
        names = sorted(made.getnames())
    assert names == [f"results/study/net-0/{name}" for name in ("bench-cuda.json", "metrics.jsonl", "run.json")]


def test_the_list_has_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "--results", str(tmp_path), "--dry-run", *arguments])
        reproduce.main()
        return capsys.readouterr().out.splitlines()

    everything = listed("--cifar10", "C", "--flowers102", "F", "--weights", "W", "--device", "cuda")
    assert "hgnp run vgg16-cifar10 --data C" in everything[0]
    assert "alexnet-flowers-fast --data F" in everything[1]
    assert "robustness.py" in everything[-1]
    assert len([line for line in everything if "cifar10-rivals/vgg16-cifar10-" in line]) == 15
    assert not listed()  # no data are given
    (tmp_path / "holdout" / "resnet-cutout-16").mkdir(parents=True)
    (tmp_path / "holdout" / "resnet-cutout-16" / "result.json").write_text("{}")
    assert (
        len(listed("--cifar10", "C", "--flowers102", "F", "--weights", "W", "--device", "cuda")) == len(everything) - 1
    )
    for study in ("vgg16-cifar10", "cifar10-rivals"):  # both have a run of this name
        (only,) = listed("--cifar10", "C", "--only", f"{study}/vgg16-cifar10-hgnp-0")
        assert f"{study}/vgg16-cifar10-hgnp-0 --resume" in only
    with pytest.raises(SystemExit, match="--only must name tasks, got nothing"):
        listed("--only", "nothing")

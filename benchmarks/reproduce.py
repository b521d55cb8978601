"""All runs behind docs/results.md and the page of the paper, in order, several at once, within a given time.

    python benchmarks/reproduce.py --cifar10 DIR --flowers102 DIR --cub200 DIR --weights DIR --device cuda --jobs 5
                                   [--beside 1] [--minutes 28] [--archive FILE.tar.gz] [--only NAME,NAME…] [--dry-run]

The tasks are those that results/README.md and results/paper/README.md list as missing. Of a study every run is a task. A task
that is finished is not repeated, one that was interrupted resumes, and one whose data are not given is left out. With
`--minutes`, a task is started only if its estimate fits the time left, robustness.py runs last on the networks that are there,
and what still runs in the end is interrupted. The paper's long runs come one after the other, with at most `--beside` others on
the GPU: with three or four, even at a higher priority of NVIDIA's MPS, both slow down so far that neither fits half an hour.

cost_profile.py is not among them: it measures times, and needs the GPU for itself.

`--archive` keeps what belongs into the repository of all runs so far (no weights), and is written anew every minute.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hgnp.experiments import studies
from hgnp.experiments.study_runs import SHARED_BY, Interrupts, start_process, stop_processes
from hgnp.progress import format_duration

KEPT = (
    "run.json", "config.yaml", "metrics.jsonl", "result.json", "rival.json", "robustness.json", "records.jsonl",
    "bench*.json",
)  # fmt: skip
HERE = Path(__file__).parent
LAST = "robustness"
MINUTE = 60.0


@dataclass(frozen=True)
class Task:
    name: str
    command: tuple[str, ...]
    """After the interpreter."""
    minutes: float
    """Estimated, on one H200 with four others."""
    finished: Callable[[], bool]
    urgent: bool = False
    """Whether it takes so long that it should have the GPU almost for itself."""


def of_study(
    name: str, out: Path, data: str | None, device: str, minutes: float, *, methods: Sequence[str] | None = None,
    networks: str = "", settings: Sequence[str] = (), urgent: bool = False,
) -> Iterator[Task]:  # fmt: skip
    """The runs of a study, of the networks whose names end like this."""
    if data is None:
        return
    for run in studies.study(name).runs(data=data, device=device, settings=settings, methods=methods):
        if run.network.endswith(networks):
            command = ("-m", "hgnp", *run.command(out))
            task = f"{out.name}/{run.name}"  # two studies may have runs of one name
            yield Task(task, command, minutes, lambda run=run: run.state(out) == "finished", urgent)  # type: ignore[misc]


def of_preset(preset: str, out: Path, data: str | None, device: str, minutes: float, *arguments: str) -> Iterator[Task]:
    """A run on held-out images."""
    if data is not None:
        command = ("-m", "hgnp", "run", preset, "--data", data, "--device", device, *arguments,
                   "--set", "data_args.holdout=5000", "--out", str(out), "--resume")  # fmt: skip
        yield Task(out.name, command, minutes, (out / "result.json").is_file)


def of_script(
    script: str, data: str | None, device: str, minutes: float, finished: Callable[[], bool], *arguments: str
) -> Iterator[Task]:
    if data is not None:
        command = (str(HERE / f"{script}.py"), *arguments, "--data", data, "--device", device)
        yield Task(script, command, minutes, finished)


def tasks(given: argparse.Namespace, results: Path) -> list[Task]:
    """All of them, in the order in which they should run."""
    cifar10, device, paper = given.cifar10, given.device, results / "paper"
    alexnet, resnet = (
        None if given.weights is None else Path(given.weights) / file
        for file in ("alexnet-imagenet-features.safetensors", "resnet18-imagenet.safetensors")
    )
    best, rivals = results / "cifar10-best", results / "cifar10-rivals"

    def all_rivals() -> bool:
        return len(list(rivals.glob("*/rival.json"))) == 6

    found = [
        *of_study("vgg16-cifar10", paper / "vgg16-cifar10", cifar10, device, 16, methods=["hgnp"], urgent=True),
        *of_study(
            "alexnet-flowers-fast", paper / "alexnet-flowers-fast", given.flowers102 if alexnet else None, device, 19,
            methods=["taylor"], settings=[f"weights={alexnet}"], urgent=True,
        ),
        *of_study("cifar10-best", best, cifar10, device, 8, networks="vgg16-cifar10-best"),
        *of_preset(
            "resnet18-cifar10-best", results / "holdout" / "resnet-cutout-16", cifar10, device, 11,
            "--set", "data_args.cutout=16",
        ),
        *of_preset(
            "vgg16-cifar10-best", results / "holdout" / "vgg-network-0.03", cifar10, device, 12, "--method", "hgnp",
            "--set", "recipe.mu=0.03", "--set", "recipe.bound=0", "--set", "recipe.penalty_every=4",
            "--set", "recipe.mu_warmup_epochs=15", "--set", "recipe.flatness={direction_over: network}",
        ),
        *of_study("cifar10-best", best, cifar10, device, 8, networks="vgg16-cifar10-best-dense"),
        *of_study("cifar10-best", best, cifar10, device, 7, networks="vgg16-cifar10-best-narrow"),
        *of_study("cifar10-best", best, cifar10, device, 11, networks="resnet18-cifar10-best"),
        *of_study("cifar10-best", best, cifar10, device, 12, networks="resnet18-cifar10-best-dense"),
        *of_study("cifar10-best", best, cifar10, device, 11, networks="resnet18-cifar10-best-narrow"),
        *of_script(
            "flatness_penalty", cifar10, device, 12, (HERE / "flatness_penalty_cifar10.md").is_file,
            "--preset", "vgg16-cifar10-best", "--set", "data_args.holdout=5000", "--jobs", "2",
            "--work", str(results / "flatness_penalty"), "--out", str(HERE / "flatness_penalty_cifar10.md"), "--variants",
            "mu=0,sam,block-0.1,network-0.03-every-4,network-0.03-every-4-warmup,network-0.1-every-4-warmup",
        ),
        *of_study("cifar10-rivals", rivals, cifar10, device, 6),
        *of_script("rivals", cifar10, device, 15, all_rivals, "--out", str(rivals)),
        *of_study(
            "resnet18-birds-fast", paper / "resnet18-birds-imagenet",
            given.cub200 if resnet and resnet.is_file() else None, device, 12, settings=[f"weights={resnet}"],
        ),
        *of_script(LAST, cifar10, device, 4, lambda: False, str(best), str(rivals)),
    ]  # fmt: skip
    known = {task.name for task in found}
    chosen = known if given.only is None else set(given.only.split(","))
    if chosen - known:
        raise SystemExit(
            f"--only must name tasks, got {', '.join(sorted(chosen - known))}; they are {', '.join(sorted(known))}"
        )
    return [task for task in found if task.name in chosen]


class Runner:
    """Runs tasks in order, at most `jobs` at once; the urgent ones first."""

    def __init__(self, waiting: Sequence[Task], jobs: int, logs: Path, minutes: float, beside: int = 1) -> None:
        self.waiting, self.jobs, self.logs = deque(sorted(waiting, key=lambda task: not task.urgent)), jobs, logs
        self.beside = beside
        self.end = time.monotonic() + MINUTE * minutes
        self.running: list[tuple[Task, subprocess.Popen[bytes], float]] = []
        self.failed: list[str] = []

    def log_of(self, task: Task) -> Path:
        return self.logs / f"{task.name}.log"

    @property
    def left(self) -> float:
        """Minutes."""
        return (self.end - time.monotonic()) / MINUTE

    def next(self) -> Task | None:
        """The first waiting task that fits the time left. The last one waits for all others, or until no other fits."""
        urgent = any(task.urgent for task, _, _ in self.running)
        if urgent and len(self.running) > self.beside:
            return None
        fitting = [task for task in self.waiting if task.minutes <= self.left and not (urgent and task.urgent)]
        others = [task for task in fitting if task.name != LAST]
        if others or not fitting:
            return others[0] if others else None
        over = not self.running or self.left < fitting[0].minutes + 1
        return fitting[0] if over else None

    def start(self, task: Task) -> None:
        self.waiting.remove(task)
        priority = "0" if task.urgent else "1"  # MPS: 0 is the higher one
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs)), "CUDA_MPS_CLIENT_PRIORITY": priority,
            **os.environ, SHARED_BY: str(min(self.jobs, 1 + self.beside) if task.urgent else self.jobs),
        }  # fmt: skip
        file = self.log_of(task)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            process = start_process([sys.executable, *task.command], log, environment)
        self.running.append((task, process, time.monotonic()))
        print(f"{task.name}: started, {len(self.waiting)} waiting", flush=True)

    def collect(self) -> None:
        for entry in list(self.running):
            task, process, start = entry
            code = process.poll()
            if code is not None:
                self.running.remove(entry)
                how = "finished" if code == 0 else f"failed with code {code}, see {self.log_of(task)}"
                self.failed += [task.name] if code else []
                print(f"{task.name}: {how}, {format_duration(time.monotonic() - start)}", flush=True)

    def last_lines(self) -> Iterator[str]:
        for task, _, _ in self.running:
            lines = self.log_of(task).read_text(errors="replace").strip().splitlines()
            yield f"{task.name}: {lines[-1] if lines else 'starting'}"

    def run(self, minutely: Callable[[], None]) -> None:
        with Interrupts() as interrupts:
            shown = time.monotonic()
            try:
                while (self.waiting or self.running) and not interrupts.count and self.left > 0:
                    while len(self.running) < self.jobs and (task := self.next()) is not None:
                        self.start(task)
                    if not self.running:
                        break  # nothing that waits fits
                    time.sleep(0.2)
                    self.collect()
                    if time.monotonic() - shown > MINUTE:
                        shown = time.monotonic()
                        print(*self.last_lines(), sep="\n", flush=True)
                        minutely()
            finally:
                stop_processes([process for _, process, _ in self.running], interrupts)
        for task, _, _ in self.running:
            print(f"{task.name}: not finished", flush=True)
        for task in self.waiting:
            print(f"{task.name}: not started, takes about {task.minutes:g} minutes", flush=True)


def archive(results: Path, file: Path) -> None:
    """What belongs into the repository of the runs so far."""
    beside = file.with_name(f"{file.name}.new")
    with tarfile.open(beside, "w:gz") as made:
        for path in sorted(results.rglob("*")):
            if path.is_file() and any(path.match(pattern) for pattern in KEPT):
                made.add(path, path.relative_to(results.parent))
    beside.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar10", "flowers102", "cub200", "weights"):
        parser.add_argument(f"--{name}", metavar="DIR")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--only", metavar="NAME,NAME…")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    missing = [task for task in tasks(given, given.results) if not task.finished()]
    if given.dry_run:
        for task in missing:
            print(f"{task.minutes:g} min  {shlex.join(['python', *task.command])}")
        return
    runner = Runner(missing, given.jobs, given.results / "logs", given.minutes, given.beside)

    def keep() -> None:
        if given.archive is not None:
            archive(given.results, given.archive)

    try:
        runner.run(keep)
    finally:
        keep()
    if runner.failed:
        raise SystemExit(f"failed: {', '.join(runner.failed)}; the same command tries them again")


if __name__ == "__main__":
    main()

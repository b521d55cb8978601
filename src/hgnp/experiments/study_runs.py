"""A study's runs, each `hgnp run` in a process of its own: one that fails, or is killed, takes none of the others with it."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hgnp.experiments.study_plan import PlannedRun

POLL = 0.1  # seconds
SHARED_BY = "HGNP_SHARED_BY"
PATIENCE = 30.0  # seconds for a run to write its last checkpoint
TAIL = 65536  # bytes


@dataclass(frozen=True)
class Slots:
    """Where runs go: `jobs` at once; a run's environment is that of its slot."""

    jobs: int
    environments: tuple[Mapping[str, str], ...] = ({},)

    def environment(self, slot: int) -> dict[str, str]:
        """Runs that share a device say so in their run.json: their times are not those of a run by itself."""
        shared_by = math.ceil(self.jobs / len(self.environments))
        return {**os.environ, **self.environments[slot % len(self.environments)], SHARED_BY: str(shared_by)}


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `error` is None, or what its process said last."""

    run: PlannedRun
    error: str | None
    seconds: float


class Watcher(Protocol):
    def started(self, run: PlannedRun) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...

    def tick(self, running: Sequence[PlannedRun]) -> None:
        """Several times a second."""


def slots_for(device: str | None, jobs: int | None) -> Slots:
    """One run per GPU, or one on a CPU with all of its threads. Several on a CPU share its cores; `jobs` at once share GPUs in
    turn. OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES, where they are set, say what there is to share."""
    gpus = _gpus() if device in (None, "cuda") else []
    if gpus:
        return Slots(jobs or len(gpus), tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus))
    jobs = jobs or 1
    on_cpu = device in (None, "cpu")
    if jobs == 1 or not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return Slots(jobs)
    return Slots(jobs, ({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))},))


def _gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(count)]
    return named[:count]


class _Job:
    """A run in its process, writing to its log."""

    def __init__(self, run: PlannedRun, out: Path, environment: Mapping[str, str]) -> None:
        self.run, self.start = run, time.monotonic()
        command = run.command(out)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = (out / "logs" / f"{run.name}.log").open("ab+")
        self._log.write(f"$ {shlex.join(['hgnp', *command])}\n".encode())
        self._log.flush()
        self._before = self._log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hgnp", *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0 if os.name == "posix" else None,  # Ctrl-C comes from us, once
        )

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        error = None if code == 0 else self._said(code)
        self._log.close()
        return Outcome(self.run, error, time.monotonic() - self.start)

    def _said(self, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._before, end - TAIL))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        said = [line.removeprefix("hgnp: ") for line in lines if line.startswith("hgnp: ")]
        return (said or lines or [f"exit code {code}"])[-1].strip()


def carry_out(missing: Sequence[PlannedRun], out: Path, slots: Slots, watcher: Watcher) -> list[Outcome]:
    """Run, or resume, each of `missing`. Ctrl-C, SIGTERM or a closed terminal stop all of them, each after its last whole
    epoch, and then raise KeyboardInterrupt."""
    waiting, running, outcomes = deque(missing), dict[int, _Job](), list[Outcome]()
    with _Interrupts() as interrupts:
        try:
            while (waiting or running) and not interrupts.count:
                for slot in range(slots.jobs):
                    if slot not in running and waiting:
                        run = waiting.popleft()
                        running[slot] = _Job(run, out, slots.environment(slot))
                        watcher.started(run)
                for slot, job in list(running.items()):
                    if (outcome := job.outcome()) is not None:
                        del running[slot]
                        outcomes.append(outcome)
                        watcher.ended(outcome)
                watcher.tick([job.run for job in running.values()])
                time.sleep(POLL)
        finally:
            _stop([job.process for job in running.values()], interrupts)
    if interrupts.count:
        raise KeyboardInterrupt
    return outcomes


def _stop(processes: Sequence["subprocess.Popen[bytes]"], interrupts: "_Interrupts") -> None:
    """Ctrl-C for each; who has not ended after half a minute, or at a second Ctrl-C, is killed with all it has started."""
    for process in processes:
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and interrupts.count < 2 and any(each.poll() is None for each in processes):
        time.sleep(POLL)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
            process.wait()


class _Interrupts:
    """Counts Ctrl-C, SIGTERM and hang-ups, to be looked at where no process can get lost between its start and its place in
    the books. What is ignored, as by nohup, stays so."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._seen)
        return self

    def _seen(self, *_: object) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last line of a run's metrics.jsonl, read from its end; None if there is none yet."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
        row = json.loads(lines[-1])
    except (OSError, IndexError, ValueError):  # not there yet, or longer than that
        return None
    return row if isinstance(row, dict) else None

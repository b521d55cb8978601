"""Runs a study: each `hgnp run` is a separate process, so that a failed or killed run does not affect the others."""

import ctypes
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
GRACE_SECONDS = 30.0  # for a run to write its last checkpoint
TAIL = 65536  # bytes
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class JobSlots:
    """`jobs` parallel runs; each slot has its own environment variables."""

    jobs: int
    environments: tuple[Mapping[str, str], ...] = ({},)

    def environment(self, slot: int) -> dict[str, str]:
        """run.json records how many runs share a device, since their times are not comparable to those of a single run."""
        shared_by = math.ceil(self.jobs / len(self.environments))
        return {**os.environ, **self.environments[slot % len(self.environments)], SHARED_BY: str(shared_by)}


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended; `error` is None or the last message of its process."""

    run: PlannedRun
    error: str | None
    seconds: float


class Watcher(Protocol):
    def started(self, run: PlannedRun) -> None: ...

    def ended(self, outcome: RunOutcome) -> None: ...

    def tick(self, running: Sequence[PlannedRun]) -> None:
        """Called several times per second."""


def job_slots(device: str | None, jobs: int | None) -> JobSlots:
    """One run per GPU, or one on a CPU with all of its threads. Several on a CPU share its cores; `jobs` runs are spread
    over the GPUs. OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES limit what is shared."""
    gpus = _gpus() if device in (None, "cuda") else []
    if gpus:
        return JobSlots(jobs or len(gpus), tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus))
    jobs = jobs or 1
    on_cpu = device in (None, "cpu")
    if jobs == 1 or not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return JobSlots(jobs)
    return JobSlots(jobs, ({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))},))


def _gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(count)]
    return named[:count]


def start_process(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a command that writes to a log. A terminal's Ctrl-C reaches this process alone, which forwards it once."""
    posix = os.name == "posix"
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
        process_group=0 if posix else None, preexec_fn=_interruptible if posix else None,
    )  # fmt: skip


def _interruptible() -> None:
    """In the child on POSIX: the study stops its runs by SIGINT, also where it ignores that signal itself, as in the background
    of a shell script. On Linux a study that is killed does so too: its runs would go on and hold their folders."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


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
        self.process = start_process([sys.executable, "-m", "hgnp", *command], self._log, environment)

    def outcome(self) -> RunOutcome | None:
        """None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        error = None if code == 0 else self._last_message(code)
        self._log.close()
        return RunOutcome(self.run, error, time.monotonic() - self.start)

    def _last_message(self, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._before, end - TAIL))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        messages = [line.removeprefix("hgnp: ") for line in lines if line.startswith("hgnp: ")]
        return (messages or lines or [f"exit code {code}"])[-1].strip()


def execute_runs(missing: Sequence[PlannedRun], out: Path, slots: JobSlots, watcher: Watcher) -> list[RunOutcome]:
    """Run, or resume, each of `missing`. Ctrl-C, SIGTERM or a closed terminal stop all of them, each after its last
    completed epoch, and raise KeyboardInterrupt."""
    waiting, running, outcomes = deque(missing), dict[int, _Job](), list[RunOutcome]()
    with Interrupts() as interrupts:
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
            stop_processes([job.process for job in running.values()], interrupts)
    if interrupts.count:
        raise KeyboardInterrupt
    return outcomes


def stop_processes(processes: Sequence["subprocess.Popen[bytes]"], interrupts: "Interrupts") -> None:
    """Interrupt each process. After half a minute, or at a second Ctrl-C, kill those left with their children."""
    for process in processes:
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and interrupts.count < 2 and any(each.poll() is None for each in processes):
        time.sleep(POLL)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
            process.wait()


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of raising, so that no process is lost between its start and its
    registration. Ignored signals, as under nohup, stay ignored."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._increment)
        return self

    def _increment(self, *_: object) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def last_line(out: Path, run: PlannedRun) -> str:
    """The last line of a run's log; before its first, that it is starting."""
    with (out / "logs" / f"{run.name}.log").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return "starting" if not lines or lines[-1].startswith("$ ") else lines[-1].strip()


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last line of a run's metrics.jsonl, read from the end; None if there is none yet."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
        row = json.loads(lines[-1])
    except (OSError, IndexError, ValueError):  # not there yet, or longer than that
        return None
    return row if isinstance(row, dict) else None

"""`hgnp study`: run networks × methods × seeds and compare them."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hgnp.experiments.study_plan import PlannedRun, StudyPlan
    from hgnp.experiments.study_runs import RunOutcome


def study(
    what: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="Built-in study or YAML file. Default: list the studies.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with the dataset (see hgnp data).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder for runs and comparison. Default: results/NAME.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, … Default: cuda if available.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of parallel runs. Default: one per GPU, or one.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of every run; repeatable."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Seeds, such as 0,1,2. Default: the study's.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="NAME,NAME…", help="Subset of the study's methods.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Run and compare methods, networks and seeds. Every method runs on every network with every seed."""
    from hgnp.experiments import studies, study_plan

    if what is None:
        list_studies()
        return
    plan = studies.find(what)
    planned = plan.runs(
        data=data, device=device, settings=set_ or (),
        seeds=None if seeds is None else study_plan.check_seeds(seeds),
        methods=None if methods is None else [name.strip() for name in methods.split(",")],
    )  # fmt: skip
    place = out or plan.out or study_plan.RESULTS / plan.name
    states = study_plan.check_states(planned, place)
    if dry_run:
        print_commands(planned, place, states, as_json=as_json)
        return

    from hgnp.experiments.study_runs import execute_runs, job_slots

    stream = sys.stderr if as_json else sys.stdout
    missing = [run for run in planned if states[run.name] != "finished"]
    if missing and data is not None and not Path(data).exists():
        raise FileNotFoundError(f"--data must be a folder, got {data}, which does not exist; see hgnp data --help")
    if missing and device is not None:
        from hgnp.train import as_device

        as_device(device)
    display = create_display(plan, place, planned, missing, stream)
    try:
        with display:
            outcomes = execute_runs(missing, place, job_slots(device, jobs), display) if missing else []
    except KeyboardInterrupt:
        command = resume_command(what, data, place, device, jobs, set_, seeds, methods)
        print(f"\nhgnp: interrupted; {command} resumes every run after its last checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None
    finish(plan, place, planned, outcomes, stream, as_json=as_json)


def finish(
    plan: "StudyPlan", out: Path, planned: Sequence["PlannedRun"], outcomes: Sequence["RunOutcome"], stream: Any,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Compare the finished runs and report the failed ones."""
    from hgnp.cli.compare import show
    from hgnp.io.atomic import as_json as text
    from hgnp.io.atomic import write_json
    from hgnp.reporting import publish

    failed = {outcome.run.name: outcome.error for outcome in outcomes if outcome.error is not None}
    done = [run for run in planned if run.name not in failed]
    about = [
        {"run": run.name, "network": run.network, "method": run.method, "seed": run.seed, "error": failed.get(run.name)}
        for run in planned
    ]
    write_json(out / "study.json", {"name": plan.name, "about": plan.about, "runs": about})
    comparison = None
    if done:
        methods = {run.method for run in done}
        made = publish.compare(
            [out / run.name for run in done], out,
            baseline=plan.baseline if plan.baseline in methods else None,
            names=[run.method for run in done],
        )  # fmt: skip
        show(made, stream)
        print(f"\n{out / 'page.html'}  (HTML page; tables and figures are beside it)", file=stream)
        comparison = publish.as_dict(made, out)
    for name, error in failed.items():
        print(f"hgnp: {name} failed: {error} (see {out / 'logs' / name}.log)", file=sys.stderr)
    if as_json:
        print(text({"name": plan.name, "out": str(out), "runs": about, "comparison": comparison}))
    if failed:
        print(f"hgnp: {len(failed)} of {len(planned)} runs failed; run the same command to retry them", file=sys.stderr)
        raise typer.Exit(1)


def print_commands(planned: Sequence["PlannedRun"], out: Path, states: Mapping[str, str], *, as_json: bool) -> None:
    """Print the command of every run; those of finished runs as comments."""
    if as_json:
        from hgnp.io.atomic import as_json as text

        rows = [{"run": run.name, "state": states[run.name], "command": ["hgnp", *run.command(out)]} for run in planned]
        print(text({"out": str(out), "runs": rows}))
        return
    for run in planned:
        print(f"{'# finished: ' if states[run.name] == 'finished' else ''}{shlex.join(['hgnp', *run.command(out)])}")


def resume_command(
    what: str, data: str | None, out: Path, device: str | None, jobs: int | None, settings: list[str] | None,
    seeds: str | None, methods: str | None,
) -> str:  # fmt: skip
    options = {
        "--data": data, "--out": str(out), "--device": device, "--jobs": jobs, "--seeds": seeds, "--methods": methods
    }  # fmt: skip
    words = ["hgnp", "study", what]
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    for setting in settings or ():
        words += ["--set", setting]
    return shlex.join(words)


def list_studies() -> None:
    from hgnp.cli.table import print_catalog
    from hgnp.experiments import studies

    print_catalog("study", {name: studies.study(name).about or "" for name in studies.names()})


def create_display(
    plan: "StudyPlan", out: Path, planned: Sequence["PlannedRun"], missing: Sequence["PlannedRun"], stream: Any
) -> "StudyLines":
    finished = len(planned) - len(missing)
    print(
        f"{plan.name}: {len(planned)} runs, {finished} already finished, {len(missing)} to run, in {out}",
        file=stream, flush=True,
    )  # fmt: skip
    return (StudyTable if sys.stderr.isatty() else StudyLines)(out, len(planned), finished, stream)


MINUTE = 60.0  # seconds between two lines about a run


class StudyLines:
    """Prints one line per run that ends, and every minute the last line of each running run's log: its epoch and time left."""

    def __init__(self, out: Path, total: int, done: int, stream: Any) -> None:
        self.out, self.total, self.done, self.stream = out, total, done, stream
        self.shown = time.monotonic()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def started(self, run: "PlannedRun") -> None: ...

    def tick(self, running: Sequence["PlannedRun"]) -> None:
        from hgnp.experiments.study_runs import last_line

        if time.monotonic() - self.shown < MINUTE:
            return
        self.shown = time.monotonic()
        for run in running:
            self.line(f"{run.name}: {last_line(self.out, run)}")

    def ended(self, outcome: "RunOutcome") -> None:
        from hgnp.progress import format_duration

        self.done += 1
        how = progress_of(self.out / outcome.run.name) if outcome.error is None else f"failed: {outcome.error}"
        self.line(f"{outcome.run.name}: {how}, {format_duration(outcome.seconds)} ({self.done} of {self.total})")

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class StudyTable(StudyLines):
    """On a terminal: also a live table of the running runs."""

    def __init__(self, out: Path, total: int, done: int, stream: Any) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(out, total, done, stream)
        self.live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
        self.start_times: dict[str, float] = {}
        self.shown = 0.0  # at once

    def __enter__(self) -> None:
        self.live.start()

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def started(self, run: "PlannedRun") -> None:
        self.start_times[run.name] = time.monotonic()

    def line(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self, running: Sequence["PlannedRun"]) -> None:
        if time.monotonic() - self.shown < 1.0:
            return
        from rich.table import Table

        from hgnp.progress import format_duration

        self.shown = time.monotonic()
        grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for run in running:
            grid.add_row(
                run.name, progress_of(self.out / run.name), format_duration(self.shown - self.start_times[run.name])
            )
        self.live.update(grid, refresh=True)


def progress_of(folder: Path) -> str:
    """A run's last completed epoch in a few words."""
    from hgnp.experiments.study_runs import last_row
    from hgnp.io.atomic import read_json
    from hgnp.progress import epoch_figures

    row = last_row(folder)
    if row is None:
        return "starting"
    metric = read_json(folder / "run.json").get("metric") or "metric"
    known = [f"{name} {value}" for name, value in epoch_figures(row, metric) if name != "radius"]
    return "  ".join([f"epoch {row['epoch']}", *known])

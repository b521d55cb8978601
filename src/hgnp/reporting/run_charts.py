"""The charts of one run, each a function of the run; `MissingChart` gives the reason where there is no data."""

from collections.abc import Callable, Sequence

from hgnp.io.runs import Run
from hgnp.reporting.charts import Axis, Chart, Figure, Heatmap, MissingChart, Number, ReferenceLine, Series

EPOCH = Axis("epoch", whole=True)
KEPT = Axis("parameters kept, κ", percent=True, reverse=True)
PHASES = {"warmup": "warm-up", "prune": "pruning", "finetune": "fine-tuning"}
SNAPSHOTS = "fine-tuned snapshots"
NO_METRIC = "The run had no validation data, so there is no metric."
NO_PENALTY = "The run had no flatness penalty: its method has none, or μ is 0."


def metric_axis(metric: str) -> Axis:
    """Accuracy is shown in percent, any other metric as it is."""
    return Axis(metric, percent=metric == "accuracy")


def all_charts(run: Run) -> list[Figure | MissingChart]:
    """Every chart, in the order of the page."""
    made: Sequence[Callable[[Run], Figure | MissingChart]] = (
        against_kept, over_epochs, losses, widths, widths_over_time, radius_and_curvature, penalised_blocks, time,
    )  # fmt: skip
    return [make(run) for make in made]


def sentence(run: Run) -> str:
    """The outcome in a sentence."""
    model = str(run.info.get("model") or "The network")
    if not run.rows:
        return f"{model}: no epoch is complete yet."
    kept = f"{run.rows[-1]['kept']:.1%} of its parameters"
    after = (run.result or {}).get("after") or {}
    before = (run.result or {}).get("before") or {}
    if run.result is None:
        return f"{model} has {kept} left so far."
    words = f"{model} was pruned to {kept}"
    if before.get("metric") is not None and after.get("metric") is not None:
        was, now = (_show(metric_axis(run.metric), side["metric"]) for side in (before, after))
        words += f"; its {run.metric} was {was} before the first removal and is {now} at the end"
    if before.get("latency_ms") and after.get("latency_ms"):
        words += f", and it is {before['latency_ms'] / after['latency_ms']:.1f} times as fast"
    return words + "."


def against_kept(run: Run) -> Figure | MissingChart:
    """The metric at each pruning level; see `Run.curve` for which epochs these are."""
    title, points = f"{run.metric.capitalize()} against κ", run.curve()
    if not points:
        return MissingChart(title, NO_METRIC if run.rows else run.state)
    kept, values = zip(*points, strict=True)
    axis = metric_axis(run.metric)
    ends = [f"{_show(axis, value)} with {share:.1%} of the parameters" for share, value in (points[0], points[-1])]
    alt = f"{run.metric} from {ends[0]} to {ends[1]}"
    series = [Series(run.method, kept, values)]
    if points := run.snapshot_points():
        kept, values = zip(*points, strict=True)
        series.append(Series(SNAPSHOTS, kept, values, colour=1, line=False))
        alt += f"; {len(points)} fine-tuned snapshot{'s' * (len(points) > 1)}"
    return Chart("metric_against_kept", title, alt, KEPT, axis, tuple(series))


def over_epochs(run: Run) -> Figure | MissingChart:
    """The metric after each epoch and, if it is a percentage, the parameters kept."""
    axis, title = metric_axis(run.metric), f"{run.metric.capitalize()} over time"
    epochs, values = _column(run, "metric")
    if not any(value is not None for value in values):
        return MissingChart(title, NO_METRIC if run.rows else run.state)
    series = [Series(run.metric, epochs, values, markers=False)]
    if axis.percent:
        series.append(Series("parameters kept", *_column(run, "kept"), colour=1, dashed=True, markers=False))
        axis = Axis(f"{run.metric}, parameters kept", percent=True)
    alt = f"{run.metric} after each of {len(epochs)} epochs, {_show(metric_axis(run.metric), values[-1])} at the end"
    return Chart("metric_over_epochs", title, alt, EPOCH, axis, tuple(series), _phases(run))


def losses(run: Run) -> Figure | MissingChart:
    """Training loss, validation loss and the flatness penalty."""
    series: list[Series] = []
    for key, label in (
        ("loss", "training loss"),
        ("val_loss", "validation loss"),
        ("penalty", "penalty, μ·max(0, q − B)"),
    ):
        epochs, values = _column(run, key)
        if any(value for value in values):
            series.append(Series(label, epochs, values, colour=len(series), dashed=bool(series), markers=False))
    if not series:
        return MissingChart("Loss over time", run.state)
    alt = f"{', '.join(one.label for one in series)} over {len(run.rows)} epochs"
    return Chart("loss_over_epochs", "Loss over time", alt, EPOCH, Axis("mean loss"), tuple(series), _phases(run))


def start_widths(run: Run) -> dict[str, int]:
    """Layer → neurons at the start, from run.json, or else the largest width in metrics.jsonl."""
    stated = run.info["at_start"].get("widths")
    widths: dict[str, int] = dict(stated) if isinstance(stated, dict) else {}
    for row in run.rows:
        for layer, width in (row.get("widths") or {}).items():
            widths[layer] = max(width, widths.get(layer, 0))
    return widths


def widths_over_time(run: Run) -> Figure | MissingChart:
    """For each layer the fraction of its neurons that are left."""
    start = {layer: width for layer, width in start_widths(run).items() if width}
    if not start or not run.rows:
        return MissingChart("Layer widths over time", "The run recorded no layer widths.")
    alive = {layer: [(row.get("widths") or {}).get(layer) for row in run.rows] for layer in start}
    shares = {layer: [None if width is None else width / start[layer] for width in alive[layer]] for layer in start}
    notes = {
        layer: [f"{'–' if width is None else width} of {start[layer]} neurons" for width in alive[layer]]
        for layer in start
    }
    least = min(start, key=lambda layer: shares[layer][-1] or 0.0)
    alt = f"fraction of neurons left in each of {len(start)} layers; the narrowest for its size at the end is {least}"
    return _heat(run, "layer_widths", "Layer widths over time", alt, shares, notes, "neurons left")


def widths(run: Run) -> Figure | MissingChart:
    """Neurons of each layer at the start and now."""
    start = start_widths(run)
    if not start or not run.rows:
        return MissingChart("Layer widths", "The run recorded no layer widths.")
    layers = tuple(start)
    now = run.rows[-1].get("widths") or {}
    before = Series("at the start", layers, tuple(float(start[layer]) for layer in layers), colour=-1)
    after = Series("at the end", layers, tuple(now.get(layer) for layer in layers), colour=0)
    alt = f"neurons in each of {len(layers)} layers, {sum(start.values()):,} at the start and {sum(now.values()):,} at the end"
    return Chart("widths_before_after", "Layer widths", alt, Axis("layer"), Axis("neurons"), (before, after), bars=True)


def radius_and_curvature(run: Run) -> Figure | MissingChart:
    """λ of the penalised block and q = vᵀHv along its eigenvector, means over the steps of an epoch, with the bound B."""
    title = "Radius and curvature over time"
    series: list[Series] = []
    for key, label in (("radius", "radius λ"), ("curvature", "curvature q = vᵀHv")):
        epochs, values = _column(run, key)
        if any(value is not None for value in values):
            series.append(Series(label, epochs, values, colour=len(series), dashed=bool(series), markers=False))
    if not series:
        return MissingChart(title, NO_PENALTY)
    shown = [value for one in series for value in one.y if value is not None]
    bound = run.recipe.get("bound")
    marks = (
        (ReferenceLine(float(bound), "bound B", vertical=False),)
        if isinstance(bound, int | float) and bound > 0
        else ()
    )
    alt = f"radius and curvature between {min(shown):.3g} and {max(shown):.3g} over {len(run.rows)} epochs"
    axis = Axis("radius, curvature", log=min(shown) > 0)
    return Chart("radius_curvature", title, alt, EPOCH, axis, tuple(series), (*_phases(run), *marks))


def penalised_blocks(run: Run) -> Figure | MissingChart:
    """For each layer the fraction of an epoch's steps in which its block was penalised."""
    title = "Penalised block"
    layers = list(dict.fromkeys(layer for row in run.rows for layer in row.get("blocks") or {}))
    if not layers:
        return MissingChart(title, NO_PENALTY)
    order = [layer for layer in start_widths(run) if layer in layers]
    layers = [*order, *(layer for layer in layers if layer not in order)]
    shares: dict[str, list[Number]] = {
        layer: [float((row.get("blocks") or {}).get(layer, 0.0)) for row in run.rows] for layer in layers
    }
    notes = {layer: [f"{share:.1%} of the steps" for share in shares[layer]] for layer in layers}
    most = max(layers, key=lambda layer: sum(share or 0.0 for share in shares[layer]))
    alt = f"share of steps in which each of {len(layers)} layers was penalised; most often {most}"
    return _heat(run, "penalised_blocks", title, alt, shares, notes, "share of steps")


def time(run: Run) -> Figure | MissingChart:
    """Seconds of each epoch (scoring, removal, training, validation), by phase."""
    series: list[Series] = []
    for colour, (phase, label) in enumerate(PHASES.items()):
        mine = [
            (row["epoch"], row["seconds"])
            for row in run.rows
            if row["phase"] == phase and row.get("seconds") is not None
        ]
        if mine:
            epochs, seconds = zip(*mine, strict=True)
            series.append(Series(label, epochs, seconds, colour=colour))
    if not series:
        return MissingChart("Time", run.state)
    total = sum(value or 0.0 for one in series for value in one.y)
    alt = f"seconds of each epoch, {total:,.1f} in all"
    return Chart("seconds", "Time", alt, EPOCH, Axis("seconds per epoch"), tuple(series), bars=True)


def _column(run: Run, key: str) -> tuple[tuple[int, ...], tuple[Number, ...]]:
    """Epochs and values; of validation, the epochs that have it."""
    every = key not in ("metric", "val_loss")
    rows = [row for row in run.rows if every or row.get(key) is not None]
    return tuple(row["epoch"] for row in rows), tuple(row.get(key) for row in rows)


def _phases(run: Run) -> tuple[ReferenceLine, ...]:
    """Where pruning and fine-tuning begin."""
    first: dict[str, int] = {}
    for row in run.rows:
        first.setdefault(row["phase"], row["epoch"])
    return tuple(
        ReferenceLine(first[phase] - 0.5, PHASES[phase]) for phase in ("prune", "finetune") if first.get(phase, 0) > 0
    )


def _heat(
    run: Run, key: str, title: str, alt: str, shares: dict[str, list[Number]], notes: dict[str, list[str]], label: str
) -> Heatmap:
    epochs = tuple(row["epoch"] for row in run.rows)
    cells, words = tuple(map(tuple, shares.values())), tuple(map(tuple, notes.values()))
    return Heatmap(key, title, alt, tuple(shares), epochs, cells, words, label)


def _show(axis: Axis, value: Number) -> str:
    return axis.show(value) + ("%" if axis.percent else "")

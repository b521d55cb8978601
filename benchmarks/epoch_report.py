"""The report of `epoch.py`: what each table says and how it was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hgnp.io.atomic import write

ABOUT = {
    "Epochs": """\
An epoch is {steps} steps of {batch} images of 3 × 32 × 32 with random flips, as in a run: {precision}, channels last, SGD with
momentum. Steps are timed for {seconds:g} s after a warm-up (eager: 20 steps) and scaled to an epoch. *graphs*: CUDA graphs, as
in a run on a GPU; *eager*: operation by operation. Ratios are to the plain epoch with graphs of the same network and κ. κ is
the fraction of parameters left, cut by L1 norms.

- *Taylor*: a plain epoch with one round: scoring a batch, removing {round} neurons, capturing all graphs again.
- *HGNP*: *default*; the *preset*, {presets};
  the same along the *first block*; in the *literal order*, v from the batch itself; *paper*, `flatness="paper"`.
- A bound of −1 keeps the penalty active in every step. *inactive*: a bound that is never exceeded, so the penalty is skipped.
- *Block*: the one penalised most often, with its share of the steps; later blocks are cheaper.
""",
    "Memory": """\
Peak MiB of {after} warm steps: weights, gradients and momentum included, the dataset not. *Allocated* misses the memory
pool of CUDA graphs; *reserved* includes it. Ratios are to the plain step run the same way.
""",
    "Naive": """\
The textbook step (`hgnp.reference`): all Kronecker factors of the batch dense, `torch.linalg.eigh` of each, vᵀHv by
differentiating twice and its gradient by a third backward; float32 with TF32 products, eager. Median of {naive} steps.
""",
}
COLUMNS = {
    "Epochs": "network | κ | parameters | method | steps | ms per step | s per epoch | ratio to plain | block",
    "Memory": "network | steps | method | MiB allocated | ratio | MiB reserved | ratio",
    "Naive": "network | κ | step | ms per step | times as fast | block",
}


Key = tuple[str, float, str, bool]
"""Network, percent of its parameters, method, and whether its steps are in graphs."""


@dataclass(frozen=True)
class Measured:
    """A step, and what an epoch takes."""

    step: float
    epoch: float
    how: str
    block: str


class Report:
    """What was measured so far, as Markdown."""

    def __init__(self, out: Path | None, head: str, facts: dict[str, Any]) -> None:
        self.out, self.head, self.facts = out, head, facts
        self.rows: dict[str, list[str]] = {}

    def add(self, title: str, *cells: str) -> None:
        self.rows.setdefault(title, []).append(_row(cells))
        print(self.rows[title][-1], flush=True)
        if self.out is not None:
            write(self.out, "\n".join([self.head, *(self._part(title) for title in self.rows)]))

    def _part(self, title: str) -> str:
        columns = COLUMNS[title].split(" | ")
        rule = ["--:" if name.startswith(("ms", "s ", "ratio", "times", "MiB", "κ")) else "---" for name in columns]
        table = [_row(columns), _row(rule), *self.rows[title]]
        return "\n".join([f"\n## {title}\n", ABOUT[title].format(**self.facts), *table, ""])


def short(known: Mapping[Key, Measured], methods: Sequence[str]) -> Iterator[str]:
    """A line a network and size: the plain epoch and the others' ratios to it, all from graphs."""
    others = [method for method in methods if method != "plain"]
    yield f"{'':16} {'plain':>8} " + " ".join(f"{method:>13}" for method in others)
    for name, kept in dict.fromkeys((name, kept) for name, kept, _, _ in known):
        mine = {
            method: known[name, kept, method, True].epoch for method in methods if (name, kept, method, True) in known
        }
        if "plain" in mine:
            ratios = [f"{mine[other] / mine['plain']:.2f}" if other in mine else "" for other in others]
            yield f"{name:9} {kept:4.3g} % {mine['plain']:6.2f} s " + " ".join(f"{ratio:>13}" for ratio in ratios)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""All rows of the paper's page with their verdicts."""

from collections import Counter
from dataclasses import dataclass

from hgnp.reporting.paper.accuracy import ablation_rows, accuracy_rows, areas_rows, equal_rows
from hgnp.reporting.paper.results import PaperResults
from hgnp.reporting.paper.rows import PaperRow
from hgnp.reporting.paper.times import inference_rows, training_rows
from hgnp.reporting.paper.verdict import AGREES, DIFFERS, DIRECTION, NONE, NOT_RUN, UNDECIDED

TIMES = ("training", "inference")
"""Sections of the page whose numbers are times."""
DECIDED = (AGREES, DIRECTION, DIFFERS)
JUDGED = (*DECIDED, UNDECIDED, NOT_RUN)


@dataclass(frozen=True)
class PaperReport:
    results: PaperResults
    rows: tuple[PaperRow, ...]

    @property
    def concluding(self) -> list[PaperRow]:
        """One row per number of the paper: of the groups of runs nearest to its settings, the first that decides, or else the
        first."""
        by_number: dict[tuple[str, str, str], list[PaperRow]] = {}
        for row in self.rows:
            by_number.setdefault((row.claim.section, row.claim.experiment.key, row.claim.what), []).append(row)
        return [next((row for row in rows if row.verdict.word in DECIDED), rows[0]) for rows in by_number.values()]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """How many of the paper's numbers on accuracy and how many on time agree, differ …, judged by the
        concluding rows."""
        found = {"accuracy": Counter[str](), "time": Counter[str]()}
        for row in self.concluding:
            if row.verdict.word != NONE:
                found["time" if row.claim.section in TIMES else "accuracy"][row.verdict.word] += 1
        return {kind: {word: results[word] for word in JUDGED} for kind, results in found.items()}


def paper_report(results: PaperResults) -> PaperReport:
    makers = (accuracy_rows, areas_rows, ablation_rows, training_rows, inference_rows, equal_rows)
    rows = [row for make in makers for row in make(results)]
    return PaperReport(results, tuple(rows))


def conclusion(row: PaperRow) -> str:
    """A row as one line of text."""
    reason = f" ({row.verdict.reason})" if row.verdict.reason else ""
    claim = row.claim
    ours = f"{row.text}; {row.verdict.word}{reason}. Runs: {row.runs}."
    return f"{claim.experiment.title}: {claim.what}. Paper: {claim.text}; ours: {ours}"

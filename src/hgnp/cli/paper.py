"""`hgnp paper`: the paper's tables and figures next to the results of runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def paper(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS_DIR", help="Folder with runs and bench.json files at any depth."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder. Default: RESULTS_DIR/page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Compare your runs with the paper. Writes numbers, deviations and verdicts as a page, tables and figures."""
    from hgnp.io.atomic import as_json as text
    from hgnp.reporting import publish
    from hgnp.reporting.paper.report import conclusion
    from hgnp.reporting.paper.verdict import NONE, NOT_RUN

    made, place = publish.paper(results, out)
    stream = sys.stderr if as_json else sys.stdout
    for row in made.concluding:
        if row.verdict.word not in (NONE, NOT_RUN):
            print(conclusion(row), file=stream)
    for kind, found in made.counts.items():
        print(f"on {kind}: " + ", ".join(f"{count} {word}" for word, count in found.items()), file=stream)
    for command in dict.fromkeys(row.command for row in made.concluding if row.command):
        print(f"not run: {command}", file=stream)
    print(f"{place / 'page.html'}  (HTML page; rows.csv, paper.json and figures/ are beside it)", file=stream)
    if as_json:
        print(text({**publish.paper_as_dict(made), "out": str(place)}))

"""`hgnp paper`: the paper's tables and figures next to what runs came to."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def paper(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS_DIR", help="A folder with runs and bench.json files anywhere below it."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the page goes; RESULTS_DIR/page if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, the last line of stdout.")] = False,
) -> None:
    """The paper's numbers, ours beside them, how the runs deviate, and what agrees; a page, tables and figures."""
    from hgnp.io.atomic import as_json as text
    from hgnp.reporting import publish
    from hgnp.reporting.paper.report import conclusion
    from hgnp.reporting.paper.verdict import NONE, NOT_RUN

    made, place = publish.paper(results, out)
    say = sys.stderr if as_json else sys.stdout
    for row in made.nearest:
        if row.verdict.word not in (NONE, NOT_RUN):
            print(conclusion(row), file=say)
    print(", ".join(f"{count} {word}" for word, count in made.counts.items()), file=say)
    for command in dict.fromkeys(row.command for row in made.nearest if row.command):
        print(f"not run: {command}", file=say)
    print(f"{place / 'page.html'}  (with rows.csv, paper.json and figures/ beside it)", file=say)
    if as_json:
        print(text({**publish.paper_as_dict(made), "out": str(place)}))

"""A run's pruned network with every width rounded to the nearest multiple, to be timed beside it: `hgnp bench OUT`.

    python benchmarks/rounded.py RUN --multiple 8 --out OUT

OUT is a folder like RUN. Its weights are random: what is compared is time, which does not depend on them.
"""

import argparse
import shutil
from pathlib import Path

import hgnp
from hgnp.experiments.build import network
from hgnp.experiments.reload import config_of, cut_to_widths, sample
from hgnp.io import runs

FILES = ("config.yaml", "metrics.jsonl", "result.json", "run.json")


def rounded(folder: Path, multiple: int, out: Path) -> dict[str, int]:
    """Writes OUT, and says what the widths are."""
    run = runs.read(folder)
    before, after = run.info["at_start"]["widths"], run.rows[-1]["widths"]
    widths = {
        name: min(before[name], max(multiple, round(width / multiple) * multiple)) for name, width in after.items()
    }
    full = cut_to_widths(network(config_of(folder)), widths, sample(folder))
    out.mkdir(parents=True)
    for name in FILES:
        shutil.copy(folder / name, out)
    hgnp.save(full, out)
    return widths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--multiple", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    widths = rounded(arguments.run, arguments.multiple, arguments.out)
    print(f"{arguments.out}: {', '.join(map(str, widths.values()))}")


if __name__ == "__main__":
    main()

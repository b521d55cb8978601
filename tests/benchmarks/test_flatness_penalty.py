"""The benchmark of the flatness penalty continues from its records."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import flatness_penalty


def test_a_training_whose_numbers_are_kept_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, names = tmp_path / "work", ["mu=0", "network-0.03-every-4"]
    command = [
        "",
        "--set",
        "model_args.width=4",
        "--epochs",
        "1",
        "--samples",
        "64",
        "--repeats",
        "1",
        "--work",
        str(work),
    ]
    command += ["--parts", "cd", "--variants", ",".join(names)]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "first.md")])
    trained: list[str] = []
    train = flatness_penalty.train

    def interrupted(given, seed, missing):  # type: ignore[no-untyped-def]
        trained.extend(missing[:1])
        train(given, seed, missing[:1])

    monkeypatch.setattr(flatness_penalty, "train", interrupted)
    flatness_penalty.main()
    flatness_penalty.main()
    for folder in work.glob("dense-*"):
        shutil.rmtree(folder)
    flatness_penalty.main()
    assert trained == names
    records = [json.loads(line) for line in (work / "records.jsonl").read_text().splitlines()]
    assert [next(iter(record)) for record in records] == ["d", *(f"c {name} 0" for name in names)]
    times = records[0]["d"]
    assert set(times) == set(flatness_penalty.VARIANTS)
    ratio = records[2]["c network-0.03-every-4 0"]["training"] / records[1]["c mu=0 0"]["training"]
    cost = times["network-0.03-every-4"] / times["mu=0"]
    row = next(
        line for line in (tmp_path / "first.md").read_text().splitlines() if line.startswith("| network-0.03-every-4")
    )
    assert f"| {ratio:.2f} |" in row
    assert f"| {cost:.2f} |" in row

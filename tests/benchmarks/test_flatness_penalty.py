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
    assert [next(iter(record)) for record in records] == ["settings", "d", *(f"c {name} 0" for name in names)]
    times = records[1]["d"]
    assert set(times) == set(flatness_penalty.VARIANTS)
    ratio = records[3]["c network-0.03-every-4 0"]["training"] / records[2]["c mu=0 0"]["training"]
    cost = times["network-0.03-every-4"] / times["mu=0"]
    row = next(
        line for line in (tmp_path / "first.md").read_text().splitlines() if line.startswith("| network-0.03-every-4")
    )
    assert f"| {ratio:.2f} |" in row
    assert f"| {cost:.2f} |" in row


def arguments(work: Path, *more: str) -> list[str]:
    small = ["--set", "model_args.width=4", "--epochs", "1", "--samples", "64", "--variants", "mu=0"]
    return ["", *small, "--work", str(work), *more]


def test_the_diagnostics_train_their_network_again_if_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatness_penalty, "trained_facts", lambda *_: {"metric": 0.5, "training": 1.0})
    monkeypatch.setattr(flatness_penalty, "eigenpairs", lambda net, batches: sum(p.numel() for p in net.parameters()))
    monkeypatch.setattr(flatness_penalty, "steps_on_q", lambda net, batches, over: over)
    monkeypatch.setattr(flatness_penalty, "report", lambda *_: "")
    monkeypatch.setattr(sys, "argv", arguments(tmp_path, "--parts", "c"))
    flatness_penalty.main()
    shutil.rmtree(tmp_path / "dense-mu0-0")  # with a machine that was taken away
    monkeypatch.setattr(sys, "argv", arguments(tmp_path, "--parts", "abc"))
    flatness_penalty.main()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [next(iter(record)) for record in records] == ["settings", "c mu=0 0", "a", "b block", "b network"]


def test_records_of_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"preset": "demo", "set": ["model_args.width=4"], "samples": 64, "epochs": 24}
    (tmp_path / "records.jsonl").write_text(json.dumps({"settings": settings}) + "\n")
    monkeypatch.setattr(sys, "argv", arguments(tmp_path))
    with pytest.raises(SystemExit):
        flatness_penalty.main()
    assert "--work must be a folder without records of other settings" in capsys.readouterr().err


def test_the_weight_of_a_variant_that_warms_up_rises_over_a_third_of_the_epochs() -> None:
    given = flatness_penalty.argparse.Namespace(preset="demo", device="cpu", data=None, set=[], epochs=60)
    plain, warm = (f"network-0.03-every-4{ending}" for ending in ("", "-warmup"))
    recipes = [
        flatness_penalty.configuration(
            given, flatness_penalty.settings(given) | flatness_penalty.changes_of(name, 60)
        ).recipe
        for name in (plain, warm)
    ]
    assert [recipe.get("mu_warmup_epochs", 0) for recipe in recipes] == [0, 20]
    assert recipes[0] | {"mu_warmup_epochs": 20} == recipes[1]

"""Study files: what runs they come to, what is refused, and the studies that come with hgnp."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from command import call
from hgnp.experiments import presets, studies
from hgnp.experiments.overrides import resolve_config, with_complete_recipe
from hgnp.experiments.study_plan import StudyPlan, check_seeds, read
from hgnp.experiments.study_runs import job_slots


def plan(**keys: Any) -> StudyPlan:
    return StudyPlan.from_dict({"networks": "demo", "methods": ["hgnp", "taylor"], **keys}, where="s.yaml", name="s")


def test_networks_times_seeds_times_methods_with_overrides_from_the_general_to_the_particular(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(presets.text("vgg16-cifar10"))
    (tmp_path / "s.yaml").write_text(
        "networks: [{config: mine.yaml, data: images, set: {recipe.mu: 2.0, recipe.lr: 2.0}}, demo]\n"
        "methods:\n  a: {method: taylor, set: {recipe.lr: 3.0}}\n  b: {set: {recipe.method: taylor}}\n"
        "seeds: [4, 7]\nset: {recipe.mu: 1.0, recipe.bound: 1.0, recipe.lr: 1.0}\nout: there\n"
    )
    made = read(tmp_path / "s.yaml")
    assert (made.name, made.out) == ("s", Path("there"))
    runs = made.runs(settings=["recipe.bound=9.0"], device="cpu")
    assert [run.name for run in runs] == [
        f"{network}-{method}-{seed}" for network in ("mine", "demo") for seed in (4, 7) for method in ("a", "b")
    ]
    first, second = runs[0].config, runs[1].config
    assert [first.recipe[key] for key in ("mu", "lr", "bound", "method")] == [2.0, 3.0, 9.0, "taylor"]
    assert (first.seed, first.device, first.data_args["folder"]) == (4, "cpu", "images")
    assert first.recipe["warmup_epochs"] == 200  # the schedule that the network has for Taylor
    assert (second.recipe["method"], second.recipe["warmup_epochs"]) == ("taylor", 50)  # the network's own
    assert "folder" not in runs[4].config.data_args


def test_the_command_of_a_run_gives_the_configuration_that_is_checked() -> None:
    changes = {"recipe.snapshots": [0.5, 0.2], "recipe.flatness": {"kfac_approx": "expand"}, "recipe.mu": 1e-5}
    for run in plan(set={**changes, "protect": ["stem.0"], "about": "ü, 'a' = \"b\""}).runs(device="cpu"):
        words = shlex.split(shlex.join(run.command(Path("out"))))
        options: dict[str, Any] = {"--set": []}
        for option, value in zip(words[2:-1:2], words[3::2], strict=True):
            options[option] = [*options["--set"], value] if option == "--set" else value
        assert words[:2] == ["run", "demo"]
        assert (words[-1], options["--out"]) == ("--resume", f"out/{run.name}")
        made = resolve_config(
            "demo", data=None, method=options["--method"], settings=options["--set"], seed=int(options["--seed"]), device="cpu"
        )  # fmt: skip
        assert with_complete_recipe(made) == run.config
        assert made.about == "ü, 'a' = \"b\""
        assert made.recipe["mu"] == 1e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"network": "demo"}, "s.yaml: key must be a known one, got 'network'; did you mean networks"),
        ({"networks": None}, "s.yaml: networks must be given, got none; for example networks: [vgg16-cifar10-fast]"),
        ({"methods": []}, "s.yaml: methods must be given, got none; for example methods: [hgnp, taylor]"),
        ({"networks": [3]}, "s.yaml: a network must be a preset, a file or {config: …, name: …, data: …, set: …}, got 3"),
        (
            {"networks": {"config": "demo", "date": "x"}},
            "s.yaml: networks: key must be a known one, got 'date'; did you mean data",
        ),
        ({"networks": {"config": "demo", "data": 3}}, "s.yaml: networks: data must be a folder, got 3"),
        ({"networks": "dem"}, "s: hgnp on dem: preset must be a known one or a file, got 'dem'; did you mean demo"),
        ({"networks": ["demo", "demo"]}, "s: runs must have distinct names, got demo-hgnp-0 twice; give networks a name"),
        ({"methods": ["hgnp", "hgnp"]}, "s.yaml: methods must differ, got ['hgnp', 'hgnp']"),
        ({"methods": 3}, "s.yaml: methods must be a list or a mapping of names to {method: …, set: …}, got 3"),
        ({"methods": {"a/b": {}}}, "s.yaml: methods.a/b: the name must be letters, digits and . _ + -, as it names folders"),
        ({"methods": {"a": 3}}, "s.yaml: methods.a must be {method: …, set: …}, got 3"),
        ({"methods": {"a": {"sets": {}}}}, "s.yaml: methods.a: key must be a known one, got 'sets'; did you mean set"),
        ({"methods": [3]}, "s.yaml: methods.3: method must be text, got 3"),
        ({"methods": ["magic"]}, "s: magic on demo: recipe.method must be"),
        ({"seeds": 0}, "s.yaml: seeds must be a list of different integers from 0 to 4294967295, or how many from 1 to"),
        ({"seeds": 10**9}, "s.yaml: seeds must be"),
        ({"seeds": [1, 1]}, "s.yaml: seeds must be"),
        ({"seeds": [True]}, "s.yaml: seeds must be"),
        ({"seeds": 600}, "s: a study must have at most 1,000 runs, got 1,200"),
        ({"set": ["recipe.mu=0"]}, "s.yaml: set must be a mapping such as {recipe.mu: 0.01}, got ['recipe.mu=0']"),
        ({"set": {"recipe.kepe": 1}}, "s: hgnp on demo: recipe: key must be a known one, got 'kepe'; did you mean keep"),
        ({"name": "a b"}, "s.yaml: name must be letters, digits"),
        ({"baseline": "tylor"}, "s.yaml: baseline must be one of the methods, got 'tylor'; did you mean taylor"),
        ({"about": 3}, "s.yaml: about must be text, got 3"),
    ],
)  # fmt: skip
def test_errors_are_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
        plan(**keys).runs()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("[a, b]")
    Path("bomb.yaml").write_text("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)))  # fmt: skip
    Path("own.yaml").write_text("networks: [{config: demo, data: x}]\nmethods: hgnp\n")
    for arguments, message in (
        (["dem"], "study must be a known one or a file, got 'dem'; did you mean demo"),
        (["missing.yaml"], "study must be an existing file, got missing.yaml"),
        (["list.yaml"], "list.yaml must be a mapping with networks and methods, got ['a', 'b']"),
        (["bomb.yaml"], "bomb.yaml must expand to at most 10,000 values"),
        (["own.yaml", "--data", "y"], "--data must be left out, got 'y': each network of the study has its own data"),
        (
            ["demo", "--methods", "hgnp,tailor"],
            "--methods must be methods of the study, got 'tailor'; did you mean taylor",
        ),
        (
            ["demo", "--seeds", "1,x"],
            "--seeds must be a list of different integers from 0 to 4294967295, got '1,x'",
        ),
        (["demo", "--seeds", "1,1"], "--seeds must be"),
        (["demo", "--set", "recipe.keep=7"], "demo: hgnp on demo: recipe.keep must be a fraction > 0 and ≤ 1, got 7"),
        (["demo", "--jobs", "0"], "Invalid value for '--jobs'"),
        (["vgg16-cifar10", "--data", "nowhere"], "--data must be a folder, got nowhere, which does not exist"),
        (["demo", "--device", "gpu"], "device must be one that PyTorch can use here, got gpu"),
        (["demo", "--out", "list.yaml"], "--out must be a folder, got list.yaml, which is a file"),
    ):
        assert call("study", *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bomb.yaml", "list.yaml", "own.yaml"]


def test_a_dry_run_prints_the_commands_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["study", "vgg16-cifar10-fast", "--data", "my data", "--dry-run", "--seeds", "3", "--device", "cuda"]
    assert call(*given) == 0
    lines = capsys.readouterr().out.splitlines()
    hgnp = (
        "hgnp run vgg16-cifar10-fast --data 'my data' --method hgnp --seed 3 --device cuda "
        "--set 'recipe.snapshots=[0.144, 0.1, 0.05]' --out results/vgg16-cifar10-fast/vgg16-cifar10-fast-hgnp-3 --resume"
    )
    assert len(lines) == 2
    assert lines[0] == hgnp
    assert "--set 'recipe.method=\"taylor\"'" in lines[1]
    assert call(*given, "--json") == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["run"], run["state"]) for run in told] == [
        ("vgg16-cifar10-fast-hgnp-3", "new"),
        ("vgg16-cifar10-fast-taylor-3", "new"),
    ]
    assert shlex.join(told[0]["command"]) == hgnp
    assert list(tmp_path.iterdir()) == []


def test_without_an_argument_the_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("study") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == studies.names()
    assert lines[0].startswith("demo\tHGNP and Taylor on scikit-learn's handwritten digits")


def test_the_studies_of_our_own_recipes() -> None:
    best = studies.study("cifar10-best").runs(data="x")
    assert len(best) == 18
    assert {run.seed for run in best} == {0, 1, 2}
    assert [run.network for run in best[::3]] == [
        f"{net}-cifar10-best{ending}" for net in ("vgg16", "resnet18") for ending in ("", "-dense", "-narrow")
    ]
    rivals = studies.study("cifar10-rivals").runs(data="x")
    assert [run.config.recipe["method"] for run in rivals if run.seed == 1] == [
        "taylor",
        "hgnp",
        "l2",
        "bn_scale",
        "sam",
    ]
    schedules = [
        {name: value for name, value in run.config.recipe.items() if name not in ("method", "seed")} for run in rivals
    ]
    assert all(each == schedules[0] for each in schedules)
    assert list(schedules[0]["snapshots"]) == [0.1]
    assert all(run.config.data_args == rivals[0].config.data_args for run in rivals)


@pytest.mark.parametrize("name", [name for name in studies.names() if not name.startswith("cifar10-")])
def test_a_study_that_comes_with_hgnp_is_of_its_preset(name: str) -> None:
    made = studies.study(name)
    runs = {run.method: run.config for run in made.runs(data=None if name == "demo" else "x", seeds=[0])}
    assert [network.config for network in made.networks] == [name]
    assert made.about
    preset = presets.preset(name)
    hgnp, taylor = runs["hgnp"].recipe, runs["taylor"].recipe
    assert (hgnp["method"], taylor["method"]) == ("hgnp", "taylor")
    assert hgnp["keep"] == preset.recipe["keep"]
    if name == "demo":
        return
    schedule = ("warmup_epochs", "prune_every", "neurons_per_round", "finetune_epochs", "lr")
    assert [hgnp[key] for key in schedule] == [preset.recipe[key] for key in schedule]
    own = {**preset.recipe, **preset.methods["taylor"]["recipe"]}
    by_itself = name.startswith("alexnet") or not name.endswith("-fast")
    assert [taylor[key] for key in schedule] == [(own if by_itself else preset.recipe)[key] for key in schedule]
    assert (hgnp["flatness"] == "paper") is not name.endswith("-fast")
    if name.startswith("alexnet"):
        for ablation in ("no-training-penalty", "no-scoring-penalty"):
            suffix = "-fast" if name.endswith("-fast") else ""
            same = resolve_config(
                f"alexnet-flowers-{ablation}{suffix}", data="x", method=None, settings=(), seed=0, device=None
            )
            assert runs[ablation].settings() == with_complete_recipe(same).settings()
    if name.startswith("vgg16"):
        assert tuple(hgnp["snapshots"]) == (0.144, 0.1, 0.05)
    assert made.seeds == ((0, 1, 2) if name == "vgg16-cifar10-fast" else (0,))


def test_seeds_of_the_command_line() -> None:
    assert check_seeds("0, 2,4294967295") == (0, 2, 4294967295)


def test_runs_share_gpus_in_turn_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert (job_slots("cpu", None).jobs, job_slots("cpu", None).environments) == (1, ({},))
    assert job_slots("cpu", 3).environment(2)["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in job_slots("cuda:1", 3).environment(0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    slots = job_slots("cuda", None)
    assert (slots.jobs, [slots.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)]) == (2, ["0", "1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a")
    slots = job_slots(None, 5)
    assert [slots.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(5)] == ["5", "GPU-a", "5", "GPU-a", "5"]
    assert slots.environment(0)["HGNP_SHARED_BY"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert job_slots(None, 4).environment(0)["OMP_NUM_THREADS"] == "1"

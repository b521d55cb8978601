"""From configurations to networks, data and options."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import hgnp
from hgnp.experiments.build import Experiment, find, prepare
from hgnp.experiments.config import Config
from hgnp.experiments.models import DigitsNet

MODULE = """
import torch
from torch import nn

NUMBER = 3

class Net(nn.Module):
    def __init__(self, *, width=4):
        super().__init__()
        self.body, self.head = nn.Linear(2, width), nn.Linear(width, 3)
    def forward(self, x):
        return {"logits": self.head(self.body(x).relu())}

def loaders(folder, *, batch=5, device="nowhere"):
    x = torch.randn(batch, 2)
    return [(x, torch.zeros(batch).long())], [folder, device]

def nothing():
    return None

def score(output, target):
    return 0.5

def asks(thing):
    return thing
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mynets.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def build(folder: Path | None = None, **changes: Any) -> Experiment:
    own = {"model": "mynets:Net", "data": "mynets:loaders", "data_args": {"folder": "f"}, "import_from": str(folder)}
    digits = {"model": "DigitsNet", "model_args": {"width": 4}, "data": "digits", "data_args": {"batch": 64}}
    values = {"recipe": {"keep": 0.5}, "device": "cpu", **(own if folder else digits), **changes}
    return prepare(Config.from_dict(values, where="here", name="mine"))


def test_a_users_own_model_and_data_by_import_path(folder: Path) -> None:
    made = build(folder, model_args={"width": 7}, output="logits", metric="mynets:score")
    assert made.net.head.in_features == 7
    assert made.train[0][0].shape == (5, 2)
    assert made.val == ["f", "cpu"]  # the folder, and the device because the callable asks for one
    assert made.options["metric"](None, None) == 0.5
    assert made.options["output"](made.net(torch.zeros(1, 2))).shape == (1, 3)
    assert made.options["output"](SimpleNamespace(logits=4)) == 4
    assert made.about["name"] == "mine"


def test_the_current_folder_can_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    made = build(folder, import_from=None)
    assert type(made.net).__name__ == "Net"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "mynets:Nett"}, "model must name something in mynets, got 'Nett'; did you mean Net"),
        ({"model": "mynots:Net"}, "existing module, got 'mynots:Net' without a module mynots"),
        ({"model": "mynets:NUMBER"}, "model must be callable, got mynets:NUMBER, a int"),
        ({"model": "mynets:"}, "model must be an import path such as package.module:name, got 'mynets:'"),
        ({"model": "DigitNet"}, "package.module:name, got 'DigitNet'; did you mean DigitsNet"),
        ({"model": "mynets:score"}, "model_args must have 'output' for score, got none; pass --set model_args.output="),
        ({"model": "mynets:nothing"}, "model must return an nn.Module, got NoneType from mynets:nothing"),
        ({"model_args": {"widht": 3}}, "model_args must be arguments of Net, got 'widht'; did you mean width"),
        ({"model": "..mynets:Net"}, "model must be an import path such as package.module:name, got '..mynets:Net'"),
        ({"model_args": {"width": "wide"}}, "model: Net must accept its arguments, but failed: "),
        ({"model_args": {"width": -1}}, "model: Net must accept its arguments, but failed: "),
        ({"data_args": {}}, "data_args must have 'folder' for loaders, got none; pass --data DIR"),
        ({"data": "mynets:nothing"}, "--data must be omitted for nothing, which takes no folder, got "),
        ({"data": "mynets:nothing", "data_args": {}}, r"data must return \(train, val\) .*, got NoneType"),
        ({"metric": "torch:nope"}, "metric must name something in torch, got 'nope'"),
        ({"loss": "torch.nn:MSELoss", "loss_args": {"reduce_it": 1}}, "arguments of MSELoss, got 'reduce_it'"),
        ({"loss_args": {"a": 1}}, "loss_args must come with loss"),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": {"momentun": 1}}, "arguments of SGD, got 'momentun'"),
        ({"recipe": {"keep": 2}}, "recipe.keep must be a fraction > 0 and ≤ 1, got 2"),
        ({"recipe": {"keep": 0.5, "seed": 4}}, "recipe.seed must equal seed or be left out, got 4"),
        ({"device": "gpu"}, "device must be one that PyTorch can use here, got gpu"),
        ({"device": "cuda:99"}, "device must be one that PyTorch can use here, got cuda:99"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_named_before_anything_is_made(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(folder, **changes)
    assert "\n" not in str(caught.value)


def test_a_module_that_misses_another_says_which(folder: Path) -> None:
    (folder / "needy.py").write_text("import nowhere_to_be_found\n")
    sys.path.insert(0, str(folder))
    with pytest.raises(
        ValueError, match=r"model must be .* imported, got needy, which needs nowhere_to_be_found; install it"
    ):
        find("model", "needy:Net")


def test_the_seed_settles_network_data_and_recipe() -> None:
    first, again, other = build(seed=3), build(seed=3), build(seed=4)
    batches = []
    for each in (first, again, other):
        torch.manual_seed(each.recipe.seed)
        batches.append(next(iter(each.train)))
    weights = [each.net.features[0].weight for each in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])
    assert first.recipe.seed == 3


def test_the_configuration_of_an_experiment_holds_every_field_of_the_recipe_and_makes_it_again() -> None:
    made = build(seed=3)
    assert made.config.recipe["warmup_epochs"] == 5
    again = prepare(made.config)
    assert again.recipe == made.recipe
    assert again.config == made.config


def test_loss_optimizer_and_scheduler_are_made_with_their_arguments() -> None:
    made = build(
        loss="torch.nn:CrossEntropyLoss", loss_args={"label_smoothing": 0.1}, optimizer="torch.optim:AdamW",
        optimizer_args={"lr": 0.01}, scheduler="torch.optim.lr_scheduler:StepLR", scheduler_args={"step_size": 2}, accumulate=4,
    )  # fmt: skip
    assert made.options["accumulate"] == 4
    with pytest.raises(ValueError, match="accumulate must be an integer ≥ 1, got 0"):
        build(accumulate=0)
    output, target = torch.randn(4, 10), torch.arange(4)
    smooth = F.cross_entropy(output, target, label_smoothing=0.1)
    assert torch.equal(made.options["loss"](output, target), smooth)
    optimizer = made.options["optimizer"](made.net.parameters())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.AdamW, 0.01)
    assert made.options["scheduler"](optimizer).step_size == 2
    function = build(loss="torch.nn.functional:cross_entropy", loss_args={"label_smoothing": 0.1})
    assert torch.equal(function.options["loss"](output, target), smooth)
    refused = build(optimizer="torch.optim:SGD", optimizer_args={"lr": -1.0})
    with pytest.raises(ValueError, match="optimizer: SGD must accept its arguments, but failed: Invalid learning rate"):
        refused.options["optimizer"](made.net.parameters())


METRICS = """
def margin(output, target, *, scale=1.0):
    return scale * float(output.max())

class Count:
    def __init__(self, start=0):
        self.seen = self.start = start
    def update(self, output, target):
        self.seen += len(target)
    def compute(self):
        return self.seen
    def reset(self):
        self.seen = self.start

count = Count(5)
"""


def test_a_metric_is_a_function_an_object_or_a_class(folder: Path) -> None:
    (folder / "mymetrics.py").write_text(METRICS)

    def metric(name: str, **args: Any) -> Any:
        return build(metric=f"mymetrics:{name}", metric_args=args, import_from=str(folder)).options["metric"]

    assert metric("margin", scale=2.0)(torch.ones(3), None) == 2
    assert metric("count").compute() == 5
    assert metric("Count", start=7).compute() == 7
    assert "metric" not in build().options
    for name, args, message in [
        ("count", {"start": 1}, "metric_args must be left out for an object, got start; name its class instead"),
        ("Count", {"begin": 1}, "metric_args must be arguments of Count, got 'begin'"),
        ("margin", {"scales": 1}, "metric_args must be arguments of margin, got 'scales'; did you mean scale"),
    ]:
        with pytest.raises(ValueError, match=message):
            metric(name, **args)


def test_facts_about_the_data_are_kept() -> None:
    assert build().about["features"] == {"train_samples": 1347, "val_samples": 450, "image_side": 8, "classes": 10}
    assert build().about["start"] == "random weights"


def test_weights_fill_the_network_except_for_a_new_head(tmp_path: Path) -> None:
    source = DigitsNet(width=4, num_classes=7)
    file = tmp_path / "w.safetensors"
    save_file(source.state_dict(), file)
    made = build(weights=str(file))
    assert torch.equal(made.net.features[0].weight, source.features[0].weight)
    assert made.net.classifier.out_features == 10
    assert "w.safetensors; at random: classifier" in made.about["start"]


def test_a_pruned_network_can_be_a_start(tmp_path: Path) -> None:
    source = DigitsNet(width=4)
    x = torch.randn(3, 1, 8, 8)
    neurons = hgnp.Neurons(source, x)
    neurons.remove({neurons.layers[0].name: [0, 2]})
    hgnp.save(source, tmp_path)
    made = build(weights=str(tmp_path / "model.safetensors"))
    assert torch.equal(made.net.eval()(x), source.eval()(x))
    assert made.about["start"] == f"weights saved by hgnp in {tmp_path / 'model.safetensors'}"


def test_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match=r"weights must be an existing .safetensors file, got .*w\.safetensors"):
        build(weights=str(file))
    file.write_bytes(b"not at all")
    with pytest.raises(ValueError, match="must be a safetensors file, but cannot be read"):
        build(weights=str(file))


def test_a_module_that_is_not_python_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_python.py").write_text("x = 1\ndef (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"model must be the import path of valid Python, got .*not_python.py line 2: invalid syntax"
    ):
        find("model", "not_python:Net")

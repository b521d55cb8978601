"""Configurations: read, refused, changed, written."""

from pathlib import Path

import pytest
import yaml

from hgnp.experiments.config import Config, parse, read

SMALL = {"model": "DigitsNet", "data": "digits", "recipe": {"keep": 0.5, "mu": 0.001}}


def config(**more: object) -> Config:
    return Config.from_dict({**SMALL, **more}, where="here", name="small")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "x"}, "here: key must be a known one, got 'modle'; did you mean model"),
        ({"model": None}, "here: model must be an import path such as .*, got none"),
        ({"recipe": [1]}, r"here: recipe must be a mapping of names to values, got \[1\]"),
        ({"data_args": "a"}, "here: data_args must be a mapping of names to values, got 'a'"),
        ({"protect": "fc"}, "here: protect must be a list of layer names, got 'fc'"),
        ({"seed": True}, "here: seed must be an integer from 0 to .*, got True"),
        ({"seed": -1}, "here: seed must be .*, got -1"),
        ({"loss": 3}, "here: loss must be an import path .*, got 3"),
        ({"methods": {"taylor": {"lr": 1}}}, "here: methods.taylor must be recipe: {field: value}, got "),
    ],
)
def test_what_cannot_be_a_configuration_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["model: [", "a: b: c", "\t- x", "!!python/object/apply:os.getcwd []", "a: 2026-99-99", f"a: {'9' * 5000}"]
)
def test_a_file_that_is_not_plain_yaml_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"my\.yaml must be YAML, got text that is not: ") as caught:
        read(file)
    assert "\n" not in str(caught.value)


LAUGHS = "a0: &a0 [ha, ha]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGED = "a0: &a0 {k: 1, l: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (LAUGHS, "must expand to at most 10,000 values, aliases included, got more in line 8"),
        (MERGED, "must expand to at most 10,000 values, aliases included, got more in line 8"),
        (f"a: &a {'x' * 20_000}\nb: [{', '.join(['*a'] * 6)}]", "must expand to at most 100,000 characters"),
        ("[" * 5000, "must expand to at most 50 levels"),
        ("a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 20 + "*a" + "]" * 20, "must expand to at most 50 levels"),
        ("- x\n" * 20_000, "must expand to at most 10,000 values"),
        ("# " + "x" * 10**7, "must have at most 100,000 characters, got more"),
        ("a: &a [1, *a]", "must have no alias inside its own anchor, got one in line 4"),
    ],
    ids=["aliases", "merged", "strings", "nested", "nested by alias", "many", "long", "recursive"],
)
def test_a_file_that_expands_to_too_much_is_refused_in_one_line(text: str, bound: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text if text[0] != "a" else f"model: DigitsNet\ndata: digits\nrecipe: {{keep: 0.5}}\n{text}")
    with pytest.raises(ValueError, match=rf"my\.yaml {bound}") as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200 + len(str(file))
    if len(text) < 10**6:
        with pytest.raises(ValueError, match=f"--set recipe: .* {bound.partition(', got')[0]}"):
            config().with_settings([f"recipe={text}"])


def test_ordinary_aliases_and_merges_are_read() -> None:
    text = "model: m:N\ndata: d:f\nmodel_args: &a {width: 8, deep: [1, 2]}\ndata_args: {<<: *a, batch: 4}\nrecipe: *a"
    got = parse(text, where="here", name="x")
    assert got.data_args == {"width": 8, "deep": [1, 2], "batch": 4}
    assert got.recipe == {"width": 8, "deep": [1, 2]}


@pytest.mark.parametrize("text", ["", "just text", "- a"])
def test_a_file_without_keys_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a mapping with model, data and recipe, got"):
        parse(text, where="here", name="x")


@pytest.mark.parametrize("name", ["..", "a/b", "/tmp/x", ""])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match="command line: name must be text without slashes, as it names the run's folder"
    ):
        config().with_settings([f'name="{name}"'])


def test_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"my\.yaml must be text in UTF-8"):
        read(tmp_path / "my.yaml")


def test_numbers_are_read_as_everyone_writes_them() -> None:
    got = parse(
        "model: m:N\ndata: d:f\nrecipe: {keep: 1e-1, mu: 1E-3, lr: .5, bound: -2e1, seed: 10}", where="", name="x"
    )
    assert got.recipe == {"keep": 0.1, "mu": 0.001, "lr": 0.5, "bound": -20.0, "seed": 10}


def test_settings_reach_any_key_and_are_parsed_as_yaml() -> None:
    before = config(model_args={"width": 8})
    after = before.with_settings(
        ["recipe.mu=1e-2", "data_args.batch=32", "seed=7", "recipe.flatness.ranking=empirical", "weights=a=b"]
    )
    assert after.recipe == {"keep": 0.5, "mu": 0.01, "flatness": {"ranking": "empirical"}}
    assert (after.data_args, after.model_args, after.seed, after.weights) == ({"batch": 32}, {"width": 8}, 7, "a=b")
    assert before.recipe == SMALL["recipe"]
    assert after.with_settings(["weights=null"]).weights is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("recip.mu=1", "key must be a known one, got 'recip'; did you mean recipe"),
        ("seed", "--set must be KEY=VALUE, such as recipe.mu=0.01, got 'seed'"),
        ("=3", "--set must be KEY=VALUE"),
        ("seed.deep=3", "seed must be an integer.*, got 'deep' inside it"),
        ("recipe.mu.x=3", r"recipe\.mu must be a mapping, got 0\.001"),
        ("recipe.mu={", "'{' must be YAML, got text that is not"),
        ("seed=abc", "command line: seed must be .*, got 'abc'"),
    ],
)
def test_settings_that_lead_nowhere_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config().with_settings([setting])


def test_a_method_brings_its_own_hyperparameters_and_settings_come_after() -> None:
    before = config(methods={"taylor": {"recipe": {"mu": 0, "warmup_epochs": 20}}})
    after = before.with_method("taylor")
    assert after.recipe == {"keep": 0.5, "mu": 0, "warmup_epochs": 20, "method": "taylor"}
    assert after.with_settings(["recipe.warmup_epochs=2"]).recipe["warmup_epochs"] == 2
    assert before.with_method("l1").recipe == {**SMALL["recipe"], "method": "l1"}
    hybrid = before.with_method("hybrid").with_settings(["recipe.threshold=0.48"])
    assert hybrid.recipe == {**SMALL["recipe"], "method": "hybrid", "threshold": 0.48}
    assert hybrid.with_method("l1").recipe == before.with_method("l1").recipe  # only the hybrid has a threshold


def test_what_is_written_is_read_as_the_same_configuration(tmp_path: Path) -> None:
    before = config(about="Zürich: ein, zwei", protect=["a.b"], data_args={"folder": "/x"}, import_from="/y", seed=3)
    before.write(tmp_path / "deep" / "config.yaml")
    assert read(tmp_path / "deep" / "config.yaml") == before
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["config.yaml"]
    assert "methods" not in yaml.safe_load((tmp_path / "deep" / "config.yaml").read_text(encoding="utf-8"))


def test_a_file_is_named_after_itself_and_its_neighbours_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(SMALL))
    got = read(tmp_path / "mine.yaml")
    assert (got.name, got.import_from) == ("mine", str(tmp_path))

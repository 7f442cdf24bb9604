"""`ppctl recipes`: list, show, copy."""

import json
import shlex

import pytest

from ppctl.cli.main import main
from ppctl.config.argv import normalise
from ppctl.config.compose import compose
from ppctl.config.resources import RECIPES_PATH, recipes


def run(capsys, *argv):
    code = main(["recipes", *argv])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("argv", [[], ["list"]])
def test_list_gives_a_name_and_a_line_for_every_recipe(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert set(rows) == set(recipes())
    assert all(len(text) > 20 for text in rows.values())


def test_show_prints_the_file_and_its_table_as_comments(capsys):
    """What is printed is still the recipe, as YAML."""
    code, out, err = run(capsys, "show", "llama3_8b")
    text = recipes()["llama3_8b"].path.read_text()
    assert (code, err, out[: len(text)]) == (0, "", text)
    head, columns, first, *_ = out[len(text) :].strip().splitlines()
    assert (head, columns.split()) == (
        "# recipe llama3_8b, published and here",
        ["#", "what", "published", "here", "why"],
    )
    assert first.startswith("# batch           4M tokens")
    assert all(line.startswith("# ") for line in out[len(text) :].strip().splitlines())


def test_a_copy_is_usable_and_never_overwrites(capsys, tmp_path, monkeypatch):
    code, out, _ = run(capsys, "copy", "quickstart", str(tmp_path / "new"))
    copy = tmp_path / "new" / "quickstart.yaml"
    assert code == 0
    assert out.splitlines()[0] == str(copy)
    copy.write_text("# changed\n")
    code, _, err = run(capsys, "copy", "quickstart", str(tmp_path / "new"))
    assert code == 2
    assert "PP-E126" in err
    assert copy.read_text() == "# changed\n"
    assert main(err.split("try: ppctl ")[1].split()) == 0
    monkeypatch.setenv(RECIPES_PATH, str(copy.parent))
    assert recipes()["quickstart"].path == copy


def test_a_copy_may_be_given_a_name_and_is_a_recipe_where_it_lies(capsys, tmp_path):
    code, out, _ = run(capsys, "copy", "quickstart", str(tmp_path / "mine.yaml"))
    command = shlex.split(out.partition("use it with: ")[2])
    assert (code, command) == (0, ["ppctl", "plan", f"+recipe={tmp_path}/mine.yaml"])
    assert main(command[1:]) == 0


def test_a_directory_that_cannot_be_made_is_an_error(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "copy", "quickstart", str(tmp_path / "file" / "x"))
    assert code == 2
    assert "cannot be written" in err


def test_own_recipes_are_listed(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("# Mine, for a test.\ntrain: {steps: 3}\n")
    monkeypatch.setenv(RECIPES_PATH, str(tmp_path))
    _, out, _ = run(capsys)
    assert any(line.split(maxsplit=1) == ["mine", "Mine, for a test."] for line in out.splitlines())


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_ends_with_a_table_of_published_here_and_why(name):
    from ppctl.config.compose import compose

    rows = compose([f"recipe={name}"]).config.published
    assert rows
    assert all(row["what"] and row["published"] and row["here"] for row in rows)
    assert all(row["why"] or row["published"] == row["here"] or row["here"] == "the same" for row in rows)
    top = [line for line in recipes()[name].path.read_text().splitlines() if line[:1].isalpha()]
    assert top[-1] == "published:"


def test_recipes_are_data_too(capsys, tmp_path):
    listed = json.loads(run(capsys, "--json")[1])["recipes"]
    assert [recipe["name"] for recipe in listed] == sorted(recipes())
    assert json.loads(run(capsys, "list", "--json")[1])["recipes"] == listed
    shown = json.loads(run(capsys, "show", "quickstart", "--json")[1])
    assert shown["values"]["train"]["steps"] == 400
    assert {name: shown[name] for name in ("name", "description", "path")} in listed
    copied = json.loads(run(capsys, "copy", "quickstart", str(tmp_path), "--json")[1])
    assert copied["path"] == str(tmp_path / "quickstart.yaml")
    assert main(shlex.split(copied["use"])[1:]) == 0


@pytest.mark.parametrize(
    "words", [["--config", "mine.yaml"], ["--config=mine.yml"], ["mine.yaml"], ["mine.yml"], ["+recipe=mine"]]
)
def test_a_file_of_settings_is_a_recipe_however_it_is_named(capsys, tmp_path, monkeypatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "mine.yml"):
        (tmp_path / name).write_text("model: {num_layers: 6}\n")
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "Et*6L"
    names = [
        compose(normalise([*words, *more])).config.log.name for more in ((), ("+scale=smoke",), ("log.name=other",))
    ]
    assert names == ["mine", "mine_smoke", "other"], "runs are called as the file"


def test_a_shipped_recipe_is_not_replaced_by_a_file_beside_it(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("model: {num_layers: 6}\n")
    assert main(["plan", "+recipe=quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "Ett|tt|tt|ttL"


@pytest.mark.parametrize("word", ["optim.lrr=3", "--bogus", "quickstar"])
def test_beside_a_word_that_means_nothing_there_is_no_plan_of_something_else(capsys, word) -> None:
    assert main(["plan", "+recipe=quickstart", word]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("no plan: 1 problem") and "error PP-E10" in err


def test_a_size_that_cannot_be_read_is_the_only_problem(capsys) -> None:
    assert main(["plan", "+recipe=deepseek_v3", "gpus_per_node=x", "optim.lr=-1"]) == 2
    assert capsys.readouterr().out.strip() == "no plan: 2 problems, PP-E102, PP-E103"


def test_a_copy_is_the_file_that_is_named_with_either_ending(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "+recipe=mine.yml"]) == 2
    assert main(shlex.split(capsys.readouterr().err.split("try: ppctl ")[1])) == 0
    assert (tmp_path / "mine.yml").is_file() and compose(["+recipe=mine.yml"]).config.log.name == "quickstart"


def test_a_recipe_that_cannot_be_read_hides_no_other(capsys, tmp_path, monkeypatch):
    (tmp_path / "odd.yaml").write_bytes(b"# caf\xe9\n")
    (tmp_path / "strange.yaml").mkdir()
    monkeypatch.setenv(RECIPES_PATH, f"{tmp_path}:~nobody-here/recipes")
    code, out, _ = run(capsys, "list")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and rows["odd"] == rows["strange"] == "cannot be read" and "quickstart" in rows


@pytest.mark.parametrize("name", ["it's", 'a"b', "a\\'b\\"])
def test_a_recipes_file_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.yaml").write_text("train: {steps: 7}\n")
    assert compose(normalise([f"./{name}.yaml"])).config.train.steps == 7


@pytest.mark.parametrize(
    "word", ["+recipe=~nobody-here/x.yaml", "model.from=~nobody-here", "data.tokenizer=~nobody-here"]
)
def test_a_home_of_nobody_is_no_directory(capsys, word):
    assert main(["plan", word]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_remedy_names_the_directory_of_the_recipes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(RECIPES_PATH, "")
    (tmp_path / "mine.yaml").write_text("defaults: [llama3_70b, _self_]\n")
    words = [
        "+recipe=mine",
        "launch.device_memory=1GiB",
        "pp=1",
        "vpp=1",
        "tp=1",
        "nodes=1",
        "gpus_per_node=1",
        "dp=1",
        "gbs=8",
    ]
    assert main(["plan", "--recipes-dir", str(tmp_path), *words]) == 4
    assert f"try: ppctl search --recipes-dir {tmp_path} +recipe=mine" in capsys.readouterr().err

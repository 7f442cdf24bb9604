"""`ppctl explain`: every code has a page and every page a code; every key is explained."""

import json
import re
from pathlib import Path

import pytest

import ppctl
from ppctl.cli.explain import PAGES, explain, pages
from ppctl.cli.main import main
from ppctl.config.argv import ALIASES
from ppctl.config.keys import docstring, keys, sections
from ppctl.errors import ConfigError
from ppctl.schedule.policies import POLICIES

SOURCES = [path for path in Path(ppctl.__file__).parent.rglob("*.py")]
CODE = re.compile(r"[\"'](PP-E[0-9]{3})[\"']")


RETIRED = {"PP-E802"}
"""Codes that runs of before have told: their pages stay."""


def test_every_code_in_the_sources_has_a_page_and_every_page_a_code_in_the_sources():
    used = {code for path in SOURCES for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert used | RETIRED == set(pages())
    assert not used & RETIRED


def test_a_code_is_on_the_page_of_its_range_once():
    seen = []
    for path in sorted(PAGES.glob("E*.md")):
        codes = re.findall(r"^## (PP-E[0-9]{3}) \S", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert all(code.startswith(f"PP-{path.stem}") for code in codes)
        seen += codes
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("code", sorted(pages()))
def test_a_page_has_a_title_and_says_something(code):
    title, text = pages()[code]
    assert title[0] == title[0].upper()
    assert len(text) > 60
    assert text.endswith((".", "`"))


@pytest.mark.parametrize("topic", ["PP-E101", "pp-e101", "E101", "e101"])
def test_a_code_is_found_in_any_spelling(topic):
    assert explain(topic).startswith("PP-E101 There is no such key\n\n")


def test_without_a_topic_codes_and_sections_are_listed():
    text = explain(None)
    assert all(code in text for code in pages())
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in sections())


@pytest.mark.parametrize("topic", ["pp_schedule", "pipeline.pp_schedule"])
def test_the_schedule_is_explained_by_when_to_take_which_and_a_command_that_works(topic, capsys):
    text = explain(topic)
    lines = text.splitlines()
    uses = [re.match(r"(\w+) {2,}\S", line) for line in lines[lines.index("When to take which:") + 1 :]]
    assert [use[1] for use in uses if use] == [policy.name for policy in POLICIES.values() if policy.trains]
    (command,) = (line.split() for line in lines if line.startswith("  ppctl "))
    assert main(command[1:]) == 0
    assert "dualpipev" in capsys.readouterr().out


def test_the_last_part_of_a_key_is_enough_and_lists_the_keys_where_several_have_it():
    assert explain("micro_batch_size").startswith("train.micro_batch_size\n")
    assert explain("pp_schedule_csv").startswith("pipeline.pp_schedule_csv\n")
    first, *lines = explain("device").splitlines()
    assert first == "device is the name of 2 keys; ppctl explain SECTION.device:"
    assert [line.split()[0] for line in lines if line[:3].strip()] == ["launch.device", "cost.device"]


def told(capsys, *words):
    assert main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_that_is_said_is_data_too(capsys):
    assert told(capsys, "e101") == {"code": "PP-E101", "title": pages()["PP-E101"][0], "text": pages()["PP-E101"][1]}
    steps = told(capsys, "steps")
    assert steps["key"] == "train.steps"
    assert (steps["type"], steps["alias"], steps["state"]) == ("int", "steps", "works")
    assert told(capsys, "pp")["flags"] == ["--pipeline-model-parallel-size"]
    assert told(capsys, "parallel.batch_p2p_comm")["default"] is False
    assert [key["key"] for key in told(capsys, "device")["keys"]] == ["launch.device", "cost.device"]
    assert steps in told(capsys, "train")["keys"]
    everything = told(capsys)
    assert [each["code"] for each in everything["codes"]] == list(pages())
    assert [each["section"] for each in everything["sections"]] == list(sections())


@pytest.mark.parametrize("name", sorted(keys()))
def test_every_key_is_explained_with_type_default_and_state(name):
    text = explain(name)
    assert text.startswith(f"{name}\n")
    assert " ".join(docstring(keys()[name]).split()) in " ".join(text.split()) and docstring(keys()[name])
    assert "\nstate    " in text
    if "works from Python" not in text:
        assert re.search(r"^type     \S", text, re.MULTILINE)
        assert re.search(r"^default  \S", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("pp", "parallel.pipeline_model_parallel_size"),
        ("log.profile", "comes in a later release"),
        ("parallel.cpu_offloading_weights", "its own switch has lost its effect"),
        ("launch.target", "works"),
        ("parallel.gradient_accumulation_fusion", "APEX"),
        ("parallel.moe_extended_tp", "ignored upstream too"),
        ("parallel.timers", "works from Python"),
        ("parallel.tensor_model_parallel_size", "works"),
        ("train.steps", "works"),
    ],
)
def test_the_state_is_honest(topic, said):
    assert said in explain(topic)


@pytest.mark.parametrize("topic", [None, *sections(), *sorted(keys())])
def test_no_line_about_a_key_or_a_section_is_wider_than_a_terminal(topic, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    wide = [line for line in explain(topic).splitlines() if len(line) > 80]
    assert all(line.startswith("test  ") for line in wide)  # a name to paste is not broken


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_explains_its_key(alias):
    assert explain(alias).startswith(ALIASES[alias] + "\n")


@pytest.mark.parametrize("name", sections())
def test_a_section_lists_its_keys_with_defaults(name):
    assert f"{name}." in explain(name)


def test_an_unknown_topic_names_the_nearest(capsys):
    with pytest.raises(ConfigError, match=r"train\.steps"):
        explain("train.stepz")
    assert main(["explain", "train.stepz"]) == 2
    assert "try: ppctl explain train.steps" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("200", 100)])
def test_a_page_is_as_wide_as_the_terminal_and_loses_no_word(columns, widest, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for code, (title, text) in pages().items():
        shown = explain(code)
        assert all(len(line) <= widest or " " not in line for line in shown.splitlines()[1:])
        assert shown.split() == f"{code} {title} {text}".split()
        assert shown.count("\n\n") == text.count("\n\n") + 1


def test_a_default_is_what_a_run_gets_where_conf_sets_another_than_the_dataclass():
    assert re.search(r"^default  false$", explain("parallel.batch_p2p_comm"), re.MULTILINE)
    assert re.search(r"^default  true$", explain("parallel.overlap_p2p_comm"), re.MULTILINE)


@pytest.mark.parametrize(("topic", "key"), [("model.lora.layers", "model.lora"), ("launch.env.PATH", "launch.env")])
def test_an_entry_of_a_mapping_is_explained_by_its_key(topic, key):
    assert explain(topic) == explain(key)

"""No text of a config has a control character: it would reach a script, the name of a file or a terminal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppctl.config.checks import check
from ppctl.config.keys import Key, text_keys
from ppctl.config.schema import RunConfig
from ppctl.errors import CONTROL

PAYLOADS = {
    "newline": "\n", "return": "\r", "tab": "\t", "NUL": "\0", "escape": "\x1b]0;x\x07", "DEL": "\x7f",
    "C1": "\x9b31m",
    "line": "\u2028", "paragraph": "\u2029", "surrogate": "\udce9", "bidi": "\u202e", "isolate": "\u2066",
    "mark": "\u200f",
}  # fmt: skip
LINES = {"parallel.pipeline_model_parallel_layout", "launch.setup", "log.prompts", "published"}
"""Text of several lines: a layout, whose parser skips them; a script's own lines; prompts, which no script and no name
gets and which screens escape; a recipe's table for readers."""


def holding(key: Key, text: str) -> Iterator[Any]:
    """Values of the key's type with `text` in each place that can hold one."""
    kind = str(key.type)
    if key.is_text:
        yield text
    if "list" in kind:
        yield [text]
    if "dict" in kind:
        yield from (({text: "b"}, {"a": text}) if "list" not in kind else ([{"what": text}],))
    if key.type is Any and not key.is_dtype:
        yield from (text, [[text]], {"a": [text]})


TEXTS = [key.name for key in text_keys().values() if next(holding(key, "a"), None) is not None]


def test_many_keys_hold_text() -> None:
    assert len(TEXTS) > 60
    assert {name for name, key in text_keys().items() if key.facts.lines} == LINES


@pytest.mark.parametrize("name", TEXTS)
def test_every_control_character_is_refused_by_its_key(name: str) -> None:
    for kind, payload in PAYLOADS.items():
        for value in holding(text_keys()[name], f"a{payload}b"):
            config = RunConfig()
            config[name] = value
            told = [each for each in check(config, {}) if each.place.startswith(f"{name} = ")]
            allowed = name in LINES and kind in ("newline", "tab")
            assert bool([each for each in told if "control characters" in each.message]) != allowed, (kind, value)
            assert not CONTROL.search("".join(map(str, told)).replace("\n", "")), kind
            if not allowed:
                assert told[0].code == "PP-E103" and told[0].remedy


def test_a_recipe_is_held_to_it(tmp_path: Path) -> None:
    from remedies import planned_json

    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"log": {"dir": "runs\ntouch x"}, "launch": {"env": {"A\x1bB": "1"}}}))
    assert yaml.safe_load(recipe.read_text())["log"]["dir"] == "runs\ntouch x"
    code, report = planned_json((f"+recipe={recipe}",))
    assert code == 2
    assert [problem["place"].partition(" ")[0] for problem in report["problems"]] == ["launch.env", "log.dir"]


def test_a_command_line_is_held_to_it() -> None:
    from remedies import planned_json

    for name in TEXTS:
        code, report = planned_json((f"{name}=a\x1b]0;x\x07b",))
        assert code == 2 and report["problems"], name

"""`ppctl explain [CODE | KEY]`: the page of an error code, or the meaning of a configuration key.

The one source of `--json`, of completion and of the site that `make docs` builds. Imports no torch, Hydra or rich.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ppctl.cli.console import aligned
from ppctl.config.argv import ALIASES, full_name
from ppctl.config.keys import (
    Key,
    did_you_mean,
    docstring,
    keys,
    mapping_with,
    nearest,
    sections,
    text_keys,
    type_text,
    value_text,
)
from ppctl.config.metadata import IGNORED, LATER, MEANING, NEEDS, PYTHON
from ppctl.config.model_parallel_config import DTYPES
from ppctl.errors import ConfigError, Problem
from ppctl.schedule.policies import POLICIES

READABLE = 100
"""Columns of running text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("topic", nargs="?", metavar="CODE|KEY", help="such as PP-E101, train.steps, pp, parallel")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the page, the key or the section; without a topic, the list of all codes and sections."""
    print(json.dumps(as_data(args.topic), indent=1, default=str) if args.json else explain(args.topic))
    return 0


def explain(topic: str | None) -> str:
    """The text for a topic. Raises ConfigError if there is no such topic."""
    data = as_data(topic)
    if "codes" in data:
        return _contents(data)
    if "section" in data:
        return _section(data)
    if "keys" in data:
        return _choice(str(topic), data["keys"])
    return _key(data) if "key" in data else f"{data['code']} {data['title']}\n\n{_wrapped(data['text'])}"


def as_data(topic: str | None) -> dict[str, Any]:
    """The data of a topic: a code, a key, several keys of one name, a section, or all codes and sections."""
    meant = _found(topic)
    if meant is None:
        return contents()
    if isinstance(meant, list):
        return key_facts(meant[0]) if len(meant) == 1 else {"keys": [key_facts(key) for key in meant]}
    if meant in sections():
        return {"section": meant, "text": summary(meant), "keys": [key_facts(key) for key in keys_of(meant)]}
    title, text = pages()[meant]
    return {"code": meant, "title": title, "text": text}


def _found(topic: str | None) -> str | list[Key] | None:
    """The code, section or keys that a topic names; None means everything. Raises ConfigError (PP-E125)."""
    if topic is None:
        return None
    if code_of(topic) in pages():
        return code_of(topic)
    if full_name(topic) in sections():
        return full_name(topic)
    called = keys_called(topic)
    if called:
        return called
    known = [*keys(), *ALIASES, *sections(), *pages()]
    close = nearest(topic, known)
    remedy = f"ppctl explain {close[0]}" if close else "ppctl explain"
    message = f"there is no error code, key or section {topic}{did_you_mean(topic, known)}"
    raise ConfigError(Problem("PP-E125", message, remedy, "command line"))


def _choice(topic: str, same_name: Sequence[Mapping[str, Any]]) -> str:
    lines = (_filled(key["text"].partition("\n\n")[0], f"  {key['key']}  ") for key in same_name)
    return "\n".join([_filled(f"{topic} is the name of {len(same_name)} keys; ppctl explain SECTION.{topic}:"), *lines])


def _wrapped(text: str) -> str:
    """Paragraphs and lists, wrapped: `* ` begins an item."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if not text.startswith("* "):
        return _filled(text)
    return "\n".join(_filled(item, "* ") for item in text[2:].split("\n* "))


def _filled(text: str, label: str = "") -> str:
    """Running text after a label, with continued lines indented to the text."""
    width = min(shutil.get_terminal_size((READABLE, 24)).columns, READABLE)
    wrapper = textwrap.TextWrapper(width, label, " " * len(label), break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(" ".join(text.split()))


def _contents(every: Mapping[str, Any]) -> str:
    codes = [_filled(each["title"], f"  {each['code']}  ") for each in every["codes"]]
    names = [_filled(each["text"], f"  {each['section']:<11} ") for each in every["sections"]]
    return "\n".join(["Error codes:", *codes, "", "Configuration sections:", *names])


def _section(section: Mapping[str, Any]) -> str:
    name, listed = section["section"], section["keys"]
    rows, limits = [], dict[str, list[str]]()
    for key in listed:
        field = key["key"].rpartition(".")[2]
        rows.append((field, value_text(key["default"]), _SHORT.get(key["state"], "")))
        limits.setdefault(key["limit"], []).append(field)
    states = dict.fromkeys(key["state"] for key in listed if key["state"] in _SHORT)
    legend = [_filled(MEANING[state], f"{_SHORT[state]:<11}") for state in states]
    limited = [_filled(f"{words}: {', '.join(same)}", "limit  ") for words, same in limits.items() if words]
    head = _filled(f"keys {name}.*: {section['text']}")
    return "\n".join([head, "", aligned(rows), *[""] * bool(legend), *legend, *[""] * bool(limited), *limited])


_SHORT = {LATER: "later", NEEDS: "needs", IGNORED: "no effect"}
"""The short form of a key's state in a list; a legend below the list explains it."""


def _key(facts: Mapping[str, Any]) -> str:
    lines = [facts["key"], "", _wrapped(facts["text"]), ""]
    if facts["state"] != PYTHON:
        lines += [_filled(facts["type"], "type     "), f"default  {value_text(facts['default'])}"]
    rows = {"limit": facts["limit"], "alias": facts["alias"], "flag": " ".join(facts["flags"])}
    lines += [_filled(text, f"{name:<9}") for name, text in rows.items() if text]
    lines.append(_filled(facts["meaning"], "state    "))
    lines += [_filled(line, " " * 9) for line in facts["notes"]]
    if facts["takes"]:
        lines.append(f"takes    {', '.join(facts['takes'])}")
    if "use" in facts:
        lines += ["", *_schedules(facts["use"])]
    return "\n".join(lines)


def _schedules(uses: Mapping[str, str]) -> list[str]:
    widest = max(map(len, uses))
    return [
        "When to take which:",
        *(_filled(use, f"{name.ljust(widest)}  ") for name, use in uses.items()),
        "",
        _filled("Bubble, memory and messages of all of them, for your own sizes and times in milliseconds:"),
        "  ppctl simulate --compare --pp 8 --microbatches 32 --tf 10 --tb 10 --tw 10",
    ]


# Codes, keys and sections as data


PAGES = Path(__file__).resolve().parent.parent / "pages"

SCHEDULE = "pipeline.pp_schedule"
"""The key whose page says when to choose each of its values."""

_HEADING = re.compile(r"^## (PP-E[0-9]{3}) (.+)$", re.MULTILINE)


@cache
def pages() -> dict[str, tuple[str, str]]:
    """Error code -> (title, text), from all pages, sorted by code."""
    sections_by_code = {}
    for path in PAGES.glob("E*.md"):
        _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for code, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            sections_by_code[code] = (title, text.strip())
    return dict(sorted(sections_by_code.items()))


def code_of(topic: str) -> str:
    """The code that `E101`, `pp-e101` or `PP-E101` means; it need not have a page."""
    return topic.upper() if topic.upper().startswith("PP-E") else f"PP-{topic.upper()}"


def keys_called(topic: str) -> list[Key]:
    """The keys that a topic means: by a full name, an alias, another system's name, or the last part of a name
    (several, if several sections have such a key). An entry of a mapping (`model.lora.rank`) means the mapping. A
    section's own name means no key."""
    name = full_name(topic)
    owner = name if name in keys() else mapping_with(name)
    if owner is not None:
        return [keys()[owner]]
    return [] if name in sections() else [key for key in keys().values() if key.field == name]


def key_facts(key: Key) -> dict[str, Any]:
    """A key with its docstring and facts; `type`, `default` and `limit` are null if no text can set the key."""
    support, names = key.facts.support, key.facts.names.split()
    settable = support.state != PYTHON
    facts: dict[str, Any] = {
        "key": key.name,
        "text": docstring(key),
        "type": ("text or null" if key.is_dtype else type_text(key.type)) if settable else None,
        "default": default(key) if settable else None,
        "limit": key.limit.words if key.limit is not None and settable else None,
        "alias": next((alias for alias, name in ALIASES.items() if name == key.name), None) if settable else None,
        "flags": [name for name in names if name.startswith("--")],
        "state": support.state,
        "meaning": MEANING[support.state],
        "notes": [line for line in (support.note, support.aside) if line],
        "takes": ["null", *DTYPES] if key.is_dtype else [],
    }
    if key.name == SCHEDULE:
        facts["use"] = {policy.name: policy.use for policy in POLICIES.values() if policy.trains}
    return facts


def summary(name: str) -> str:
    """The line about a section."""
    return (sections()[name].__doc__ or "").splitlines()[0]


def keys_of(section: str) -> list[Key]:
    """The keys of `section` (such as `model`) whose value can be given as text, on a command line or in a file."""
    return [key for key in text_keys().values() if key.name.rpartition(".")[0] == section]


def contents() -> dict[str, Any]:
    """All codes and sections, each in a line."""
    codes = [{"code": code, "title": title} for code, (title, _) in pages().items()]
    return {"codes": codes, "sections": [{"section": name, "text": summary(name)} for name in sections()]}


def default(key: Key) -> Any:
    """The value of a key that nobody sets."""
    configured = _configured() if key.name.startswith("parallel.") else {}
    return configured.get(key.name, key.default)


@cache
def _configured() -> dict[str, Any]:
    """The values of conf/parallel, which differ from the dataclass's documented defaults."""
    from ppctl.config.resources import conf_directory
    from ppctl.config.yaml_file import YamlFile

    values = YamlFile(conf_directory() / "parallel" / "default.yaml", "conf/parallel/default.yaml").values
    return {f"parallel.{name}": value for name, value in values.items()}

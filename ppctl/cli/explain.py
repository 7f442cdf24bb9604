"""`ppctl explain [CODE | KEY]`: the page of an error code, or the meaning of a configuration key.

Knows how they are shown. Must not know what is said of them: that is `reference`. Imports no torch, no Hydra and no
rich.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ppctl.cli import reference
from ppctl.cli.console import aligned
from ppctl.cli.reference import code_facts, code_of, default, key_facts, keys_called, keys_of, pages, section_facts
from ppctl.config.argv import ALIASES, full_name
from ppctl.config.keys import Key, did_you_mean, docstring, keys, nearest, sections, value_text
from ppctl.config.metadata import IGNORED, LATER, MEANING, NEEDS, PYTHON
from ppctl.errors import ConfigError, Problem

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
    meant = _found(topic)
    if meant is None:
        return _contents()
    if isinstance(meant, list):
        return _key(key_facts(meant[0])) if len(meant) == 1 else _choice(str(topic), meant)
    if meant in sections():
        return _section(meant)
    title, text = pages()[meant]
    return f"{meant} {title}\n\n{_wrapped(text)}"


def as_data(topic: str | None) -> dict[str, Any]:
    """The data of a topic: a code, a key, several keys of one name, a section, or all codes and sections."""
    meant = _found(topic)
    if meant is None:
        return reference.contents()
    if isinstance(meant, list):
        return key_facts(meant[0]) if len(meant) == 1 else {"keys": [key_facts(key) for key in meant]}
    return section_facts(meant) if meant in sections() else code_facts(meant)


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


def _choice(topic: str, same_name: Sequence[Key]) -> str:
    """The keys of one name, to choose from."""
    lines = (_filled(docstring(key).partition("\n\n")[0], f"  {key.name}  ") for key in same_name)
    return "\n".join([_filled(f"{topic} is the name of {len(same_name)} keys; ppctl explain SECTION.{topic}:"), *lines])


def _wrapped(text: str) -> str:
    """Paragraphs and lists, wrapped: `* ` begins an item."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if not text.startswith("* "):
        return _filled(text)
    return "\n".join(_filled(item, "* ") for item in text[2:].split("\n* "))


def _filled(text: str, label: str = "") -> str:
    """Running text behind a label, with continued lines indented to the text."""
    width = min(shutil.get_terminal_size((READABLE, 24)).columns, READABLE)
    wrapper = textwrap.TextWrapper(width, label, " " * len(label), break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(" ".join(text.split()))


def _contents() -> str:
    every = reference.contents()
    codes = [_filled(each["title"], f"  {each['code']}  ") for each in every["codes"]]
    names = [_filled(each["text"], f"  {each['section']:<11} ") for each in every["sections"]]
    return "\n".join(["Error codes:", *codes, "", "Configuration sections:", *names])


def _section(name: str) -> str:
    listed = keys_of(name)
    rows = aligned((key.field, value_text(default(key)), _SHORT.get(key.facts.support.state, "")) for key in listed)
    states = dict.fromkeys(key.facts.support.state for key in listed)
    legend = [_filled(MEANING[state], f"{_SHORT[state]:<11}") for state in states if state in _SHORT]
    head = _filled(f"keys {name}.*: {reference.summary(name)}")
    return "\n".join([head, "", rows, *(["", *legend] if legend else []), *_limits(listed)])


def _limits(listed: Sequence[Key]) -> list[str]:
    """The limits of a section's keys, each with all its keys."""
    alike: dict[str, list[str]] = {}
    for key in listed:
        if key.limit is not None:
            alike.setdefault(key.limit.words, []).append(key.field)
    return ["", *(_filled(f"{words}: {', '.join(fields)}", "limit  ") for words, fields in alike.items())] * bool(alike)


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
    """When to take which schedule, and the command that has figures for the reader's own sizes."""
    widest = max(map(len, uses))
    return [
        "When to take which:",
        *(_filled(use, f"{name.ljust(widest)}  ") for name, use in uses.items()),
        "",
        _filled("Bubble, memory and messages of all of them, for your own sizes and times in milliseconds:"),
        "  ppctl simulate --compare --pp 8 --microbatches 32 --tf 10 --tb 10 --tw 10",
    ]

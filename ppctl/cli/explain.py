"""`ppctl explain [CODE | KEY]`: the page of an error code, or the meaning of a configuration key.

Knows the pages of `ppctl/pages/` and the table of keys. Imports no torch, no Hydra and no rich.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ppctl.cli.table import aligned
from ppctl.config.argv import ALIASES, full_name
from ppctl.config.keys import Key, did_you_mean, docstring, keys, nearest, sections, text_keys, type_text, value_text
from ppctl.config.metadata import IGNORED, LATER, NEEDS, PYTHON
from ppctl.config.model_parallel_config import DTYPES
from ppctl.config.support import MEANING, SHOWN_BY
from ppctl.errors import ConfigError, Problem
from ppctl.schedule.policies import POLICIES

PAGES = Path(__file__).resolve().parent.parent / "pages"

READABLE = 100
"""Columns of running text."""

_HEADING = re.compile(r"^## (PP-E[0-9]{3}) (.+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("topic", nargs="?", metavar="CODE|KEY", help="such as PP-E101, train.steps, pp, parallel")


def run(args: argparse.Namespace) -> int:
    """Print the page, the key or the section; without a topic, the list of all codes and sections."""
    print(explain(args.topic))
    return 0


def explain(topic: str | None) -> str:
    """The text for a topic. Raises ConfigError if there is no such topic."""
    if topic is None:
        return _contents()
    code = topic.upper() if topic.upper().startswith("PP-E") else f"PP-{topic.upper()}"
    sections_by_code = pages()
    if code in sections_by_code:
        title, text = sections_by_code[code]
        return f"{code} {title}\n\n{_wrapped(text)}"
    name = _key_name(topic)
    if name in keys():
        return _key(keys()[name])
    if name in sections():
        return _section(name)
    known = [*keys(), *ALIASES, *sections(), *sections_by_code]
    close = nearest(topic, known)
    remedy = f"ppctl explain {close[0]}" if close else "ppctl explain"
    message = f"there is no error code, key or section {topic}{did_you_mean(topic, known)}"
    raise ConfigError(Problem("PP-E125", message, remedy, "command line"))


def _key_name(topic: str) -> str:
    """The full name of a key, by an alias, by itself, or by its last part where only one key has that."""
    name = full_name(topic)
    ending = [key for key in keys() if key.endswith(f".{name}")]
    return ending[0] if len(ending) == 1 and name not in keys() and name not in sections() else name


def _wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal, but no wider than READABLE."""
    return "\n\n".join(_filled(paragraph) for paragraph in text.split("\n\n"))


def _filled(text: str, label: str = "") -> str:
    """Running text behind a label, with continued lines indented to the text."""
    width = min(shutil.get_terminal_size((READABLE, 24)).columns, READABLE)
    wrapper = textwrap.TextWrapper(width, label, " " * len(label), break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(" ".join(text.split()))


def pages() -> dict[str, tuple[str, str]]:
    """Error code -> (title, text), from all pages, sorted by code."""
    found = {}
    for path in PAGES.glob("E*.md"):
        _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for code, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            found[code] = (title, text.strip())
    return dict(sorted(found.items()))


def _contents() -> str:
    codes = [_filled(title, f"  {code}  ") for code, (title, _) in pages().items()]
    names = [_filled((cls.__doc__ or "").splitlines()[0], f"  {name:<11} ") for name, cls in sections().items()]
    return "\n".join(["Error codes:", *codes, "", "Configuration sections:", *names])


def _section(name: str) -> str:
    found = [key for key in text_keys().values() if key.name.startswith(f"{name}.")]
    rows = aligned((key.field, _value(key), _SHORT.get(key.facts.support.state, "")) for key in found)
    states = dict.fromkeys(key.facts.support.state for key in found)
    legend = [_filled(MEANING[state], f"{_SHORT[state]:<11}") for state in states if state in _SHORT]
    head = _filled(f"keys {name}.*: {(sections()[name].__doc__ or '').splitlines()[0]}")
    return "\n".join([head, "", rows, *(["", *legend] if legend else []), *_limits(found)])


def _limits(found: Sequence[Key]) -> list[str]:
    """The limits of a section's keys, each with all its keys."""
    alike: dict[str, list[str]] = {}
    for key in found:
        if key.limit is not None:
            alike.setdefault(key.limit.words, []).append(key.field)
    return ["", *(_filled(f"{words}: {', '.join(fields)}", "limit  ") for words, fields in alike.items())] * bool(alike)


_SHORT = {LATER: "later", NEEDS: "needs", IGNORED: "no effect"}
"""The short form of a key's state in a list; a legend below the list explains it."""


def _key(key: Key) -> str:
    state = key.facts.support
    words = "text or null" if key.is_dtype else type_text(key.type)
    lines = [key.name, "", _wrapped(docstring(key)), "", _filled(words, "type     "), f"default  {_value(key)}"]
    if key.limit is not None:
        lines.append(_filled(key.limit.words, "limit    "))
    short = [alias for alias, name in ALIASES.items() if name == key.name]
    if short:
        lines.append(f"alias    {short[0]}")
    if state.state == PYTHON:
        del lines[4:]
    lines.append(_filled(MEANING[state.state], "state    "))
    lines += [_filled(line, " " * 9) for line in (state.note, state.aside) if line]
    if key.is_dtype:
        lines.append(f"takes    {', '.join(['null', *DTYPES])}")
    if key.name in SHOWN_BY:
        lines.append(f"test     {SHOWN_BY[key.name]}")
    if key.name == "pipeline.pp_schedule":
        lines += ["", *_schedules()]
    return "\n".join(lines)


def _schedules() -> list[str]:
    """When to take which schedule, and the command that has figures for the reader's own sizes."""
    used = {policy.name: policy.use for policy in POLICIES.values() if policy.trains}
    widest = max(map(len, used))
    return [
        "When to take which:",
        *(_filled(use, f"{name.ljust(widest)}  ") for name, use in used.items()),
        "",
        _filled("Bubble, memory and messages of all of them, for your own sizes and times in milliseconds:"),
        "  ppctl simulate --compare --pp 8 --microbatches 32 --tf 10 --tb 10 --tw 10",
    ]


def _value(key: Key) -> str:
    configured = _configured() if key.name.startswith("parallel.") else {}
    return value_text(configured.get(key.name, key.default))


@cache
def _configured() -> dict[str, Any]:
    """The values of conf/parallel, which differ from the dataclass's documented defaults."""
    from ppctl.config.resources import conf_directory
    from ppctl.config.yaml_file import YamlFile

    values = YamlFile(conf_directory() / "parallel" / "default.yaml", "conf/parallel/default.yaml").values
    return {f"parallel.{name}": value for name, value in values.items()}

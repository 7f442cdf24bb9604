"""`ppctl explain [CODE | KEY]`: the page of an error code, or what a configuration key means.

Knows the pages of `ppctl/pages/` and the table of keys. Imports no torch, no Hydra and no rich.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ppctl.config.argv import ALIASES, full_name
from ppctl.config.keys import Key, did_you_mean, docstring, keys, nearest, sections, text_keys, type_text
from ppctl.config.support import MEANING, PYTHON, WORKS, support
from ppctl.errors import ConfigError, Problem

PAGES = Path(__file__).resolve().parent.parent / "pages"

READABLE = 100
"""Columns of running text."""

_HEADING = re.compile(r"^## (PP-E[0-9]{3}) (.+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("topic", nargs="?", metavar="CODE|KEY", help="such as PP-E101, train.steps, pp, parallel")


def run(args: argparse.Namespace) -> int:
    """Print the page, the key, the section, or without a topic what there is."""
    print(explain(args.topic))
    return 0


def explain(topic: str | None) -> str:
    """The text for a topic. Raises ConfigError where there is none."""
    if topic is None:
        return _contents()
    code = topic.upper() if topic.upper().startswith("PP-E") else f"PP-{topic.upper()}"
    sections_by_code = pages()
    if code in sections_by_code:
        title, text = sections_by_code[code]
        return f"{code} {title}\n\n{_wrapped(text)}"
    name = full_name(topic)
    if name in keys():
        return _key(keys()[name])
    if name in sections():
        return _section(name)
    known = [*keys(), *ALIASES, *sections(), *sections_by_code]
    close = nearest(topic, known)
    remedy = f"ppctl explain {close[0]}" if close else "ppctl explain"
    message = f"there is no code and no key {topic}{did_you_mean(topic, known)}"
    raise ConfigError(Problem("PP-E125", message, remedy, "command line"))


def _wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal, and never wider than is pleasant to read."""
    width = min(shutil.get_terminal_size((READABLE, 24)).columns, READABLE)
    plain = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(textwrap.fill(p, width, break_long_words=False, break_on_hyphens=False) for p in plain)


def pages() -> dict[str, tuple[str, str]]:
    """Error code -> (title, text), over all pages, in order of codes."""
    found = {code: (title, text) for path in PAGES.glob("E*.md") for code, title, text in _sections_of(path)}
    return dict(sorted(found.items()))


def _sections_of(path: Path) -> Iterator[tuple[str, str, str]]:
    text = path.read_text(encoding="utf-8")
    heads = list(_HEADING.finditer(text))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        yield head[1], head[2], text[head.end() : after.start() if after else None].strip()


def _contents() -> str:
    codes = [f"  {code}  {title}" for code, (title, _) in pages().items()]
    names = [f"  {name:<11} {(cls.__doc__ or '').splitlines()[0]}" for name, cls in sections().items()]
    return "\n".join(["Error codes:", *codes, "", "Configuration sections:", *names])


def _section(name: str) -> str:
    found = [key for key in text_keys().values() if key.name.startswith(f"{name}.")]
    width = max(len(key.name) for key in found)
    lines = [f"{key.name:<{width}}  {_value(key):<10}  {_short(key)}".rstrip() for key in found]
    return "\n".join([(sections()[name].__doc__ or "").splitlines()[0], "", *lines])


def _short(key: Key) -> str:
    state = support(key.name)
    return "" if state.state == WORKS else MEANING[state.state]


def _key(key: Key) -> str:
    state = support(key.name)
    words = "text or null" if key.is_dtype else type_text(key.type)
    lines = [key.name, "", docstring(key), "", f"type     {words}", f"default  {_value(key)}"]
    short = [alias for alias, name in ALIASES.items() if name == key.name]
    if short:
        lines.append(f"alias    {short[0]}")
    if state.state == PYTHON:
        del lines[4:]
    lines.append(f"state    {MEANING[state.state]}")
    lines += [f"         {line}" for line in (state.note, state.aside) if line]
    if state.accepts:
        lines.append(f"takes    {', '.join(map(_text, state.accepts))}")
    if state.test:
        lines.append(f"test     {state.test}")
    return "\n".join(lines)


def _value(key: Key) -> str:
    configured = _configured() if key.name.startswith("parallel.") else {}
    return _text(configured.get(key.name, key.default))


@cache
def _configured() -> dict[str, Any]:
    """What conf/parallel sets beside the dataclass's documented defaults."""
    from ppctl.config.resources import conf_directory
    from ppctl.config.yaml_file import YamlFile

    values = YamlFile(conf_directory() / "parallel" / "default.yaml", "conf/parallel/default.yaml").values
    return {f"parallel.{name}": value for name, value in values.items()}


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)

"""A tokenizer's chat template: messages become one text, of which the template may say what the assistant wrote.

Knows Jinja as chat templates are written for it (transformers' `apply_chat_template`, whose environment this is). Must
not know tokens, nor files of conversations. transformers itself is not called: importing it imports torch, and the
launcher reads conversations too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ppctl.data.template_limits import Limited
from ppctl.errors import DataError, Problem
from ppctl.host.files import read_text

Message = Mapping[str, Any]

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around what a template generates, until it is rendered: two of Unicode's noncharacters, which no text may hold."""
_SETTINGS = "tokenizer_config.json"
_KEYWORD = re.compile(r"\{%-?\s*generation\b")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: tuple[tuple[int, int], ...]
    """Begin and end, in characters, of what stands between `{% generation %}` and `{% endgeneration %}`."""


class RenderingFailed(ValueError):
    """A template's objection to a conversation, in its own words."""


class ChatTemplate:
    """Renders conversations. Raises DataError (PP-E419) for a template that is none.

    `marks` are texts that templates read by name, such as `bos_token`. There is no `strftime_now`, and no `random` and
    `lipsum`: data that depend on the day or on chance would be other data after a resume, and on every rank.
    """

    def __init__(self, source: str, marks: Mapping[str, str], place: str) -> None:
        environment = Limited(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = environment.bounded("tojson", _to_json(environment))
        self._environment = environment
        environment.globals["raise_exception"] = _refuse
        del environment.globals["lipsum"], environment.filters["random"]
        self.place, self.marks = place, dict(marks)
        self.says_what_is_generated = _KEYWORD.search(source) is not None
        """Whether the template has the keyword `generation`."""
        try:
            self._template = environment.from_string(source)
        except (
            TemplateError,
            SyntaxError,
            RecursionError,
            ValueError,
        ) as error:  # Python's own: `break` outside a loop
            message = f"Jinja cannot read the chat template: {error}"
            raise DataError(Problem("PP-E419", message, "data.chat_template=FILE.jinja", place)) from None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> Rendered:
        """The text of `messages`; with `prompt`, followed by what an answer of the assistant begins with.

        Raises RenderingFailed with the template's own words.
        """
        if any(mark in json.dumps([*messages, tools], ensure_ascii=False) for mark in (_BEGIN, _END)):
            raise RenderingFailed("the conversation holds U+FDD0 or U+FDD1, which are no characters")
        self._environment.begin()
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.marks,
            )
        except UndefinedError as error:
            clock = "strftime_now" in str(error)
            why = "; there is no clock, because data must not depend on the day" if clock else ""
            raise RenderingFailed(f"{error}{why}") from None
        except Exception as error:  # a template is a program: what it does with a conversation may fail in any way
            raise RenderingFailed(str(error) or type(error).__name__) from None
        return _without_marks(text)


def open_template(tokenizer: str, file: str | None) -> ChatTemplate:
    """The template in `file` (`data.chat_template`), or else the one that belongs to `data.tokenizer`.

    Raises DataError (PP-E419) where there is none.
    """
    directory = Path(tokenizer).expanduser()
    directory = directory.parent if directory.is_file() else directory
    settings = _settings(directory) if tokenizer != "byte" else {}
    if file is not None:
        path = Path(file).expanduser()
        try:
            return ChatTemplate(read_text(path), _marks(settings), str(path))
        except OSError as error:
            message = f"data.chat_template={file} cannot be read: {error.strerror or error}"
            raise DataError(Problem("PP-E419", message, "data.chat_template=null", str(path))) from None
    for source, path in _sources(directory, settings):
        return ChatTemplate(source, _marks(settings), str(path))
    message = f"data.tokenizer={tokenizer} has no chat template, and data.format=chat renders messages with one"
    looked = f"looked for chat_template.jinja and {_SETTINGS} in {directory}"
    place = "data.tokenizer" if tokenizer == "byte" else looked
    raise DataError(Problem("PP-E419", message, "data.chat_template=FILE.jinja", place))


def _sources(directory: Path, settings: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """The templates of a tokenizer's directory, the one that counts first: transformers' order."""
    sources = []
    with suppress(OSError):
        sources.append((read_text(directory / "chat_template.jinja"), directory / "chat_template.jinja"))
    named = settings.get("chat_template")
    if isinstance(named, list):  # several, by name
        named = next((row.get("template") for row in named if row.get("name") == "default"), None)
    if isinstance(named, str):
        sources.append((named, directory / _SETTINGS))
    return sources


def _settings(directory: Path) -> Mapping[str, Any]:
    try:
        settings: Any = json.loads(read_text(directory / _SETTINGS))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _marks(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by the names that templates know them by: `bos_token`, `eos_token`, …"""
    marks = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            marks[name] = text
    return marks


def _without_marks(text: str) -> Rendered:
    """Take out the marks around what was generated."""
    pieces, generated, begin, length = re.split(f"([{_BEGIN}{_END}])", text), [], 0, 0
    for piece in pieces:
        if piece == _BEGIN:
            begin = length
        elif piece == _END:
            generated.append((begin, length))
        else:
            length += len(piece)
    return Rendered("".join(pieces[::2]), tuple(generated))


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, transformers' keyword for what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(environment: Limited) -> Callable[..., str]:
    """Jinja's own filter escapes for HTML."""

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        if indent is None and separators is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return environment.concat(encoder.iterencode(value))  # which stops where it is too long

    return to_json


def _refuse(message: str) -> None:
    raise TemplateError(message)

"""`python -m ppctl.data.rendering`: renders conversations with one chat template, within limits of time and memory.

A template is a foreign program: it may never end, or fill the memory with one operation. In a process of its own it can
harm nothing else. The environment is that of transformers' `apply_chat_template`, whose import would import torch.

Each line of stdin is a JSON object and gets one on stdout: first the template, then conversations.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any

from jinja2 import Template, TemplateError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 2**24
"""The most characters of a rendered text: no conversation has as many."""

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Marks around generated text while a template is rendered: two of Unicode's noncharacters, which texts cannot have."""
_KEYWORD = re.compile(r"\{%-?\s*generation\b")
_PLACE = re.compile(r"\bat 0x[0-9a-f]{6,}>")
"""How Python prints a value without a text: by its address in memory."""

Spans = Sequence[tuple[int, int]]


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, transformers' keyword around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def main() -> None:
    """Answer each line of stdin until stdin ends. The kernel ends this process if an answer takes too long."""
    asked = json.loads(sys.stdin.readline())
    for limit, most in ((resource.RLIMIT_AS, asked["memory"]), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(limit, (most, most))

    def answer(make: Callable[[], Any]) -> None:
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # SIGPROF ends the process, in any operation
        made, failed = None, ""
        try:
            made = make()
        except MemoryError:
            failed = f"it needs more than {asked['memory'] // 2**20:,} MiB of memory"
        except Exception as error:  # a template may fail in any way
            clock = isinstance(error, UndefinedError) and "strftime_now" in str(error)
            why = "; there is no clock, because data must not depend on the day" if clock else ""
            failed = f"{error}{why}" or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"failed": failed} if failed else {"made": made}), flush=True)

    says = _KEYWORD.search(asked["source"]) is not None
    compiled = cache(partial(_compiled, asked["source"]))

    def first() -> bool:
        compiled()
        return says

    answer(first)
    for given in map(json.loads, sys.stdin):
        answer(lambda: rendered(compiled(), given, asked["marks"], says=says))  # noqa: B023  # called at once


def _compiled(source: str) -> Template:
    """The template, in an environment without chance: data must not differ after a resume, or between ranks."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    del environment.globals["lipsum"], environment.filters["random"]
    return environment.from_string(source)


def rendered(
    template: Template, given: Mapping[str, Any], marks: Mapping[str, str], *, says: bool
) -> tuple[str, Spans | None]:
    """The text of a conversation, and begin and end, in characters, of what the assistant wrote.

    The assistant's text stands between `{% generation %}` and `{% endgeneration %}` if the template has these (`says`).
    Otherwise it is the text that each turn adds to the previous turns; None if rendering the first turns does not give
    a beginning of the whole. A `prompt` asks for the text up to the next answer. Raises TemplateError for texts that
    are too long or would differ in another process.
    """
    messages, tools, asks = given["messages"], given["tools"], given["prompt"]
    says = says or asks  # nobody reads which part of a prompt is an answer
    held = json.dumps([*messages, tools], ensure_ascii=False)
    if _BEGIN in held or _END in held:
        raise TemplateError("the conversation holds U+FDD0 or U+FDD1, which are no characters")

    def render(turns: Sequence[Any], *, prompt: bool = False) -> str:
        text = template.render(messages=turns, tools=tools, documents=None, add_generation_prompt=prompt, **marks)
        if len(text) > LONGEST:
            raise TemplateError(f"it makes a text of more than {LONGEST:,} characters")
        return text

    pieces, spans, length = re.split(f"[{_BEGIN}{_END}]", render(messages, prompt=asks)), list[tuple[int, int]](), 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        if number % 2:
            spans.append((length - len(piece), length))
    whole = "".join(pieces)
    if any(place not in held for place in _PLACE.findall(whole)):
        raise TemplateError("it puts out a value whose text names a place in memory")
    for number, message in enumerate(messages if not says else ()):
        if message["role"] == "assistant":
            before, after = render(messages[:number], prompt=True), render(messages[: number + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                return whole, None
            spans.append((len(before), len(after)))
    return whole, spans


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON as transformers' filter writes it; Jinja's own escapes for HTML."""
    if not isinstance(layout.get("indent"), int):
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
    return _indented(json.dumps(value), json.dumps([ensure_ascii, layout]))


@lru_cache(maxsize=64)
def _indented(text: str, options: str) -> str:
    """The JSON `text` in another layout, cached: this is slow, and a template writes its tools for every turn."""
    ensure_ascii, layout = json.loads(options)
    return json.dumps(json.loads(text), ensure_ascii=ensure_ascii, **layout)


def _refuse(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()

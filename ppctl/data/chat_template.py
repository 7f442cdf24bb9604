"""A tokenizer's chat template: makes one text of messages, and marks which parts of it the assistant wrote.

The marks come from the template itself, or from rendering the conversation turn by turn. Launcher and ranks run no
template themselves: a child process does (`rendering`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ppctl.data.tokenizer import named_marks, read_settings
from ppctl.errors import DataError, Problem
from ppctl.host.files import expanded, read_text
from ppctl.host.processes import python

Spans = Sequence[tuple[int, int]]
"""(start, end) character positions of pieces of a text."""

SECONDS, MEMORY = 10.0, 2**30
"""Limits for one conversation: processor seconds, and bytes. 200 turns take a fraction of the time."""
_SETTINGS = "tokenizer_config.json"


class RenderingFailed(ValueError):
    """A template's objection to a conversation, in its own words."""


class ChatTemplate:
    """Renders conversations. Raises DataError (PP-E419) for an invalid template.

    `marks` are texts that templates read by name, such as `bos_token`. There is no `strftime_now`, `random` or
    `lipsum`: data that depend on the day or on chance would differ after a resume, and between ranks.
    """

    says_what_is_generated: bool
    """Whether the template has the keyword `generation`."""

    def __init__(self, source: str, marks: Mapping[str, str], place: str) -> None:
        self.place = place
        # Everything that rendered texts depend on.
        self.given = {"source": source, "marks": dict(marks), "seconds": SECONDS, "memory": MEMORY}
        try:
            self._process: subprocess.Popen[str] | None = self._start()
        except RenderingFailed as error:
            message = f"Jinja cannot read the chat template: {error}"
            raise DataError(Problem("PP-E419", message, "data.chat_template=FILE.jinja", place)) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """(the text of a conversation, the spans of it that the assistant wrote or None if unknown). A `prompt` ends
        where the next answer begins. Raises RenderingFailed with the template's own words, or if rendering takes too
        much time or memory."""
        self._process = self._process or self._start()
        text, spans = self._answer(self._process, {"messages": messages, "tools": tools, "prompt": prompt})
        return text, spans

    def _start(self) -> subprocess.Popen[str]:
        """Start the process that renders; returns it once it has read the template. Raises RenderingFailed."""
        process = subprocess.Popen(
            python("ppctl.data.rendering"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # sets have one order in all processes
        )
        weakref.finalize(self, _end, process)
        self.says_what_is_generated = self._answer(process, self.given)
        return process

    def _answer(self, process: subprocess.Popen[str], question: Mapping[str, Any]) -> Any:
        """The process's answer. Raises RenderingFailed if the template refuses or the process ends."""
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        with suppress(BrokenPipeError):
            # a table may hold dates and bytes, which Jinja, too, writes as str does
            print(json.dumps(question, default=str), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline() or "null")
        if answer is None:
            self._process = None
            if process.wait() == -signal.SIGPROF:
                raise RenderingFailed(f"it takes more than {SECONDS:g} s: it does not seem to end")
            raise RenderingFailed(f"it ends the process that renders it (exit code {process.returncode})")
        if "failed" in answer:
            raise RenderingFailed(answer["failed"])
        return answer["made"]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError, ValueError):  # a pipe may be broken
        process.communicate()


def open_template(tokenizer: str, file: str | None) -> ChatTemplate:
    """The template in `file` (`data.chat_template`), else the tokenizer's. Raises DataError (PP-E419) if there is
    none, or if it cannot be read."""
    directory = expanded(tokenizer)
    directory = directory.parent if directory.is_file() else directory
    settings = read_settings(directory / _SETTINGS) if tokenizer != "byte" else {}
    path = directory / "chat_template.jinja" if file is None else expanded(file)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        if file is not None or not isinstance(error, FileNotFoundError):
            named, remedy = (path, "FILE.jinja") if file is None else (f"data.chat_template={file}", "null")
            message = f"{named} cannot be read: {getattr(error, 'strerror', None) or error}"
            raise DataError(Problem("PP-E419", message, f"data.chat_template={remedy}", str(path))) from None
    else:  # as in transformers, a separate file comes first
        return ChatTemplate(text, named_marks(settings), str(path))
    source, path = settings.get("chat_template"), directory / _SETTINGS
    if isinstance(source, list):  # several templates, by name
        source = next((row.get("template") for row in source if row.get("name") == "default"), None)
    if isinstance(source, str):
        return ChatTemplate(source, named_marks(settings), str(path))
    message = f"data.tokenizer={tokenizer} has no chat template, but data.format=chat renders messages with one"
    looked = f"looked for chat_template.jinja and {_SETTINGS} in {directory}"
    place = "data.tokenizer" if tokenizer == "byte" else looked
    raise DataError(Problem("PP-E419", message, "data.chat_template=FILE.jinja", place))

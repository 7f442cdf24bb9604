"""Conversations and prompts with completions: from a line or row to tokens, and which tokens are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ppctl.config.training_config import CHAT, COMPLETION
from ppctl.data.chat_template import ChatTemplate, RenderingFailed, Spans
from ppctl.data.text import Line, encoded, lines
from ppctl.data.token_cache import Progress, encoded_once
from ppctl.data.tokenizer import Tokenizer, Tokens
from ppctl.errors import Problem

_LIKE = {
    CHAT: '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}',
    COMPLETION: '{"prompt": "2 + 2 =", "completion": " 4"}',
}
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""ShareGPT's names of roles -> the names that templates use, where the two differ."""
_ASSISTANT = "assistant"
_KINDS: dict[type, str] = {list: "a list that is empty or has other values", str: "text", dict: "an object"}


class Learned(NamedTuple):
    """A conversation, or a prompt with its completion, in tokens."""

    tokens: Tokens
    learned: npt.NDArray[np.bool_]
    """For each token, whether it is trained on. Never the first token, which nothing precedes."""
    place: str
    text: str
    begins: npt.NDArray[np.int64]
    """For each token, the position of its first character in `text`; beyond the text for an added end."""
    early: int
    """How many of the learned tokens begin before the generated text, and end in it."""

    def runs(self) -> list[tuple[bool, str]]:
        """Pieces of text as (whether its tokens are trained on, text); an added end token is shown as `<end>`."""
        if not len(self.tokens):
            return []
        changes = [0, *(np.flatnonzero(np.diff(self.learned)) + 1).tolist(), len(self.tokens)]
        runs = []
        for first, after in pairwise(changes):
            begin = 0 if first == 0 else int(self.begins[first])
            end = len(self.text) if after == len(self.tokens) else int(self.begins[after])
            added = after == len(self.tokens) and self.begins[-1] == len(self.text)
            runs.append((bool(self.learned[first]), self.text[begin:end] + ("<end>" if added else "")))
        return runs


class _Text(NamedTuple):
    text: str
    learned: Spans
    place: str


def encode_conversations(
    files: list[Path], tokenizer: Tokenizer, template: ChatTemplate | None, progress: Progress = lambda size: None
) -> Iterator[Learned]:
    """Yield every line or row of `files` in order, encoded: messages that the template renders, or without a template a
    prompt and its completion. `progress` is as in `documents`. Raises DataError as `encoded` does."""
    keys = ("prompt", "completion") if template is None else ("messages", "conversations", "tools")
    texts = (_text_of(line, template) for line in lines(files, progress, keys))
    return encoded(texts, lambda batch: _encoded(batch, tokenizer, template))


def kept_conversations(
    files: list[Path], tokenizer: Tokenizer, template: ChatTemplate | None, cache: Path | None
) -> list[Learned]:
    """The conversations of `encode_conversations`, kept in `cache`, without texts: a learned token is kept as its
    complement, which is negative. Raises as `encoded_once` does."""

    def make(progress: Progress) -> Iterator[tuple[Tokens, str]]:
        for one in encode_conversations(files, tokenizer, template, progress):
            own = one.tokens.astype("<i4")
            yield np.where(one.learned, ~own, own), one.place

    form = {"template": None if template is None else template.given, "tokenizer": tokenizer.identity}
    tokens, lengths, _ = encoded_once(cache, files, form, np.dtype("<i4"), make)
    none = np.zeros(0, np.int64)
    pieces = enumerate(np.split(tokens, np.cumsum(lengths)[:-1]), start=1)
    return [Learned(np.where(t < 0, ~t, t), t < 0, f"conversation {n:,}", "", none, 0) for n, t in pieces]


def _encoded(batch: Sequence[_Text], tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Learned]:
    """Without a template, texts get the tokenizer's marks around them, and an end; a template writes its own. A token
    that begins before the answer is learned if the template marks generated text, else it belongs to the prompt."""
    around = template is None
    pieces = tokenizer.encode_pieces([item.text for item in batch], around=around)
    for item, (ids, begins, ends, added) in zip(batch, pieces, strict=True):
        learned, early = np.zeros((2, len(ids)), dtype=np.bool_)
        for begin, end in item.learned:
            learned |= (begins >= begin) & (begins < end) & ~added
            if template is not None and template.says_what_is_generated:
                early |= (begins < begin) & (ends > begin)
        learned |= early
        if around and tokenizer.eos is not None and not (len(ids) and ids[-1] == tokenizer.eos):
            ids = np.append(ids, np.array([tokenizer.eos], dtype=ids.dtype))
            learned, begins = np.append(learned, True), np.append(begins, len(item.text))
        learned[:1] = False
        yield Learned(ids, learned, item.place, item.text, begins, int(early[1:].sum()))


def _text_of(line: Line | Problem, template: ChatTemplate | None) -> _Text | Problem:
    if isinstance(line, Problem):
        like = _LIKE[COMPLETION if template is None else CHAT]
        return replace(line, remedy=like) if line.code == "PP-E403" else line
    rendered = _completion(line) if template is None else _chat(line, template)
    if isinstance(rendered, _Text):
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:  # JSON may contain half of a surrogate pair, which is no character
            message = f"not UTF-8 text: {error.reason} at character {error.start} of the conversation"
            return Problem("PP-E411", message, "leave the line out", line.place)
    return rendered


def _completion(line: Line) -> _Text | Problem:
    prompt, completion = line.value.get("prompt"), line.value.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        return _wrong_form(line, COMPLETION, 'strings under "prompt" and "completion"')
    return _Text(prompt + completion, [(len(prompt), len(prompt) + len(completion))], line.place)


def _chat(line: Line, template: ChatTemplate) -> _Text | Problem:
    messages = line.value.get("messages", line.value.get("conversations"))
    if not messages or not _objects(messages):
        return _wrong_form(line, CHAT, 'a list of messages under "messages"', _kind(messages))
    messages = [_message(each) for each in messages]
    if not all(isinstance(each.get("role"), str) for each in messages):
        return _wrong_form(line, CHAT, 'messages with a "role" (or "from")', "messages without")
    if not all(map(_says_something, messages)):
        wanted = 'messages with a "content" (or "value") that is text or a list of parts'
        return _wrong_form(line, CHAT, wanted, "messages without")
    if not any(each["role"] == _ASSISTANT for each in messages):
        message = "a conversation without an assistant turn has no token to train on"
        return Problem("PP-E422", message, "leave the line out", line.place)
    tools = line.value.get("tools")
    with suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) else tools  # as tables often hold them
    if tools is not None and not _objects(tools):
        return _wrong_form(line, CHAT, 'null, a list of objects or its JSON under "tools"', _kind(tools))
    try:
        text, learned = template.render(messages, tools)
    except RenderingFailed as error:
        message = f"the chat template at {template.place} refuses the conversation: {error}"
        return Problem("PP-E420", message, "data.chat_template=FILE.jinja", line.place)
    if learned is None:
        message = (
            f"the chat template at {template.place} writes earlier turns differently when others follow, so that "
            "nobody can tell which of the text is the assistant's"
        )
        remedy = "data.chat_template=FILE.jinja, a copy with {% generation %} … {% endgeneration %} around the answers"
        return Problem("PP-E420", message, remedy, line.place)
    return _Text(text, learned, line.place)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _kind(value: Any) -> str | None:
    return None if value is None else f"{_KINDS.get(type(value), 'another value')} there"


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form of templates, also from a message in ShareGPT's form."""
    if "role" in given or "from" not in given:
        return dict(given)
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    role = given["from"]
    return {"role": _SHAREGPT.get(role, role) if isinstance(role, str) else None, "content": given.get("value"), **rest}


def _says_something(message: Mapping[str, Any]) -> bool:
    """Whether a message has content: templates would write null as "None". Only calls of tools may have none."""
    content = message.get("content")
    if content is None:
        return not message.keys() <= {"role", "content", "name"}
    return isinstance(content, str) or _objects(content)


def _wrong_form(line: Line, form: str, wanted: str, held: str | None = None) -> Problem:
    message = f"the line is not an object with {wanted} (data.format={form}) but {held or line.described}"
    return Problem("PP-E418", message, _LIKE[form], line.place)

"""`python -m ppctl.pretrained.generate`: what `ppctl generate` starts. A question on stdin, the text on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from ppctl.data.chat_template import open_template
from ppctl.data.load import load_tokenizer
from ppctl.data.prompts import Prompt, make_prompt
from ppctl.data.tokenizer import Tokenizer, read_settings
from ppctl.errors import DataError, PpctlError, Problem, visible
from ppctl.families.directory import CONFIG
from ppctl.model.draw import Sampling, drawn
from ppctl.pretrained.conversion import printed_progress
from ppctl.pretrained.hugging_face import GENERATION
from ppctl.pretrained.whole_model import WholeModel, open_model

_HELD = "\ufffd"
"""The end of a text whose last character needs further tokens."""


class Question(TypedDict):
    """All that `ppctl generate` was asked for."""

    source: str
    tokenizer: str
    prompt: str
    chat: bool
    system: str | None
    template: str | None
    tokens: int
    sampling: tuple[float, int | None, float] | None
    seed: int
    device: str | None
    dtype: str | None
    json: bool


def main() -> int:
    """Answer the question; returns the exit code."""
    asked: Question = json.load(sys.stdin)
    try:
        _answer(asked)
    except PpctlError as error:
        for problem in error.problems:
            print(f"error {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _answer(asked: Question) -> None:
    tokenizer = load_tokenizer(asked["tokenizer"])
    device = torch.device(asked["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = None if asked["dtype"] is None else getattr(torch, asked["dtype"])
    model = open_model(Path(asked["source"]), device, dtype, printed_progress())
    text, prompt = _prompt(asked, tokenizer, model)
    ends, began, ids, shown = _ends(asked["tokenizer"], tokenizer), time.monotonic(), list[int](), Shown(tokenizer)
    for token in _continued(model, prompt, asked):
        if token in ends:
            break
        ids.append(token)
        if not asked["json"]:
            print(visible(shown.add(token)), end="", flush=True)
    else:
        token = -1
    if asked["json"]:
        ended = "end of text" if token in ends else "limit"
        answer = {"prompt": text, "text": tokenizer.decode(ids), "tokens": ids, "ended": ended}
        print(json.dumps(answer | {"prompt_tokens": len(prompt)}))
        return
    print(visible(shown.rest()))
    seconds = max(time.monotonic() - began, 1e-9)
    why = "the model ended its text" if token in ends else "the limit (--tokens, or the model's positions)"
    print(f"note: {len(ids)} tokens in {seconds:.1f} s, {len(ids) / seconds:.3g} tokens/s; {why}", file=sys.stderr)


def _prompt(asked: Question, tokenizer: Tokenizer, model: WholeModel) -> Prompt:
    """The prompt. Raises DataError as `make_prompt` and `open_template`, and PP-E560 beyond the model's positions."""
    try:
        template = open_template(asked["tokenizer"], asked["template"]) if asked["chat"] else None
    except DataError as error:
        raise DataError(replace(each, remedy="--template FILE.jinja") for each in error.problems) from None
    prompt = make_prompt(asked["prompt"], tokenizer, model.words, template, asked["system"])
    if model.longest is not None and len(prompt.tokens) >= model.longest:
        message = f"the prompt has {len(prompt.tokens)} tokens, and the model {model.longest} positions"
        raise DataError(Problem("PP-E560", message, "ppctl explain PP-E560"))
    return prompt


def _continued(model: WholeModel, prompt: list[int], asked: Question) -> Iterator[int]:
    """Token after token, by the likeliest or as `sampling` draws."""
    dice = torch.Generator().manual_seed(asked["seed"])
    sampling = None if asked["sampling"] is None else Sampling(*asked["sampling"])
    given, room = prompt, model.longest or sys.maxsize
    for _ in range(min(asked["tokens"], room - len(prompt))):
        logits = model.after(given)
        token = int(logits.argmax() if sampling is None else drawn(logits, sampling, dice))
        yield token
        given = [token]


def _ends(named: str, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of the settings beside it."""
    path = Path(named).expanduser()
    directory, ends = path if path.is_dir() else path.parent, {tokenizer.eos}
    for file in () if named == "byte" else (GENERATION, CONFIG):
        found = read_settings(directory / file).get("eos_token_id")
        ends |= set(found) if isinstance(found, list) else {found}
    return {end for end in ends if isinstance(end, int)}


class Shown:
    """The text of tokens piece by piece: a character of several tokens comes when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.ids = tokenizer, list[int]()
        self.first, self.done = 0, 0
        """Where the tokens begin that are decoded together, as blanks between words depend on neighbours; and how many
        are shown."""

    def add(self, token: int) -> str:
        """What can be shown after a further token."""
        self.ids.append(token)
        return self._piece(held=_HELD)

    def rest(self) -> str:
        """What is left."""
        return self._piece(held="")

    def _piece(self, held: str) -> str:
        before = self.tokenizer.decode(self.ids[self.first : self.done])
        text = self.tokenizer.decode(self.ids[self.first :])
        if len(text) <= len(before) or (held and text.endswith(held)):
            return ""
        self.first, self.done = self.done, len(self.ids)
        return text[len(before) :]


if __name__ == "__main__":
    sys.exit(main())

"""`python -m ppctl.pretrained.generate`: what `ppctl generate` starts. Its arguments on stdin, the text on stdout."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ppctl.data.chat_template import open_template
from ppctl.data.load import load_tokenizer
from ppctl.data.prompts import Prompt, make_prompt
from ppctl.data.tokenizer import Tokenizer, read_settings
from ppctl.errors import DataError, Problem, visible
from ppctl.families.directory import CONFIG
from ppctl.model.draw import drawn
from ppctl.pretrained.conversion import exit_code_of, printed_progress
from ppctl.pretrained.hugging_face import GENERATION
from ppctl.pretrained.whole_model import WholeModel, open_model


def main() -> int:
    """Continue the prompt; returns the exit code."""
    return exit_code_of(lambda: _generate(Namespace(**json.load(sys.stdin))))


def _generate(args: Namespace) -> None:
    tokenizer, dtype = load_tokenizer(args.tokenizer), None if args.dtype is None else getattr(torch, args.dtype)
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.end, model = tokenizer.eos, open_model(Path(args.source), args.device, dtype, printed_progress())
    prompt, ids = _prompt(args, tokenizer, model), list[int]()
    most = min(args.tokens, (model.longest or sys.maxsize) - len(prompt.tokens))
    began = time.monotonic()
    for piece in pieces(tokenizer, _continued(model, prompt.tokens, args, most, ids)):
        if not args.json:
            print(visible(piece), end="", flush=True)
    seconds, ended = time.monotonic() - began, "limit" if len(ids) == most else "end of text"
    if args.json:
        print(json.dumps({"prompt": prompt.text, "text": tokenizer.decode(ids), "tokens": ids, "ended": ended}))
    else:
        print(f"\nnote: {len(ids)} tokens in {seconds:.1f} s, ended by: {ended}", file=sys.stderr)


def _prompt(args: Namespace, tokenizer: Tokenizer, model: WholeModel) -> Prompt:
    """The prompt. Raises DataError as `make_prompt` and `open_template`, and PP-E560 beyond the model's positions."""
    try:
        chat = args.chat or args.template is not None or args.system is not None
        template = open_template(args.tokenizer, args.template) if chat else None
    except DataError as error:
        raise DataError(replace(each, remedy="--template FILE.jinja") for each in error.problems) from None
    prompt = make_prompt(args.prompt, tokenizer, model.words, template, args.system)
    if model.longest is not None and len(prompt.tokens) >= model.longest:
        message = f"the prompt has {len(prompt.tokens)} tokens, and the model {model.longest} positions"
        raise DataError(Problem("PP-E560", message, "ppctl explain PP-E560"))
    return prompt


def _continued(model: WholeModel, given: list[int], args: Namespace, most: int, ids: list[int]) -> Iterator[int]:
    """At most so many tokens, each also added to `ids`, the likeliest or draws; up to an end that the tokenizer or the
    settings beside it name."""
    dice, path = torch.Generator().manual_seed(args.seed or 0), Path(args.tokenizer).expanduser()
    draws = any(each is not None for each in (args.temperature, args.top_k, args.top_p, args.seed))
    ends = {args.end}
    for file in () if args.tokenizer == "byte" else (GENERATION, CONFIG):
        named = read_settings((path if path.is_dir() else path.parent) / file).get("eos_token_id")
        ends |= {*named} if isinstance(named, list) else {named}
    while len(ids) < most:
        with torch.inference_mode():
            logits = model.after(torch.tensor([given], device=args.device))
        how = args.temperature or 1.0, args.top_k, args.top_p or 1.0
        token = int(drawn(logits, dice, *how) if draws else logits.argmax())
        if token in ends:
            return
        ids.append(token)
        yield token
        given = [token]


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they come; a character of several tokens comes when it is whole."""
    ids, first, done = list[int](), 0, 0  # decoded together from `first` on: blanks depend on neighbours
    for token in tokens:
        ids.append(token)
        before, now = tokenizer.decode(ids[first:done]), tokenizer.decode(ids[first:])
        if not now.endswith("\ufffd"):
            yield now[len(before) :]
            first, done = done, len(ids)
    yield tokenizer.decode(ids[first:])[len(tokenizer.decode(ids[first:done])) :]


if __name__ == "__main__":
    sys.exit(main())

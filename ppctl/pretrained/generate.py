"""`python -m ppctl.pretrained.generate`: what `ppctl generate` starts. Its arguments on stdin, the text on stdout.

This process holds a whole model, from a checkpoint of any cut or a Hugging Face directory. It continues one row of
tokens, and keeps the keys and values of the tokens so far.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.data.chat_template import open_template
from ppctl.data.load import load_tokenizer
from ppctl.data.prompts import Prompt, make_prompt
from ppctl.data.tokenizer import Tokenizer, read_settings
from ppctl.errors import DataError, Problem, visible
from ppctl.families.config_json import known_families
from ppctl.families.directory import CONFIG, read_config_file
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Layer
from ppctl.host.files import expanded
from ppctl.model.draw import drawn
from ppctl.model.linear import columns
from ppctl.model.packing import Packing
from ppctl.model.stage import StageModule, build_stage
from ppctl.model.stage_model import pieces as pieces_of
from ppctl.plan import StageSpec
from ppctl.pretrained.conversion import Progress, SavedWeights, exit_code_of, printed_progress
from ppctl.pretrained.hugging_face import GENERATION, open_weights


class _WholeModel(NamedTuple):
    """Continues one row of tokens; a second row needs another one."""

    after: Callable[[Tensor], Tensor]
    """The next tokens of the row, [1, s] int64 -> the logits [vocabulary] after the last of them."""
    words: int | None = None
    """The number of tokens in the vocabulary that the model has rows for; None if unknown."""
    longest: int | None = None
    """The number of positions that the model has rows for; None if it has no such table."""


def open_model(source: Path, device: torch.device, dtype: torch.dtype | None, progress: Progress) -> _WholeModel:
    """The model at `source`, a checkpoint or a directory with a config.json; `dtype` None keeps the embedding's. Raises
    ConfigError and CheckpointError as imports and exports do."""
    if not (source / CONFIG).is_file():
        saved = SavedWeights(source, dtype=None, mtp=False)
        model, first = saved.model, next(iter(saved.dtypes.values()))
        read: Callable[[str], Tensor] = saved.tensor
    elif read_config_file(source).get("model_type") in known_families():
        model, _, names, reader = open_weights(source, mtp=False)
        read, first = reader.tensor, reader.spec(next(iter(names))).dtype
    else:
        from ppctl.foreign.library import read_whole_model  # transformers, which other models do without

        return _WholeModel(_CachedByLibrary(read_whole_model(source, dtype).to(device)))
    stage = _filled(model, read, progress, device=device, dtype=dtype or first)
    learned = model.position_embedding_type == "learned_absolute" and foreign_of(model) is None
    go_on = _Cached(stage) if isinstance(stage, StageModule) else _CachedByLibrary(stage.model)
    return _WholeModel(go_on, model.vocab_size, model.max_position_embeddings if learned else None)


@torch.no_grad()
def _filled(model: ModelConfig, read: Callable[[str], Tensor], progress: Progress, **given: Any) -> Any:
    """A stage of all layers, with the values that `read` gives by canonical name."""
    decoder = (Layer("decoder", index) for index in range(model.num_layers))
    spec = StageSpec(0, 0, 0, (Layer("embedding"), *decoder, Layer("loss")), (), (), 0, 0, 0)
    given |= {"seed": 0, "initialize": lambda *_: None}
    if (foreign := foreign_of(model)) is None:
        stage: Any = build_stage(spec, model, **given)
    else:
        from ppctl.foreign.foreign_stage import build_foreign_stage

        stage = build_foreign_stage(spec, model, foreign, **given)
    rows: Mapping[str, Any] = stage.parameter_rows()
    tensors: Mapping[str, Tensor] = {**stage.canonical_parameters(), **stage.canonical_buffers()}
    for done, (name, tensor) in enumerate(tensors.items(), 1):
        progress(name, done, len(tensors))
        for of, piece in pieces_of(name, tensor, rows[name], range(model.num_moe_experts or 0)):
            piece.copy_(read(of))
    return stage.train(False)


class _Cached:
    """ppctl's own decoder, one row at a time."""

    def __init__(self, stage: StageModule) -> None:
        assert stage.output is not None  # set, since the stage has the whole model
        self.stage, self.head, self.seen = stage, stage.output, 0
        stage.output = None  # logits are needed only after the last token
        for layer in stage.decoder_layers().values():
            attention: Any = layer.get_submodule("attention")
            attention.shared = _KeptKeys()

    def __call__(self, tokens: Tensor) -> Tensor:
        first, self.seen = self.seen, self.seen + tokens.shape[1]
        if self.stage.rotary is not None:  # a table as long as the row, indexed by position
            self.stage.rotary.turns(self.head.weight, 1 << self.seen.bit_length())
        positions = torch.arange(first, self.seen, device=tokens.device)[None]
        (state,) = self.stage(tokens, tokens=tokens, packing=Packing(positions))
        return columns(state[:, -1:], self.head)[0][0, 0]


class _KeptKeys:
    """An `Attend` of new queries to all keys and values so far."""

    kept: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: object, scale: float | None, _: object) -> Tensor:
        """Keep `k` and `v`, and return the attention [b, heads, s, values' width] of a whole prompt or of one token."""
        k, v = self.kept = tuple(map(lambda *pair: torch.cat(pair, dim=2), *filter(None, (self.kept, (k, v)))))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=grouped)


class _CachedByLibrary:
    """A model of transformers with its own cache; a model without one computes the whole row for every token."""

    def __init__(self, model: Any) -> None:
        self.model, self.past, self.seen = model.eval(), None, list[Tensor]()
        keeps = "past_key_values" in inspect.signature(model.forward).parameters
        self.named: dict[str, Any] = {"use_cache": keeps, "return_dict": True}

    def __call__(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens)
        given = torch.cat(self.seen, dim=1) if self.past is None else tokens
        result = self.model(input_ids=given, **self.named)
        if self.named["use_cache"]:
            self.past = self.named["past_key_values"] = result.past_key_values
        logits: Tensor = result.logits[0, -1]
        return logits


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


def _prompt(args: Namespace, tokenizer: Tokenizer, model: _WholeModel) -> Prompt:
    """Make the prompt. Raises DataError as `make_prompt` and `open_template`, and PP-E560 for too long a prompt."""
    try:
        chat = args.chat or args.template is not None or args.system is not None
        template = open_template(args.tokenizer, args.template) if chat else None
    except DataError as error:
        raise DataError(replace(each, remedy="--template FILE.jinja") for each in error.problems) from None
    prompt = make_prompt(args.prompt, tokenizer, model.words, template, args.system)
    if model.longest is not None and len(prompt.tokens) >= model.longest:
        message = f"the prompt has {len(prompt.tokens)} tokens, but the model has only {model.longest} positions"
        raise DataError(Problem("PP-E560", message, "ppctl explain PP-E560"))
    return prompt


def _continued(model: _WholeModel, given: list[int], args: Namespace, most: int, ids: list[int]) -> Iterator[int]:
    """Yield at most `most` tokens, the likeliest or drawn ones, and add each to `ids`. End before an end token, which
    the tokenizer or the settings name."""
    dice, path = torch.Generator().manual_seed(args.seed or 0), expanded(args.tokenizer)
    draws = any(each is not None for each in (args.temperature, args.top_k, args.top_p, args.seed))
    ends = {args.end}
    for file in () if args.tokenizer == "byte" else (GENERATION, CONFIG):
        named = read_settings((path if path.is_dir() else path.parent) / file).get("eos_token_id")
        ends |= {*named} if isinstance(named, list) else {named}
    while len(ids) < most:
        with torch.inference_mode():
            logits = model.after(torch.tensor([given], device=args.device))
        drawing = args.temperature or 1.0, args.top_k, args.top_p or 1.0
        token = int(drawn(logits, dice, *drawing) if draws else logits.argmax())
        if token in ends:
            return
        ids.append(token)
        yield token
        given = [token]


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come; a character of several tokens is yielded when it is complete."""
    ids, first, done = list[int](), 0, 0  # decoded together from `first` on, since blanks depend on neighbours
    for token in tokens:
        ids.append(token)
        before, now = tokenizer.decode(ids[first:done]), tokenizer.decode(ids[first:])
        if not now.endswith("\ufffd"):
            yield now[len(before) :]
            first, done = done, len(ids)
    yield tokenizer.decode(ids[first:])[len(tokenizer.decode(ids[first:done])) :]


if __name__ == "__main__":
    sys.exit(main())

"""Values that a draft takes from outside: a model's sizes and tokenizer, and the rows that a vocabulary needs.

Must not know how these are read: the functions that read them are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ppctl.config.argv import PLACE
from ppctl.config.draft import DEFAULT, Draft
from ppctl.config.foreign_rules import READ, without_effect
from ppctl.config.keys import text_keys
from ppctl.config.mapping import converted_value
from ppctl.errors import PpctlError, Problem

_TOKENIZER = "data.tokenizer"
_VOCABULARY, _DIVISOR, _TP = (
    "model.vocab_size",
    "model.make_vocab_size_divisible_by",
    "parallel.tensor_model_parallel_size",
)

ReadModel = Callable[[str, str, Mapping[str, str], Mapping[str, Any]], Mapping[str, Any]]
"""From model.from, model.implementation, model.hf_overrides and model.lora to values by key: of the model, and
data.tokenizer. Raises PpctlError."""

CountTokens = Callable[[str], int]
"""From the value of `data.tokenizer` to the rows that an embedding needs for it. Raises PpctlError."""


def take_model(draft: Draft, typed: set[str], read_model: ReadModel, *, scaled: bool, for_training: bool) -> None:
    """Put the sizes of `model.from` over those of files."""
    source = draft.get("model.from")
    if not isinstance(source, str) or not source:
        return
    if scaled:
        message = "a miniature has weights of its own: model.from and +scale exclude each other"
        draft.problems.append(Problem("PP-E103", message, "model.from=null", f"model.from = {source}"))
        return
    try:
        asked = (_asked(draft, f"model.{name}") for name in ("implementation", "hf_overrides", "lora"))
        values = read_model(source, *asked)
    except PpctlError as error:
        draft.problems += error.problems
        for name in ("hf_overrides", "lora"):  # of a model of which nothing is known they are not wrong besides
            draft.put(f"model.{name}", None)  # first, since a mapping would be added to the wrong one
            draft.put(f"model.{name}", {})
        return
    if values.get("model.transformers") is not None:
        now = {name: draft.get(name) for name in sorted(typed)}
        fitting = {name: values.get(name, text_keys()[name].default) for name in now if name in text_keys()}
        draft.problems += without_effect(now, fitting.__getitem__, PLACE, READ)
        put_back(draft, fitting, READ)
    is_set = draft.provenance.get(_TOKENIZER, DEFAULT) != DEFAULT
    for name, value in values.items():
        if name not in typed and not (name == _TOKENIZER and is_set):
            draft.put(name, value)
            draft.provenance[name] = f"model.from={source}"
    if for_training and not is_set and _TOKENIZER not in values:
        message = (
            f"{source} has no tokenizer, and {_TOKENIZER} names none (a directory, or byte where bytes are meant): "
            "bytes would be read as tokens of its vocabulary"
        )
        draft.problems.append(Problem("PP-E417", message, f"{_TOKENIZER}=byte", f"model.from = {source}"))


def _asked(draft: Draft, name: str) -> Any:
    """The value that a key will have; its default in place of one of another type, which is refused afterwards."""
    try:
        return converted_value(name, draft.get(name))
    except ValueError:
        return text_keys()[name].default


def put_back(draft: Draft, fitting: Mapping[str, Any], read: Collection[str]) -> None:
    """Plan the model that there is, not the sizes that were refused: its description has layers of its own."""
    for name, value in fitting.items():
        if name.startswith("model.") and name not in read:
            draft.put(name, value)


def take_vocabulary(draft: Draft, count_tokens: CountTokens, *, for_training: bool) -> None:
    """Set a vocabulary that nothing sets by the tokenizer, and round it as Megatron does."""
    source, rows, tokenizer = draft.provenance.get(_VOCABULARY, DEFAULT), draft.get(_VOCABULARY), draft.get(_TOKENIZER)
    if source.startswith("model.from"):
        return  # its weights have these rows
    reason = ""
    if source == DEFAULT or source.startswith("scale="):
        if draft.provenance.get(_TOKENIZER, DEFAULT) != DEFAULT and isinstance(tokenizer, str):
            try:
                rows = count_tokens(tokenizer)
                reason = f"{_TOKENIZER}={tokenizer} has {rows:,} tokens"
            except PpctlError as error:
                if for_training:
                    draft.problems += error.problems
                else:
                    reasons = "; ".join(problem.message for problem in error.problems)
                    draft.notes.append(f"the vocabulary stays {rows}, because {reasons}; {_VOCABULARY}=N sets it")
        elif (
            source == DEFAULT and not draft.get("model.from") and draft.provenance.get("data.path", DEFAULT) != DEFAULT
        ):
            without = f"data.path is set, and neither {_TOKENIZER} nor {_VOCABULARY}"
            draft.notes.append(f"{without}: the vocabulary is {rows}, which is enough for bytes")
    multiple = _multiple(draft)
    if multiple > 1 and isinstance(rows, int) and rows % multiple:
        before = reason or f"{rows:,} ({source})"
        divisor = f"make_vocab_size_divisible_by {draft.get(_DIVISOR)} x tp {draft.get(_TP)}"
        rows, reason = -(-rows // multiple) * multiple, f"{before}, rounded up to a multiple of {divisor}"
    if reason:
        draft.put(_VOCABULARY, rows)
        draft.provenance[_VOCABULARY] = f"derived: {reason}"


def _multiple(draft: Draft) -> int:
    """What the vocabulary is rounded up to a multiple of; 1 where a factor is wrong, which `check` reports."""
    divisor, tp = draft.get(_DIVISOR), draft.get(_TP)
    sound = all(type(n) is int and text_keys()[key].allows(n) for key, n in ((_DIVISOR, divisor), (_TP, tp)))
    return divisor * tp if sound and divisor > 1 else 1

"""The size of the vocabulary, where nothing sets it: the tokenizer's, rounded as Megatron rounds it."""

from __future__ import annotations

from collections.abc import Callable

from ppctl.config.draft import DEFAULT, TOKENIZER, Draft
from ppctl.config.keys import text_keys
from ppctl.errors import PpctlError

_VOCABULARY, _DIVISOR, _TP = (
    "model.vocab_size",
    "model.make_vocab_size_divisible_by",
    "parallel.tensor_model_parallel_size",
)

CountTokens = Callable[[str], int]
"""From the value of `data.tokenizer` to the rows that an embedding needs for it. Raises PpctlError."""


def vocabulary(draft: Draft, count_tokens: CountTokens, *, for_training: bool) -> None:
    """Set a vocabulary that nothing sets by the tokenizer, and round it as Megatron does."""
    source, rows, tokenizer = draft.source(_VOCABULARY), draft.values[_VOCABULARY], draft.values[TOKENIZER]
    if source.startswith("model.from"):
        return  # its weights have these rows
    reason = ""
    if source == DEFAULT or source.startswith("scale="):
        if draft.source(TOKENIZER) != DEFAULT and isinstance(tokenizer, str):
            try:
                rows = count_tokens(tokenizer)
                reason = f"{TOKENIZER}={tokenizer} has {rows:,} tokens"
            except PpctlError as error:
                if for_training:
                    draft.problems += error.problems
                else:
                    reasons = "; ".join(problem.message for problem in error.problems)
                    draft.notes.append(f"the vocabulary stays {rows}, because {reasons}; {_VOCABULARY}=N sets it")
        elif source == DEFAULT and not draft.values["model.from"] and draft.source("data.path") != DEFAULT:
            without = f"data.path is set, and neither {TOKENIZER} nor {_VOCABULARY}"
            draft.notes.append(f"{without}: the vocabulary is {rows}, which is enough for bytes")
    multiple = _multiple(draft)
    if multiple > 1 and isinstance(rows, int) and rows % multiple:
        before = reason or f"{rows:,} ({source})"
        divisor = f"make_vocab_size_divisible_by {draft.values[_DIVISOR]} x tp {draft.values[_TP]}"
        rows, reason = -(-rows // multiple) * multiple, f"{before}, rounded up to a multiple of {divisor}"
    if reason:
        draft.put(_VOCABULARY, rows, f"derived: {reason}")


def _multiple(draft: Draft) -> int:
    """The number that the vocabulary becomes a multiple of; 1 if a factor is wrong, which `check` reports."""
    divisor, tp = draft.values[_DIVISOR], draft.values[_TP]
    sound = all(
        type(value) is int and text_keys()[key].allows(value) for key, value in ((_DIVISOR, divisor), (_TP, tp))
    )
    return divisor * tp if sound and divisor > 1 else 1

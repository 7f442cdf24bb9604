"""From words to a RunConfig, with the source of every value and all problems (ARCHITECTURE.md draws the steps).

The order of strength: defaults, conf/, recipe, `model.from`, command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppctl.config.argv import PLACE, Arguments, normalise, typed_again
from ppctl.config.checks import check, ignored, notes
from ppctl.config.draft import (
    DEFAULT,
    GLOBAL_BATCH,
    TOKENIZER,
    CountSamples,
    Draft,
    ReadModel,
    command_line,
    files,
    model,
    put_back,
    scale_down,
    split_choices,
    with_remedy,
)
from ppctl.config.mapping import convert
from ppctl.config.model_rules import without_effect
from ppctl.config.schema import RunConfig
from ppctl.config.unknown_words import not_an_override
from ppctl.errors import ConfigError, PpctlError, Problem

_VOCABULARY, _DIVISOR = "model.vocab_size", "model.make_vocab_size_divisible_by"
_TP = "parallel.tensor_model_parallel_size"

CountTokens = Callable[[str], int]
"""From the value of `data.tokenizer` to the number of rows that its embedding needs. Raises PpctlError."""


class RefusedError(ConfigError):
    """Problems, with the config as far as it could be composed, so that planning can find more problems."""

    def __init__(self, problems: Sequence[Problem], composed: Composed) -> None:
        super().__init__(problems)
        self.composed = composed


@dataclass(frozen=True, slots=True)
class Composed:
    """A config, and where each of its values came from."""

    config: RunConfig
    provenance: dict[str, str]
    """Dotted key -> where its value came from: `default`, a file and line, `command line`, `derived: ...`."""
    notes: tuple[str, ...] = ()
    """Decisions made for the user, to be printed."""


def compose(
    overrides: Sequence[str] | Arguments,
    *,
    for_training: bool = False,
    read_model: ReadModel | None = None,
    count_tokens: CountTokens | None = None,
    count_samples: CountSamples | None = None,
) -> Composed:
    """The config that `overrides` describe, on top of the defaults, conf/ and the recipe that they name.

    Values that `read_model` reads from `model.from` are stronger than files and weaker than the command line; the
    model's tokenizer is weaker than both. If nothing sets the vocabulary, `count_tokens` gives it; `count_samples`
    gives the length of an epoch. `for_training` also refuses settings that can only be planned. Raises RefusedError
    with all problems.
    """
    arguments = _read(overrides)
    choices, values = split_choices(arguments)
    scale, recipe = choices.pop("scale", None), choices.get("recipe")
    draft = files(choices, arguments.problems)
    # A recipe's layout was written for the recipe's own model, not for a model from the command line.
    before = (files({"recipe": recipe}, []) if recipe and "model" in choices else draft).sizes()
    batch = draft.values[GLOBAL_BATCH]
    command_line(draft, values, arguments)
    draft.set_rampup_aside(batch)
    if read_model is not None:
        model(draft, read_model, scaled=scale is not None, for_training=for_training)
    draft.set_layout_aside(before)
    draft.put("recipe", recipe, arguments.sources.get("recipe", PLACE) if recipe else DEFAULT)
    if scale is not None:
        scale_down(draft, scale, arguments.sources.get("scale", PLACE))
    if count_tokens is not None:
        _vocabulary(draft, count_tokens, for_training=for_training)
    return _checked(draft, arguments, for_training, count_samples)


def override(
    config: RunConfig,
    provenance: Mapping[str, str],
    overrides: Sequence[str] | Arguments,
    *,
    for_training: bool = False,
    count_samples: CountSamples | None = None,
) -> Composed:
    """`config` with `overrides` on top, for `resume`: a choice of recipe or model is a problem. If they change pp, vpp
    or the model's layers and give no layout, the old layout is dropped, with a note. Raises RefusedError."""
    arguments = _read(overrides)
    choices, values = split_choices(arguments)
    for group, option in choices.items():
        message = f"{group}={option}: a resumed run keeps its {group}; leave this out"
        arguments.problems.append(Problem("PP-E104", message, place=PLACE))
    draft = Draft.of(config, provenance, arguments.problems)
    before = dict(draft.values)
    command_line(draft, values, arguments)
    draft.set_layout_aside(before)
    if config.model.transformers is not None:
        now = {name: draft.values[name] for name in sorted(draft.typed)}
        draft.problems += without_effect(now, before, PLACE, {"model.from"})
        put_back(draft, {name: before[name] for name in now}, {"model.from"})
    return _checked(draft, arguments, for_training, count_samples)


def _read(overrides: Sequence[str] | Arguments) -> Arguments:
    """The arguments, read from words if a command has not done so; words other than overrides become problems."""
    arguments = overrides if isinstance(overrides, Arguments) else normalise(overrides)
    return replace(arguments, problems=[*arguments.problems, *map(not_an_override, arguments.rest)])


def _vocabulary(draft: Draft, count_tokens: CountTokens, *, for_training: bool) -> None:
    """Set the draft's vocabulary size by the tokenizer if nothing else sets it, and round it up as Megatron does."""
    source, rows, tokenizer = draft.source(_VOCABULARY), draft.value(_VOCABULARY), draft.value(TOKENIZER)
    if source.startswith("model.from") or rows is None:
        return  # the model's weights give the rows, or `check` refuses them
    reason = ""
    if source == DEFAULT or source.startswith("scale="):
        if draft.source(TOKENIZER) != DEFAULT and tokenizer:
            try:
                rows = count_tokens(tokenizer)
                reason = f"{TOKENIZER}={tokenizer} has {rows:,} tokens"
            except PpctlError as error:
                if for_training:
                    draft.problems += error.problems
                else:
                    reasons = "; ".join(problem.message for problem in error.problems)
                    draft.notes.append(f"the vocabulary stays {rows}, because {reasons}; {_VOCABULARY}=N sets it")
        elif source == DEFAULT and not draft.value("model.from") and draft.source("data.path") != DEFAULT:
            without = f"data.path is set, but neither {TOKENIZER} nor {_VOCABULARY} is"
            draft.notes.append(f"{without}: the vocabulary is {rows}, which is enough for bytes")
    divisor, tp = draft.value(_DIVISOR) or 1, draft.value(_TP) or 1
    multiple = divisor * tp if divisor > 1 else 1
    if rows % multiple:
        before = reason or f"{rows:,} ({source})"
        factors = f"make_vocab_size_divisible_by {divisor} x tp {tp}"
        rows, reason = -(-rows // multiple) * multiple, f"{before}, rounded up to a multiple of {factors}"
    if reason:
        draft.put(_VOCABULARY, rows, f"derived: {reason}")


def _checked(draft: Draft, arguments: Arguments, for_training: bool, count_samples: CountSamples | None) -> Composed:
    """Adjust a composed draft, and return its checked config. Raises RefusedError with all problems."""
    draft.adjust(count_samples, for_training=for_training)
    config, wrong = convert(draft.values, draft.place)
    named = {problem.place.partition(" (")[0]: problem for problem in wrong}
    # A value that was derived from a wrong one is wrong too: one problem is enough.
    first = [problem for problem in named.values() if "(derived" not in problem.place]
    problems = [with_remedy(problem, draft) for problem in (*draft.problems, *first)]
    problems += check(config, draft.provenance, for_training=for_training, skip=named, usual=draft.covered)
    noted = (*draft.notes, *ignored(config, draft.provenance), *(() if problems else notes(config, draft.provenance)))
    composed = Composed(config, draft.provenance, noted)
    if problems:
        same = typed_again("plan", arguments)
        raise RefusedError([replace(p, remedy=same) if p.code == "PP-E118" else p for p in problems], composed)
    return composed

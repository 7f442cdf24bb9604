"""The learning rate of a run that goes on with another length: whether the rate jumps, and commands that avoid it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ppctl.cli.runs import program
from ppctl.config.argv import full_name
from ppctl.config.batch_sizes import steps_for_tokens
from ppctl.config.keys import text_keys
from ppctl.config.learning_rate import RatePiece, lr_at, pieces_of, warmup_steps
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem, pasted
from ppctl.launch.run_directory import with_value

_JUMP = 2.0
"""If the rate rises by more than this factor from one step to the next, the user has to confirm it."""


def sets_rate(key: str) -> bool:
    """Whether a key is about the learning rate alone."""
    return key.startswith(("optim.lr", "optim.min_lr", "optim.warmup_"))


def same_rates(before: RunConfig, after: RunConfig) -> bool:
    """Whether two configs have the same learning rate for every update."""
    return _rates(before) == _rates(after)


def rates_text(before: RunConfig, after: RunConfig, done: int) -> str:
    """`2.06e-06 in step 60, 0.000439 in step 61, 0 in step 80`: the last rate, the next one, the highest, the end's."""
    end, (_, warmup, pieces) = after.train.steps, _rates(after)
    turns = (done + 1, end, warmup, *(piece.until + 1 for piece in pieces))
    highest = max((step for step in turns if done < step <= end), key=lambda step: _rate(after, step), default=end)
    rates = [(_rate(before, max(done, 1)), max(done, 1))]
    rates += [(_rate(after, step), step) for step in sorted({done + 1, highest, end}) if done < step <= end]
    return ", ".join(f"{rate:.3g} in step {step}" for rate, step in rates)


def jumps(before: RunConfig, after: RunConfig, done: int) -> bool:
    """Whether the next step's rate is far above the last step's, and above the rate that the old config gives it."""
    expected = max(_rate(before, max(done, 1)), _rate(before, done + 1))
    return done < after.train.steps and _rate(after, done + 1) > _JUMP * expected * (1 + 1e-9)


def jump_problem(before: RunConfig, after: RunConfig, done: int, typed: Sequence[str], *more: str) -> Problem:
    """The problem of a jump of the rate behind step `done`, with the commands to choose from. `typed` are the words
    after `ppctl resume`; `more` are switches that also the first command needs, which keeps the decay."""
    last, following = _rate(before, max(done, 1)), _rate(after, done + 1)
    jump = f"{following / last:.3g} times as high" if last else "above 0"
    choices: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
    if held := _held(before):
        # Without typed rates, as in the command that is printed for it.
        told = _with(after, {key: before[key] for key in text_keys() if sets_rate(key)} | held)
        rate = _rate(told, after.train.steps)
        choice = f"the decay ends at step {before.train.steps:,} as before, and the rate stays {rate:.3g}"
        choices.append((choice + ("" if rate else " (nothing is learned)"), held, more))
    choices.append(("a new warm-up", _warmed_up(before, done, after.train.steps), ("--allow",)))
    choices.append(("the rates of a run that was as long from its start", {}, ("--allow",)))
    jumped = f"the next step's learning rate would be {jump}: {rates_text(before, after, done)}"
    # The rates of a choice replace typed rates.
    kept = [word for word in typed if not sets_rate(word)]
    commands = [
        pasted("ppctl", "resume", *(kept if rates else typed), *_words(rates), *allow) for _, rates, allow in choices
    ]
    message = f"{jumped}. Choose: {'; '.join(choice for choice, _, _ in choices)}"
    return Problem("PP-E617", message, "\n".join(commands), "train.steps (command line)")


def longer(run: str, config: RunConfig, done: int | None = None, steps: int | None = None, *more: str) -> str:
    """The command that goes on until `steps` (None: as many again) with `more`; the rate neither jumps nor is 0."""
    done = config.train.steps if done is None else done
    length: dict[str, Any] = {"steps": steps or 2 * done}
    length |= {key: None for key in ("train.samples", "train.tokens", "train.epochs") if config[key] is not None}
    words = ["resume", run, *_words(length)]
    with suppress(ValueError, ArithmeticError):  # of an altered file, whose problems `resume` reports
        last = max(_rate(config, max(done, 1)), _rate(config, done + 1))
        calm = [rates for rates in ({}, _held(config)) if 0 < _rate(_with(config, length | rates), done + 1) <= last]
        more = more if calm else (*more, "--allow")
        words += _words(calm[0] if calm else _warmed_up(config, done, length["steps"]))
    return f"{program()} {pasted(*words, *more)}"


def _held(config: RunConfig) -> dict[str, Any]:
    """Values that keep the decay's end where it is, at the present last step; none if the config sets the end, or if
    the warm-up ends later."""
    optim = config.optim
    free = optim.lr_decay_steps is None and optim.lr_decay_tokens is None
    free = free and warmup_steps(optim, steps_for_tokens(config)) < config.train.steps
    return {"optim.lr_decay_steps": config.train.steps} if free and optim.lr_decay_style not in _WITHOUT_END else {}


_WITHOUT_END = ("constant", "piecewise")


def _warmed_up(config: RunConfig, done: int, steps: int) -> dict[str, Any]:
    """Values for a rate that rises from the last step's to the peak, and falls to min_lr at the end."""
    optim = config.optim
    left = steps - done
    longest = (left + 1) // 2  # so that the rate falls again before the end
    top = done + min(max(warmup_steps(optim, steps_for_tokens(config)) or left // 10, 1), longest)
    rates = [("constant", done, _rate(config, done)), ("linear", top, optim.lr), ("cosine", steps, optim.min_lr)]
    rows = [f"{{style: {style}, until: {until}, lr: {rate:.3g}}}" for style, until, rate in rates]
    unset = ("optim.lr_decay_steps", "optim.lr_decay_tokens", "optim.lr_wsd_decay_steps")
    return {
        "optim.lr_decay_style": "piecewise",
        "optim.lr_pieces": f"[{', '.join(rows[: 2 + (top < steps)])}]",
        **{key: None for key in unset if config[key] is not None},
    }


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


def _with(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    for key, value in values.items():
        section, _, name = full_name(key).partition(".")
        config = with_value(config, section, **{name: value})
    return config


def _rate(config: RunConfig, step: int) -> float:
    return lr_at(step - 1, config.optim, config.train.steps, steps_for_tokens(config))


def _rates(config: RunConfig) -> tuple[float, int, list[RatePiece]]:
    optim, steps_for = config.optim, steps_for_tokens(config)
    return optim.lr, warmup_steps(optim, steps_for), pieces_of(optim, config.train.steps, steps_for)

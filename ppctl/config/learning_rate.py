"""The learning rate as a function of the updates made: a warm-up, then pieces, each of which ends at a rate.

Every style of `optim.lr_decay_style` is a list of pieces, and so is the weight of the MTP losses, over the steps done.
Both are pure functions, so that no cut and no resume changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from ppctl.config.batch_sizes import StepsFor, steps_for_tokens
from ppctl.config.keys import Finding
from ppctl.config.pieces import read_piece, read_weight_piece
from ppctl.config.schema import ModelConfig, OptimConfig, RunConfig


class RatePiece(NamedTuple):
    """The rate from the end of the previous piece until update `until`, where it is `lr`."""

    style: str
    until: int
    lr: float
    since: int | None = None
    """The update at which the piece's shape begins, if that may lie inside the warm-up: as in Megatron's WSD."""


SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda p: 0.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "exponential": lambda p: 2.0 * math.pow(0.5, p) - 1.0,
    "minus_sqrt": lambda p: 1.0 - math.sqrt(p),
}
"""Style of a piece -> the share left, at progress p in [0, 1], of the distance between its first and its last rate. The
last two are Megatron's shapes of WSD's decay."""


def lr_at(updates: int, optim: OptimConfig, steps: int, steps_for: StepsFor | None = None) -> float:
    """The learning rate of the update that follows `updates` others, out of `steps`.

    The warm-up is linear, lr x (u + 1) / w while u = updates < w: no update is lost at rate 0. Then each piece goes
    from rate a at update s to rate b at update e: b + (a - b) x shape((u - s) / (e - s)). The last piece's rate stays.
    `inverse-square-root` is lr x sqrt(max(w, 1) / max(u, 1)), at least min_lr, up to its last step.
    """
    warmup = warmup_steps(optim, steps_for)
    if updates < warmup:
        return optim.lr * ((updates + 1) / warmup)
    begin, lr = warmup, optim.lr
    for piece in pieces_of(optim, steps, steps_for):
        if piece.style == "inverse-square-root" and updates <= piece.until:
            return max(piece.lr, lr * math.sqrt(max(warmup, 1) / max(updates, 1)))
        if updates < piece.until:
            begin = begin if piece.since is None else piece.since
            if begin < updates == warmup > 0:
                return lr  # Megatron's warm-up ends with this update
            return piece.lr + (lr - piece.lr) * SHAPES[piece.style]((updates - begin) / (piece.until - begin))
        begin, lr = max(begin, piece.until), piece.lr
    return lr


def warmup_steps(optim: OptimConfig, steps_for: StepsFor | None) -> int:
    """Updates of the warm-up."""
    return _steps(optim.warmup_steps, optim.warmup_tokens, steps_for)


def pieces_of(optim: OptimConfig, steps: int, steps_for: StepsFor | None) -> list[RatePiece]:
    """The pieces after the warm-up, in order. `steps_for` is called only if something is given in tokens."""
    if optim.lr_decay_style == "constant":
        return []
    if optim.lr_decay_style == "piecewise":
        return _given(optim, steps_for)
    end = _steps(optim.lr_decay_steps or steps, optim.lr_decay_tokens, steps_for)
    if optim.lr_decay_style != "WSD":
        return [RatePiece(optim.lr_decay_style, end, optim.min_lr)]
    stable = end - (optim.lr_wsd_decay_steps or 0)
    return [RatePiece("constant", stable, optim.lr), RatePiece(optim.lr_wsd_decay_style, end, optim.min_lr, stable)]


def _given(optim: OptimConfig, steps_for: StepsFor | None) -> list[RatePiece]:
    pieces, lr = [], optim.lr
    for style, steps, tokens, rate in map(read_piece, optim.lr_pieces or ()):
        lr = rate if rate is not None else lr if style == "constant" else optim.min_lr
        pieces.append(RatePiece(style, _steps(steps, tokens, steps_for), lr))
    return pieces


def _steps(given: int, given_tokens: float | None, steps_for: StepsFor | None) -> int:
    """The steps given, or the steps for `given_tokens`. Raises ValueError if these need a missing `steps_for`."""
    if given_tokens is None:
        return given
    if steps_for is None:
        raise ValueError("the rate is given in tokens, but not how many tokens a step takes")
    return steps_for(given_tokens)


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """(keys, what is wrong, remedy) of settings of the learning rate that contradict each other."""
    optim = config.optim
    if optim.min_lr > optim.lr:
        message = "the learning rate falls to min_lr, which is above lr"
        yield ("optim.min_lr", "optim.lr"), message, f"optim.min_lr={optim.lr}"
    if optim.warmup_tokens is not None and optim.warmup_steps:
        message = "the warm-up is given twice: in steps and in tokens"
        yield ("optim.warmup_tokens", "optim.warmup_steps"), message, "optim.warmup_steps=0"
    if optim.lr_decay_tokens is not None and optim.lr_decay_steps is not None:
        message = "the end of the decay is given twice: in steps and in tokens"
        yield ("optim.lr_decay_tokens", "optim.lr_decay_steps"), message, "optim.lr_decay_steps=null"
    piecewise = optim.lr_decay_style == "piecewise"
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_steps is None:
        message = "lr_decay_style=WSD needs lr_wsd_decay_steps"
        remedy = f"optim.lr_wsd_decay_steps={max(config.train.steps // 10, 1)}"
        yield ("optim.lr_wsd_decay_steps", "optim.lr_decay_style"), message, remedy
    if piecewise and optim.lr_pieces is None:
        message = "lr_decay_style=piecewise needs lr_pieces"
        yield ("optim.lr_pieces", "optim.lr_decay_style"), message, "optim.lr_decay_style=cosine"
    if piecewise and (optim.lr_decay_steps is not None or optim.lr_decay_tokens is not None):
        message = "lr_pieces already say where the decay ends: lr_decay_steps and lr_decay_tokens must be null"
        yield ("optim.lr_pieces",), message, "optim.lr_decay_steps=null optim.lr_decay_tokens=null"
    ends = [piece.until for piece in _given(optim, steps_for_tokens(config))] if piecewise else []
    if shown := _out_of_order(ends):
        message = f"the pieces of the learning rate end after {shown} steps: each must end later than the one before"
        yield ("optim.lr_pieces",), message, "ppctl explain optim.lr_pieces"
    yield from _decay_within_warmup(config)


def _decay_within_warmup(config: RunConfig) -> Iterator[Finding]:
    """A finding if the last piece ends before the warm-up does: then the rate falls to its end right after the peak."""
    optim, steps_for = config.optim, steps_for_tokens(config)
    warmup, pieces = warmup_steps(optim, steps_for), pieces_of(optim, config.train.steps, steps_for)
    if pieces and pieces[-1].until <= warmup < config.train.steps and pieces[-1].lr != optim.lr:
        counted = "tokens" if optim.lr_decay_tokens is not None else "steps"
        given = ("optim.lr_pieces",) if optim.lr_pieces else (f"optim.lr_decay_{counted}", "optim.warmup_steps")
        message = f"the decay ends after {pieces[-1].until:,} steps, within the warm-up of {warmup:,}"
        yield given, message, "ppctl explain optim.lr_pieces" if optim.lr_pieces else f"{given[0]}=null"


def unreached_peak(config: RunConfig) -> Iterator[str]:
    """A note on a warm-up that ends after the run."""
    steps, warmup = config.train.steps, warmup_steps(config.optim, steps_for_tokens(config))
    if warmup > steps:
        yield (
            f"the warm-up takes {warmup:,} steps, but the run ends after {steps:,}: the rate never reaches optim.lr; "
            "optim.warmup_steps and train.steps set them"
        )


def _out_of_order(ends: list[int]) -> str:
    """The ends as text if one is not later than the previous one; else empty."""
    wrong = any(after <= before for before, after in pairwise(ends))
    return ", ".join(f"{end:,}" for end in ends) if wrong else ""


def mtp_weight(step: int, model: ModelConfig, steps_for: StepsFor) -> float:
    """The weight of the MTP losses in the step that follows `step` completed ones."""
    for steps, tokens, weight in map(read_weight_piece, model.mtp_loss_scaling_pieces or ()):
        if step < _steps(steps, tokens, steps_for):
            return weight
    return model.mtp_loss_scaling_factor


def broken_mtp_rules(config: RunConfig) -> Iterator[Finding]:
    """Findings about pieces of the MTP weight that do not end after the previous piece."""
    key, rows, steps_for = (
        "model.mtp_loss_scaling_pieces",
        config.model.mtp_loss_scaling_pieces,
        steps_for_tokens(config),
    )
    ends = [_steps(steps, tokens, steps_for) for steps, tokens, _ in map(read_weight_piece, rows or ())]
    if shown := _out_of_order(ends):
        message = f"the weights of the MTP losses end after {shown} steps: each must end later than the one before"
        yield (key,), message, f"{key}=null"

"""The learning rate of every update, against values that Megatron's formulas give by hand."""

import math
import shlex
from itertools import product

import pytest

from ppctl.config.batch_sizes import BatchSizes
from ppctl.config.compose import compose
from ppctl.config.learning_rate import lr_at, pieces_of
from ppctl.config.pieces import STYLES, WSD_STYLES, read_piece
from ppctl.config.schema import OptimConfig
from ppctl.errors import ConfigError

OPTIM = OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=4)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),
        (6, 0.2 + 0.4 * (1 + math.cos(math.pi / 4))),
        (8, 0.6),
        (11, 0.2 + 0.4 * (1 + math.cos(7 * math.pi / 8))),
        (12, 0.2),
        (500, 0.2),
    ],
)
def test_the_rate_warms_up_and_then_follows_half_a_cosine(step, expected):
    assert lr_at(step, OPTIM, 12) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 7), (1, 1), (3, 3), (5, 3), (3, 4)])
def test_no_step_of_a_run_is_lost_at_rate_zero_and_the_rate_never_exceeds_lr(warmup, steps):
    optim = OptimConfig(lr=0.1, min_lr=0.0, warmup_steps=warmup)
    assert all(0 < lr_at(step, optim, steps) <= 0.1 for step in range(steps))


def steps_for(tokens):
    """Steps for tokens, where each step takes so many."""
    return BatchSizes(tokens).steps_for if tokens else None


def rates(steps=10, tokens=0, until=12, **settings):
    optim = OptimConfig(**{"lr": 1.0, "min_lr": 0.2, "warmup_steps": 2} | settings)
    return [lr_at(update, optim, steps, steps_for(tokens)) for update in range(until)]


BEHIND = [1 - share / 8 for share in range(8)]
"""What is left of the way from the warm-up's end, update 2, to update 10."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_decay_style": "constant"}, [1.0] * 10),
        ({"lr_decay_style": "linear"}, [0.2 + 0.8 * left for left in BEHIND] + [0.2] * 2),
        ({"lr_decay_style": "linear", "lr_decay_steps": 6}, [1.0, 0.8, 0.6, 0.4] + [0.2] * 6),
        ({"lr_decay_style": "inverse-square-root"}, [math.sqrt(2 / u) for u in range(2, 11)] + [0.2]),
        ({"lr_decay_style": "inverse-square-root", "min_lr": 0.6},
         [*(math.sqrt(2 / u) for u in range(2, 6)), *[0.6] * 6]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"},
         [1.0] * 5 + [0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 4},
         [1.0] * 5 + [0.2 + 0.8 * (2 * 0.5 ** (part / 4) - 1) for part in (1, 2, 3)] + [0.2] * 2),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 4, "lr_wsd_decay_style": "minus_sqrt"},
         [1.0] * 5 + [0.2 + 0.8 * (1 - math.sqrt(part / 4)) for part in (1, 2, 3)] + [0.2] * 2),
    ],
)  # fmt: skip
def test_a_style_falls_as_megatron_says(settings, expected):
    assert rates(**settings) == pytest.approx([0.5, 1.0, *expected], rel=1e-12)


def megatron(optim, steps, now):
    """The rate that Megatron's OptimizerParamScheduler has after `now` of its steps, by its rules in their order."""
    warmup, end = optim.warmup_steps, optim.lr_decay_steps or steps
    if warmup and now <= warmup:
        return optim.lr * now / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    if now > end:
        return optim.min_lr
    if optim.lr_decay_style == "inverse-square-root":
        return max(optim.min_lr, optim.lr * max(warmup, 1) ** 0.5 / max(now, 1) ** 0.5)
    style, gone = optim.lr_decay_style, (now - warmup) / (end - warmup)
    if style == "WSD":
        style, gone = optim.lr_wsd_decay_style, (now - end + optim.lr_wsd_decay_steps) / optim.lr_wsd_decay_steps
    left = {
        "linear": lambda: 1 - gone,
        "cosine": lambda: (1 + math.cos(math.pi * gone)) / 2,
        "exponential": lambda: 2 * 0.5**gone - 1,
        "minus_sqrt": lambda: 1 - gone**0.5,
    }
    return optim.min_lr + (1.0 if gone <= 0 else left[style]()) * (optim.lr - optim.min_lr)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("optim.lr_decay_steps=8", "optim.lr_decay_steps=null"),
        ("optim.lr_decay_steps=8 optim.warmup_steps=0 optim.warmup_tokens=4096", "optim.lr_decay_steps=null"),
        ("optim.lr_decay_tokens=4096", "optim.lr_decay_tokens=null"),
        ("optim.lr_decay_style=inverse-square-root optim.lr_decay_steps=7", "optim.lr_decay_steps=null"),
        (
            "optim.lr_decay_style=piecewise 'optim.lr_pieces=[{style: linear, until: 8}]'",
            "ppctl explain optim.lr_pieces",
        ),
        ("optim.lr_decay_steps=9", None),
        ("optim.lr_decay_steps=8 train.steps=8", None),  # the run is in its warm-up to its end
        ("optim.lr_decay_steps=8 optim.min_lr=1e-3", None),  # nothing falls
        ("optim.lr_decay_style=constant", None),
    ],
)
def test_a_decay_that_ends_within_the_warm_up_is_refused(words: str, remedy: str | None) -> None:
    """As Megatron asserts: the rate would fall from the peak to min_lr in one step, and stay there."""
    line = "data.seq_length=64 gbs=8 steps=100 optim.lr=1e-3 optim.warmup_steps=8 " + words
    try:
        compose(shlex.split(line))
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.code == "PP-E103" and problem.remedy == remedy and "within the warm-up of 8" in problem.message
    else:
        assert remedy is None


@pytest.mark.parametrize("warmup", [0, 1, 5, 10, 15])
@pytest.mark.parametrize("min_lr", [0.0, 0.3])
@pytest.mark.parametrize("style", [*STYLES[:-1]])
def test_every_update_behind_the_warm_up_has_megatrons_rate(style, min_lr, warmup):
    """A warm-up begins with a rate above 0, one step before Megatron's; from its end on both count alike."""
    for decay, shape in product((1, 5, 10, 15, 20, 25) if style == "WSD" else (None,), WSD_STYLES):
        optim = OptimConfig(
            lr=1.0, min_lr=min_lr, warmup_steps=warmup, lr_decay_style=style, lr_decay_steps=20,
            lr_wsd_decay_steps=decay, lr_wsd_decay_style=shape,
        )  # fmt: skip
        ours = [lr_at(update, optim, 30) for update in range(30)]
        theirs = [megatron(optim, 30, update if update >= warmup else update + 1) for update in range(30)]
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12), (decay, shape)


def test_pieces_follow_each_other_in_steps_and_tokens():
    pieces = [
        {"style": "constant", "until": "400 tokens"},
        {"style": "linear", "until": 8, "lr": 0.4},
        {"style": "constant", "until": 9},
        {"style": "constant", "until": 10, "lr": 0.1},
    ]
    found = rates(tokens=100, lr_decay_style="piecewise", lr_pieces=pieces)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.85, 0.7, 0.55, 0.4, 0.1, 0.1, 0.1], rel=1e-12)


def test_tokens_count_for_warm_up_and_decay():
    in_steps = rates(warmup_steps=3, lr_decay_steps=7)
    assert rates(warmup_steps=0, warmup_tokens=250.0, lr_decay_tokens=700.0, tokens=100) == in_steps


def test_deepseeks_recipe_has_the_published_rates():
    config = compose(["+recipe=deepseek_v3"]).config
    per_step = config.train.global_batch_size * config.data.seq_length

    def at(tokens):
        return lr_at(math.ceil(tokens / per_step), config.optim, config.train.steps, steps_for(per_step))

    assert at(5e12) == at(9.99e12) == 2.2e-4
    assert at(12.15e12) == pytest.approx((2.2e-4 + 2.2e-5) / 2, rel=1e-4)
    assert at(14.4e12) == 2.2e-5
    assert at(14.7e12) == at(15e12) == 7.3e-6
    assert [piece.style for piece in pieces_of(config.optim, 1, steps_for(per_step))] == [
        "constant",
        "cosine",
        "constant",
        "constant",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"style": "cosine"},
        {"style": "step", "until": 3},
        {"style": "cosine", "until": 0},
        {"style": "cosine", "until": True},
        {"style": "cosine", "until": "10 apples"},
        {"style": "cosine", "until": 3, "lr": -1},
        {"style": "cosine", "until": 3, "rate": 1},
        "cosine",
    ],
)
def test_what_is_no_piece_is_refused(row):
    with pytest.raises(ValueError, match=r"piece|rate|tokens"):
        read_piece(row)

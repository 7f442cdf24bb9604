"""The loss scale's rule, step by step."""

import pytest

from ppctl.config.schema import OptimConfig
from ppctl.train.mixed_precision import LossScale


@pytest.mark.parametrize(
    ("steps", "scale"),
    [
        ("", 16),
        ("x", 16),  # the first of two chances
        ("xx", 8),
        ("xxx", 4),  # no chance comes back without a window
        ("xxxxxxxx", 2),  # the minimum
        ("...", 32),
        ("......", 64),
        ("..x...", 32),  # an overflow starts the window anew
        ("xx...x", 16),  # the window gave the chances back
    ],
)
def test_the_scale_halves_without_chances_left_and_doubles_after_a_window(steps, scale):
    optim = OptimConfig(initial_loss_scale=16, min_loss_scale=2, loss_scale_window=3, hysteresis=2)
    loss_scale = LossScale.of(optim)
    for step in steps:
        loss_scale.update(overflow=step == "x")
    assert loss_scale.scale == scale
    again = LossScale.of(optim)
    again.restore(loss_scale.state())
    assert again == loss_scale
    assert loss_scale.exhausted == (steps == "xxxxxxxx")


def test_a_smaller_window_counts_also_after_a_checkpoint_beyond_it():
    loss_scale = LossScale.of(OptimConfig(initial_loss_scale=16, loss_scale_window=500))
    loss_scale.restore({"scale": 16.0, "good_steps": 900, "chances": 2})
    loss_scale.update(overflow=False)
    assert (loss_scale.scale, loss_scale.good_steps) == (32, 0)


def test_a_fixed_scale_stays():
    loss_scale = LossScale.of(OptimConfig(loss_scale=8))
    loss_scale.update(overflow=True)
    assert loss_scale.scale == 8
    assert loss_scale.exhausted

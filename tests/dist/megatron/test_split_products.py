"""The real Megatron-core's products with weights under schedules that split backwards: deferred to W, and bit-equal.

A GPTModel trains three steps under ppctl's split schedules and under Megatron's functions, in one process each.
"""

import logging

import pytest
from ranks import run_ranks

import ppctl

# The helper and `ppctl.adopt` come with Megatron's extra of the tests.
real = pytest.importorskip("real_megatron")
Case = real.Case

pytestmark = real.needs_megatron


class Told(logging.Handler):
    """The lines about what is deferred, and what stays in I."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []
        logger = logging.getLogger("ppctl")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        if " matrices to W" in record.getMessage():
            self.lines.append(record.getMessage())


def compared(case, schedule):
    real.on_cpus()
    real.initialise(case)
    from megatron.core.pipeline_parallel import schedules

    told = Told()
    ppctl.adopt(schedule)
    ours = real.train(case, lambda: schedules.get_forward_backward_func())
    ppctl.release()
    real.forget_scales()
    theirs = real.train(case, lambda: schedules.get_forward_backward_func())
    nonzero = sum(bool(each.any()) for name, each in theirs.items() if " gradient " in name)
    return real.differences(ours, theirs), told.lines, nonzero


ALL = "stage {} defers {} of {} matrices to W"
CASES = [
    (Case(pp=2, words="tied ddp overlap fusion"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, words="bias ddp"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, words="partial"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=4, words="ddp overlap"), "zb_h2", {0: 5, 1: 4, 2: 4, 3: 5}),
    (Case(pp=2, dp=2, words="dist overlap gather"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, dp=2, words="dist overlap bf16 fusion"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, vpp=2, words="ddp overlap align"), "interleaved_zero_bubble", {0: 5, 1: 4, 2: 4, 3: 5}),
    (Case(pp=2, tp=2, words="sp"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, tp=2, words="bias ddp overlap fusion sp"), "zb_h1", {0: 9, 1: 9}),
    (Case(pp=2, tp=2, words="bias"), "zb_h1", {0: 9, 1: 9}),
]


@pytest.mark.parametrize(
    ("case", "schedule", "matrices"),
    [
        pytest.param(*each, marks=[pytest.mark.whole] * (number > 0), id=f"{each[0]}")
        for number, each in enumerate(CASES)
    ],
)
def test_every_matrix_of_a_gpt_model_waits_for_w_and_no_bit_differs(case, schedule, matrices):
    lines = set()
    for differ, told, nonzero in run_ranks(compared, case.world, case, schedule, timeout=120):
        assert differ == [] and nonzero
        lines |= set(told)
    assert lines == {ALL.format(stage, count, count) for stage, count in matrices.items()}


MIXED = "0F0,0F1,0I0,0B1,0W0\n1F0,1I0,1F1,1B1,1W0\n"
"""Both stages make the last backward whole, and then the weight gradients of the one before it."""


def under_a_file(case, path):
    """What differs, and how often a parameter was ready in a step: how many gradients it got outside of `no_sync`."""
    real.on_cpus()
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    made, init = [], Group.__init__
    Group.__init__ = lambda self, *arguments, **named: (init(self, *arguments, **named), made.append(self))[0]
    real.M = 2  # a sum of two has the same bits in either order
    differ, told, nonzero = compared(case, path)
    return differ, told, nonzero, {n for group in made for n in group.golden_per_param_grad_ready_counts.values()}


@pytest.mark.whole
@pytest.mark.parametrize("words", ["ddp overlap", "bias dist overlap gather"])
def test_a_file_with_whole_and_split_backwards_readies_every_parameter_once_and_last(words, tmp_path):
    path = tmp_path / "mixed.csv"
    path.write_text(MIXED)
    for differ, told, nonzero, ready in run_ranks(under_a_file, 4, Case(2, None, 2, words=words), path, timeout=120):
        assert differ == [] and nonzero and told
        assert ready == {1}


@pytest.mark.whole
@pytest.mark.parametrize("words", ["moe", "mtp", "moe mtp ddp overlap"])
def test_routers_stay_in_i_and_are_named_with_their_share(words):
    case = Case(pp=2, words=words)
    told = []
    for differ, lines, nonzero in run_ranks(compared, 2, case, "zb_h1", timeout=120):
        assert differ == [] and nonzero
        told += lines
    named = [line for line in told if "router.weight" in line]
    assert len(told) == 2 and len(named) == (2 if "moe" in words else 0), told
    assert all("% of weight gradients' FLOPs stay in I" in line for line in named)

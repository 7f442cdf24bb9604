"""The bitwise law: whatever the cut, five steps give the bits of one plain-torch process."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch.nn.functional as F
from dense_runs import config_of, hold_to_reference, reference, train_cut
from pairwise import in_tiers
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.schedule.action import Op
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import to_slots


def numbers_of_microbatches(pp: int) -> list[int]:
    return sorted({1, 2, pp, pp + 1, 2 * pp + 1})


FUSED = dict(batch_p2p_comm=True, batch_p2p_sync=True, overlap_p2p_comm=False)
MODES = {
    "ahead": {},
    "fused": FUSED,
    "one by one": dict(overlap_p2p_comm=False),
    "variable": dict(variable_seq_lengths=True),
    "fused, variable": dict(FUSED, variable_seq_lengths=True),
    "warm-up and flush overlapped": dict(overlap_p2p_comm_warmup_flush=True),
    "a backend of its own": dict(pipeline_model_parallel_comm_backend="gloo"),
    "plain": dict(transport="plain"),
    "plain, variable": dict(transport="plain", variable_seq_lengths=True),
}
CUTS = [
    (pp, vpp, m) for pp in (1, 2, 4) for vpp in (1, 2, 3) for m in numbers_of_microbatches(pp) if vpp == 1 or m >= pp
]
GRID = [
    (*cut, tied, deallocate, mode)
    for cut, tied, deallocate, mode in product(CUTS, (False, True), (False, True), MODES)
    if cut[0] > 1 or mode == "ahead"
]
MODE_SAMPLE = zip(random.Random(9).sample(CUTS[6:], len(MODES) - 1), [*MODES][1:], strict=True)
SAMPLE = [
    *((*cut, False, True, "ahead") for cut in random.Random(7).sample(CUTS, 8)),
    *((*cut, cut[2] % 2 == 0, True, mode) for cut, mode in MODE_SAMPLE),
    (2, 2, 5, False, True, "fused"),
    (4, 1, 9, False, True, "fused"),
]


@pytest.mark.shows(
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.overlap_p2p_comm",
    "parallel.batch_p2p_comm",
    "parallel.variable_seq_lengths",
    "parallel.pipeline_model_parallel_comm_backend",
    "parallel.overlap_p2p_comm_warmup_flush",
)
@pytest.mark.parametrize(("pp", "vpp", "m", "tied", "deallocate", "mode"), in_tiers(GRID, SAMPLE))
def test_any_cut_gives_the_bits_of_one_process(text, pp, vpp, m, tied, deallocate, mode):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=tied, deallocate_pipeline_outputs=deallocate, **MODES[mode])


@pytest.mark.shows("parallel.pipeline_model_parallel_layout")
@pytest.mark.parametrize(
    ("pp", "vpp", "layout"),
    [
        pytest.param(4, 1, "E||t*6|L", id="empty stage"),
        pytest.param(4, 1, "E|t*3|t*3|L", id="E alone and L alone"),
        pytest.param(2, 3, "E|t*2||t*3|t|L", id="empty stage among chunks"),
        pytest.param(2, 2, "Et*5|t||L", id="uneven"),
        pytest.param(1, 4, "Et|t*4||tL", id="one rank, four chunks"),
    ],
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_any_layout_gives_the_bits_of_one_process(text, pp, vpp, layout, tied):
    hold_to_reference(text, pp=pp, vpp=vpp, m=4, layout=layout, tied=tied)


@pytest.mark.shows("parallel.deallocate_pipeline_outputs", "pipeline.pp_schedule")
@pytest.mark.parametrize(
    ("schedule", "deallocate"),
    in_tiers([*product(("gpipe", "1f1b"), (False, True))], [("gpipe", True), ("1f1b", False)]),
)
def test_schedule_and_deallocation_change_no_bit(text, schedule, deallocate):
    hold_to_reference(text, pp=2, vpp=1, m=5, tied=True, pp_schedule=schedule, deallocate_pipeline_outputs=deallocate)


@pytest.mark.shows("pipeline.extra_warmup")
@pytest.mark.parametrize(
    ("pp", "vpp", "m", "extra"),
    [
        pytest.param(4, 1, 9, 1, marks=pytest.mark.whole),
        pytest.param(4, 1, 6, 3, marks=pytest.mark.whole),
        (3, 1, 2, "auto"),
        (4, 2, 9, 1),
    ],
)
def test_a_longer_warmup_changes_no_bit(text, pp, vpp, m, extra):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, extra_warmup=extra)


@pytest.mark.shows("pipeline.pp_batch_size")
@pytest.mark.parametrize(
    ("pp", "vpp", "m", "calls", "how"),
    [
        pytest.param(1, 1, 4, 2, {}, marks=pytest.mark.whole),
        pytest.param(2, 1, 6, 3, {}, marks=pytest.mark.whole),
        (2, 2, 4, 2, {}),
        (4, 1, 4, 4, {"variable_seq_lengths": True}),
        (3, 1, 6, 2, {"batch_p2p_comm": True, "overlap_p2p_comm": False}),
        (2, 2, 4, 2, {"transport": "plain"}),
    ],
)
def test_several_schedule_calls_a_step_change_no_bit(text, pp, vpp, m, calls, how):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, pp_batch_size=2 * m // calls, **how)


@pytest.mark.shows("pipeline.scale_grads_in_schedule")
@pytest.mark.parametrize(("pp", "vpp", "m", "calls"), [(1, 1, 3, 1), (2, 2, 4, 1), (3, 1, 6, 2)])
def test_scaling_in_the_schedule_weighs_every_microbatch_alike(text, pp, vpp, m, calls):
    how = {"scale_grads_in_schedule": True} | ({"pp_batch_size": 2 * m // calls} if calls > 1 else {})
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, **how)


def own_loss(logits, labels):
    """Cross entropy over the labels that count, as a user would write it."""
    counts = (labels != -100).float()
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)
    return (each * counts).sum()


def own_mean(logits, labels):
    return own_loss(logits, labels) / float((labels != -100).sum())


@pytest.mark.shows("pipeline.loss_fn")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_given_loss_is_a_sum_over_tokens_or_a_mean(text, scaled):
    how = {"loss_fn": own_mean if scaled else own_loss, "scale_grads_in_schedule": scaled}
    hold_to_reference(text, pp=2, vpp=1, m=3, **how)


def v_shaped(pp: int, m: int) -> str:
    """ZBV with its backwards made whole, as CSV: the turn of the V is on one rank, and so are its two ends."""
    rows = make_schedule("zbv_zero_bubble", pp=pp, vpp=2, num_microbatches=m).actions
    return "".join(",".join(str(a).replace("I", "B") for a in row if a.op is not Op.W) + "\n" for row in rows)


@pytest.mark.shows("pipeline.pp_schedule_csv")
@pytest.mark.parametrize(
    ("csv", "pp", "m"),
    [
        pytest.param("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", 2, 3, id="loop"),
        pytest.param(v_shaped(2, 5), 2, 5, id="V"),
        pytest.param(v_shaped(3, 4), 3, 4, id="V of three"),
        pytest.param(to_slots(make_schedule("interleaved_1f1b", pp=2, vpp=3, num_microbatches=3)), 2, 3, id="dumped"),
    ],
)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.whole), True])
def test_a_given_schedule_gives_the_bits_of_one_process(text, tmp_path, csv, pp, m, tied):
    path = tmp_path / "schedule.csv"
    path.write_text(csv)
    hold_to_reference(text, pp=pp, vpp=None, m=m, tied=tied, pp_schedule_csv=str(path))


@pytest.mark.shows("parallel.data_parallel_size")
def test_two_replicas_agree_with_one_process_to_a_millionth(text):
    """dp changes the order of the sum over microbatches: each rank sums its own first. All else is the same.

    eps is 1e-4 on both sides: AdamW divides by sqrt(v) + eps, and at 1e-8 the last bit of a nearly zero gradient can
    decide about a whole step of its weight.
    """
    losses, norms, weights, *_ = reference(text, 4, False, eps=1e-4)
    config = config_of(text, pp=2, vpp=1, m=2, dp=2)
    config.optim.eps = 1e-4
    for rank_losses, rank_norms, rank_weights in run_ranks(train_cut, 4, to_mapping(config)):
        assert rank_losses == pytest.approx(losses, rel=1e-6)
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        for name, value in rank_weights.items():
            expected = weights[name].numpy()
            assert abs(value - expected).max() / abs(expected).max() <= 1e-6, name

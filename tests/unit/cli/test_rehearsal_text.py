"""The screen of `ppctl rehearse`: the verdict first, within 80 columns, and only what differs from the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppctl.cli import rehearse
from ppctl.cli.main import main
from ppctl.cli.rehearse import _text as rehearsal_text
from ppctl.launch.planning import planned
from ppctl.plan.rehearsal import Rehearsal, kinds_of, replayed
from ppctl.records.rehearsal_record import (
    HostWait,
    LayerKernels,
    MeasuredTraffic,
    Moment,
    Operations,
    Rehearsed,
    StageMemory,
)

MIB = 2**20
SMALL = ("+recipe=quickstart", "launch.device=cuda", "layout=null", "pp=2", "vpp=1", "launch.memory_reserve=0GiB")


def rehearsal(device_memory: str = "64GiB", extra: int = 0) -> Rehearsal:
    """The quickstart on two ranks, everything measured as planned; `extra` bytes more of every kind."""
    composed, plan, problems = planned([*SMALL, f"launch.device_memory={device_memory}"])
    assert composed is not None
    assert plan is not None
    assert not [problem for problem in problems if problem.code != "PP-E801"]
    result = Rehearsal(composed.config, plan, plan, ())
    measured = []
    for kind in kinds_of(composed.config, plan):
        rank, cost = kind.ranks[0], plan.pp_ranks[kind.pp_ranks[0]]
        kept = result.planned_kept(cost.pp_rank) + extra
        own = cost.peak_bytes - cost.buffer_bytes + extra
        memory = StageMemory(cost.pp_rank, kept, kept + MIB, 2 * MIB)
        steps = replayed(plan.schedule.actions[cost.pp_rank], {cost.pp_rank: memory})
        top = max(steps, key=lambda step: step[1])[0]
        each = Rehearsed(
            rank=rank,
            weight_bytes=cost.weight_bytes + extra,
            gradient_bytes=cost.gradient_bytes,
            optimizer_bytes=cost.optimizer_bytes,
            peak_bytes=own,
            peak_action="",
            stages=(memory,),
            moments=(Moment(top, own, own),),
            in_update=0,
            host_waits=(
                HostWait("ppctl/train/grad_norm.py", 53, "step", 1),
                HostWait("ppctl/parallel/dispatch.py", 59, "forward", (3 + rank) * plan.num_microbatches),
                *([HostWait("ppctl/train/figures.py", 46, "step", 2)] if rank else []),
            ),
            operations=(Operations("forward", 1000, 400), Operations("step", 50, 20)),
            traffic=(
                MeasuredTraffic("send", "pp", "message", 8, 24 * MIB),
                MeasuredTraffic("alltoall", "ep", "forward", 4 + rank, MIB),
                MeasuredTraffic("alltoall", "ep", "backward", 4 + rank, MIB),
            ),
            seconds=1.0,
            layers=(
                LayerKernels("decoder", "forward", 4, 88, 56, 4 * 1_500_000_000, 0),
                LayerKernels("decoder", "backward", 4, 170, 112, 4 * 5_500_000_000, 4 * rank),
            ),
        )
        measured.append((kind, each))
    return replace(result, measured=tuple(measured))


AS_PLANNED = """\
quickstart fits: memory peaks at 108.12 MiB on pp_rank 0 in 0B0 (planned:
  108.12 MiB)
a device has 64.00 GiB: 0.2% of it is used
against the plan: weights, gradients and optimizer equal to the byte, kept
  activations equal to the byte, peaks equal to the byte
rehearsed: 2 of 2 ranks, one of each kind, with all 8 microbatches

Peak memory in MiB, the action at the peak, and the rank that it follows from
pp_rank  planned  measured  difference  at   from
0         108.12    108.12       equal  0B0  rank 0
1          93.51     93.51       equal  1B0  rank 1

Activations of a microbatch in MiB: kept from forward to backward, and what each
  needs on top while it runs
stage  planned  measured  difference  more in F  more in B
0        15.30     15.30       equal       1.00       2.00
1        16.43     16.43       equal       1.00       2.00

Where the host waits for the device
ppctl/parallel/dispatch.py:59  3 to 4 per microbatch in forward  all ranks
ppctl/train/figures.py:46      2 per step                        rank 1
ppctl/train/grad_norm.py:53    once per step                     all ranks

Operations and kernel launches of a step, and the least that the host needs for
  them at 5 us a launch (the plan's step: 17.7 ms)
rank  operations  launches  seconds
0          1,050       420   0.0021
1          1,050       420   0.0021

Kernels of a layer and microbatch, those that are neither products nor
  attention, and what these read and write. A backward computes again what is
  recomputed and adds to the weights' gradients, unless a W does
layer        pass  kernels  others  their GB  host waits
decoder   forward       22      14      1.50           0
decoder  backward     42.5      28      5.50         0.5

Messages and collectives of one rank in a step
what      over    count    MiB  ranks
alltoall    ep  8 to 10   2.00  all ranks
send        pp        8  24.00  all ranks
"""

OFF_PLAN = """\
quickstart fits: memory peaks at 112.89 MiB on pp_rank 0 in 0B0 (planned:
  108.12 MiB)
a device has 64.00 GiB: 0.2% of it is used
against the plan: weights, gradients and optimizer within 4.77 MiB, kept
  activations within 31.2%, peaks within 5.1%
rehearsed: 2 of 2 ranks, one of each kind, with all 8 microbatches

Peak memory in MiB, the action at the peak, and the rank that it follows from
pp_rank  planned  measured  difference  at   from
0         108.12    112.89      +4.41%  0B0  rank 0
1          93.51     98.28      +5.10%  1B0  rank 1

State in MiB, where it is not as planned
                planned  measured  difference
rank 0 weights     2.97      7.74   +4.77 MiB
rank 1 weights     2.97      7.74   +4.77 MiB

Activations of a microbatch in MiB: kept from forward to backward, and what each
  needs on top while it runs
stage  planned  measured  difference  more in F  more in B
0        15.30     20.07     +31.16%       1.00       2.00
1        16.43     21.19     +29.03%       1.00       2.00
"""


def test_the_screen_begins_with_the_verdict_and_fits_80_columns() -> None:
    assert rehearsal_text(rehearsal(), 80) == AS_PLANNED.rstrip("\n")


def test_state_is_a_table_only_where_it_is_not_as_planned() -> None:
    assert rehearsal_text(rehearsal(extra=5_000_000), 80).startswith(OFF_PLAN.rstrip("\n"))
    assert "State in" not in AS_PLANNED


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ("0.12GiB", "quickstart fits: memory"),
        ("0.107GiB", "quickstart fits, tight: memory"),
        ("0.05GiB", "quickstart does not fit: memory"),
        ("null", "quickstart is held against no limit (launch.device_memory=null): memory"),
    ],
)
def test_the_first_words_say_whether_it_fits(memory: str, verdict: str) -> None:
    text = rehearsal_text(rehearsal(memory), 160)
    assert text.startswith(verdict)
    assert ("a device has" in text) == (memory != "null")


def test_one_rank_alone_says_which_pp_ranks_it_stands_for() -> None:
    both = rehearsal()
    alone = rehearsal_text(replace(both, measured=both.measured[1:]), 160)
    assert "rehearsed: 1 of 2 ranks, for pp_rank 1, with all 8 microbatches" in alone


def test_no_wait_is_said_in_words() -> None:
    both = rehearsal()
    quiet = tuple((kind, replace(each, host_waits=(), traffic=())) for kind, each in both.measured)
    text = rehearsal_text(replace(both, measured=quiet), 160)
    assert "The host never waits for the device" in text
    assert "Messages" not in text
    assert text == text.strip()


def test_a_picture_of_an_unknown_form_is_refused_before_anything_is_rehearsed(capsys, monkeypatch):
    monkeypatch.setattr(rehearse, "_rehearse", lambda *_: pytest.fail("rehearsed for nothing"))
    for option in ("--timeline", "--page"):
        assert main(["rehearse", *SMALL, option, "step.png"]) == 2
        assert "PP-E129: --timeline step.png: its name must end in one of .html, .json, .txt" in capsys.readouterr().err

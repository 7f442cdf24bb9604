"""The schedules as pure functions: sizes in, compute-only Schedule out.

Policies with whole backwards have one shape: some forwards to warm up, then forward and backward in turn, then the
remaining backwards; they differ in the order of a rank's forwards (`schedule_table`) and in the length of the warm-up.
Policies that split backwards are in `zero_bubble`. `POLICIES` has a row with the facts about each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule import zero_bubble
from ppctl.schedule.action import Action, Op, Placement, Schedule, lane
from ppctl.schedule.schedule_table import get_schedule_table, in_turn, warmup_counts


def extra_of(pp: int, pp_rank: int, extra_warmup: int) -> int:
    """How many more forwards than the textbook's a rank runs ahead: at most one for each rank after it."""
    return min(extra_warmup, pp - pp_rank - 1)


def forward_only(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """Forwards alone, in the order of the schedule table: evaluation and generation."""
    return _by_table("forward_only", Placement("loop", pp, pp * vpp), num_microbatches, group, None)


def forwards_alone(placement: Placement, num_microbatches: int) -> Schedule:
    """`forward_only` for any placement, to evaluate a model that any schedule trains."""
    group = min(placement.pp, num_microbatches)
    return _by_table("forward_only", placement, num_microbatches, group, None)


def gpipe(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """All forwards, then all backwards; with chunks, all of a chunk before the next. All microbatches are in flight."""
    placement = Placement("loop", pp, pp * vpp)
    return _by_table("gpipe", placement, num_microbatches, num_microbatches, lambda pp_rank: vpp * num_microbatches)


def one_f_one_b(pp: int, vpp: int, num_microbatches: int, group: int, extra_warmup: int = 0) -> Schedule:
    """Non-interleaved 1F1B: `pp - pp_rank - 1` forwards ahead, then one forward and one backward in turn. One chunk.
    Neighbours wait two message times per microbatch for each other. With more forwards in flight (`extra_warmup`, of
    which each rank takes `extra_of`), messages may take longer before any rank waits."""

    def warmup(pp_rank: int) -> int:
        counts = warmup_counts(pp, pp_rank, num_microbatches=num_microbatches)
        return min(counts.warmup + extra_of(pp, pp_rank, extra_warmup), counts.total)

    return _by_table("1f1b", Placement("loop", pp, pp), num_microbatches, group, warmup)


def interleaved_1f1b(pp: int, vpp: int, num_microbatches: int, group: int, extra_warmup: int = 0) -> Schedule:
    """Megatron's interleaved 1F1B: a group of microbatches runs through a chunk, then through the next chunk.

    A group must fill the pipeline, or its first microbatch has not come round when its second chunk is due. If the last
    group is shorter than pp (Megatron refuses that), it is filled up to pp and the missing microbatches are left out of
    the order: sound because the full order is, and no rank holds more. `extra_warmup` as in 1F1B. Raises ScheduleError.
    """
    if vpp > 1 and group < min(pp, num_microbatches):
        message = f"groups of {group} microbatches do not fill a pipeline of pp {pp}: interleaving would hang"
        raise ScheduleError(Problem("PP-E306", message, f"parallel.microbatch_group_size_per_vp_stage={pp}"))
    rest = num_microbatches % group
    filled = num_microbatches + (pp - rest if vpp > 1 and 0 < rest < pp else 0)

    def warmup(pp_rank: int) -> int:
        """Megatron's number of forwards, over all chunks, before the rank's first backward, plus the extra warm-up."""
        if pp == 1:  # Megatron does not pipeline here; the chunks still have to run one after the other
            return min((vpp - 1) * group, vpp * num_microbatches)
        counts = warmup_counts(
            pp,
            pp_rank,
            num_microbatches=filled,
            num_model_chunks=vpp,
            microbatch_group_size_per_vp_stage=group,
            interleaved=True,
        )
        return min(counts.warmup + extra_of(pp, pp_rank, extra_warmup), counts.total)

    schedule = _by_table("interleaved_1f1b", Placement("loop", pp, pp * vpp), filled, group, warmup)
    if filled == num_microbatches:
        return schedule
    rows = tuple(tuple(action for action in row if action.mb < num_microbatches) for row in schedule.actions)
    return replace(schedule, num_microbatches=num_microbatches, actions=rows)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to order a step, with facts about it."""

    name: str
    make: Callable[..., Schedule]
    """`make(pp, vpp, num_microbatches, group)`, and a fifth argument if the policy takes an extra warm-up."""
    chunks: int = 1
    """Chunks per rank that the policy is made for."""
    fixed: bool = False
    """Whether the policy runs no other number of chunks."""
    placement: str = "loop"
    """How the policy places stages: `Placement.kind`."""
    splits: bool = False
    """Whether the policy splits backwards into I and W."""
    trains: bool = True
    """Whether the policy has backwards, so that a run's `pipeline.pp_schedule` may name it."""
    extra_warmup: bool = False
    """Whether forwards beyond the textbook's may run ahead."""
    pairs: bool = False
    """Whether the policy has, or can get (`pairs.pair_up`), forwards and backwards that run side by side."""
    settles: bool = False
    """Whether memory after a few rounds of the pipeline is known to be the same for any number of microbatches."""
    other_names: tuple[str, ...] = ()
    """The policy's names in other systems that differ in more than case: torch's classes without their prefix
    `Schedule`, and NeMo Automodel's documentation."""
    for_more_chunks: str = ""
    """The policy to take if a rank has more chunks."""
    least_microbatches: Callable[[int], int] = lambda pp: 1
    """pp -> the fewest microbatches for which the policy makes lists; to run fewer, it drops some from such a list."""
    needs_microbatches: Callable[[int], int] = lambda pp: 1
    """pp -> the fewest microbatches that the policy runs."""
    use: str = ""
    """When to choose the policy: the text of `ppctl explain pp_schedule`."""

    def runs(self, vpp: int) -> bool:
        """Whether the policy can run this many chunks per rank."""
        return vpp == self.chunks or not self.fixed

    @property
    def chunks_in_words(self) -> str:
        """The number of chunks in words, such as `one chunk per rank`."""
        number = {1: "one chunk", 2: "two chunks"}.get(self.chunks, f"{self.chunks} chunks")
        return f"{number} per rank" + (", down a V and back up" if self.placement == "v" else "")


_WHOLE: dict[str, Any] = {"extra_warmup": True, "pairs": True, "settles": True}
_HALVED: dict[str, Any] = {"fixed": True, "splits": True, "for_more_chunks": "interleaved_zero_bubble"}
_ON_A_V: dict[str, Any] = {"chunks": 2, "fixed": True, "placement": "v", "splits": True}

_ROWS = (
    Policy(
        "1f1b", one_f_one_b, **_WHOLE, fixed=True, for_more_chunks="interleaved_1f1b",
        use="many times as many microbatches as ranks: whole backwards, the fewest messages",
    ),
    Policy(
        "interleaved_1f1b", interleaved_1f1b, **_WHOLE, chunks=2, other_names=("Interleaved1F1B", "dfs"),
        use="fewer microbatches: whole backwards, vpp times less bubble for vpp times the messages and some memory",
    ),
    Policy(  # breadth-first with several chunks
        "gpipe", gpipe, other_names=("LoopedBFS", "looped_bfs"),
        use="comparisons: all microbatches are in memory at once",
    ),
    Policy(
        "zb_h1", zero_bubble.zb_h1, **_HALVED, other_names=("ZBH1",),
        use="a third of 1F1B's bubble for its memory and its messages",
    ),
    Policy(
        "zb_h2", zero_bubble.zb_h2, **_HALVED, other_names=("ZBH2",),
        use="memory for twice the activations: no bubble on any rank but filling and draining, with 1F1B's messages",
    ),
    Policy(
        "interleaved_zero_bubble", zero_bubble.interleaved_zero_bubble, chunks=2, splits=True,
        other_names=("InterleavedZeroBubble", "zero_bubble"),
        use="what zb_h1 is to 1F1B, for several chunks, also for more than two",
    ),
    Policy(
        "zbv_zero_bubble", zero_bubble.zbv_zero_bubble, **_ON_A_V, least_microbatches=zero_bubble.fills_zbv,
        other_names=("ZBVZeroBubble", "v_schedule", "ZBV"),
        use="no bubble but filling and draining for 1F1B's memory, where F, I and W take about the same time",
    ),
    Policy(
        "v_half", zero_bubble.v_half, **_ON_A_V, other_names=("VHalf",),
        use="half of 1F1B's memory, with about half of its bubble",
    ),
    Policy(
        "v_min", zero_bubble.v_min, **_ON_A_V, other_names=("VMin",),
        use="a third of 1F1B's memory; its bubble grows with the microbatches where F, I and W differ",
    ),
    Policy(
        "dualpipev", zero_bubble.dualpipev, **_ON_A_V, pairs=True, needs_microbatches=zero_bubble.fills_dualpipev,
        use="experts on several ranks: forwards stand beside backwards, to hide exchanges; at least 2 pp microbatches",
    ),
    Policy("forward_only", forward_only, trains=False),
)  # fmt: skip

POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in _ROWS}
"""The policies by name, the most used first."""


AUTO = "auto"
"""The name that asks for a searched schedule (`search`), and the name of a found one."""

SPELLINGS = {
    spelling.lower(): policy.name
    for policy in _ROWS
    if policy.trains
    for spelling in (policy.name, *policy.other_names)
} | {AUTO: AUTO}
"""Values of a run's `pipeline.pp_schedule`, as `schedule_policy` reads them -> the policy, or AUTO."""


def schedule_policy(name: str | None) -> str | None:
    """The policy `name` of any system, in any case (`Interleaved1F1B`, `ScheduleGPipe`, `V-Half`), AUTO, or None."""
    return SPELLINGS.get((name or "").lower().replace("-", "_").removeprefix("schedule"))


def fitting_policy(vpp: int) -> str:
    """The policy of a run that names none, for this number of chunks per rank."""
    return POLICIES["1f1b"].for_more_chunks if vpp > 1 else "1f1b"


def make_schedule(
    name: str,
    *,
    pp: int,
    vpp: int = 1,
    num_microbatches: int,
    microbatch_group_size: int | None = None,
    extra_warmup: int = 0,
) -> Schedule:
    """The compute-only schedule of a policy.

    `microbatch_group_size` (default pp, at most num_microbatches) is how many microbatches run through one chunk before
    the next; only the table of several chunks depends on it. `extra_warmup` (0 to pp - 1) is how many forwards more
    than the textbook's are in flight, on each rank at most one for every rank after it. Raises ScheduleError with
    every size that makes no sense.
    """
    group = pp if microbatch_group_size is None else microbatch_group_size
    sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    if microbatch_group_size is not None:
        sizes["microbatch_group_size"] = microbatch_group_size
    problems = [Problem("PP-E304", f"{key} must be above 0, not {value}") for key, value in sizes.items() if value < 1]
    policy = POLICIES.get(name)
    if policy is None:
        near = get_close_matches(name, POLICIES, 1, 0.4) or ["1f1b"]
        message = f"there is no schedule {name!r}, only {', '.join(POLICIES)}"
        problems.append(Problem("PP-E304", message, f"pipeline.pp_schedule={near[0]}"))
    most = pp - 1 if policy is not None and policy.extra_warmup else 0
    if not 0 <= extra_warmup <= max(most, 0):
        message = f"extra_warmup must be 0 to {most} for {name} with pp {pp}, not {extra_warmup}"
        problems.append(Problem("PP-E304", message, f"pipeline.extra_warmup={max(most, 0) if extra_warmup > 0 else 0}"))
    if problems or policy is None:
        raise ScheduleError(problems)
    if not policy.runs(vpp):
        message = f"{name} runs {policy.chunks_in_words}, but vpp is {vpp}"
        remedy = f"pipeline.pp_schedule={policy.for_more_chunks}" if policy.for_more_chunks else f"vpp={policy.chunks}"
        raise ScheduleError(Problem("PP-E305", message, remedy))
    if num_microbatches < policy.needs_microbatches(pp):
        message = too_few_microbatches(policy, pp, num_microbatches)
        raise ScheduleError(Problem("PP-E304", message, f"num_microbatches={policy.needs_microbatches(pp)}"))
    more = (extra_warmup,) if extra_warmup else ()
    return policy.make(pp, vpp, num_microbatches, min(group, num_microbatches), *more)


def too_few_microbatches(policy: Policy, pp: int, num_microbatches: int) -> str:
    """The message for a number of microbatches below `policy.needs_microbatches`."""
    least = policy.needs_microbatches(pp)
    return f"{policy.name} needs {least} or more microbatches to fill a V of {2 * pp} stages, not {num_microbatches}"


def _by_table(
    name: str, placement: Placement, num_microbatches: int, group: int, warmup: Callable[[int], int] | None
) -> Schedule:
    """Every rank's row from the one table; without `warmup` the backwards are left out."""
    chunks = placement.num_stages // placement.pp
    table = get_schedule_table(num_microbatches, chunks, group)
    rows: list[tuple[Action, ...]] = []
    for pp_rank in range(placement.pp):
        stages = placement.stages_of(pp_rank)
        ahead = [lane(Op.F, stage, num_microbatches) for stage in stages]
        forwards = [ahead[chunk][mb] for mb, chunk in table]
        if warmup is None:
            rows.append(tuple(forwards))
            continue
        back = [lane(Op.B, stage, num_microbatches) for stage in reversed(stages)]
        backwards = [back[chunk][mb] for mb, chunk in table]
        rows.append(tuple(in_turn(forwards, backwards, warmup(pp_rank))))
    return Schedule(name, placement, num_microbatches, tuple(rows))

"""Judge a schedule: complete, owned, ordered, matched, within its channels' capacities, and free of deadlock.

Reports everything that it finds. Works on compute-only and on lowered schedules. Must not know policies or prices.
Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ppctl.errors import Problem
from ppctl.schedule.action import (
    BACKWARDS,
    MESSAGES,
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Op,
    Schedule,
    deps,
    lane,
    receive_slots,
    send_slots,
)
from ppctl.schedule.executor import TIMED, execute
from ppctl.schedule.grid import grid, marked

_SHOWN = 6
"""How many actions or ranks one problem names; the rest are counted."""


def verify(schedule: Schedule) -> list[Problem]:
    """What is wrong with a schedule; empty means that every rank can run its list to the end as it stands.

    Every (stage, microbatch) has one F, and one B or one I and W (none has in a forward-only schedule), on the rank
    that owns the stage and after what it needs. In a lowered schedule every edge between ranks has its messages, in the
    same order at both ends and with no more receives posted than `receive_slots`; every stage reduces its gradients
    after its last backward; and the lists run to their ends with sends that complete only once their receive is posted.
    In a batched schedule the order is judged per pair of ranks, both directions together, and a batch is over when all
    messages in it have met their other ends. Linear in the number of actions. Order is judged where nothing is missing,
    deadlock where nothing else is wrong.
    """
    rows, pp = len(schedule.actions), schedule.placement.pp
    if rows != pp:
        return [Problem("PP-E303", f"{rows} rows for pp {pp}: one row per pp_rank")]
    if problems := list(_incomplete(schedule)):
        return problems
    return [*_disordered(schedule), *_crossed(schedule), *_beyond_slots(schedule)] or _hanging(schedule)


def _some(things: Iterable[object]) -> str:
    """The first few, and how many more there are."""
    named = [str(thing) for thing in things]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more


def _incomplete(schedule: Schedule) -> Iterator[Problem]:
    """Per rank: what is missing, what stands there twice, and what does not belong there."""
    for pp_rank, (row, wanted) in enumerate(zip(schedule.actions, _wanted(schedule), strict=True)):
        found = set(row)
        if missing := sorted(wanted - found):
            place = grid(schedule, pp_rank, len(row), f"the end, without {_some(missing)}")
            yield Problem("PP-E310", f"rank {pp_rank} lacks {_some(missing)}", place=place)
        if len(found) < len(row):
            twice = [action for action, times in Counter(row).items() if times > 1]
            place = grid(schedule, pp_rank, row.index(twice[0], row.index(twice[0]) + 1), "once more")
            yield Problem("PP-E311", f"rank {pp_rank} has more than once: {_some(twice)}", place=place)
        if foreign := sorted(found - wanted):
            reasons = [f"{action} ({_why_foreign(action, pp_rank, schedule)})" for action in foreign]
            place = grid(schedule, pp_rank, row.index(foreign[0]), _why_foreign(foreign[0], pp_rank, schedule))
            yield Problem("PP-E312", f"rank {pp_rank} has what it must not: {_some(reasons)}", place=place)


def _wanted(schedule: Schedule) -> list[set[Action]]:
    """What every rank has to run. What a schedule has anywhere (backwards, messages, sync) it has everywhere."""
    place, count = schedule.placement, schedule.num_microbatches
    ops = {action.op for row in schedule.actions for action in row}
    messages, backward = bool(ops & MESSAGES), bool(ops & BACKWARDS)
    sync = backward and (messages or Op.REDUCE_GRAD in ops)
    wanted: list[set[Action]] = [set() for _ in range(place.pp)]
    for stage in range(place.num_stages):
        own = wanted[place.rank_of(stage)]
        own.update(lane(Op.F, stage, count), lane(Op.B, stage, count) if backward else ())
        if sync:
            own.add(Action(Op.REDUCE_GRAD, stage))
        if stage and messages and not place.is_local(stage - 1):
            before = wanted[place.rank_of(stage - 1)]
            before.update(lane(Op.SEND_F, stage - 1, count), lane(Op.RECV_B, stage - 1, count) if backward else ())
            own.update(lane(Op.RECV_F, stage, count), lane(Op.SEND_B, stage, count) if backward else ())
    for stage, mb in schedule.split:
        if 0 <= stage < place.num_stages and 0 <= mb < count:
            own = wanted[place.rank_of(stage)]
            own.remove(Action(Op.B, stage, mb))
            own.update((Action(Op.I, stage, mb), Action(Op.W, stage, mb)))
    return wanted


def _why_foreign(action: Action, pp_rank: int, schedule: Schedule) -> str:
    op, stage, mb = action
    place = schedule.placement
    if not 0 <= stage < place.num_stages:
        return f"the stages are 0 to {place.num_stages - 1}"
    if place.rank_of(stage) != pp_rank:
        return f"stage {stage} is rank {place.rank_of(stage)}'s"
    if op is not Op.REDUCE_GRAD and not 0 <= mb < schedule.num_microbatches:
        return f"the microbatches are 0 to {schedule.num_microbatches - 1}"
    if op in MESSAGES:
        return "that edge has no message between ranks"
    return "a stage has backwards to reduce, or none" if op is Op.REDUCE_GRAD else "a backward is B, or I and W"


def _disordered(schedule: Schedule) -> Iterator[Problem]:
    """Per rank: actions that stand before one of the same list that they need."""
    for pp_rank, row in enumerate(schedule.actions):
        position = {action: index for index, action in enumerate(row)}
        early = [
            (index, f"{action} before {need}", f"before {need}")
            for index, action in enumerate(row)
            if action[0] not in RECEIVES
            for need in deps(action, schedule)
            if position.get(need, -1) > index
        ]
        if early:
            index, _, note = early[0]
            message = f"rank {pp_rank} has things before what they need: {_some(text for _, text, _ in early)}"
            yield Problem("PP-E313", message, place=grid(schedule, pp_rank, index, note))


def _sequences(schedule: Schedule, ops: frozenset[Op]) -> dict[Channel, list[Action]]:
    """Per queue, in list order, its messages, each named by its receive: at the end of `ops`."""
    receive = {
        Op.SEND_F: (Op.RECV_F, 1),
        Op.SEND_B: (Op.RECV_B, -1),
        Op.RECV_F: (Op.RECV_F, 0),
        Op.RECV_B: (Op.RECV_B, 0),
    }
    sequences: dict[Channel, list[Action]] = {}
    by_stage: dict[tuple[Op, int], list[Action]] = {}
    for row in schedule.actions:
        for action in row:
            op, stage, mb = action
            if op in ops:
                if (op, stage) not in by_stage:
                    queue = schedule.queue(schedule.placement.channel(action))
                    by_stage[op, stage] = sequences.setdefault(queue, [])
                posted_as, step = receive[op]
                by_stage[op, stage].append(Action(posted_as, stage + step, mb))
    return sequences


def _crossed(schedule: Schedule) -> Iterator[Problem]:
    """Per queue: messages that are sent in one order and received in another."""
    posted = _sequences(schedule, RECEIVES)
    for queue, sent in _sequences(schedule, SENDS).items():
        if sent != posted[queue]:
            number, (sent_for, received_by) = next(
                (n, pair) for n, pair in enumerate(zip(sent, posted[queue], strict=True), 1) if pair[0] != pair[1]
            )
            message = f"channel {queue}: message {number} is sent for {sent_for} but received by {received_by}"
            yield Problem("PP-E314", message)


def _beyond_slots(schedule: Schedule) -> Iterator[Problem]:
    """Per channel: no capacity, or more receives posted and not yet used than it has slots."""
    used_by = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
    tallies = _tallies(schedule)
    for row in schedule.actions:
        for action in row:
            op, stage, _ = action
            if op in RECEIVES:
                tally = tallies[op, stage]
                tally.posted += 1
                if tally.posted > tally.slots and not tally.first_beyond:
                    tally.first_beyond = str(action)
            elif op in used_by and (used := tallies.get((used_by[op], stage))) is not None:
                used.posted -= 1
    for tally in dict.fromkeys(tallies.values()):
        if tally.channel not in schedule.capacities:
            yield Problem("PP-E315", f"channel {tally.channel} carries messages and has no capacity")
        elif tally.first_beyond:
            message = f"channel {tally.channel} has {tally.slots} receive slots and {tally.first_beyond} needs one more"
            yield Problem("PP-E316", message)


@dataclass(slots=True, eq=False)
class _Tally:
    """How many receives of a channel are posted and not used."""

    channel: Channel
    slots: int
    posted: int = 0
    first_beyond: str = ""


def _tallies(schedule: Schedule) -> dict[tuple[Op, int], _Tally]:
    """The tally of every receive operation's channel."""
    place = schedule.placement
    ops = {action.op for row in schedule.actions for action in row} & RECEIVES
    by_channel: dict[Channel, _Tally] = {}
    tallies: dict[tuple[Op, int], _Tally] = {}
    for stage in range(place.num_stages - 1):
        for op, receiver in ((Op.RECV_F, stage + 1), (Op.RECV_B, stage)):
            if op in ops and not place.is_local(stage):
                channel = place.channel(Action(op, receiver))
                slots = receive_slots(schedule.capacities.get(channel, 0))
                tallies[op, receiver] = by_channel.setdefault(channel, _Tally(channel, slots))
    return tallies


def _hanging(schedule: Schedule) -> list[Problem]:
    """The deadlock, if there is one: where every rank that is stuck waits, and for what."""
    nothing = [0.0] * schedule.placement.num_stages
    stuck = execute(schedule, dict.fromkeys(TIMED, nothing), lambda channel: 0.0).stuck
    if not stuck:
        return []
    at = {pp_rank: schedule.actions[pp_rank][index] for pp_rank, index in sorted(stuck.items())}
    message = "the schedule hangs: " + _some(f"rank {pp_rank} waits at {action}" for pp_rank, action in at.items())
    lines = [
        marked(schedule.actions[pp_rank], pp_rank, index, f"waits for {_awaited(schedule, pp_rank, index)}")
        for pp_rank, index in sorted(stuck.items())
    ]
    sends = not schedule.batched and any(action.op in SENDS for action in at.values())
    return [Problem("PP-E317", message, "pipeline.p2p_capacity=null" if sends else "", "\n".join(lines[:_SHOWN]))]


def _awaited(schedule: Schedule, pp_rank: int, index: int) -> str:
    """What would set a stuck rank free."""
    row, place = schedule.actions[pp_rank], schedule.placement
    action = row[index]
    if schedule.batched and action.op in MESSAGES:
        source, target, _ = place.channel(action)
        return f"rank {target} to receive it" if action.op in SENDS else f"rank {source} to send it"
    if action.op in SENDS:
        channel = place.channel(action)
        sent = [a for a in row[: index + 1] if a.op in SENDS and place.channel(a) == channel]
        oldest = sent[-1 - send_slots(schedule.capacities[channel])]
        return f"rank {channel.target} to receive {oldest}"
    need = deps(action, schedule)[-1]
    need = deps(need, schedule)[0] if need.op in RECEIVES else need
    return f"{need} of rank {place.rank_of(need.stage)}"

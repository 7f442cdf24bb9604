"""Judge a schedule: complete, owned, ordered, matched, within its channels' capacities, and free of deadlock.

Reports everything that it finds. Works on compute-only and on lowered schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import lt

from ppctl.errors import Problem, some
from ppctl.schedule.action import (
    BACKWARDS,
    INPUT_GRADIENTS,
    MESSAGES,
    RECEIVES,
    SENDS,
    TIMED,
    WEIGHT_GRADIENTS,
    Action,
    Channel,
    Edge,
    F,
    Op,
    Schedule,
    deps,
    lane,
    receive_slots,
    send_slots,
)
from ppctl.schedule.batching import shorter
from ppctl.schedule.executor import Execution, execute
from ppctl.schedule.pairs import wrong_pairs

_WAITING_SHOWN = 6
"""The most stuck ranks whose rows are shown."""
_RANKS_SHOWN = 8
"""The most ranks whose rows are shown around a mark."""
_BEFORE, _AFTER = 2, 2


def verify(schedule: Schedule, run: Execution | None = None, sound: Schedule | None = None) -> list[Problem]:
    """The problems of a schedule; empty means that every rank can run its list to the end.

    `run` is an execution of the schedule at any costs, if there is one, which shows stuck ranks. If the schedule
    repeats rounds of a `shorter` one, the shorter lists are judged: each further round adds the same actions in the
    same order. The execution is always of the whole. The lists of the schedule `sound` are not judged again.

    The rules: every (stage, microbatch) has one F, and one B or one I and W (in a forward-only schedule neither), on
    the rank that owns the stage and after its dependencies. In a lowered schedule every edge between ranks has its
    messages, in the same order at both ends and with at most `receive_slots` receives posted; every stage reduces its
    gradients after its last backward; and all lists run to their ends, where a send completes only when its receive is
    posted. In a batched schedule order is checked per pair of ranks, both directions together, and a batch completes
    when all its messages have met their other ends.

    Linear in the number of actions. Order is checked if nothing is missing, deadlock if nothing else is wrong, and
    pairs (`wrong_pairs`) if the lists run to their ends.
    """
    rows, pp = len(schedule.actions), schedule.placement.pp
    if rows != pp:
        return [Problem("PP-E303", f"there are {rows} rows, but pp is {pp}: write one row per pp_rank")]
    lists = shorter(schedule) or schedule
    wrong = [] if lists is sound else list(_wrong_lists(lists))
    return wrong or _hanging(schedule, run) or [*wrong_pairs(schedule)]


def _wrong_lists(schedule: Schedule) -> Iterable[Problem]:
    """The faults of the lists, but for deadlocks and pairs."""
    wanted = _wanted(schedule)
    lanes = [_lanes_of(row, own, schedule.num_microbatches) for row, own in zip(schedule.actions, wanted, strict=True)]
    complete = [own for own in lanes if own is not None]
    if len(complete) < len(lanes):
        return _incomplete(schedule, [set(chain.from_iterable(own.values())) for own in wanted])
    return chain(_disordered(schedule, complete), _crossed(schedule, complete), _beyond_slots(schedule, complete))


def out_of_order(schedule: Schedule) -> dict[int, tuple[Action, Action]]:
    """The stages that add up gradients in another order than the microbatches', each with two actions as evidence. A
    schedule with such stages runs, but its floating-point sums may differ in bits from other schedules'."""
    misplaced: dict[int, tuple[Action, Action]] = {}
    for row in schedule.actions:
        last: dict[tuple[bool, int], Action] = {}
        for action in row:
            # I also adds gradients: of weights that are not deferred to W
            for sums in (INPUT_GRADIENTS, WEIGHT_GRADIENTS):
                if action.op in sums:
                    before = last.get((sums is INPUT_GRADIENTS, action.stage))
                    if before is not None and before.mb > action.mb:
                        misplaced.setdefault(action.stage, (before, action))
                    last[sums is INPUT_GRADIENTS, action.stage] = action
    return misplaced


_Wanted = dict[tuple[Op, int], Sequence[Action]]
"""(operation, stage) -> the actions that a rank has to run."""


def _wanted(schedule: Schedule) -> list[_Wanted]:
    """The actions that every rank has to run. A schedule that has messages anywhere, or backwards and sync on a trained
    stage, must have them everywhere."""
    place, count = schedule.placement, schedule.num_microbatches
    ops = set().union(*({op for op, _, _ in row} for row in schedule.actions))
    messages, backward = bool(ops & MESSAGES), bool(ops & BACKWARDS)
    sync = backward and (messages or Op.REDUCE_GRAD in ops)
    halves: dict[int, list[int]] = {}
    for stage, mb in schedule.split:
        halves.setdefault(stage, []).append(mb)
    wanted: list[_Wanted] = [{} for _ in range(place.pp)]
    for stage in range(place.num_stages):
        own = wanted[place.rank_of(stage)]
        own[F, stage] = lane(F, stage, count)
        if backward and stage >= schedule.frozen_stages:
            split = set(halves.get(stage, ()))
            for op in (Op.I, Op.W) if split else ():
                own[op, stage] = [action for action in lane(op, stage, count) if action.mb in split]
            if len(split) < count:
                own[Op.B, stage] = [action for action in lane(Op.B, stage, count) if action.mb not in split]
            if sync:
                own[Op.REDUCE_GRAD, stage] = [Action(Op.REDUCE_GRAD, stage)]
    for edge in schedule.edges if messages else ():
        if backward or edge.send is Op.SEND_F:
            wanted[edge.channel.source][edge.send, edge.sender] = lane(edge.send, edge.sender, count)
            wanted[edge.channel.target][edge.receive, edge.receiver] = lane(edge.receive, edge.receiver, count)
    return wanted


def _incomplete(schedule: Schedule, wanted: Sequence[set[Action]]) -> Iterator[Problem]:
    """Per rank: missing, repeated and foreign actions."""
    for pp_rank, (row, own) in enumerate(zip(schedule.actions, wanted, strict=True)):
        present = set(row)
        if missing := sorted(own - present):
            place = _rows_around(schedule, pp_rank, len(row), f"the end, without {some(missing)}")
            yield Problem("PP-E310", f"rank {pp_rank} lacks {some(missing)}", place=place)
        if len(present) < len(row):
            twice = [action for action, times in Counter(row).items() if times > 1]
            place = _rows_around(schedule, pp_rank, row.index(twice[0], row.index(twice[0]) + 1), "once more")
            yield Problem("PP-E311", f"rank {pp_rank} has more than once: {some(twice)}", place=place)
        if foreign := sorted(present - own):
            reasons = [f"{action} ({_why_foreign(action, pp_rank, schedule)})" for action in foreign]
            place = _rows_around(schedule, pp_rank, row.index(foreign[0]), _why_foreign(foreign[0], pp_rank, schedule))
            yield Problem("PP-E312", f"rank {pp_rank} must not have these actions: {some(reasons)}", place=place)


def _why_foreign(action: Action, pp_rank: int, schedule: Schedule) -> str:
    """The reason why `action` does not belong in this rank's list; call it only for an action that does not."""
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
    return "its stage has no gradients to reduce" if op is Op.REDUCE_GRAD else "a backward is a B, or an I and a W"


_Lanes = dict[tuple[Op, int], list[int]]
"""(operation, stage) -> the index in a rank's list for each microbatch, -1 for none: compared at C speed."""


def _lanes_of(row: Sequence[Action], wanted: _Wanted, count: int) -> _Lanes | None:
    """The index of each action in a rank's list of `count` microbatches; None unless it has each wanted action once."""
    at = dict(zip(row, range(len(row)), strict=True))
    if len(at) < len(row) or len(row) != sum(map(len, wanted.values())):
        return None
    lanes: _Lanes = {}
    for key, actions in wanted.items():
        try:
            found = list(map(at.__getitem__, actions))
        except KeyError:
            return None
        if len(found) < count:  # split backwards, or REDUCE_GRAD, which is once for all microbatches
            some = dict(zip((action.mb for action in actions), found, strict=True))
            found = [some.get(mb, some.get(-1, -1)) for mb in range(count)]
        lanes[key] = found
    return lanes


def _disordered(schedule: Schedule, lanes: Sequence[_Lanes]) -> Iterator[Problem]:
    """Per rank: actions that come before an action of the same list that they need."""
    split, stages = schedule.split, range(schedule.placement.num_stages)
    mbs = range(schedule.num_microbatches if split else 1)
    examples = [{((s, mb) in split, (s + 1, mb) in split): mb for mb in mbs}.values() for s in stages]
    """By stage one microbatch of every kind: microbatches that are split equally need the same actions."""
    for pp_rank, own in enumerate(lanes):
        early: list[tuple[int, Action, Action]] = []
        for (op, stage), at in own.items():
            lists = (deps(Action(op, stage, mb), schedule) for mb in examples[stage] if op not in RECEIVES)
            needs = (
                {(need.op, need.stage) for need in chain.from_iterable(lists)}
                if op is not Op.REDUCE_GRAD
                else {(each, stage) for each in WEIGHT_GRADIENTS}
            )
            for key in needs & own.keys():
                if any(map(lt, at, own[key])):
                    named = repeat(Action(op, stage)) if op is Op.REDUCE_GRAD else lane(op, stage, len(at))
                    pairs = zip(named, at, lane(*key, len(at)), own[key], strict=False)
                    early += [(i, action, need) for action, i, need, j in pairs if 0 <= i < j]
        if early:
            early.sort()
            index, _, need = early[0]
            message = f"rank {pp_rank} has things before what they need: "
            message += some(f"{action} before {other}" for _, action, other in early)
            yield Problem("PP-E313", message, place=_rows_around(schedule, pp_rank, index, f"before {need}"))


def _edges_of(
    schedule: Schedule, lanes: Sequence[_Lanes], way: Callable[[Channel], Channel]
) -> dict[Channel, list[Edge]]:
    """`way(channel)` -> the edges of these channels whose messages are in the lists."""
    edges: dict[Channel, list[Edge]] = {}
    for edge in schedule.edges:
        if (edge.receive, edge.receiver) in lanes[edge.channel.target]:
            edges.setdefault(way(edge.channel), []).append(edge)
    return edges


def _crossed(schedule: Schedule, lanes: Sequence[_Lanes]) -> Iterator[Problem]:
    """Per queue: messages that are sent in one order and received in another."""
    for queue, edges in _edges_of(schedule, lanes, schedule.queue).items():
        sent = _in_order(lanes[queue.source][edge.send, edge.sender] for edge in edges)
        posted = _in_order(lanes[queue.target][edge.receive, edge.receiver] for edge in edges)
        if sent != posted:
            number = next(n for n, pair in enumerate(zip(sent, posted, strict=True)) if pair[0] != pair[1])
            differing = [divmod(order[number], schedule.num_microbatches) for order in (sent, posted)]
            sent_for, received_by = (Action(edges[n].receive, edges[n].receiver, mb) for n, mb in differing)
            message = f"channel {queue}: message {number + 1} is sent for {sent_for} but received by {received_by}"
            yield Problem("PP-E314", message)


def _in_order(lanes: Iterable[list[int]]) -> list[int]:
    """The messages of several lanes, numbered one lane after another, as they stand in the list."""
    at = list(chain.from_iterable(lanes))
    return sorted(range(len(at)), key=at.__getitem__)


def _beyond_slots(schedule: Schedule, lanes: Sequence[_Lanes]) -> Iterator[Problem]:
    """Per channel: no capacity, or more receives posted and not yet used than it has slots."""
    for channel, edges in _edges_of(schedule, lanes, lambda channel: channel).items():
        if channel not in schedule.capacities:
            yield Problem("PP-E315", f"channel {channel} carries messages but has no capacity")
            continue
        own, slots = lanes[channel.target], receive_slots(schedule.capacities[channel])
        posted = sorted(chain.from_iterable(own[edge.receive, edge.receiver] for edge in edges))
        users = (own.get((op, edge.receiver), ()) for edge in edges for op in edge.ops)
        used = sorted(at for at in chain.from_iterable(users) if at >= 0)
        # A receive has a slot if the message `slots` before it is used earlier in the list.
        if any(map(lt, posted[slots:], used)):
            beyond = next(at for at, free in zip(posted[slots:], used, strict=False) if at < free)
            needs = schedule.actions[channel.target][beyond]
            yield Problem("PP-E316", f"channel {channel} has {slots} receive slots, but {needs} needs one more")


def _hanging(schedule: Schedule, run: Execution | None) -> list[Problem]:
    """The problem of a deadlock, if there is one: where every stuck rank waits, and for what."""
    nothing = dict.fromkeys(TIMED, [0.0] * schedule.placement.num_stages)
    stuck = (run or execute(schedule, nothing, lambda channel: 0.0)).stuck
    if not stuck:
        return []
    at = {pp_rank: schedule.actions[pp_rank][index] for pp_rank, index in sorted(stuck.items())}
    message = "the schedule hangs: " + some(f"rank {pp_rank} waits at {action}" for pp_rank, action in at.items())
    lines = [
        _marked(schedule.actions[pp_rank], pp_rank, index, f"waits for {_awaited(schedule, pp_rank, index)}")
        for pp_rank, index in sorted(stuck.items())[:_WAITING_SHOWN]
    ]
    sends = not schedule.batched and any(action.op in SENDS for action in at.values())
    return [Problem("PP-E317", message, "pipeline.p2p_capacity=null" if sends else "", "\n".join(lines))]


def _awaited(schedule: Schedule, pp_rank: int, index: int) -> str:
    """The event that would free a stuck rank."""
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


def _marked(row: Sequence[Action], pp_rank: int, index: int, note: str) -> str:
    """One rank's row around an action, with `<-- here` and a note after it; an index past the end marks the end."""
    before, after = _window(row, index)
    return f"rank {pp_rank}: {' '.join([*before, '<-- here,'])} {note}{'; ' if after else ''}{' '.join(after)}"


def _rows_around(schedule: Schedule, pp_rank: int, index: int, note: str) -> str:
    """The rows of all ranks (of the nearest, if there are many) around one action, which is marked."""
    count = len(schedule.actions)
    first = max(0, min(pp_rank - _RANKS_SHOWN // 2, count - _RANKS_SHOWN))
    lines = []
    for other in range(first, min(first + _RANKS_SHOWN, count)):
        row = schedule.actions[other]
        if other == pp_rank:
            lines.append(_marked(row, other, index, note))
        else:
            before, after = _window(row, index)
            lines.append(f"rank {other}: {' '.join([*before, *after])}")
    return "\n".join(lines)


def _window(row: Sequence[Action], index: int) -> tuple[list[str], list[str]]:
    """The cells up to `index` and those after it, cut if there are more."""
    before = ["..."] * (index > _BEFORE) + [str(action) for action in row[max(index - _BEFORE, 0) : index + 1]]
    after = [str(action) for action in row[index + 1 : index + 1 + _AFTER]]
    return before, after + ["..."] * (index + 1 + _AFTER < len(row))

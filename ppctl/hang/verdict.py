"""The failure of a job in which nothing moves: of which rank, why, and a table of what every rank does.

Knows how a person reads it. Must not know processes, clocks or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.hang.waits import Wait, root, same_exchange, waits
from ppctl.plan import Plan
from ppctl.rank_records import RankFailure, RankState

STILL, DEAD_EDGE, FREES = "PP-E706", "PP-E707", "PP-E822"
_ROWS = 32


def verdict(plan: Plan, states: Sequence[RankState], still: float, now: float) -> RankFailure:
    """The failure of the rank that all wait for, nothing having moved for `still` seconds before `now`.

    `now` is on the clock of the states; there is at least one.
    """
    found = waits(plan, states)
    culprit = root(found)
    assert culprit is not None  # of no states none is late
    code, message = STILL, _message(found, culprit, still)
    if culprit.on is None and not culprit.state.stopped and (same := same_exchange(plan, found, culprit)) is not None:
        message = _no_exchange(*same, found, still)
    if culprit.sent and culprit.on is not None and not culprit.state.stopped:  # else its state is old
        by_rank = {wait.state.rank: wait.state for wait in found}
        code, message = DEAD_EDGE, _dead_edge(culprit, by_rank[culprit.on], still)
    return RankFailure(
        rank=culprit.state.rank,
        message=message,
        type="Hang",
        code=code,
        stage=None if culprit.current is None else culprit.current.stage,
        action=None if culprit.current is None else str(culprit.current),
        place="\n".join(_row(wait, now) for wait in found[:_ROWS]),
        host=culprit.state.host,
    )


def _message(found: Sequence[Wait], culprit: Wait, still: float) -> str:
    own, waiting = culprit.state, [wait for wait in found if wait.on is not None]
    nothing = f"nothing has moved for {still:.0f} s"
    if own.stopped:
        return f"{nothing}, and this rank's process is stopped, or its host {own.host} does not answer"
    states = {(wait.state.state, wait.state.step) for wait in found}
    if not waiting and len(found) > 1 and len(states) == 1 and culprit.current is None:
        return f"{nothing}, and all ranks wait in the same collective: a connection between two of them may be dead"
    ranks = f"{len(waiting)} of {len(found)} ranks wait for this one in the end" if waiting else "this rank the longest"
    ranks += _along(waiting, own.rank)
    beside = f"; it runs {culprit.current} beside {culprit.beside}" if culprit.beside is not None else ""
    return f"{nothing}, and {ranks}" + (f" (it is on {own.host})" if own.host else "") + _at_once(found) + beside


def _at_once(found: Sequence[Wait]) -> str:
    """Which ranks compute and wait for no other; of several each one's device may wait for a message of another's."""
    computing = [str(wait.state.rank) for wait in found if wait.on is None and wait.current and wait.state.working]
    if len(computing) < 2:
        return ""
    ranks = ", ".join(computing[:_ROWS])
    return f"; ranks {ranks} compute at once: on GPUs their allocators may wait for each other ({FREES})"


def _along(waiting: Sequence[Wait], rank: int) -> str:
    """Which ranks wait for this one in an exchange, by axis."""
    by_axis: dict[str, list[str]] = {}
    for wait in waiting:
        if wait.axis is not None and wait.on == rank:
            by_axis.setdefault(wait.axis, []).append(str(wait.state.rank))
    return "".join(
        f", {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} in an exchange along {axis}"
        for axis, ranks in by_axis.items()
    )


def _no_exchange(axis: str, ranks: Sequence[int], found: Sequence[Wait], still: float) -> str:
    states = {wait.state.rank: wait.state for wait in found}
    all_of = " and ".join(f"{rank}{_on(states[rank])}" for rank in ranks)
    ends = f"ranks {all_of} have all started the same collective along {axis}, and it does not end"
    return f"nothing has moved for {still:.0f} s: {ends}; a connection between two of them may be dead"


def _dead_edge(culprit: Wait, sender: RankState, still: float) -> str:
    own = culprit.state
    ends = f"rank {sender.rank}{_on(sender)} does not reach rank {own.rank}{_on(own)}"
    return f"{ends}: {culprit.needs} was sent and has not come for {still:.0f} s, and both are alive"


def _on(state: RankState) -> str:
    return f" on {state.host}" if state.host else ""


def _row(wait: Wait, now: float) -> str:
    """One row of the table: what a rank does, for how long, and which rank it waits for."""
    own = wait.state
    where = f"in {wait.current}" if wait.current is not None else own.state
    where += f" beside {wait.beside}" if wait.beside is not None else ""
    last = f", after {wait.done}" if wait.done is not None else ""
    on = ", stopped or gone" if own.stopped else ""
    if wait.on is not None:
        sent = ", which was sent" if wait.sent else ""
        on += f", waits for rank {wait.on}" + (f" ({wait.needs}{sent})" if wait.needs is not None else "")
        on += f" in an exchange along {wait.axis}" if wait.axis is not None else ""
    return f"rank {own.rank}: step {own.step + 1}, {where}{last}, for {max(0.0, now - own.since):.0f} s{on}"

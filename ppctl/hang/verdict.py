"""What is told of a job in which nothing moves: the culprit's error record, and a row for every rank.

Knows how a person reads it. Must not know processes, clocks or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.hang.waits import Standing, Wait, root, waits
from ppctl.plan import Plan

STILL, DEAD_EDGE = "PP-E706", "PP-E707"
_ROWS = 32


def verdict(plan: Plan, standings: Sequence[Standing], still: float, now: float) -> dict[str, object]:
    """The error record of the rank that all wait for: what goes into errors/ and into the report."""
    found = waits(plan, standings)
    culprit = root(found)
    assert culprit is not None  # there is a standing, or nothing would be late
    by_rank = {wait.standing.rank: wait.standing for wait in found}
    code, message = STILL, _message(found, culprit, still)
    if culprit.sent and culprit.on is not None and not culprit.standing.gone:  # else its record is old
        code, message = DEAD_EDGE, _dead_edge(culprit, by_rank[culprit.on], still)
    return {
        "rank": culprit.standing.rank,
        "stage": None if culprit.current is None else culprit.current.stage,
        "action": None if culprit.current is None else str(culprit.current),
        "code": code,
        "type": "Hang",
        "message": message,
        "place": "\n".join(line(wait, now) for wait in found[:_ROWS]),
        "remedy": "",
        "others": [],
        "traceback": "",
        "exit_code": 1,
    }


def _message(found: Sequence[Wait], culprit: Wait, still: float) -> str:
    own, waiting = culprit.standing, [wait for wait in found if wait.on is not None]
    nothing = f"nothing has moved for {still:.0f} s"
    if own.gone:
        return f"{nothing}, and this rank's process is stopped, or its host {own.host} does not answer"
    states = {(wait.standing.state, wait.standing.step) for wait in found}
    if not waiting and len(found) > 1 and len(states) == 1 and culprit.current is None:
        return f"{nothing}, and all ranks wait in the same collective: a connection between two of them may be dead"
    ranks = f"{len(waiting)} of {len(found)} ranks wait for this one in the end" if waiting else "this rank the longest"
    return f"{nothing}, and {ranks}" + (f" (it is on {own.host})" if own.host else "")


def _dead_edge(culprit: Wait, sender: Standing, still: float) -> str:
    own = culprit.standing
    ends = f"rank {sender.rank}{_on(sender)} does not reach rank {own.rank}{_on(own)}"
    return f"{ends}: {culprit.needs} was sent and has not come for {still:.0f} s, and both are alive"


def _on(standing: Standing) -> str:
    return f" on {standing.host}" if standing.host else ""


def line(wait: Wait, now: float) -> str:
    """One row: where a rank is, since when, and whom it waits for."""
    own = wait.standing
    where = f"in {wait.current}" if wait.current is not None else own.state
    last = f", after {wait.done}" if wait.done is not None else ""
    on = ", stopped or gone" if own.gone else ""
    if wait.on is not None:
        sent = ", which was sent" if wait.sent else ""
        on += f", waits for rank {wait.on}" + (f" ({wait.needs}{sent})" if wait.needs is not None else "")
    return f"rank {own.rank}: step {own.step + 1}, {where}{last}, for {max(0.0, now - own.since):.0f} s{on}"

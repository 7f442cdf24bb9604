"""Where in a schedule something is wrong, as a person sees it: rows of cells, with a mark behind one of them.

Knows rows and columns. Must not know what is wrong. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.schedule.action import Action, Schedule

_RANKS = 8
"""How many ranks' rows are shown around a mark."""
_BEFORE, _AFTER = 2, 2


def marked(row: Sequence[Action], pp_rank: int, index: int, note: str) -> str:
    """One rank's row around an action, with `<-- here` and a note behind it; an index past the end marks the end."""
    before, after = _window(row, index)
    return f"rank {pp_rank}: {' '.join([*before, '<-- here,'])} {note}{'; ' if after else ''}{' '.join(after)}"


def grid(schedule: Schedule, pp_rank: int, index: int, note: str) -> str:
    """The rows of all ranks (of the nearest, where there are many) around one action, which is marked."""
    count = len(schedule.actions)
    first = max(0, min(pp_rank - _RANKS // 2, count - _RANKS))
    lines = []
    for other in range(first, min(first + _RANKS, count)):
        row = schedule.actions[other]
        if other == pp_rank:
            lines.append(marked(row, other, index, note))
        else:
            before, after = _window(row, index)
            lines.append(f"rank {other}: {' '.join([*before, *after])}")
    return "\n".join(lines)


def _window(row: Sequence[Action], index: int) -> tuple[list[str], list[str]]:
    """The cells up to `index` and those behind it, cut where there are more."""
    before = ["..."] * (index > _BEFORE) + [str(action) for action in row[max(index - _BEFORE, 0) : index + 1]]
    after = [str(action) for action in row[index + 1 : index + 1 + _AFTER]]
    return before, after + ["..."] * (index + 1 + _AFTER < len(row))

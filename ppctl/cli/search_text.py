"""The answer of a search as text: a table, commands to paste, what was cut off and why. Standard library only.

Knows columns and units. Must not know streams, nor how a search works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppctl.cli.console import aligned, fits, folded, number, prose
from ppctl.cli.plan_text import room
from ppctl.config.argv import SHORT, retyped
from ppctl.plan.memory_limit import GIB, amount
from ppctl.plan.violations import Overrides, overrides_text
from ppctl.search.answer import BAND, BAND_SOURCE, AnswerRow, Change, Other, others
from ppctl.search.branch import CLOSE, Search
from ppctl.search.space import Configuration, SearchSpace


def text(
    search: Search,
    listed: Sequence[AnswerRow],
    firsts: Mapping[tuple[str, ...], int],
    lines: Sequence[str],
    columns: int,
) -> str:
    """The answer in paragraphs."""
    blocks = [prose([counts(search)], columns)]
    if listed:
        blocks += [table(listed, columns), prose([order(listed, firsts, compared=search.compared)], columns)]
        blocks.append("\n".join(f"{n:>2}  {line}" for n, line in enumerate(lines, 1)))
        first = search.found[0].plan.step_time_s
        blocks.append(prose(["why not", *(f"  {reason(first, other)}" for other in others(search))], columns))
    return "\n\n".join(blocks)


def counts(search: Search) -> str:
    """How many configurations were ruled out, skipped and planned, and what that proves."""
    numbers = search.counts
    total, planned = number(numbers.total, "configuration"), number(numbers.planned, "was planned", "were planned")
    cut = number(numbers.memory, "needs", "need") + " more memory than there is"
    cut += f", {number(numbers.rules, 'is', 'are')} against a rule" * bool(numbers.rules)
    if not search.proved:
        seen = total if search.counted else f"the {total} looked at until then"
        more = "others may be faster" if numbers.planned else "to search fewer, type what you know, as tp=1 cp=1 mbs=1"
        return f"interrupted: of {seen} {cut}, {numbers.undecided:,} had not been decided, {planned}; {more}"
    proof = f"none is more than {CLOSE:.0%} faster than the first under these prices" if search.found else "none fits"
    return f"of {total} {cut}, {number(numbers.left, 'is', 'are')} slower by their bound, {planned}; {proof}"


def table(listed: Sequence[AnswerRow], columns: int) -> str:
    """A row for each configuration; on a narrow screen the configuration stands below its figures."""
    head = ["", "tokens/s", "MFU", "bubble", "peak GiB", "room", "limited by"]
    body, ways = [head], [["configuration"]]
    for place, row in enumerate(listed, 1):
        plan = row.planned.plan
        mfu = "" if plan.timing.mfu is None else f"{plan.timing.mfu:.1%}"
        figures = [
            f"{plan.timing.tokens_per_s:,.0f}",
            mfu,
            f"{plan.bubble_fraction:.1%}",
            f"{plan.peak_bytes / GIB.size:.1f}",
        ]
        body.append([str(place), *figures, room(plan), row.limit])
        alike = (f"or cp{of.cp} mbs{of.micro_batch_size}" for of in row.alike)
        ways.append([sizes(row.planned.configuration), *alike])
    blank = [""] * len(head)
    each = ([*(blank if n else row), way] for row, some in zip(body, ways, strict=True) for n, way in enumerate(some))
    if fits(wide := aligned(each, 6), columns):
        return wide
    below = ["", *(f"\n{prose([' '.join(['  ', *some])], columns)}" for some in ways[1:])]
    return "\n".join(map("".join, zip(aligned(body, 6).splitlines(), below, strict=True)))


_AGAIN = {"modules": "recompute-modules", "full": "recompute-full"}
_SHARDED = {"optimizer_gradients": "sharded", "full": "sharded-full"}


def sizes(point: Configuration) -> str:
    """A configuration in short words, without sizes that are 1."""
    named = {name: getattr(point, name) for name in ("tp", "cp", "pp", "vpp", "ep")}
    named["etp"] = point.etp if point.etp != point.tp else 1
    words = [f"{name}{size}" for name, size in named.items() if size > 1]
    words += [f"mbs{point.micro_batch_size}", _AGAIN.get(point.recomputation, "")]
    words += [point.schedule] * (point.pp > 1)
    return " ".join(filter(None, [*words, _SHARDED.get(point.data_parallel_sharding, "")]))


def order(listed: Sequence[AnswerRow], firsts: Mapping[tuple[str, ...], int], *, compared: bool) -> str:
    """How certain the order is."""
    best = listed[0].planned.plan.step_time_s
    close = sum(row.planned.plan.step_time_s <= (1 + BAND) * best for row in listed)
    note = f"the first {close} are within {BAND:.1%} of each other, the median error of plans ({BAND_SOURCE})"
    if close == 1:
        note = f"no other division of the ranks {f'is within {BAND:.1%}' if compared else 'was planned yet'}"
    elif not compared:
        note += "; interrupted before all others were planned"
    for place in sorted({*firsts.values()} - {0}):
        named = [" and ".join(slower) for slower, first in firsts.items() if first == place]
        note += f"; priced again with {', or with '.join(named)} a tenth slower, number {place + 1} is first"
    stays = "; priced again with links, memory or products or two of them a tenth slower, the first stays"
    return note + stays * (bool(firsts) and not any(firsts.values()))


def reason(first: float, other: Other) -> str:
    """Why the fastest configuration has a different value of an axis."""
    name = f"{other.axis}={other.value}"
    if other.seconds is None:
        return f"{name}: nothing with it fits the memory"
    more = other.seconds / first - 1
    share = f"; {other.reason} {'takes' if other.reason[-1] != 's' else 'take'} {other.share:.0%}"
    cost = f"{more:.1%} slower{_error(more)}" if more >= 0.0005 else "as fast"
    if not other.planned:
        cost = f"at least {cost}" if more >= 0.0005 else "perhaps as fast"
    return f"{name}: {cost}{share * (other.share >= 0.01)}"


def _error(share: float) -> str:
    """Words for a difference that is too small to count."""
    return ", within the error of plans" * (abs(share) <= BAND)


def so_far(search: Search) -> str:
    """The search so far in one line: how many configurations are decided, and the best one."""
    done = search.counts
    seen = number(done.total, "configuration") + " seen so far" * (not search.counted)
    decided = f"{done.total - done.undecided:,} of {seen} decided"
    note = f"{decided} for {number(search.space.world, 'GPU')}; {done.planned:,} planned"
    if not search.found:
        return note + "; none fits yet" * bool(done.planned)
    best = search.found[0]
    return f"{note}; best so far {best.plan.timing.tokens_per_s:,.0f} tokens/s: {sizes(best.configuration)}"


def refinement(data: Mapping[str, Any]) -> str:
    """The result of planning rows again, in words; `data` is the JSON's `refined`."""
    best, rows = data["best"], "the first row" if data["rows"] == 1 else f"the first {data['rows']} rows"
    note = f"refined ({number(data['plans'], 'plan')} of {rows}{'' if data['complete'] else ', ended early'}): "
    if best is None:
        return note + ("nothing is faster than the first" if data["plans"] or data["complete"] else "none was finished")
    note += f"number {best['row']} is " * (best["row"] != 1) + f"{best['faster']:.1%} faster than the first"
    return f"{note} with {overrides_text(best['words'])}{_error(best['faster'])}:\n{best['line']}"


def line(typed: Sequence[str], space: SearchSpace, point: Configuration, more: Overrides | None = None) -> str:
    """The command that trains a configuration, with `more` words."""
    made = overrides_text({**space.words(point), **(more or {})}).split(" ")
    words = [*(retyped([each]) for each in typed), *made]
    return " ".join(["ppctl train", *map(_short, filter(None, words))])


def _short(word: str) -> str:
    """A word with the short name of its key; its value stays as it is."""
    key, equals, value = word.partition("=")
    return f"{SHORT.get(key, key)}{equals}{value}"


def frontier(found: Sequence[tuple[Search, list[AnswerRow]]], columns: int) -> str:
    """A row for each number of GPUs, with the fastest configuration."""
    head = ["GPUs", "tokens/s", "per GPU", "MFU", "room", "configuration"]
    body = [head]
    for search, listed in found:
        gpus = f"{search.space.world:,}"
        if not listed:
            why = "nothing fits" if search.counts.memory or search.over else "every configuration is against a rule"
            body.append([gpus, "", "", "", "", why if search.proved else "interrupted"])
            continue
        planned = listed[0].planned
        timing = planned.plan.timing
        mfu = "" if timing.mfu is None else f"{timing.mfu:.1%}"
        rates = [f"{timing.tokens_per_s:,.0f}", f"{timing.tokens_per_s_per_device:,.0f}", mfu, room(planned.plan)]
        body.append([gpus, *rates, sizes(planned.configuration) + " (interrupted)" * (not search.proved)])
    return aligned(folded(body, columns, " "), 5)


def compared(search: Search, changes: Sequence[Change]) -> str:
    """The place of the configuration of --against among the plans, and the effect of each single change to it."""
    first, asked = search.found[0].plan.step_time_s, changes[0]
    assert asked.step_time_s is not None  # a hanging schedule is refused before the search
    faster = sum(each.plan.step_time_s < asked.step_time_s for each in search.found)
    fits = "" if asked.fits else f", but its memory does not fit ({amount(asked.peak)} at the peak)"
    lines = [
        f"against: a step takes {asked.step_time_s:.4g} s, {(more := asked.step_time_s / first - 1):.1%} more than the "
        f"first's {first:.4g} s{_error(more)}{fits}; {number(faster, 'plan is', 'plans are')} faster. With one change "
        f"(less than {BAND:.1%} is within the error of plans):"
    ]
    for change in changes[1:]:
        if change.step_time_s is None:
            effect = "against a rule"
        else:
            effect = f"{change.step_time_s / asked.step_time_s - 1:+.1%}" + ", does not fit" * (not change.fits)
        lines.append(f"  {overrides_text(change.words)}: {effect}")
    return "\n".join(lines)

"""The answer of a search as text: a table, lines to paste, what was cut off and why. Standard library only.

Knows columns and units. Must not know streams, nor how a search works.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.cli.console import aligned, folded, prose
from ppctl.config.argv import ALIASES, retyped
from ppctl.plan.memory_limit import GIB
from ppctl.plan.violations import overrides_text
from ppctl.search.answer import BAND, Other, Row, first_if, others
from ppctl.search.branch import CLOSE, Search
from ppctl.search.space import Configuration, Space

_SHORT = {key: alias for alias, key in sorted(ALIASES.items(), key=lambda item: -len(item[0]))}


def text(search: Search, listed: Sequence[Row], lines: Sequence[str], columns: int) -> str:
    """The answer in paragraphs."""
    blocks = [prose([counts(search)], columns)]
    if listed:
        blocks.append(table(listed, columns))
        blocks.append(prose([order(listed)], columns))
        blocks.append("\n".join(f"{n}  {line}" for n, line in enumerate(lines, 1)))
    if reasons := [reason(search, other) for other in (others(search) if search.found else ())]:
        blocks.append(prose(["why not", *(f"  {each}" for each in reasons)], columns))
    return "\n\n".join(blocks)


def counts(search: Search) -> str:
    """What became of all configurations, and what that proves."""
    of = search.counts
    cut = f"{of.memory:,} need more memory than there is"
    cut += f", {of.rules:,} are against a rule" * bool(of.rules)
    if not search.proved:
        return f"interrupted: of {of.total:,} configurations {cut}, {of.planned:,} were planned; others may be faster"
    proof = f"none is more than {CLOSE:.0%} faster than the first under these prices" if search.found else "none fits"
    return (
        f"of {of.total:,} configurations {cut}, {of.left:,} are slower by their bound, {of.planned:,} were planned; "
        f"{proof}"
    )


def table(listed: Sequence[Row], columns: int) -> str:
    """A row for each configuration."""
    head = ["", "tokens/s", "MFU", "bubble", "peak GiB", "room", "limited by", "configuration"]
    body = [head]
    for number, row in enumerate(listed, 1):
        plan, peak = row.planned.plan, row.planned.peak
        room = "" if plan.limit is None else f"{1 - peak / plan.limit.available_bytes:.0%}"
        mfu = "" if plan.timing.mfu is None else f"{plan.timing.mfu:.1%}"
        figures = [f"{plan.timing.tokens_per_s:,.0f}", mfu, f"{plan.bubble_fraction:.1%}", f"{peak / GIB.size:.1f}"]
        body.append([str(number), *figures, room, row.limit, sizes(row.planned.configuration)])
    return aligned(folded(body, columns, " "), 6)


def sizes(of: Configuration) -> str:
    """A configuration in short words, without what is 1."""
    named = {"tp": of.tp, "cp": of.cp, "pp": of.pp, "vpp": of.vpp, "ep": of.ep, "etp": of.etp}
    words = [f"{name}{size}" for name, size in named.items() if size > 1 or name in ("tp", "pp")]
    again = {"none": "", "modules": "recompute-modules", "full": "recompute-full"}.get(of.recomputation, "")
    return " ".join(
        filter(
            None,
            [
                *words,
                f"mbs{of.micro_batch_size}",
                again,
                of.schedule * (of.pp > 1),
                _SHARDED[of.data_parallel_sharding],
            ],
        )
    )


_SHARDED = {"none": "", "optimizer_gradients": "sharded", "full": "sharded-full"}


def order(listed: Sequence[Row]) -> str:
    """How sure the order is."""
    best = listed[0].planned.plan.step_time_s
    close = sum(row.planned.plan.step_time_s <= (1 + BAND) * best for row in listed)
    moved = {f"{factor - 1:+.0%}": first_if(listed, factor) + 1 for factor in (0.9, 1.1)}
    said = "a plan's seconds are not known better than that"
    alike = (
        f"the first {close} are within {BAND:.0%} of each other: {said}"
        if close > 1
        else f"no other division of the ranks is within {BAND:.0%}"
    )
    firsts = {number for number in moved.values()}
    steady = (
        "the first stays first"
        if firsts == {1}
        else "; ".join(f"{by}: number {number} is first" for by, number in moved.items())
    )
    return f"{alike}. With links and memory a tenth faster or slower {steady}."


def reason(search: Search, other: Other) -> str:
    """Why the first configuration has another value of an axis."""
    best = search.found[0].plan.step_time_s
    name = f"{other.axis}={other.value}"
    if other.seconds is None:
        return f"{name}: nothing with it fits the memory"
    more = other.seconds / best - 1
    share = "" if other.exchanges is None else f"; exchanges inside layers take {other.exchanges:.0%}"
    if more <= 0:
        return f"{name}: its bound is not more than {CLOSE:.0%} below the first's step{share}"
    return f"{name}: {'' if other.planned else 'at least '}{more:.1%} slower{share}"


def so_far(search: Search) -> str:
    """The best so far in one line."""
    if not search.found:
        return f"{len(search.tree.heap):,} branches open"
    best = search.found[0]
    return f"{best.plan.timing.tokens_per_s:,.0f} tokens/s: {sizes(best.configuration)}"


def line(typed: Sequence[str], space: Space, of: Configuration) -> str:
    """The command that trains a configuration."""
    words = retyped(typed)
    for key, alias in _SHORT.items():
        words = words.replace(f"{key}=", f"{alias}=")
    return " ".join(filter(None, ["ppctl train", words, overrides_text(space.words(of))]))

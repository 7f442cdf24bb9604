"""The page of a search: memory against seconds of a step, plans as points, and what was cut off by its bound as ticks.

Knows how the picture is drawn. Must not know how a search works. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from math import log10

from ppctl.cli.console import number
from ppctl.cli.search_text import counts, sizes
from ppctl.plan.memory_limit import GIB
from ppctl.search.branch import Search

_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 460, 70, 20
_WIDEST = 2.0  # the slowest step that is drawn, in times of the fastest
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:20px;max-width:1100px}"
    "div{overflow-x:auto}svg{min-width:700px}"
    "text{font-size:12px;fill:currentColor}path{fill:none;stroke:#97a1b3}circle{fill:#2f6fbf;stroke:#2f6fbf}"
    "circle:hover{stroke:currentColor;stroke-width:3}.first{fill:#00794f}.over{fill:none}.over,.device{stroke:#c0262d}"
)


def page(search: Search) -> str:
    """The page, as text. Nothing is fetched when it is opened."""
    title = f"{search.space.values.config.recipe or 'a model'} on {number(search.space.world, 'GPU')}"
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    head += f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head>"
    head += f"<body><h1>{escape(title)}</h1><p>{escape(counts(search))}</p>"
    return "\n".join(
        [head, *(_scatter_plot(search) if search.found else ["<p>nothing that fits was planned</p>"]), "</body>\n"]
    )


def _scatter_plot(search: Search) -> Iterator[str]:
    first, limit = search.found[0].plan.step_time_s, search.found[0].plan.limit
    points = [each for each in (*search.found, *search.over) if each.plan.step_time_s <= _WIDEST * first]
    cut = [branch for branch in search.tree.heap if branch.seconds <= _WIDEST * first]
    times = [*(each.plan.step_time_s for each in points), *(branch.seconds for branch in cut)]
    begin, end = 0.97 * min(times), 1.02 * max(times)
    room, below = limit.available_bytes if limit else 0, _TOP + _HEIGHT
    top = 1.08 * max([room, *(each.plan.peak_bytes for each in points)])

    def x(seconds: float) -> int:
        return round(_LEFT + _WIDTH * (seconds - begin) / (end - begin))

    def y(size: float) -> int:
        return round(below - _HEIGHT * size / top)

    yield f'<div><svg viewBox="0 0 {_LEFT + _WIDTH + 40} {below + 60}" role="img" aria-label="memory against time">'
    yield f'<path d="M{_LEFT} {_TOP}V{below}H{_LEFT + _WIDTH}"/>'
    for part in range(6):
        seconds, size = begin + (end - begin) * part / 5, top * part / 5
        yield f'<text x="{x(seconds)}" y="{below + 54}" text-anchor="middle">{seconds:.4g} s</text>'
        yield f'<text x="{_LEFT - 8}" y="{y(size)}" text-anchor="end">{size / GIB.size:.1f} GiB</text>'
    yield f'<path class="device" d="M{_LEFT} {y(room)}H{_LEFT + _WIDTH}"/>'
    yield f'<text x="{_LEFT + 6}" y="{y(room) - 5}">memory of a device, after the reserve</text>'
    columns: Counter[int] = Counter()
    for branch in cut:
        columns[x(branch.seconds)] += branch.size
    for at, size in sorted(columns.items()):  # longer ticks for more configurations
        yield f'<path stroke-width="2" d="M{at} {below + 2}v{5 + 6 * log10(size + 1):.0f}">'
        yield f"<title>cut off by their bounds: {number(size, 'configuration')}</title></path>"
    for place, each in reversed([*enumerate(points)]):
        seconds, peak = each.plan.step_time_s, each.plan.peak_bytes
        words = f"{sizes(each.configuration)}: {seconds:.4g} s, {each.plan.timing.tokens_per_s:,.0f} tokens/s, "
        words += f"peak {peak / GIB.size:.1f} GiB" + ", does not fit" * (not each.fits)
        if each.bound:
            yield f'<path d="M{x(max(begin, each.bound))} {y(peak)}H{x(seconds)}"/>'
        kind = "over" if not each.fits else "" if place else "first"
        yield f'<circle class="{kind}" cx="{x(seconds)}" cy="{y(peak)}" r="5"><title>{escape(words)}</title></circle>'
    more = sum(branch.size for branch in search.tree.heap) - sum(columns.values())
    yield "</svg></div><p>Points: planned configurations, each with a line from its bound; green is the first. Ticks:"
    yield f"sets of configurations that take at least so long; {number(more, 'more is', 'more are')} right of the"
    yield "picture.</p>"

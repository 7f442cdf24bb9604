"""Runs side by side: the keys in which they differ, their results, and their curves on the screen and as one page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ppctl.cli.console import UNFOLDED, aligned, curve, in_blocks
from ppctl.config.argv import SHORT
from ppctl.config.keys import text_keys, value_text
from ppctl.config.mapping import to_values
from ppctl.errors import visible
from ppctl.records.json_reader import finite
from ppctl.runs.rundir import RunDir
from ppctl.schedule.drawings import filled

_PAGE = Path(__file__).with_name("curves.html")
CURVES = {"loss": "loss", "grad_norm": "grad norm", "tokens_per_s": "tokens/s"}
"""A figure of a step -> its title."""
_LONGEST_VALUE = 24
_MOST_POINTS = 4000
"""The most points of one run's curve on a page."""
_NOT_ITS_OWN = ("log.name", "log.dir", "checkpoint.resume", "pipeline.pp_microbatch_size")
"""Keys that do not tell runs apart: paths, where the last start went on from, and second names of other keys."""


def letters(count: int) -> list[str]:
    """A, B and so on to Z, then AA, AB."""
    return [(ascii_uppercase[n // 26 - 1] if n >= 26 else "") + ascii_uppercase[n % 26] for n in range(count)]


def differing(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each of `values`, for the keys whose values are not all equal. `model.transformers` is left
    out: thousands of letters, which follow from other keys."""
    names = dict.fromkeys(name for each in values for name in each if name != "model.transformers")
    rows = {name: [each.get(name) for each in values] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def labels(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of `values` (key -> value) the words that set it apart from the others, such as `lr=0.001 seed=2`."""
    rows = {name: row for name, row in differing(values).items() if name not in _NOT_ITS_OWN}
    last = [name.rpartition(".")[2] for name in text_keys()]
    short = {name: SHORT.get(name, name.rpartition(".")[2]) for name in rows}
    words = {name: name if last.count(word) > 1 else word for name, word in short.items()}
    return [" ".join(f"{words[name]}={value_text(row[n])}" for name, row in rows.items()) for n in range(len(values))]


def comparison(runs: Sequence[RunDir]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """(the differences and results of runs, which `--json` prints; each run's records by step).

    `keys` has a key's value in every run, `steps` the steps that all have done; `tokens_per_s` is each run's median.
    Raises ConfigError (PP-E611) if a config cannot be read."""
    from statistics import median  # fractions and decimals

    configs = [to_values(run.read_config()) for run in runs]
    metrics = [{record["step"]: record for record in run.metrics()} for run in runs]
    common = sorted(set.intersection(*(set(records) for records in metrics)))
    speeds = [[r["tokens_per_s"] for r in records.values() if r.get("tokens_per_s")] for records in metrics]

    def last(key: str) -> list[Any]:
        return [next((r[key] for r in reversed(records.values()) if key in r), None) for records in metrics]

    compared = {
        "runs": [str(run.path) for run in runs],
        "ids": [run.id for run in runs],
        "labels": labels(configs),
        "done": [max(records, default=0) for records in metrics],
        "keys": differing(configs),
        "loss": last("loss"),
        "eval_loss": last("eval_loss"),
        "tokens_per_s": [median(speed) if speed else None for speed in speeds],
        "steps": [{"step": n, **{key: [by_step[n].get(key) for by_step in metrics] for key in ("loss", "tokens_per_s")}}
                  for n in common],
    }  # fmt: skip
    return compared, [[records[step] for step in sorted(records)] for records in metrics]


# On the screen


def comparison_text(compared: Mapping[str, Any], records: Sequence[Sequence[Mapping[str, Any]]], columns: int) -> str:
    """The keys that differ, the results and the curves of runs, as text."""
    names = letters(len(records))
    lines = [aligned(zip(names, compared["ids"], strict=True)), "", *_table(compared, names, columns), ""]
    lines += _curves(records, names, 100 if columns == UNFOLDED else columns)
    return "\n".join(lines).rstrip("\n")


def results(compared: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table of results: each run's steps, losses and speed."""
    rows = [("step", "done", ",d"), ("loss", "loss", ".4f"), ("held out", "eval_loss", ".4f")]
    rows.append(("tokens/s", "tokens_per_s", ",.0f"))
    shown = [[name, *(_figure(value, form) for value in compared[key])] for name, key, form in rows]
    return [row for row in shown if row[0] != "held out" or set(row[1:]) != {"-"}]


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(compared: Mapping[str, Any], names: Sequence[str], columns: int) -> Iterator[str]:
    """A table with a column per run; with a row per run, if there are more than three. Too long values stand below."""
    rows = [[name, *map(value_text, row)] for name, row in compared["keys"].items()]
    room = _LONGEST_VALUE
    if len(names) < 4 and rows:
        room = (columns - max(len(row[0]) for row in rows) - 2 * len(names)) // len(names)
    short = [row for row in rows if max(map(len, row[1:])) <= room]
    table = [["key", *names], *short, *results(compared)]
    yield from [] if rows else ["no key differs\n"]
    yield in_blocks(table if len(names) < 4 else [list(row) for row in zip(*table, strict=True)], columns)
    for name, *values in (row for row in rows if row not in short):
        yield "\n".join([name, *(f"  {letter}  {value}" for letter, value in zip(names, values, strict=True))])


def _curves(records: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str], columns: int) -> Iterator[str]:
    """A line per run and figure. The lines of one figure have the same scale; their lengths follow the runs' steps."""
    steps = max((run[-1]["step"] for run in records if run), default=0) or 1
    for key, name in CURVES.items():
        values = [[math.nan if record.get(key) is None else record[key] for record in run] for run in records]
        bounds = [value for run in values for value in run if math.isfinite(value)]
        if not bounds:
            continue
        form = ",.0f" if key == "tokens_per_s" else ".4f"
        ends = [[_figure(run[at].get(key) if run else None, form) for run in records] for at in (0, -1)]
        room = columns - max(len(name), 2) - sum(max(5, *map(len, end)) + 2 for end in ends) - 2
        widths = [max(1, room * run[-1]["step"] // steps) if run else 0 for run in records]
        drawn = [curve(run, at_most, bounds) for run, at_most in zip(values, widths, strict=True)]
        rows = zip(names, *ends, drawn, strict=True)
        yield aligned([(name, "first", "last", ""), *rows], 3) + "\n"


# As a page


def comparison_page(compared: Mapping[str, Any], records: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """One HTML file with the curves by step, tokens and time, and the table. Nothing is fetched when it is opened."""
    names = letters(len(records))
    heads = [f"{name}  {run}" for name, run in zip(names, compared["ids"], strict=True)]
    titles = [visible(f"{head}  {label}".rstrip(), "") for head, label in zip(heads, compared["labels"], strict=True)]
    rows = [["run", *heads], *([name, *map(value_text, row)] for name, row in compared["keys"].items())]
    table = [[visible(cell, "") for cell in row] for row in zip(*rows, *results(compared), strict=True)]
    runs = [{"name": title, "points": list(_points(run))} for title, run in zip(titles, records, strict=True)]
    title = f"{len(runs)} run{'s' * (len(runs) != 1)} side by side"
    return filled(_PAGE.read_text(encoding="utf-8"), title,
                  {"title": title, "names": list(CURVES.values()), "runs": runs, "table": table})  # fmt: skip


def _points(records: Sequence[Mapping[str, Any]]) -> Iterator[list[float | None]]:
    """Each step's number, tokens and seconds so far, and figures; of too many steps only those with extreme losses."""
    before, tokens, seconds, points = 0, 0.0, 0.0, []
    for record in records:
        steps, before = record["step"] - before, record["step"]  # `log.interval` leaves steps out
        tokens += steps * (record.get("tokens") or 0)
        seconds += steps * (record.get("step_time_s") or 0.0)
        points.append(finite([record["step"], tokens, round(seconds, 3), *map(record.get, CURVES)]))
    size = -(-len(points) // (_MOST_POINTS // 2))
    for at in range(0, len(points), size or 1):
        part = sorted(points[at : at + size], key=lambda point: math.inf if point[3] is None else point[3])
        yield from sorted([part[0], part[-1]] if len(part) > 2 else part, key=lambda point: point[0])

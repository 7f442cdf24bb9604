"""`ppctl runs --compare A B`: the keys in which two runs differ, and their losses and speeds side by side.

Knows configs and metrics of runs. Must not know how a run is found, nor change one.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from ppctl.cli.table import aligned
from ppctl.config.keys import text_keys, value_of, value_text
from ppctl.rundir import RunDir

_ROWS = 12
"""The most steps that the table shows."""


def comparison(runs: tuple[RunDir, RunDir]) -> dict[str, Any]:
    """What two runs have that is not the same: `keys` (key -> both values), and `steps` that both have done.

    `tokens_per_s` is each run's median. Raises ConfigError (PP-E611) where a config cannot be read.
    """
    configs = [run.read_config() for run in runs]
    values = {name: [value_of(config, name) for config in configs] for name in text_keys()}
    metrics = [{record["step"]: record for record in run.metrics()} for run in runs]
    both = sorted(metrics[0].keys() & metrics[1].keys())
    shown = ("loss", "tokens_per_s")
    speeds = [[r["tokens_per_s"] for r in records.values() if r.get("tokens_per_s")] for records in metrics]
    return {
        "runs": [str(run.path) for run in runs],
        "ids": [run.id for run in runs],
        "done": [max(records, default=0) for records in metrics],
        "keys": {name: pair for name, pair in values.items() if pair[0] != pair[1]},
        "tokens_per_s": [median(speed) if speed else None for speed in speeds],
        "steps": [{"step": n, **{key: [of[n].get(key) for of in metrics] for key in shown}} for n in both],
    }


def text(found: dict[str, Any], columns: int) -> str:
    """The comparison in tables, of so many columns: keys, then a dozen steps from the first common one to the last."""
    named = aligned(zip("AB", found["ids"], strict=True))
    lines = [named, "", _keys(found["keys"], columns) if found["keys"] else "no key differs", ""]
    steps = found["steps"]
    if steps:
        last = len(steps) - 1
        chosen = sorted({round(n * last / (_ROWS - 1)) for n in range(_ROWS)}) if last >= _ROWS else range(last + 1)
        heads = ("step", "loss A", "loss B", "difference", "tokens/s A", "tokens/s B")
        lines.append(aligned([heads, *(_row(steps[n]) for n in chosen)], 6))
    else:
        lines.append("no step was done by both")
    speeds = [f"{name} {'-' if speed is None else f'{speed:,.0f}'}" for name, speed in _speeds(found)]
    return "\n".join([*lines, "", f"tokens/s, median: {', '.join(speeds)}{_faster(found)}"])


def _keys(keys: dict[str, Any], columns: int) -> str:
    """The keys that differ, with both values; values that are too long for the table, as paths are, stand below it."""
    room = (columns - max(map(len, keys)) - 4) // 2
    rows = [(name, *map(value_text, pair)) for name, pair in keys.items()]
    short = [row for row in rows if max(map(len, row[1:])) <= room]
    below = [f"{name}\n  A  {a}\n  B  {b}" for name, a, b in rows if max(len(a), len(b)) > room]
    return "\n".join([aligned([("key", *"AB"), *short]) if short else "key", *below])


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    first, second = step["loss"]
    apart = "" if None in (first, second) else f"{second - first:+.2e}" if second != first else "equal"
    losses = ["" if loss is None else f"{loss:.6f}" for loss in (first, second)]
    speeds = ["" if speed is None else f"{speed:,.0f}" for speed in step["tokens_per_s"]]
    return (str(step["step"]), *losses, apart, *speeds)


def _speeds(found: dict[str, Any]) -> list[tuple[str, float | None]]:
    return list(zip("AB", found["tokens_per_s"], strict=True))


def _faster(found: dict[str, Any]) -> str:
    first, second = found["tokens_per_s"]
    return f" ({second / first - 1:+.1%})" if first and second else ""

"""What `ppctl trace` says of a measured step: where each rank's time went, what its length hangs on; of two, both.

Knows ledgers, traces and the simulator. Must not know files of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ppctl.cli.table import aligned, in_blocks, prose
from ppctl.plan import Plan
from ppctl.schedule.measured_step import TimeLedger
from ppctl.schedule.simulate import critical_path, seconds_by_kind
from ppctl.schedule.trace import Trace, bubble_fraction, step_time
from ppctl.schedule.what_if import SHARE, StageChange, measured_costs, stage_changes


class SeenStep(NamedTuple):
    """One pipeline's step of a run."""

    run: str
    step: int
    plan: Plan
    pipeline: tuple[int, ...]
    trace: Trace
    ledgers: list[TimeLedger]

    @property
    def named_ranks(self) -> str:
        """The pipeline's ranks, which stand apart where others share its stages: `ranks 0, 2`."""
        first, *rest = self.pipeline
        if not rest:
            return f"rank {first}"
        evenly = self.pipeline == tuple(range(first, first + len(self.pipeline)))
        return f"ranks {first} to {rest[-1]}" if evenly else f"ranks {', '.join(map(str, self.pipeline))}"

    @property
    def seconds(self) -> float:
        """From the first rank's begin to the last one's end."""
        return self.ledgers[0].total


def report(seen: SeenStep) -> dict[str, Any]:
    """The step as values, seconds."""
    path = critical_path(seen.plan.schedule, seen.trace)
    simulated, changes = stage_changes(seen.plan.schedule, measured_costs(seen.trace, seen.plan.schedule))
    return {
        "step": seen.step,
        "step_time_s": seen.seconds,
        "bubble_fraction": bubble_fraction(seen.trace),
        "ranks": [
            {"rank": rank, "pp_rank": pp_rank, "seconds": seen.ledgers[pp_rank].rows()}
            for pp_rank, rank in enumerate(seen.pipeline)
        ],
        "critical_path": {
            "actions": [str(span.action) for span in path],
            "messages": sum(a.pp_rank != b.pp_rank for a, b in pairwise(path)),
            "seconds": seconds_by_kind(path),
        },
        "simulated_s": simulated,
        "stages": [change._asdict() for change in changes],
    }


def text(seen: SeenStep, columns: int) -> str:
    """The ledger, the critical path, and the stages with what each would change, in at most so many columns."""
    found, pipeline_s = report(seen), step_time(seen.trace)
    path = found["critical_path"]
    kinds = ", ".join(
        f"{'between them' if kind == 'messages' else kind} {_ms(seconds)}"
        for kind, seconds in path["seconds"].items()
        if seconds
    )
    head = [
        f"step {seen.step} of run {seen.run}: {seen.seconds:.4f} s, from the first action to the last one "
        f"{pipeline_s:.4f} s",
        f"bubble {bubble_fraction(seen.trace):.1%} measured, {seen.plan.bubble_fraction:.1%} planned",
    ]
    if (others := seen.plan.sizes.world // len(seen.pipeline) - 1) > 0:
        more = "another pipeline has" if others == 1 else f"{others} other pipelines have"
        head.append(f"the pipeline of {seen.named_ranks}; {more} the same stages: --pipeline RANK shows it")
    said = [
        f"critical path: {len(path['actions'])} actions, {path['messages']} messages between ranks: {kinds}",
        f"simulated from what was measured: {_ms(found['simulated_s'])} of {_ms(pipeline_s)}",
    ]
    ledger = in_blocks(_ledger_table(seen.ledgers, seen.pipeline), columns)
    stages = aligned(_stage_table([StageChange(**stage) for stage in found["stages"]]))
    return "\n\n".join([prose(head, columns), ledger, prose(said, columns), stages])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _stage_table(changes: Sequence[StageChange]) -> list[list[str]]:
    """What each stage took, and what the step would change with it."""
    rows = [["stage", "forward ms", "backward ms", f"step if {SHARE:.0%} faster", f"if {SHARE:.0%} slower"]]
    for stage, forward, backward, faster, slower in changes:
        rows.append([str(stage), *(f"{1e3 * s:.2f}" for s in (forward, backward)), _change(faster), _change(slower)])
    return rows


def _change(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f} ms"


def _ledger_table(found: Sequence[TimeLedger], pipeline: tuple[int, ...]) -> list[list[str]]:
    """A row for each part of a step, a column for each rank of the pipeline: milliseconds and shares."""
    shown = [_by_rank(ledger, pipeline) for ledger in found]
    names = list(dict.fromkeys(name for rows in shown for name in rows))
    waits = [name for name in (f"waiting for rank {rank}" for rank in pipeline) if name in names]
    ordered = [
        "compute",
        "gradients",
        *waits,
        *(name for name in names if name not in ("compute", "gradients", *waits)),
    ]
    table = [["ms", *(f"rank {rank}" for rank in pipeline)]]
    for name in ordered:
        seconds = [rows.get(name, 0.0) for rows in shown]
        if any(seconds):
            table.append(
                [
                    name,
                    *(
                        f"{1e3 * each:.1f} {each / ledger.total:4.0%}"
                        for each, ledger in zip(seconds, found, strict=True)
                    ),
                ]
            )
    return [*table, ["step", *(f"{1e3 * ledger.total:.1f}     " for ledger in found)]]


def _by_rank(ledger: TimeLedger, pipeline: tuple[int, ...]) -> dict[str, float]:
    """A ledger's rows; who was waited for is named as the columns are."""
    renamed = {f"waiting for pp_rank {pp_rank}": f"waiting for rank {rank}" for pp_rank, rank in enumerate(pipeline)}
    return {renamed.get(name, name): seconds for name, seconds in ledger.rows().items()}


# Two runs


def both(first: SeenStep, second: SeenStep) -> dict[str, Any]:
    """Two steps side by side: means over the ranks of a pipeline, and over the microbatches of a stage. Seconds."""
    sides = (first, second)
    rows = [_means(seen.ledgers) for seen in sides]
    names = dict.fromkeys([*rows[0], *rows[1]])
    changes = [report(seen)["stages"] for seen in sides]
    alike = len(changes[0]) == len(changes[1])
    return {
        "runs": [seen.run for seen in sides],
        "steps": [seen.step for seen in sides],
        "step_time_s": [seen.seconds for seen in sides],
        "bubble_fraction": [bubble_fraction(seen.trace) for seen in sides],
        "ledger": {name: [row.get(name, 0.0) for row in rows] for name in names},
        "stages": [
            {"stage": a["stage"], **{part: [a[part], b[part]] for part in ("forward", "backward")}}
            for a, b in zip(*changes, strict=True)
        ]
        if alike
        else None,
    }


def _means(found: Sequence[TimeLedger]) -> dict[str, float]:
    """The rows of a ledger, averaged over ranks; whom they wait for is left out."""
    sums: dict[str, float] = {}
    for ledger in found:
        for name, seconds in ledger.rows().items():
            key = "waiting" if name.startswith("waiting") else name
            sums[key] = sums.get(key, 0.0) + seconds / len(found)
    return sums


def compared(found: Mapping[str, Any]) -> str:
    """Two steps in tables, whose columns are called A and B."""
    sides = zip("AB", found["runs"], found["steps"], strict=True)
    heads = list("AB")
    rows = [["ms, mean of the ranks", *heads, "difference"]]
    rows += [_pair(name, pair) for name, pair in found["ledger"].items() if any(pair)]
    rows.append(_pair("step", found["step_time_s"]))
    bubbles = found["bubble_fraction"]
    rows.append(["bubble", *(f"{each:.1%}" for each in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points"])
    lines = [*(f"{name}  run {run}, step {step}" for name, run, step in sides), "", aligned(rows), ""]
    if found["stages"] is None:
        return "\n".join([*lines, "the runs have different stages, which are not compared"])
    table = [["ms, mean", *heads, "difference"]]
    for stage in found["stages"]:
        table += [_pair(f"stage {stage['stage']} {part}", stage[part], 2) for part in ("forward", "backward")]
    return "\n".join([*lines, aligned(table)])


def _pair(name: str, pair: Sequence[float], digits: int = 1) -> list[str]:
    first, second = pair
    share = f" ({second / first - 1:+.0%})" if first else ""
    return [name, *(f"{1e3 * each:.{digits}f}" for each in pair), f"{1e3 * (second - first):+.{digits}f}{share}"]

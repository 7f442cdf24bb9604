"""The lives of a run under agents: what each begins with and why, and whether another one is worth it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from ppctl.launch.enter import go_on
from ppctl.launch.outcome import failures
from ppctl.runs import fence, run_starts
from ppctl.runs.run_starts import slurm_start
from ppctl.runs.rundir import RunDir


def before(run: RunDir, *, submitted: bool) -> str:
    """The start that an agent compares with the run's newest before its first life: in SLURM's job the one that `enter`
    wrote, elsewhere the one that is the newest now."""
    entered = slurm_start() if submitted else None
    return fence.variables(entered, run.path)[fence.LIFE] if entered else fence.newest(run.path)


def begin(run: RunDir, job: str, number: int, nodes: Sequence[str], most: int, word: str = "") -> str | None:
    """Prepare the run directory for life `number` of this job on `nodes`, while no rank lives, and record it. The
    life's name ends with `word`, since anybody may change the store's count. Returns why the life is needed, empty for
    the first; None, and changes nothing, if more than `most` lives in a row have done no new step."""
    environment, name = run.environment(), f"{job}.{number}{word}"
    before = environment.get("starts", [])
    done = [life["step"] for life in before] + [each["step"] for each in run.metrics_file(last=1).read()]
    told = why(run, before[-1]["nodes"], nodes) if before else ""
    told = told or ("an agent met the others anew" if number > 1 else "its job began once more") * bool(before)
    record = {"time": time.time(), "step": max(done, default=0), "nodes": list(nodes), "why": told}
    if fruitless([*before, record][-number:]) > most:  # of this job alone
        return None
    if before:
        go_on(run, name)
    else:
        run_starts.begin_start(run, name)
        run_starts.sweep(run)
    run.write_environment(environment | {"starts": [*before, record]})
    return told


def why(run: RunDir, before: Sequence[str], now: Sequence[str]) -> str:
    """Why the last life ended, by its ranks' records, and which nodes have gone and come; empty if nothing tells."""
    said = [f"rank {each.rank}: {each.message.partition(chr(10))[0]}" for each in failures([], run.errors())[:1]]
    said += [f"{node} has gone" for node in (Counter(before) - Counter(now)).elements()]
    said += [f"{node} takes its place" for node in (Counter(now) - Counter(before)).elements()]
    return "; ".join(said)


def fruitless(lives: Sequence[Mapping[str, Any]]) -> int:
    """How many of `lives` in a row, ending with the last but one, have done no new step."""
    new = [after["step"] > before["step"] for before, after in pairwise(lives)]
    return len(list(takewhile(lambda each: not each, reversed(new))))

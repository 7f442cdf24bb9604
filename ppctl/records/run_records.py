"""The entries of a run directory's JSON files, as `json_reader` checks them; unknown entries are kept.

An older run has fewer entries, a newer one more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

from ppctl.records.json_reader import Count, Line, read
from ppctl.records.rank_records import RankFailure, RankState

STATES = ("queued", "starting", "running", "finished", "failed", "stopped", "interrupted")
"""The states of status.json. A `queued` run waits for its scheduler; the last four are of a run that has ended."""


def _is_a_time(seconds: float) -> None:
    if not 0 <= seconds < 2**36:
        raise ValueError(f"a time takes seconds since 1970, not {seconds}")


Time = Annotated[float, _is_a_time]
Step = Count | None
Figure = float | None
"""A number that is null if it was not finite."""
ASKED_WORDS = "a callback of train.callbacks asked for it"
"""The message of a run that stopped before its last step and will not go on."""


class Status(TypedDict, total=False):
    """status.json."""

    state: Annotated[str, frozenset(STATES)]
    time: Time
    step: Step
    message: str | None
    start_up: dict[Line, float] | None


class Holder(TypedDict, total=False):
    """holder.json: `processes.identity`."""

    machine: Line
    boot: Line
    pid: Annotated[int, range(1, 2**31)]
    started: Count | None


class Life(TypedDict):
    """A start by agents: the run's progress before it, the hosts of its ranks, and why this start was needed."""

    time: Time
    step: Count
    nodes: list[Line]
    why: Line
    start_up: NotRequired[dict[Line, float]]


class Environment(TypedDict, total=False):
    """env.json."""

    variables: dict[Line, str]
    compose_s: float
    agent: Holder
    starts: list[Life]


class Job(TypedDict, total=False):
    """job.json: a job's number and cluster, for SLURM's commands; or a JobSet's name and its NAMESPACE@CONTEXT."""

    job: Annotated[str, re.compile(r"[0-9]{1,20}(_[0-9]{1,6})?|ppctl-[a-z0-9-]{1,40}")]
    code: Annotated[str, re.compile(r"[a-z0-9]{1,16}")]
    cluster: Annotated[str, re.compile(r"(?!-)[\w.-]{0,255}(@[^\x00-\x1f\x7f]{1,253})?", re.ASCII)]


def _is_a_row(row: Mapping[str, Any]) -> None:
    read(RankState, row)


class HostStates(TypedDict):
    """heartbeats/<host>.json."""

    host: Line
    time: Time
    ranks: list[Annotated[dict[str, Any], _is_a_row]]


def _is_a_failure(record: Mapping[str, Any]) -> None:
    RankFailure.from_json(record)


Failure = Annotated[dict[str, Any], _is_a_failure]
"""errors/rank-NNNN.json."""


class _Contact(TypedDict):
    name: Line
    ranks: list[Count]
    best_s: float


class _EdgeTimes(TypedDict):
    hosts: list[Line]
    contacts: list[_Contact]


def _have_hosts(edges: _EdgeTimes) -> None:
    if any(rank >= len(edges["hosts"]) for contact in edges["contacts"] for rank in contact["ranks"]):
        raise ValueError("contacts name ranks that have no host")


EdgeTimes = Annotated[_EdgeTimes, _have_hosts]
"""edges.json."""


class Result(TypedDict, total=False):
    """result.json."""

    state: Annotated[str, frozenset(STATES)]
    step: Step
    loss: Figure
    sample: dict[str, Any] | None
    """Texts of any characters, since the model may write any."""
    samples: list[dict[str, Any]] | None
    start_up: dict[Line, float] | None


class _Step(TypedDict):
    step: Count


class Metrics(_Step, total=False):
    """A line of metrics.jsonl."""

    loss: Figure
    grad_norm: Figure
    lr: Figure
    tokens: Figure
    tokens_per_s: Figure
    step_time_s: Figure
    bubble_fraction: Figure
    mfu: Figure
    slowest_stage: Step
    slowest_rank: Step
    eval_loss: Figure
    eval_samples: Step

"""From a config and its plan to a run directory that is ready to start: made anew, or set to go on.

Knows what a run directory must hold before the first rank reads it. Must not know how a config was composed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ppctl.config.schema import RunConfig
from ppctl.launch.environment import Started
from ppctl.launch.record import environment_record
from ppctl.plan import Plan
from ppctl.run_starts import set_aside
from ppctl.rundir import RunDir
from ppctl.runs import last_checkpoint


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be run. `config.launch.device` is settled: `cuda` or `cpu`."""

    config: RunConfig
    plan: Plan
    command: str
    """The command line, ready to paste."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the data is: `{description, digest, samples, held_out}`."""
    compose_s: float = 0.0
    """Seconds that composing, checking and planning took."""


def with_value(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """`config` with other values in one section; the original is left alone."""
    return replace(config, **{section: replace(getattr(config, section), **values)})


def new_run(launch: Launch, started: Started) -> RunDir:
    """Make the run directory. A job that its starter has started again goes on in the directory that it has."""
    root, name = Path(launch.config.log.dir), launch.config.log.name
    before = root.absolute() / name / str(started.run_id)
    if started.run_id and started.restarts and (before / "config.yaml").exists():
        return go_on(RunDir(before), launch, last_checkpoint(RunDir(before)))
    return RunDir.create(root, name, lambda draft: _fill(draft, launch), started.run_id)


def go_on(run: RunDir, launch: Launch, checkpoint: Path | None) -> RunDir:
    """Set `run` to go on from `checkpoint` as `launch` says; what it was before is kept under numbered names."""
    resume = launch.config.checkpoint.resume if checkpoint is None else str(checkpoint)
    set_aside(run)
    _fill(run, replace(launch, config=with_value(launch.config, "checkpoint", resume=resume)))
    return run


def _fill(run: RunDir, launch: Launch) -> None:
    where = environment_record(launch.config.launch.device, launch.config.launch.env)
    run.write_environment(where | {"data": dict(launch.data), "compose_s": round(launch.compose_s, 3)})
    run.write_plan(launch.plan)
    run.add_command(launch.command)
    run.write_status("starting")
    run.write_config(launch.config)

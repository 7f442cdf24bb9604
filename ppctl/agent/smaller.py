"""The plan with which a run goes on, in its directory, on the hosts that are left (`launch.shrink=smaller`)."""

from __future__ import annotations

import sys

from ppctl.errors import ConfigError, TrainingError
from ppctl.launch.run_directory import with_value
from ppctl.plan.build import build_plan
from ppctl.plan.memory_limit import amount
from ppctl.plan.sizes import derive_world
from ppctl.plan.violations import ConfigValues, overrides_text
from ppctl.runs import fence
from ppctl.runs.run_starts import set_aside
from ppctl.runs.rundir import RunDir
from ppctl.search.remaining import Whole, nothing_fits, remaining


def complete(run: RunDir) -> None:
    """Write the plan for the run's config if the process that replaced the config died before it replaced the plan,
    which then still has the ranks of more hosts."""
    config, plan = run.read_config(), run.read_plan()
    sizes, _ = derive_world(ConfigValues(config, plan.provenance), [])
    if sizes is not None and sizes.world != plan.sizes.world:
        run.write_plan(build_plan(config, plan.provenance, title=plan.name))


def plan_smaller(run: RunDir, nodes: int, start: str = "") -> None:
    """Replace the run's config and plan by those for `nodes` hosts, and print what that costs. Raises ConfigError
    (PP-E230), and TrainingError (PP-E779) if the run has begun a later start than `start`, even during planning."""
    config, plan = run.read_config(), run.read_plan()
    whole = Whole(ConfigValues(config, plan.provenance), plan)
    found = remaining(whole, nodes)
    if found is None:
        raise ConfigError(nothing_fits(whole, nodes))
    values = whole.on(found.nodes).overridden(found.words)
    spares = max(config.launch.spares, nodes - found.nodes)
    if older := fence.older(start):
        raise TrainingError(older)
    set_aside(run)
    run.write_config(with_value(values.config, "launch", spares=spares))
    run.write_plan(build_plan(values.config, values.provenance, title=plan.name))
    cost = f"{plan.step_time_s / found.plan.step_time_s:.0%} of the tokens/s, at most {amount(found.plan.peak_bytes)}"
    print(f"note: {nodes} of {whole.nodes} nodes go on with {overrides_text(found.words)}: {cost}", file=sys.stderr)

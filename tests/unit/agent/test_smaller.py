"""A run directory that goes on with fewer hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppctl.agent.smaller import plan_smaller
from ppctl.errors import ConfigError
from ppctl.launch.planning import planned
from ppctl.runs.rundir import RunDir

RUN = ("+recipe=quickstart", "launch.device=cpu", "nodes=3", "gpus_per_node=2", "pp=2", "vpp=1", "gbs=12")


def run_of(path: Path, *words: str) -> RunDir:
    composed, plan, problems = planned([*(word.removeprefix("+") for word in RUN), *words])
    assert plan is not None and not problems
    run = RunDir(path)
    (path / "errors").mkdir(parents=True)
    run.write_plan(plan)
    run.write_config(composed.config)
    return run


def test_config_and_plan_become_those_of_the_hosts_that_are_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = run_of(tmp_path)
    plan_smaller(run, 2)
    config, plan = run.read_config(), run.read_plan()
    assert (config.launch.nodes, config.train.global_batch_size) == (2, 12)
    assert (plan.sizes.dp, plan.sizes.pp, plan.num_microbatches) == (2, 2, 3)
    assert (tmp_path / "plan-1.json").exists() and (tmp_path / "config-1.yaml").exists()
    assert "note: 2 of 3 nodes go on with launch.nodes=2: 75% of the tokens/s, at most" in capsys.readouterr().err


def test_hosts_that_the_plan_does_not_use_wait_as_spares(tmp_path: Path) -> None:
    run = run_of(tmp_path, "nodes=4", "gbs=16", "pp=2", "model.num_layers=2")
    plan_smaller(run, 3)
    launch = run.read_config().launch
    assert launch.nodes + launch.spares >= 3


def test_nothing_that_fits_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "nodes=2", "tp=4", "pp=1")  # ranks that divide layers are on both
    with pytest.raises(ConfigError, match="nothing fits 1 of 2 nodes: at least 2 are needed"):
        plan_smaller(run, 1)

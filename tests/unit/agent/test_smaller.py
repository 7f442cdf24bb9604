"""A run directory that goes on with fewer hosts."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ppctl.agent import smaller
from ppctl.agent.smaller import complete, plan_smaller
from ppctl.errors import ConfigError, TrainingError
from ppctl.launch.planning import planned
from ppctl.runs import fence
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


def test_a_run_that_goes_on_elsewhere_while_it_is_planned_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    (tmp_path / "life").write_text("7.0")
    start, before, found = fence.newest(tmp_path), (run.read_config(), run.read_plan()), smaller.remaining

    def slow(*words: Any) -> Any:
        (tmp_path / "life").write_text("7.1")
        return found(*words)

    monkeypatch.setattr(smaller, "remaining", slow)
    with pytest.raises(TrainingError, match="PP-E779"):
        plan_smaller(run, 2, start)
    assert (run.read_config(), run.read_plan()) == before and not (tmp_path / "plan-1.json").exists()


class Died(BaseException):
    pass


CHANGES = [(RunDir, "_write"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (shutil, "copy2")]


def die_before(change: int, patch: pytest.MonkeyPatch) -> None:
    """The process dies before the change with this number to a file, counted from 1."""
    done = count(1)

    def dies(real: Any) -> Any:
        def act(*arguments: Any, **more: Any) -> Any:
            if next(done) == change:
                raise Died
            return real(*arguments, **more)

        return act

    for place, name in CHANGES:
        patch.setattr(place, name, dies(getattr(place, name)))


def test_whoever_dies_while_it_replaces_config_and_plan_leaves_a_run_that_fits(tmp_path: Path) -> None:
    """The next start has all hosts, or those that were left, and its life is still the one that was begun before."""
    nodes = []
    for change in count(1):
        run = run_of(tmp_path / str(change))
        (run.path / "life").write_text("j.1")
        died = False
        with pytest.MonkeyPatch.context() as patch:
            die_before(change, patch)
            try:
                plan_smaller(run, 2)
            except Died:
                died = True
        complete(run)
        config, plan = run.read_config(), run.read_plan()
        assert config.launch.nodes is not None and plan.sizes.world == 2 * config.launch.nodes
        assert (run.path / "life").read_text() == "j.1"
        nodes.append(config.launch.nodes)
        if not died:
            break
    assert len(nodes) > 6 and nodes == sorted(nodes, reverse=True) and {*nodes} == {2, 3}


def test_a_plan_that_fits_is_left_as_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    before = os.stat(tmp_path / "plan.json")
    complete(run)
    after = os.stat(tmp_path / "plan.json")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

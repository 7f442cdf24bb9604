"""Hosts of which one is lost, and no spare is left: `launch.shrink`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agents import TRAIN, Hosts, kill
from command import losses, metrics, only_run
from oracle.reference import reference_losses

pytestmark = [pytest.mark.whole, pytest.mark.timeout(280)]


def lose_a_host(cwd: Path, text: Path, *words: str) -> Hosts:
    hosts = Hosts(cwd, *TRAIN, f"data.path={text}", "launch.shrink_after=5s", *words)
    hosts.wait_for_step(10)
    kill([hosts.agents[1].pid, *hosts.ranks(1)])
    return hosts


def test_the_host_that_is_left_goes_on_in_another_cut_with_the_global_batch(tmp_path: Path, text: Path) -> None:
    hosts = lose_a_host(tmp_path, text, "launch.shrink=smaller", "steps=200")
    assert hosts.ends() == {0: 0, 1: -9}, hosts.said()
    run = only_run(tmp_path)
    assert [record["step"] for record in metrics(run)] == list(range(1, 201))
    assert losses(run) == pytest.approx(reference_losses(run, 200), rel=1e-6)
    before, now = (json.loads((run / name).read_text()) for name in ("plan-1.json", "plan.json"))
    assert (before["world_size"], now["world_size"]) == (4, 2)
    (told,) = [line for line in hosts.said().splitlines() if line.startswith("note: 1 of 2 nodes go on with ")]
    assert "pipeline_model_parallel_size=" in told and "of the tokens/s, at most" in told
    first, second = json.loads((run / "env.json").read_text())["starts"]
    assert (first["nodes"], second["nodes"]) == (["node-0", "node-1"], ["node-0"])
    assert "node-1 has gone" in second["why"]
    assert {*first["start_up"]} == {*second["start_up"]} == {"compose", "import", "groups", "build", "warm-up", "load"}


def test_the_run_ends_with_the_exit_code_that_means_requeue(tmp_path: Path, text: Path) -> None:
    hosts = lose_a_host(tmp_path, text, "launch.shrink=requeue", "steps=2000")
    assert hosts.ends() == {0: 75, 1: -9}, hosts.said()
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)

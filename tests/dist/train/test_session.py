"""What a rank holds: no more than its part needs, and the same config and plan as the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of
from ranks import RanksFailed, run_ranks
from stores import sealed_store

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.rank.rendezvous import SharedRun
from ppctl.reach.start import call_roll
from ppctl.runs.rundir import RunDir
from ppctl.train.session import build_session


def what_a_rank_holds(mapping):
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    return session.data.training is not None, sorted(session.replica.weights.model)


def test_only_ranks_with_an_embedding_or_a_loss_open_data_and_each_builds_its_own_layers(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage and a rank " * 50)
    config = config_of(tmp_path / "corpus.txt", pp=4, vpp=1, m=1, layout="Et|t*2||t*3L")
    held = run_ranks(what_a_rank_holds, 4, to_mapping(config))
    assert [reads for reads, _ in held] == [True, False, False, True]
    layers = [{name.split(".")[1] for name in names if name.startswith("layers.")} for _, names in held]
    assert layers == [{"0"}, {"1", "2"}, set(), {"3", "4", "5"}]
    assert held[2][1] == [], "an empty stage has no weights"


def compare(mapping, seed, p2p_capacity):
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    if dist.get_rank() == 1:
        config.train.seed += seed
        plan = replace(plan, p2p_capacity=p2p_capacity)
    store, rank, world = sealed_store(), dist.get_rank(), dist.get_world_size()
    digest = SharedRun(RunDir(Path("nowhere")), config, plan).digest
    call_roll(store, rank, world, digest, edge_limit=20.0, patience=60.0)


@pytest.mark.parametrize(("seed", "p2p_capacity"), [(1, None), (0, 7)], ids=["another config", "another plan"])
def test_ranks_that_differ_all_stop_before_the_first_message(
    tmp_path: Path, seed: int, p2p_capacity: int | None
) -> None:
    mapping = to_mapping(config_of(tmp_path / "never read", pp=3, vpp=1, m=3))
    run_ranks(compare, 3, mapping, 0, None)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(compare, 3, mapping, seed, p2p_capacity)
    assert [failure.kind for failure in caught.value.failures] == ["ConfigError"] * 3
    assert all("PP-E742: ranks 1 have another config or plan" in f.message for f in caught.value.failures)

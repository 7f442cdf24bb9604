"""What ranks send in a step, counted where collectives meet torch's dispatcher, against the plan: number and bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axis_runs import MaskedBatches, config_of, world_of
from own_worlds import in_own_worlds
from ranks import run_ranks
from sent_bytes import SentByAxis

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp, no sp": ("biases", dict(tp=2)),
    "sp, groups fewer than ranks": ("grouped", dict(tp=4, sp=True)),
    "sp, cp ring": ("grouped", dict(tp=2, sp=True, cp=2)),
    "experts, ep and sp": ("experts", dict(tp=2, sp=True, ep=2, etp=1, dp=2)),
    "latent, etp, sharded": ("deepseek", dict(tp=2, sp=True, dp=2, data_parallel_sharding="optimizer_gradients")),
    "Muon, sharded": ("experts", dict(dp=4, ep=2, data_parallel_sharding="optimizer_gradients", name="muon")),
    "tied": ("biases", dict(tp=2, pp=2, layout="Et*2|t*2L", data_parallel_sharding="none")),
    "pp, recomputed": (
        "grouped",
        dict(
            tp=2, sp=True, pp=2, layout="Et*2|t*2L", recompute_granularity="full", recompute_method="uniform"
        ),
    ),
}  # fmt: skip
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("grouped", dict(cp=2, ways="all_gather", dp=2)),
    "heads": ("latent", dict(cp=2, ways="a2a", tp=2, sp=True)),
    "heads and ring": ("experts", dict(cp=4, ways="a2a+p2p", levels=[2, 2])),
    "full sharding": ("experts", dict(tp=2, sp=True, ep=2, dp=2, data_parallel_sharding="full")),
    "Muon, full sharding": (
        "grouped", dict(dp=2, pp=2, layout="Et*2|t*2L", data_parallel_sharding="full", name="muon")
    ),
    "zero bubble": ("deepseek", dict(tp=2, sp=True, pp=2, layout="Et*2|t*2mL", pp_schedule="zb_h1")),
    "dropout, recomputed": (
        "gpt3",
        dict(tp=2, sp=True, pp=2, layout="Et*2|t*2L", recompute_granularity="full", recompute_method="uniform"),
    ),
    "modules": (
        "deepseek",
        dict(
            tp=2, sp=True, pp=2, layout="Et*2|t*2mL", recompute_granularity="selective",
            recompute_modules=["mla_up_proj", "moe"],
        ),
    ),
    "experts' blocks recomputed": (
        "experts",
        dict(tp=2, sp=True, dp=2, ep=2, recompute_granularity="selective", recompute_modules=["mlp", "core_attn"]),
    ),
}  # fmt: skip


def count_all(mappings: list[dict[str, Any]]) -> list[tuple[int, dict[Any, Any], dict[Any, Any]]]:
    """Runs in a rank: of each config (pp_rank, what was sent, what the plan says), without pipeline's messages:
    these go to connections of their own, where torch's dispatcher does not see them."""
    return in_own_worlds(lambda mapping: _count(from_mapping(mapping)), mappings)


def _count(config: Any) -> tuple[int, dict[Any, Any], dict[Any, Any]]:
    etp = "parallel.expert_tensor_parallel_size"
    plan = build_plan(config, {} if config.parallel.expert_tensor_parallel_size is None else {etp: "command line"})
    assert not plan.problems, plan.problems
    counted = SentByAxis()
    with counted:
        session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
        trainer = Trainer(session, MaskedBatches(config, session.own.dp_rank))  # type: ignore[arg-type]
        trainer.step(0)
        counted.watch(session)
        counted.counts = True
        trainer.step(1)
        counted.counts = False
    session.pipeline.close()
    planned = {(each.axis, each.kind): (each.number, each.bytes) for each in plan.traffic[session.own.pp_rank]}
    found = {key: tuple(value) for key, value in counted.of.items()}
    return session.own.pp_rank, found, {key: value for key, value in planned.items() if key != ("pp", "send")}


@cache
def results(world: int, whole: bool) -> dict[str, list[Any]]:
    chosen = {name: case for name, case in (WHOLE if whole else CASES).items() if world_of(_config(case)) == world}
    ranks = run_ranks(count_all, world, [to_mapping(_config(case)) for case in chosen.values()], timeout=300)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(chosen)}


def _config(case: tuple[str, dict[str, Any]]) -> Any:
    kind, axes = case
    config = config_of(kind, **axes)
    config.model.vocab_size = 48  # of uneven runs the plan has the first rank's
    return config


NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.whole) for name in WHOLE)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_the_plans(name: str) -> None:
    """Exactly on every rank; of exchanges that carry experts' rows the sum over all ranks."""
    ranks = results(world_of(_config({**CASES, **WHOLE}[name])), name in WHOLE)[name]
    sums: dict[Any, list[float]] = {}
    for _, found, planned in ranks:
        assert planned
        found = {key: numbers for key, numbers in found.items() if numbers[1] or key in planned}
        assert {key: number for key, (number, _) in found.items()} == {key: n for key, (n, _) in planned.items()}
        for key, (_, size) in planned.items():
            if key[0] in ("ep", "etp") and key[1] == "all_to_all":
                both = sums.setdefault(key, [0.0, 0.0])
                both[0] += found[key][1]
                both[1] += size
            else:
                assert found[key][1] == pytest.approx(size, abs=1), key
    for key, (found_all, planned_all) in sums.items():
        assert found_all == pytest.approx(planned_all, abs=len(ranks)), key

"""Every parallel axis, in float64 against one process: losses, gradients, norm, clipping and weights within 1e-12.

All combinations of one world size run in one set of processes; a test is one combination.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from axis_runs import MODELS, SIZES, config_of, differences, train_all, world_of
from pairwise import pairwise
from ranks import run_ranks

from ppctl.config.mapping import to_mapping

Case = tuple[str, str, str, tuple[int, int], int, str, str]
"""Model, tensor parallelism, context parallelism, (ep, etp; 0: tp's), dp, sharding, cut."""

TENSOR = {"-": {}, "tp 2": dict(tp=2), "tp 2 sp": dict(tp=2, sp=True), "tp 4 sp": dict(tp=4, sp=True)}
CONTEXT: dict[str, dict[str, Any]] = {
    "-": {},
    "cp 2, p2p": dict(cp=2),
    "cp 2, all_gather": dict(cp=2, ways="all_gather"),
    "cp 2, a2a": dict(cp=2, ways="a2a"),
    "cp 2, a way for each layer": dict(cp=2, ways=["a2a", "p2p", "all_gather", "p2p"]),
    "cp 4, p2p": dict(cp=4),
    "cp 4, a2a+p2p": dict(cp=4, ways="a2a+p2p", levels=[2, 2]),
}
CUTS: dict[str, dict[str, Any]] = {
    "pp 1": {},
    "pp 2": dict(pp=2, layout="Et*2|t*2{m}L", cross_entropy_loss_fusion=True),
    "pp 2, full recompute": dict(pp=2, layout="Et*2|t*2{m}L", recompute_granularity="full", recompute_method="uniform"),
    "pp 2, vpp 2": dict(pp=2, layout="Et|t|t*2|{m}L", virtual_pipeline_model_parallel_size=2),
    "zb_h1": dict(pp=2, layout="Et*2|t*2{m}L", pp_schedule="zb_h1"),
    "zb_h1, modules recomputed": dict(
        pp=2,
        layout="Et*2|t*2{m}L",
        pp_schedule="zb_h1",
        recompute_granularity="selective",
        recompute_modules=["layernorm", "mla_up_proj", "moe_act"],
    ),
    "dualpipev": dict(pp=2, layout="Et|t|t*2|{m}L", virtual_pipeline_model_parallel_size=2, pp_schedule="dualpipev"),
}


def axes_of(case: Case) -> dict[str, Any]:
    """The keywords of `config_of`."""
    kind, tensor, context, (ep, etp), dp, sharding, cut = case
    axes = TENSOR[tensor] | CONTEXT[context] | CUTS[cut] | dict(ep=ep, dp=dp, data_parallel_sharding=sharding)
    if "layout" in axes:
        axes["layout"] = axes["layout"].format(m="m" * (MODELS[kind].get("mtp_num_layers") or 0))
    return axes | (dict(etp=etp) if etp else {})


def is_possible(case: Case) -> bool:
    kind, tensor, context, (ep, etp), dp, sharding, cut = case
    tp, moe = TENSOR[tensor].get("tp", 1), "num_moe_experts" in MODELS[kind]
    cp, way = CONTEXT[context].get("cp", 1), CONTEXT[context].get("ways", "p2p")
    inner = 2 if "a2a" in str(way) else 1
    ranks = tp * cp * dp * (1 if cut == "pp 1" else 2)
    experts = moe or (ep == 1 and etp == 0)
    divides = tp * cp * dp % (ep * (etp or tp)) == 0
    modules = cut != "zb_h1, modules recomputed" or kind == "deepseek"  # the one that has all of them
    enough = cut != "dualpipev" or dp == 1
    return (
        ranks <= 8
        and tp * inner <= SIZES["num_attention_heads"]
        and (max(tp, cp) > 1 or dp == 1)
        and experts
        and divides
        and (sharding == "none" or dp * cp > 1)
        and (not moe or tp == 1 or "sp" in tensor)
        and modules
        and enough
    )


GRID: list[Case] = [
    case
    for case in itertools.product(
        MODELS,
        TENSOR,
        CONTEXT,
        [(1, 0), (1, 1), (2, 0), (2, 1), (4, 1)],
        (1, 2),
        ("none", "optimizer_gradients", "full"),
        CUTS,
    )
    if is_possible(case)
]
SAMPLE: list[Case] = [
    ("grouped", "tp 4 sp", "-", (1, 0), 1, "none", "pp 1"),
    ("biases", "tp 2", "-", (1, 0), 1, "none", "pp 2"),
    ("latent", "tp 2 sp", "-", (1, 0), 1, "none", "pp 2, vpp 2"),
    ("experts", "tp 2 sp", "-", (2, 0), 2, "full", "pp 1"),
    ("deepseek", "tp 2 sp", "-", (2, 1), 2, "optimizer_gradients", "pp 1"),
    ("deepseek", "tp 2 sp", "-", (1, 0), 1, "none", "zb_h1, modules recomputed"),
    ("deepseek", "tp 2 sp", "cp 2, p2p", (2, 1), 1, "full", "pp 1"),
    ("packed", "-", "cp 2, all_gather", (1, 0), 1, "none", "pp 2"),
    ("packed, dropped", "-", "cp 2, p2p", (1, 0), 1, "none", "pp 1"),
    ("gpt3, all scores", "-", "cp 4, a2a+p2p", (1, 0), 1, "none", "pp 1"),
]


PAIRS: list[Case] = pairwise(GRID, SAMPLE)[len(SAMPLE) :]
"""What completes the sample's pairs."""
DRAWN: list[Case] = [*dict.fromkeys(random.Random(14).sample(GRID, 40))]
TIERS: dict[str, list[Case]] = {"": SAMPLE, "whole": PAIRS, "soak": [c for c in DRAWN if c not in SAMPLE + PAIRS]}
"""Marker -> its cases."""


@cache
def results(world: int, tier: str) -> dict[Case, list[dict[str, Any]]]:
    """Of all cases of a tier that have this size."""
    chosen = [c for c in TIERS[tier] if world_of(config_of(c[0], **axes_of(c))) == world]
    mappings = [to_mapping(config_of(c[0], **axes_of(c))) for c in chosen]
    ranks = run_ranks(train_all, world, mappings, timeout=900)
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(chosen)}


PARAMETERS = [
    pytest.param(*case, marks=getattr(pytest.mark, tier) if tier else ()) for tier in TIERS for case in TIERS[tier]
]


@pytest.mark.shows(
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.context_parallel_size",
    "parallel.hierarchical_context_parallel_sizes",
    "parallel.expert_tensor_parallel_size",
    "model.cp_comm_type",
    "parallel.cross_entropy_loss_fusion",
)
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("kind", "tensor", "context", "experts", "dp", "sharding", "cut"), PARAMETERS)
def test_any_axes_agree_with_one_process(kind, tensor, context, experts, dp, sharding, cut):
    case = kind, tensor, context, experts, dp, sharding, cut
    world = world_of(config_of(kind, **axes_of(case)))
    tier = next(tier for tier, cases in TIERS.items() if case in cases)
    far = differences(kind, results(world, tier)[case])
    assert {what: value for what, value in far.items() if not value <= 1e-12} == {}


COMPILED: list[Case] = [
    ("grouped", "tp 2 sp", "-", (1, 0), 1, "none", "pp 1"),
    ("biases", "tp 2", "-", (1, 0), 1, "none", "pp 2"),
    ("packed", "-", "cp 2, p2p", (1, 0), 1, "none", "pp 1"),
    ("deepseek", "tp 2 sp", "cp 2, a2a", (2, 1), 1, "full", "pp 1"),
]


@pytest.mark.shows("train.compile")
@pytest.mark.whole  # the compiler, on every rank
@pytest.mark.timeout(480)
@pytest.mark.parametrize("recomputed", [{}, {"recompute_granularity": "selective"}], ids=["kept", "core_attn"])
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_layers_that_are_compiled_between_their_exchanges_agree_with_one_process(case: Case, recomputed) -> None:
    config = config_of(case[0], **axes_of(case), compile=True, **recomputed)
    ranks = run_ranks(train_all, world_of(config), [to_mapping(config)], timeout=450)
    far = differences(case[0], [rank[0] for rank in ranks])
    assert {what: value for what, value in far.items() if not value <= 1e-12} == {}


def test_a_cut_at_fixed_axes_changes_no_bit():
    """In float32: pp, vpp, schedules and recompute at tp 2 under sequence parallelism."""
    for kind, cuts in {"deepseek": ("pp 1", "pp 2, vpp 2", "zb_h1, modules recomputed"), "biases": CUTS}.items():
        cases = [(kind, "tp 2 sp", "-", (1, 0), 1, "none", cut) for cut in cuts]
        cases = [case for case in cases if is_possible(case)]
        configs = [config_of(kind, **axes_of(case), params_dtype="float32") for case in cases]
        alone = run_ranks(train_all, 2, [to_mapping(configs[0])])
        cut = run_ranks(train_all, 4, [to_mapping(config) for config in configs[1:]], timeout=120)
        for number, case in enumerate(cases[1:]):
            assert [r["loss"] for r in cut[0][number]["records"]] == [r["loss"] for r in alone[0][0]["records"]], case
            for rank in cut:
                for name, value in rank[number]["weights"].items():
                    assert np.array_equal(value, alone[0][0]["weights"][name]), (case, name)

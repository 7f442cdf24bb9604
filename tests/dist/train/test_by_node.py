"""Runs whose tokens go to their experts by node have the bits of runs that send every copy straight to its rank."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from expert_runs import config_of, train_cut
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import to_mapping

WORLD = 4
SELECTIVE = {"train.recompute_granularity": "selective"}
CASES = {
    # kind, layout, pp, dp, ep, ranks of a node, keys
    "two nodes of two": ("deepseek", "Et*5mL", 1, 4, 4, 2, {}),
    "pairs behind which weights' gradients wait, experts again": (
        "deepseek", "Et*2|t*3|m|L", 2, 2, 2, 1,
        SELECTIVE | {
            "train.recompute_modules": ["experts", "layernorm"],
            "parallel.overlap_moe_expert_parallel_comm": True,
            "parallel.delay_wgrad_compute": True,
        },
    ),
}  # fmt: skip
WHOLE = {
    "nodes of one": ("deepseek", "Et*5mL", 1, 4, 4, 1, {}),
    "no groups": ("softmax", "Et*5L", 1, 4, 4, 2, {}),
    "two groups of two": ("softmax", "Et*5L", 1, 4, 2, 1, {}),
    "blocks again": ("deepseek", "Et*5mL", 1, 4, 4, 2, SELECTIVE | {"train.recompute_modules": ["moe"]}),
    "split backwards": ("softmax", "Et*2|t*3L", 2, 2, 2, 1, {"pipeline.pp_schedule": "zb_h1"}),
    "dualpipev": (
        "softmax", "Et*2|t|t|tL", 2, 2, 2, 1,
        SELECTIVE | {"train.recompute_modules": ["experts"], "pipeline.pp_schedule": "dualpipev"},
    ),
    "experts divided": (
        "deepseek", "Et*5mL", 1, 2, 2, 2,
        {
            "parallel.tensor_model_parallel_size": 2, "parallel.expert_tensor_parallel_size": 2,
            "parallel.sequence_parallel": True,
        },
    ),
    "sharded": ("softmax", "Et*5L", 1, 4, 2, 1, {"parallel.data_parallel_sharding": "optimizer_gradients"}),
}  # fmt: skip


def config(text, case, dispatch):
    kind, layout, pp, dp, ep, per_node, changes = case
    made = config_of(text, kind, 4 if pp == 2 else 2, layout, pp, dp, ep)
    made.train.steps = 2
    for key, value in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(made, section), name, value)
    made.launch.nodes, made.launch.gpus_per_node = WORLD // per_node, per_node
    made.parallel.expert_dispatch = dispatch
    return to_mapping(made)


def train_all(mappings):
    return in_own_worlds(train_cut, mappings)


@cache
def runs(text: Path, whole: bool):
    """Case -> dispatch -> of each rank (records, weights)."""
    cases = WHOLE if whole else CASES
    order = [(name, dispatch) for name in cases for dispatch in ("flat", "by_node")]
    mappings = [config(text, cases[name], dispatch) for name, dispatch in order]
    ranks = run_ranks(train_all, WORLD, mappings, timeout=280.0)
    return {each: [rank[number] for rank in ranks] for number, each in enumerate(order)}


@pytest.mark.timeout(300)
@pytest.mark.shows("parallel.expert_dispatch")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.whole) for name in WHOLE)])
def test_by_node_changes_no_bit(text, name):
    found = runs(text, name in WHOLE)
    for (records, weights), (expected, theirs) in zip(found[name, "by_node"], found[name, "flat"], strict=True):
        for key in {"loss", "grad_norm", "mtp_loss", "aux_loss"} & expected[0].keys():
            assert [record[key] for record in records] == [record[key] for record in expected], key
        assert weights.keys() == theirs.keys()
        assert all(np.array_equal(value, theirs[key]) for key, value in weights.items())

"""The bitwise law under I and W: five steps give the bits of one process, or of the same run with whole backwards."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_runs import MODELS, STEPS, config_of, hold, reference
from pairwise import in_tiers, pairwise
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.plan.build import build_plan
from ppctl.schedule.policies import POLICIES
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
WAYS = {
    "nothing": {},
    "full": FULL,
    "full, two layers a run": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "full, one microbatch of a window spared": FULL | {"num_microbatches_with_partial_activation_checkpoints": 1},
    "attention": SELECTIVE,
    "norms": SELECTIVE | {"recompute_modules": ["layernorm"]},
    "feed-forward": SELECTIVE | {"recompute_modules": ["mlp", "core_attn"]},
    "experts": SELECTIVE | {"recompute_modules": ["moe"]},
    "in experts": SELECTIVE | {"recompute_modules": ["layernorm", "moe_act"]},
    "up-projections": SELECTIVE | {"recompute_modules": ["layernorm", "mla_up_proj", "core_attn"]},
}
SPLIT = [name for name, policy in POLICIES.items() if policy.splits]
LAYOUTS = {1: "Et*5{m}L", 2: "Et*3|t*2{m}L", 3: "Et|t*4|{m}L", 4: "E|t*2|t*3|{m}L", 6: "E|t|t|t*3|{m}|L"}


def recomputes(kind: str, way: str) -> bool:
    """Whether the model has what this way recomputes."""
    model = MODELS[kind]
    if way in ("experts", "in experts"):
        return "num_moe_experts" in model
    if way == "feed-forward":
        return "num_moe_experts" not in model or "moe_layer_freq" in model
    return way != "up-projections" or "multi_latent_attention" in model


def chunks(name: str) -> int:
    return 2 if POLICIES[name].placement == "v" or name == "interleaved_zero_bubble" else 1


GRID = [
    (kind, name, pp, way, calls)
    for kind, name, pp, way, calls in product(MODELS, SPLIT, (1, 2, 3), WAYS, (1, 2))
    if recomputes(kind, way) and pp * chunks(name) in LAYOUTS
]
SAMPLE = [
    ("deepseek, tied, two MTP modules", "zbv_zero_bubble", 2, "norms", 1),
    ("latent attention", "zb_h1", 2, "up-projections", 2),
    ("softmax", "interleaved_zero_bubble", 2, "in experts", 1),
    *random.Random(5).sample([row for row in GRID if row[1] == "dualpipev" and row[2] < 3], 2),
]


def config_under(text: Path, kind: str, name: str, pp: int, m: int, dp: int = 1, **options: object) -> RunConfig:
    modules = "m" * (MODELS[kind].get("mtp_num_layers") or 0)
    layout = LAYOUTS[pp * chunks(name)].format(m=modules)
    config = config_of(text, kind, m, layout, pp, dp)
    config.pipeline.pp_schedule = name
    for key, value in options.items():
        owner = next(
            part
            for part in (config.pipeline, config.train, config.optim, config.parallel, config.launch)
            if hasattr(part, key)
        )
        setattr(owner, key, value)
    return config


@pytest.mark.parametrize(("kind", "name", "pp", "way", "calls"), in_tiers(pairwise(GRID, SAMPLE), SAMPLE))
def test_split_backwards_give_the_bits_of_one_process(text, kind, name, pp, way, calls):
    m = 2 * pp + (calls == 1)
    options = {**WAYS[way], **({"pp_batch_size": 2 * m} if calls > 1 else {})}
    config = config_under(text, kind, name, pp, calls * m, **options)
    hold(config, reference(text, kind, calls * m))


def train_parts(mapping: dict) -> tuple[list[dict], dict]:
    """Runs in a rank: records, and this rank's masters by name and data-parallel rank."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    records = [trainer.step(step).record for step in range(STEPS)]
    own = session.own.dp_rank
    return records, {(name, own): p.detach().numpy().copy() for name, p in session.replica.weights.master.items()}


PRECISIONS = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "float16": {"fp16": True, "loss_scale": 1024.0},
    "autocast": {"enable_autocast": True, "autocast_dtype": "bfloat16"},
}
SPREAD = {
    "one replica": {},
    "replicas": {"dp": 2},
    "gradients": {"dp": 2, "data_parallel_sharding": "optimizer_gradients"},
    "full": {"dp": 2, "data_parallel_sharding": "full"},
    "full, experts": {"dp": 2, "data_parallel_sharding": "full", "expert_model_parallel_size": 2},
    "fused messages": {"batch_p2p_comm": True, "batch_p2p_sync": True, "overlap_p2p_comm": False},
    "plain messages": {"transport": "plain"},
}
OTHER_GRID = [
    (kind, name, precision, spread)
    for kind, name, precision, spread in product(MODELS, SPLIT, PRECISIONS, SPREAD)
    if spread != "full, experts" or "num_moe_experts" in MODELS[kind]
]
OTHER_SAMPLE = [
    ("deepseek, tied, two MTP modules", "zbv_zero_bubble", "bfloat16", "full, experts"),
    ("softmax", "zb_h1", "float16", "gradients"),
    ("latent attention", "interleaved_zero_bubble", "autocast", "fused messages"),
    ("softmax", "dualpipev", "bfloat16", "plain messages"),
]


@pytest.mark.parametrize(
    ("kind", "name", "precision", "spread"), in_tiers(pairwise(OTHER_GRID, OTHER_SAMPLE), OTHER_SAMPLE)
)
def test_split_backwards_give_the_bits_of_whole_ones(text, kind, name, precision, spread):
    """Where one process is no measure: other dtypes than float32, and sums over replicas."""
    found = []
    for schedule in (name, "1f1b" if chunks(name) == 1 else "interleaved_1f1b"):
        config = config_under(text, kind, name, 2, 5, **PRECISIONS[precision], **SPREAD[spread])
        config.pipeline.pp_schedule = schedule
        results = run_ranks(train_parts, 2 * SPREAD[spread].get("dp", 1), to_mapping(config))
        figures = [{key: r.get(key) for key in ("loss", "grad_norm", "mtp_loss", "aux_loss")} for r in results[0][0]]
        parts = [(key, value.tobytes()) for _, weights in results for key, value in weights.items()]
        found.append((figures, sorted(parts)))
    assert found[0] == found[1]
    assert found[0][0][-1]["loss"] < found[0][0][0]["loss"]

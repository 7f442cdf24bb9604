"""Small spaces of configurations, drawn from a seed, and all of their configurations with their plans."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ppctl.config.compose import compose
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.violations import ConfigValues
from ppctl.search.space import Configuration, SearchSpace

_MODEL = ["model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=1024", "model.vocab_size=8192"]
_RUN = ["launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "data.seq_length=512"]
_TYPED = ("tp", "cp", "pp", "vpp", "mbs", "parallel.data_parallel_sharding", "recompute", "pp_schedule")


def space(seed: int, most: int = 60) -> SearchSpace:
    """A space of at most `most` configurations, some of which do not fit the device in most spaces."""
    draw = random.Random(seed)
    order = random.Random(~seed).choice(("tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "pp-tp-cp-ep-dp"))
    while True:
        words = [
            *_MODEL,
            *_RUN,
            f"parallel.order={order}",
            f"nodes={draw.choice((1, 2))}",
            f"gpus_per_node={draw.choice((2, 3, 4, 8))}",
        ]
        words += [f"model.num_layers={draw.randint(2, 9)}", f"gbs={draw.choice((8, 24, 48, 96))}"]
        if draw.random() < 0.4:
            words += ["model.num_moe_experts=8", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=256"]
            words += [f"parallel.overlap_moe_expert_parallel_comm={draw.choice(('true', 'false'))}"]
        words += [f"cost.stack={draw.choice(('ppctl', 'megatron'))}"]
        if draw.random() < 0.2:
            words += ["model.mtp_num_layers=1"]
        if draw.random() < 0.3:
            words += ["launch.transport=channels", "parallel.batch_p2p_comm=false", "parallel.batch_p2p_sync=false"]
            words += ["parallel.overlap_p2p_comm=true"]
        words += [f"launch.device_memory={draw.choice((400, 600, 900, 2000))}MiB", "launch.memory_reserve=0GiB"]
        choices = {
            "tp": (1, 2, 4), "cp": (1, 2), "pp": (2, 3, 4), "vpp": (1, 2), "mbs": (1, 2),
            "parallel.data_parallel_sharding": ("none", "optimizer_gradients", "full"),
            "recompute": ("null", "full"), "pp_schedule": ("1f1b", "interleaved_1f1b", "zb_h1", "v_min", "dualpipev"),
        }  # fmt: skip
        words += [f"{key}={draw.choice(choices[key])}" for key in draw.sample(_TYPED, draw.randint(3, 5))]
        try:
            composed = compose(words)
        except Exception:  # what was drawn contradicts itself
            continue
        drawn = SearchSpace(ConfigValues(composed.config, composed.provenance))
        if 6 <= sum(1 for _ in every(drawn)) <= most:
            return drawn


def every(space: SearchSpace) -> Iterator[Configuration]:
    """All configurations of a space whose axes divide ranks and model."""
    for axes in space.axes():
        sizes = space.sizes(axes)
        if sizes is None:
            continue
        for batch, again in [(b, r) for b in space.batches(sizes.dp) for r in space.recomputations]:
            yield from space.layouts(axes._replace(micro_batch_size=batch[0], recomputation=again), sizes)


def all_plans(space: SearchSpace) -> dict[Configuration, Plan]:
    """Every configuration that the rules allow, with its plan."""
    plans = {of: plan_alone(space.values_of(of)) for of in every(space) if space.obeys(of)}
    return {of: plan for of, plan in plans.items() if plan is not None and plan.timing.pipeline_s}

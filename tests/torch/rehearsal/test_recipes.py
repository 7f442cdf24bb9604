"""The plan's bytes against the rehearsal's: every recipe with every recomputation that its model can have.

A case is a short cut of a recipe: three pp_ranks of a dense layer or two, at the real widths, sequence and micro batch.
"""

import random
from dataclasses import replace

import pytest
from pairwise import in_tiers

from ppctl.config.resources import recipes
from ppctl.launch.planning import planned
from ppctl.plan.memory import held_bytes
from ppctl.rehearsal import stand_ins
from ppctl.rehearsal.rank import rehearse

CLOSE, LITTLE = 0.01, 2**20 // 10
KEPT_CLOSE = 0.002
MODES = (
    "none", "full 1", "full 2", "block 1",
    "core_attn", "mlp", "layernorm", "moe", "experts", "moe_act", "mla_up_proj",
    "mlp layernorm", "core_attn mlp", "moe layernorm", "experts layernorm", "moe_act layernorm",
    "mla_up_proj layernorm", "moe moe_act", "experts moe_act",
)  # fmt: skip
PP = 3
MICROBATCHES = 2 * PP


def recomputation(mode):
    """The overrides of a mode, nothing being left of the recipe's own."""
    granularity, method, layers, modules = "null", "null", "null", "null"
    word, _, count = mode.partition(" ")
    if word in ("full", "block"):
        granularity, method, layers = "full", {"full": "uniform"}.get(word, word), count
    elif mode != "none":
        granularity, modules = "selective", f"[{mode.replace(' ', ',')}]"
    return [
        f"train.recompute_granularity={granularity}",
        f"train.recompute_method={method}",
        f"train.recompute_num_layers={layers}",
        f"train.recompute_modules={modules}",
        "train.recompute_stages=null",
        "parallel.num_microbatches_with_partial_activation_checkpoints=null",
    ]


def config_of(recipe):
    return planned([f"+recipe={recipe}"])[0].config


def possible(model, mode):
    """Whether the model has what the mode computes again."""
    has = {
        "mla_up_proj": model.multi_latent_attention,
        **dict.fromkeys(("moe", "experts", "moe_act"), model.num_moe_experts),
    }
    return all(has.get(word, True) for word in mode.split())


def cut(recipe, mode, *more):
    """(config, plan) of a cut of the recipe: dense layers ahead of experts where it has them."""
    config = config_of(recipe)
    model, ep = config.model, config.parallel.expert_model_parallel_size or 1
    mtp = model.mtp_num_layers or 0
    overrides = [f"+recipe={recipe}", f"pp={PP}", "vpp=1", f"dp={ep}", "model.num_layers=5"]
    if model.num_moe_experts:
        dense = isinstance(model.moe_layer_freq, list | str) and "0" in str(model.moe_layer_freq)
        overrides.append(f"model.moe_layer_freq={'[0,1,1,1,1]' if dense else 1}")
    overrides += [
        f"layout='Et|tt|tt{'m' * mtp}L'",
        f"gbs={MICROBATCHES * ep * config.train.micro_batch_size}",
        "pipeline.pp_schedule=1f1b",
        "pipeline.extra_warmup=0",
        "parallel.data_parallel_sharding=none",
        "launch.nodes=null",
        "launch.gpus_per_node=null",
        "launch.device_memory=null",
        "launch.device=cuda",
        *recomputation(mode),
        *more,
    ]
    composed, plan, problems = planned(overrides, for_training=True)
    assert plan is not None, problems
    return composed.config, plan


def grid():
    for recipe in sorted(recipes()):
        model = config_of(recipe).model
        yield from ((recipe, mode) for mode in MODES if possible(model, mode))


GRID = [*grid()]


def sample():
    """Each recipe once, with modes that differ as far as can be."""
    order, taken = random.Random(0), set()
    for recipe in dict(GRID):
        modes = [mode for name, mode in GRID if name == recipe]
        mode = order.choice([mode for mode in modes if mode not in taken] or modes)
        taken.add(mode)
        yield recipe, mode


def close(planned_bytes, measured, share=CLOSE):
    return abs(planned_bytes - measured) <= max(share * measured, LITTLE)


@pytest.mark.parametrize(("recipe", "mode"), in_tiers(GRID, [*sample()]))
def test_the_plan_is_what_is_measured(recipe, mode, monkeypatch):
    # Whether a product adds to a sum in place a trial on the device tells; the plan has the gradient that lives if not.
    able = stand_ins.capability
    monkeypatch.setattr(
        stand_ins, "capability", lambda *args, **named: replace(able(*args, **named), adds_products=False)
    )
    config, plan = cut(recipe, mode)
    off = []
    for cost in plan.pp_ranks:
        measured = rehearse(config, plan, cost.pp_rank * plan.sizes.world // PP)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            if getattr(measured, name) != getattr(cost, name):
                off.append(f"pp_rank {cost.pp_rank}: {name} {getattr(measured, name):,} of {getattr(cost, name):,}")
        for memory in measured.stages:
            layers = plan.stages[memory.stage].layers
            kept = held_bytes(config, memory.stage, layers, plan.sizes, config.train.micro_batch_size)[1]
            if not close(kept, memory.kept, KEPT_CLOSE):
                off.append(
                    f"stage {memory.stage} keeps {memory.kept:,} of {kept:,} planned ({memory.kept / kept - 1:+.2%})"
                )
        peak = cost.peak_bytes - cost.buffer_bytes
        if not close(peak, measured.peak_bytes):
            share = measured.peak_bytes / peak - 1
            off.append(
                f"pp_rank {cost.pp_rank}: {measured.peak_bytes:,} in {measured.peak_action} of {peak:,} ({share:+.2%})"
            )
    assert not off, "; ".join(off)


@pytest.mark.parametrize(
    ("recipe", "typed", "sent"),
    [
        ("llama3_8b", ["cp=2"], {("cp", "send")}),
        pytest.param(
            "llama3_8b", ["cp=2", "model.cp_comm_type=all_gather"], {("cp", "allgather_base")}, marks=pytest.mark.whole
        ),
        pytest.param(
            "llama3_8b", ["cp=2", "model.cp_comm_type=a2a"], {("cp", "alltoall_base")}, marks=pytest.mark.whole
        ),
        ("mixtral_8x7b", ["tp=2", "sp=true", "etp=2"], {("etp", "alltoall_base"), ("tp", "reduce_scatter_base")}),
        (
            "qwen3_30b_a3b",
            ["launch.nodes=6", "launch.gpus_per_node=4"],
            {("ep-outer", "alltoall_base"), ("ep-inner", "alltoall_base")},
        ),
    ],
)
def test_other_axes_are_rehearsed(recipe, typed, sent):
    config, plan = cut(recipe, "none", *typed)
    measured = rehearse(config, plan, 0)
    assert sent <= {(each.group, each.kind) for each in measured.traffic if each.bytes}
    for memory in measured.stages:
        layers = plan.stages[memory.stage].layers
        kept = held_bytes(config, memory.stage, layers, plan.sizes, config.train.micro_batch_size)[1]
        assert close(kept, memory.kept, KEPT_CLOSE)


@pytest.mark.parametrize(
    ("typed", "axis", "outside", "megabytes"),
    [
        pytest.param(["parallel.expert_dispatch=flat"], "ep", 56 / 64, 411, marks=pytest.mark.whole),
        ([], "ep-outer", 7 / 8, 206),
    ],
)
def test_each_exchange_of_deepseek_v3_sends_so_much_over_the_network(typed, axis, outside, megabytes):
    """With 64 ranks on 8 nodes and a router limited to 4 of them, in the rehearsal as in the plan; `experts` are made
    again without an exchange. Beside 4 exchanges of rows for each layer their weights travel twice."""
    on_nodes = ["launch.nodes=24", "launch.gpus_per_node=8", "gbs=64", *typed]
    config, plan = cut("deepseek_v3", "experts", *on_nodes)
    measured = rehearse(config, plan, 64)
    layers = sum(layer.kind == "decoder" for layer in plan.stages[1].layers)
    found = [each for each in measured.traffic if each.group == axis and each.kind == "alltoall_base"]
    assert sum(each.count for each in found) == layers * (4 + 2 + 1)  # and the counts, or the experts of each row
    (backward,) = (each for each in found if each.during == "backward")
    weights = 4096 * 8 * (1 if axis == "ep" else 4) * 2
    assert (backward.bytes / layers - weights) / 2 * outside / 1e6 == pytest.approx(megabytes, abs=1)
    (planned_bytes,) = (each.bytes for each in plan.traffic[1] if (each.axis, each.kind) == (axis, "all_to_all"))
    others = (63 / 64 if axis == "ep" else 7 / 8) * sum(each.bytes for each in found)
    assert planned_bytes == pytest.approx(others, rel=1e-3)

"""Rules on values: each is broken once, and its remedy is accepted."""

import shlex

import pytest

from ppctl.config.checks import check
from ppctl.config.compose import compose
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.plan.build import build_plan

MLA = ["model.multi_latent_attention=true"]
MOE = ["model.num_moe_experts=8"]


@pytest.mark.shows("parallel.pipeline_dtype", "pipeline.pp_seq_len", "pipeline.dtype")
@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (["steps=0"], ["train.steps"]),
        (["gbs=-4"], ["train.global_batch_size"]),
        (["pp=0"], ["parallel.pipeline_model_parallel_size"]),
        (["vpp=0"], ["parallel.virtual_pipeline_model_parallel_size"]),
        (["lr=0"], ["optim.lr"]),
        (["lr=inf"], ["optim.lr"]),
        (["lr=nan"], ["optim.lr"]),
        (["optim.weight_decay=-1"], ["optim.weight_decay"]),
        (["checkpoint.keep=-1"], ["checkpoint.keep"]),
        (["checkpoint.local_replicas=1"], ["checkpoint.local_replicas", "checkpoint.local"]),
        (["checkpoint.local_replicas=2"], ["checkpoint.local_replicas"]),
        (["checkpoint.local=/dev/shm/ppctl"], ["checkpoint.local", "checkpoint.local_every"]),
        (["optim.muon_momentum=0.5"], ["optim.muon_momentum", "optim.name"]),
        (["optim.muon_adjust_lr=original"], ["optim.muon_adjust_lr", "optim.name"]),
        (["optim.beta2=1"], ["optim.beta2"]),
        (["optim.min_lr=1"], ["optim.min_lr", "optim.lr"]),
        (["model.num_attention_heads=7"], ["model.hidden_size", "model.num_attention_heads"]),
        (["model.kv_channels=33"], ["model.hidden_size", "model.num_attention_heads", "model.kv_channels"]),
        (["model.num_query_groups=3"], ["model.num_query_groups", "model.num_attention_heads"]),
        (["model.num_query_groups=16"], ["model.num_query_groups", "model.num_attention_heads"]),
        (["model.rotary_percent=0.01"], ["model.rotary_percent"]),
        (["model.cp_comm_type=[p2p,a2a]"], ["model.cp_comm_type", "model.num_layers"]),
        (["model.cp_comm_type=[ring]"], ["model.cp_comm_type"]),
        (["model.cp_comm_type=[]"], ["model.cp_comm_type"]),
        (["parallel.hierarchical_context_parallel_sizes=[8]"], ["parallel.hierarchical_context_parallel_sizes"]),
        (["parallel.hierarchical_context_parallel_sizes=[1,2]"], ["parallel.hierarchical_context_parallel_sizes"]),
        (["model.rotary_percent=1.5"], ["model.rotary_percent"]),
        (["model.mscale_all_dim=1"], ["model.mscale_all_dim", "model.multi_latent_attention"]),
        (["model.rotary_scaling_type=linear"], ["model.rotary_scaling_type"]),
        (
            ["model.rotary_scaling_factor=8", "model.rotary_scaling_type=llama3", "model.beta_fast=1"],
            ["model.beta_fast", "model.beta_slow"],
        ),
        (["model.mscale=2"], ["model.mscale", "model.rotary_scaling_factor"]),
        ([*MLA, "model.qk_pos_emb_head_dim=33"], ["model.qk_pos_emb_head_dim"]),
        ([*MLA, "model.add_qkv_bias=true"], ["model.add_qkv_bias", "model.multi_latent_attention"]),
        ([*MLA, "model.rotary_percent=0.5"], ["model.rotary_percent", "model.multi_latent_attention"]),
        (
            ["model.rotary_scaling_factor=4", "model.rotary_base=1"],
            ["model.rotary_base", "model.rotary_scaling_factor"],
        ),
        ([*MOE, "model.moe_router_topk=9"], ["model.moe_router_topk", "model.num_moe_experts"]),
        ([*MOE, "model.moe_router_num_groups=3"], ["model.moe_router_num_groups", "model.num_moe_experts"]),
        (
            [*MOE, "model.moe_router_num_groups=4", "model.moe_router_group_topk=1", "model.moe_router_topk=3"],
            ["model.moe_router_topk", "model.moe_router_group_topk"],
        ),
        ([*MOE, "model.moe_router_group_topk=2"], ["model.moe_router_group_topk", "model.moe_router_num_groups"]),
        (["seq=9000"], ["data.seq_length", "model.max_position_embeddings"]),
        (["train.on_bad_step=go"], ["train.on_bad_step"]),
        (["train.on_bad_step=rollback:0"], ["train.on_bad_step"]),
        (["train.on_bad_step=rollback:5"], ["train.on_bad_step", "checkpoint.interval"]),
        (
            ["train.on_bad_step=rollback:12", "checkpoint.interval=10"],
            ["train.on_bad_step", "checkpoint.keep", "checkpoint.interval"],
        ),
        (
            ["train.on_bad_step=rollback:11", "checkpoint.interval=10", "train.batch_rampup=[8,8,64]", "gbs=32"],
            ["train.on_bad_step", "train.batch_rampup"],
        ),
        (["launch.device=gpu"], ["launch.device"]),
        (["launch.device_memory=80 apples"], ["launch.device_memory"]),
        (["launch.share_gpu=true", "launch.device=cpu"], ["launch.share_gpu", "launch.device"]),
        (["log.name=a/b"], ["log.name"]),
        (["log.name=.."], ["log.name"]),
        (["log.name="], ["log.name"]),
        (["log.trace=10:12", "steps=10"], ["log.trace", "train.steps"]),
        (["log.torch_profile=3:4", "steps=2"], ["log.torch_profile", "train.steps"]),
        (["log.gradients=1:4", "steps=2"], ["log.gradients", "train.steps"]),
        (["data.path="], ["data.path"]),
        (["pipeline.pp_schedule=1f2b"], ["pipeline.pp_schedule"]),
        (["pipeline.pp_schedule=null"], ["pipeline.pp_schedule"]),
        (["parallel.params_dtype=bf16"], ["parallel.params_dtype", "parallel.bf16"]),
        (["pipeline.dtype=bf16"], ["pipeline.dtype", "parallel.bf16"]),
        (["pipeline.pp_seq_len=64"], ["pipeline.pp_seq_len", "data.seq_length"]),
        (["pipeline.pp_schedule=PipelineScheduleMulti"], ["pipeline.pp_schedule"]),
        (["train.recompute_granularity=ful"], ["train.recompute_granularity"]),
        (["train.recompute_method=block"], ["train.recompute_method", "train.recompute_granularity"]),
        (["recompute=full", "train.recompute_method=blok"], ["train.recompute_method"]),
        (["recompute=full", "train.recompute_num_layers=0"], ["train.recompute_num_layers"]),
        (
            ["recompute=full", "train.recompute_modules=[mlp]"],
            ["train.recompute_modules", "train.recompute_granularity"],
        ),
        (["recompute=selective", "train.recompute_modules=[mlp,attn]"], ["train.recompute_modules"]),
        (["recompute=selective", "train.recompute_modules=[moe,mlp]"], ["train.recompute_modules"]),
        (["recompute=selective", "train.recompute_modules=[]"], ["train.recompute_modules"]),
        (["parallel.fp16=true", "parallel.bf16=true"], ["parallel.bf16", "parallel.fp16"]),
        (["parallel.fp16=true", "parallel.params_dtype=bf16"], ["parallel.params_dtype", "parallel.fp16"]),
        (["parallel.params_dtype=fp16"], ["parallel.params_dtype", "parallel.fp16"]),
        (["parallel.params_dtype=fp64", "parallel.bf16=true"], ["parallel.params_dtype", "parallel.bf16"]),
        (["parallel.params_dtype=fp64", "parallel.fp16=true"], ["parallel.params_dtype", "parallel.fp16"]),
        (["parallel.params_dtype=fp64", "pipeline.dtype=fp32"], ["pipeline.dtype", "parallel.params_dtype"]),
        (
            ["model.position_embedding_type=learned_absolute", "model.mtp_num_layers=1"],
            ["model.position_embedding_type", "model.mtp_num_layers"],
        ),
        (["parallel.pipeline_dtype=fp64"], ["parallel.pipeline_dtype", "parallel.params_dtype"]),
        (
            ["parallel.params_dtype=fp64", "parallel.enable_autocast=true"],
            ["parallel.enable_autocast", "parallel.params_dtype"],
        ),
        (["parallel.params_dtype=fp64", "model.fp8=hybrid"], ["model.fp8", "parallel.params_dtype"]),
        (["parallel.enable_autocast=true"], ["parallel.enable_autocast", "parallel.autocast_dtype"]),
        (["parallel.autocast_dtype=bf16"], ["parallel.autocast_dtype", "parallel.enable_autocast"]),
        (
            ["parallel.enable_autocast=true", "parallel.autocast_dtype=fp16"],
            ["parallel.autocast_dtype", "parallel.fp16"],
        ),
        (["optim.hysteresis=3"], ["optim.hysteresis", "parallel.fp16"]),
        (["parallel.fp16=true", "optim.loss_scale=8", "optim.hysteresis=3"], ["optim.hysteresis", "optim.loss_scale"]),
        (["parallel.fp16=true", "optim.min_loss_scale=0"], ["optim.min_loss_scale"]),
        (
            ["parallel.fp16=true", "optim.min_loss_scale=8", "optim.initial_loss_scale=4"],
            ["optim.initial_loss_scale", "optim.min_loss_scale"],
        ),
        (
            ["train.compile=true", "recompute=selective", "train.recompute_modules=[core_attn,mlp]"],
            ["train.compile", "train.recompute_modules"],
        ),
        (["train.recompute_stages=[1]"], ["train.recompute_stages", "train.recompute_granularity"]),
        (
            ["parallel.cpu_offloading=true"],
            ["parallel.cpu_offloading", "parallel.cpu_offloading_num_layers"],
        ),
        (
            ["parallel.cpu_offloading_num_layers=2"],
            ["parallel.cpu_offloading_num_layers", "parallel.cpu_offloading"],
        ),
        (
            ["parallel.cpu_offloading_activations=false"],
            ["parallel.cpu_offloading_activations", "parallel.cpu_offloading"],
        ),
        (
            [
                "parallel.cpu_offloading=true",
                "parallel.cpu_offloading_num_layers=2",
                "parallel.cpu_offloading_activations=false",
            ],
            ["parallel.cpu_offloading_activations", "parallel.cpu_offloading"],
        ),
        (
            ["parallel.cpu_offloading=true", "parallel.cpu_offloading_num_layers=2", "train.compile=true"],
            ["train.compile", "parallel.cpu_offloading"],
        ),
        (["parallel.cpu_offloading_num_layers=-2"], ["parallel.cpu_offloading_num_layers"]),
        (
            ["parallel.num_microbatches_with_partial_activation_checkpoints=1", "recompute=selective"],
            ["parallel.num_microbatches_with_partial_activation_checkpoints", "train.recompute_granularity"],
        ),
        (["parallel.bf16=true", "parallel.pipeline_dtype=fp32"], ["parallel.pipeline_dtype", "parallel.bf16"]),
    ],
)
def test_a_broken_rule_is_told_once_with_its_keys_and_a_remedy_that_mends_it(typed, keys):
    with pytest.raises(ConfigError) as error:
        compose(typed)
    (problem,) = error.value.problems
    assert problem.code == "PP-E103"
    assert [line.partition(" = ")[0] for line in problem.place.splitlines()] == keys
    for line in problem.remedy.splitlines():
        (remedy,) = shlex.split(line)
        key = remedy.partition("=")[0]
        assert key in keys
        kept = [token for token in typed if compose_key(token) != key]
        compose([*kept, remedy])


@pytest.mark.parametrize(
    ("typed", "named"), [("zbv2", "zbv"), ("DualPipe", "dualpipev"), ("Interleaved", "interleaved1f1b")]
)
def test_the_schedule_that_is_meant_is_named(typed, named):
    with pytest.raises(ConfigError) as error:
        compose([f"pipeline.pp_schedule={typed}"])
    assert error.value.problems[0].remedy == f"pipeline.pp_schedule={named}"


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("log.trace=5:3", "log.trace=3:5"),
        ("train.exit_after=soon", "train.exit_after=11h50m"),
        ("launch.device_memory=80 apples", "launch.device_memory=80GiB"),
    ],
)
def test_a_value_that_cannot_be_read_is_answered_with_one_that_can(typed, remedy):
    with pytest.raises(ConfigError) as error:
        compose([typed])
    assert error.value.problems[0].remedy == remedy


def test_a_longer_sample_than_a_foreign_model_has_positions_is_answered_with_a_shorter_one():
    config = compose(["seq=512"]).config
    config.model.max_position_embeddings = 256
    (problem,) = check(config, {})
    assert problem.remedy == "data.seq_length=256\nmodel.max_position_embeddings=512"
    config.model.transformers = {}
    assert [found.remedy for found in check(config, {}) if found.message == problem.message] == ["data.seq_length=256"]


def compose_key(token):
    from ppctl.config.argv import ALIASES

    key = token.partition("=")[0]
    return ALIASES.get(key, key)


def test_parallel_rules_are_told_without_asking_for_a_pipeline_dtype():
    found = check(compose(["pp=4"]).config, {})
    assert [p for p in found if p.code == "PP-E117"] == []
    with pytest.raises(ConfigError, match="PP-E117") as error:
        compose(["parallel.sequence_parallel=true"])
    assert {p.code for p in error.value.problems} == {"PP-E117"}


def test_checking_changes_nothing():
    config = compose(["pp=4"]).config
    before = repr(config)
    check(config, {}, for_training=True)
    assert repr(config) == before


def test_a_config_without_provenance_is_checked_by_its_values():
    config = RunConfig()
    config.parallel.perform_initialization = False
    config.parallel.cpu_offloading_weights = True
    assert {problem.code for problem in check(config, {})} == {"PP-E110", "PP-E111"}


def test_a_loss_function_of_ones_own_needs_logits_of_all_words():
    config = RunConfig()
    config.pipeline.loss_fn = max
    assert check(config, {}) == []
    config.parallel.tensor_model_parallel_size = 2
    (problem,) = check(config, {})
    assert (problem.code, problem.remedy) == ("PP-E103", "tp=1")
    assert build_plan(config, {}).problems == (problem,)

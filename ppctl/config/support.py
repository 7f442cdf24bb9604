"""What this release honours: one honest state for every field of `parallel` and `pipeline`, and for values elsewhere.

A setting that cannot take effect is refused by name, never ignored. Knows states and reasons. Must not know how a
value is checked for sense: that is `checks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppctl.config.keys import Key, as_typed, place_of, text_keys, value_of, value_text
from ppctl.config.schedules import PLANNED_SCHEDULES, schedule_policy
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem

WORKS, PLANS, LATER, NEEDS, IGNORED, PYTHON = "works", "plans", "later", "needs", "ignored", "python"

MEANING = {
    WORKS: "works",
    PLANS: "later: `ppctl plan` works with it; training comes in a later release",
    LATER: "later: comes in a later release, and is refused until then",
    NEEDS: "needs a library or build that ppctl does not use",
    IGNORED: "ignored upstream too, or nothing to act on here: accepted, with a note",
    PYTHON: "works from Python: takes an object, which no text can set",
}
"""Each state begins with one of four words: works, later, needs, ignored."""

_CODES = {LATER: "PP-E110", NEEDS: "PP-E111"}


@dataclass(frozen=True, slots=True)
class Support:
    """How far one key is honoured."""

    state: str
    note: str = ""
    accepts: tuple[Any, ...] | None = None
    """The values that take effect; none means all (WORKS) or the default alone (any other state)."""
    test: str = ""
    """Of a field that works: the test that shows it, as pytest names it."""
    aside: str = ""
    """What else there is to know; not a part of the refusal."""

    def refuses(self, key: Key, value: Any) -> bool:
        """Whether `value` is one that this release does not honour."""
        accepted = (key.default,) if self.accepts is None else self.accepts
        if self.state == IGNORED:
            return False
        return (self.state != WORKS or self.accepts is not None) and value not in accepted


def _works(tests: dict[str, str], accepts: tuple[Any, ...] | None = None) -> dict[str, Support]:
    """Field -> its state, for fields that work; the tests are relative to tests/."""
    return {name: Support(WORKS, "", accepts, f"tests/{test}") for name, test in tests.items()}


def _each(names: str, state: str, note: str = "", aside: str = "") -> dict[str, Support]:
    return {name: Support(state, note, aside=aside) for name in names.split()}


_LAW = "dist/train/test_bitwise_law.py"
_MODELS = "dist/train/test_bitwise_models.py"
_SPLIT = "unit/plan/test_plan_split.py"
_RULES = "unit/config/test_checks.py::test_a_broken_rule_is_told_once_with_its_keys_and_a_remedy_that_mends_it"
_PACKED = "dist/train/test_packed_documents.py::test_any_cut_of_packed_documents_gives_the_same_bits"
_PRECISION = "dist/train/test_precision_ranks.py"
_AUTOCAST = f"{_PRECISION}::test_autocast_computes_in_bfloat16_and_keeps_float32"
_BFLOAT16 = "torch/train/test_precision.py::test_bfloat16_training_follows_float32_training"
_PLAN = "unit/plan/test_plan.py"
_RECOMPUTE = "dist/train/test_recompute.py"
_SHARDED = "dist/parallel/test_sharded.py"
_API = "on the config of a model that the schedules' functions run"
_PLAIN = "from Python: the schedules' functions do it in plain torch"
_STEPS = "torch/megatron/test_schedule_steps.py"
_CALLS = "torch/megatron/test_schedule_functions.py"
_STORES = "test_a_step_stores_finalizes_and_leaves_the_config_alone"
_PYXIS = "needs pyxis and enroot on the nodes; with these it was not run yet"
_PYXIS_TEST = "unit/launch/test_script.py::test_the_script_with_every_option_is_as_recorded"
_TE = "Transformer Engine's userbuffers"

_PARALLEL = {
    **_works(
        {
            "pipeline_model_parallel_size": f"{_LAW}::test_any_cut_gives_the_bits_of_one_process",
            "virtual_pipeline_model_parallel_size": f"{_LAW}::test_any_cut_gives_the_bits_of_one_process",
            "pipeline_model_parallel_layout": f"{_LAW}::test_any_layout_gives_the_bits_of_one_process",
            "data_parallel_size": f"{_LAW}::test_two_replicas_agree_with_one_process_to_a_millionth",
            "microbatch_group_size_per_vp_stage": f"{_PLAN}::test_a_group_size_counts_only_when_it_was_given",
            "num_microbatches_with_partial_activation_checkpoints": f"{_RECOMPUTE}::test_recompute_changes_no_bit",
            "bf16": _BFLOAT16,
            "fp16": f"{_PRECISION}::test_float16_follows_float32_under_any_scale_until_one_overflows",
            "enable_autocast": _AUTOCAST,
            "autocast_dtype": _AUTOCAST,
            "deterministic_mode": f"{_PRECISION}::test_deterministic_mode_refuses_other_kernels",
            "deallocate_pipeline_outputs": f"{_LAW}::test_schedule_and_deallocation_change_no_bit",
            "num_layers_in_first_pipeline_stage": f"{_SPLIT}::test_megatrons_splits_have_the_recorded_rows",
            "num_layers_in_last_pipeline_stage": f"{_SPLIT}::test_megatrons_splits_have_the_recorded_rows",
            "account_for_embedding_in_pipeline_split": f"{_SPLIT}::test_megatrons_splits_have_the_recorded_rows",
            "account_for_loss_in_pipeline_split": f"{_SPLIT}::test_megatrons_splits_have_the_recorded_rows",
            "num_layers_per_virtual_pipeline_stage": f"{_SPLIT}::test_layers_per_chunk_give_the_chunks",
        }
    ),
    **_each("tensor_model_parallel_size", PLANS, "tensor parallelism"),
    **_each("context_parallel_size", PLANS, "context parallelism"),
    **_works(
        {"expert_model_parallel_size": f"{_MODELS}::test_experts_spread_over_ranks_agree_with_replicas_to_a_millionth"}
    ),
    **_each("expert_tensor_parallel_size", PLANS, "tensor parallelism of experts"),
    **_works(
        {
            "params_dtype": _BFLOAT16,
            "pipeline_dtype": _RULES,
        },
        (None, "float32", "bfloat16", "float16"),
    ),
    **_works(
        {
            "overlap_p2p_comm": f"{_LAW}::test_any_cut_gives_the_bits_of_one_process",
            "batch_p2p_comm": f"{_LAW}::test_any_cut_gives_the_bits_of_one_process",
            "batch_p2p_sync": "dist/megatron/test_p2p.py::test_activations_go_down_and_gradients_come_back",
            "variable_seq_lengths": f"{_LAW}::test_any_cut_gives_the_bits_of_one_process",
        }
    ),
    "pipeline_model_parallel_comm_backend": Support(
        WORKS,
        "NCCL between ranks: not yet run",
        None,
        f"tests/{_LAW}::test_any_cut_gives_the_bits_of_one_process",
    ),
    "overlap_p2p_comm_warmup_flush": Support(
        WORKS,
        "channels overlap warm-up and flush in any case",
        None,
        f"tests/{_LAW}::test_any_cut_gives_the_bits_of_one_process",
    ),
    **_each("sequence_parallel", PLANS, "tensor parallelism"),
    **_each("hierarchical_context_parallel_sizes", LATER),
    **_works({"data_parallel_sharding": f"{_SHARDED}::test_every_way_of_sharding_agrees_with_replicas"}),
    **_each("overlap_moe_expert_parallel_comm delay_wgrad_compute", LATER),
    **_each("cross_entropy_loss_fusion cross_entropy_fusion_impl", PLANS, "fused cross entropy"),
    **_each("perform_initialization", LATER),
    **_each("cpu_offloading cpu_offloading_num_layers cpu_offloading_activations", LATER, "activation offloading"),
    **_each("cpu_offloading_weights cpu_offloading_double_buffering", LATER, "activation offloading"),
    **_each("gradient_accumulation_fusion", NEEDS, "APEX's fused_weight_gradient_mlp_cuda", _PLAIN),
    **_each("defer_embedding_wgrad_compute wgrad_deferral_limit", NEEDS, "gradient_accumulation_fusion (APEX)", _PLAIN),
    **_each("use_te_rng_tracker", NEEDS, "Transformer Engine"),
    **_each("use_ring_exchange_p2p", NEEDS, "a custom build of torch with ring_exchange"),
    **_each("tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs", NEEDS, _TE),
    **_each("tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1", NEEDS, _TE),
    **_each("tp_comm_bootstrap_backend", NEEDS, _TE),
    **_each("moe_extended_tp", IGNORED, "expert_tensor_parallel_size took its place"),
    **_each("async_tensor_model_parallel_allreduce", IGNORED, "it is deprecated"),
    **_each("tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs", IGNORED, "it is deprecated"),
    **_each("use_cpu_initialization", IGNORED, "initial weights never depend on the device"),
    **_each("barrier_with_L1_time", IGNORED, "a run has no timers; those of the schedules' functions obey it"),
    **_each("_cpu_offloading_context", IGNORED, "it is internal to cpu_offloading"),
}

_PIPELINE = {
    **_works(
        {
            "pp_schedule": f"{_LAW}::test_schedule_and_deallocation_change_no_bit",
            "pp_schedule_csv": f"{_LAW}::test_a_given_schedule_gives_the_bits_of_one_process",
            "pp_microbatch_size": f"{_PLAN}::test_the_world_and_the_batch_follow_from_what_was_given",
            "pp_batch_size": f"{_LAW}::test_several_schedule_calls_a_step_change_no_bit",
            "scale_grads_in_schedule": f"{_LAW}::test_scaling_in_the_schedule_weighs_every_microbatch_alike",
            "p2p_capacity": "dist/engine/test_engine.py::test_capacity_changes_nothing_but_time",
            "extra_warmup": f"{_LAW}::test_a_longer_warmup_changes_no_bit",
            "layers_per_stage": f"{_SPLIT}::test_layers_per_stage_are_nemos",
            "round_virtual_stages_to_pp_multiple": f"{_SPLIT}::test_layers_per_stage_are_nemos",
            "module_fqns_per_model_part": f"{_SPLIT}::test_modules_by_name_are_a_layout",
            "pp_seq_len": _RULES,
        }
    ),
    **_works({"dtype": _RULES}, (None, "float32", "bfloat16", "float16")),
    **_each("patch_inner_model patch_causal_lm_model", LATER, "it belongs to Hugging Face models"),
    **_each("patch_stage_backward_maybe_with_nosync", LATER, "it belongs to Hugging Face models under FSDP"),
}

_ELSEWHERE = {
    **_works(
        {
            "train.compile": "torch/model/test_compile.py::test_a_compiled_stage_agrees_to_a_millionth",
            "train.eval_interval": "dist/train/test_evaluation.py::test_training_does_not_notice",
            "train.eval_steps": "dist/train/test_evaluation.py::test_there_is_one_at_the_end_and_a_sample_counts_once",
            "data.eod_mask_loss": "dist/train/test_own_data.py::test_what_follows_a_documents_end_does_not_count",
            "data.reset_position_ids": _PACKED,
            "data.reset_attention_mask": _PACKED,
            "data.validation_split": "dist/train/test_evaluation.py::test_a_held_out_sample_is_never_trained_on",
        }
    ),
    **_works(
        {
            f"train.recompute_{name}": f"{_RECOMPUTE}::test_recompute_changes_no_bit"
            for name in ("granularity", "method", "num_layers", "modules", "stages")
        }
    ),
    **{
        f"launch.container_{name}": Support(WORKS, _PYXIS, None, f"tests/{_PYXIS_TEST}")
        for name in ("image", "mounts", "workdir")
    },
    **_each("log.profile", LATER, "measured costs per stage"),
    **_each("model.gated_linear_unit model.add_bias_linear model.normalization", PLANS, "GPT-3's blocks"),
    **_each("model.position_embedding_type", PLANS, "GPT-3's blocks"),
    **_each("model.attention_backend", PLANS, "the choice of an attention kernel"),
    **_each("model.attention_dropout model.hidden_dropout", PLANS, "dropout"),
    **_works(
        {
            "model.num_moe_experts": f"{_MODELS}::test_any_cut_of_a_model_with_experts_and_mtp_gives_the_same_bits",
            "model.mtp_num_layers": f"{_MODELS}::test_any_cut_of_a_model_with_experts_and_mtp_gives_the_same_bits",
        }
    ),
}


_OBJECTS = {
    name: Support(PYTHON, note, None, f"tests/{test}")
    for name, note, test in (
        ("parallel.timers", _API, "torch/megatron/test_schedule_functions.py::test_the_timers_of_a_step"),
        ("parallel.finalize_model_grads_func", _API, f"{_CALLS}::{_STORES}"),
        ("parallel.grad_scale_func", _API, f"{_STEPS}::test_auxiliary_losses_are_scaled_as_the_loss_is"),
        ("parallel.no_sync_func", _API, f"{_CALLS}::test_an_exception_anywhere_leaves_no_sync_and_names_the_action"),
        ("parallel.grad_sync_func", _API, "dist/megatron/test_trace.py::test_a_sample_of_the_traces"),
        ("parallel.param_sync_func", _API, "dist/megatron/test_trace.py::test_a_sample_of_the_traces"),
        ("pipeline.loss_fn", "", f"{_LAW}::test_a_given_loss_is_a_sum_over_tokens_or_a_mean"),
    )
}


def _table() -> dict[str, Support]:
    table = {f"parallel.{name}": support for name, support in _PARALLEL.items()}
    table |= {f"pipeline.{name}": support for name, support in _PIPELINE.items()}
    table |= _ELSEWHERE
    return table | _OBJECTS


SUPPORT = _table()
"""Dotted key -> its state; a key that is not here works."""


def support(key: str) -> Support:
    """How far `key` is honoured."""
    return SUPPORT.get(key, Support(WORKS))


def _refusal(key: Key, value: Any, place: str) -> Problem:
    """The problem of a value that this release does not honour."""
    state = support(key.name)
    what = f" ({state.note})" if state.note else ""
    reason = {
        LATER: f"comes in a later release{what}",
        NEEDS: f"needs {state.note or 'a library'}, which ppctl does not use",
    }.get(state.state, f"is not supported{what}")
    accepted = state.accepts or (key.default,)
    message = f"{key.name}={value_text(value)} {reason}"
    return Problem(_CODES.get(state.state, "PP-E110"), message, as_typed(key.name, accepted[0]), place)


def refused(config: RunConfig, provenance: Mapping[str, str], skip: Collection[str]) -> Iterator[Problem]:
    """Set values that this release does not honour, each by name."""
    for name, state in SUPPORT.items():
        key = text_keys().get(name)
        if key is None or name in skip or state.state == PLANS:
            continue
        value = value_of(config, name)
        is_set = provenance.get(name, "default") != "default" or value != key.default
        if is_set and state.refuses(key, value):
            yield _refusal(key, value, place_of(name, value, provenance))


def ignored(config: RunConfig, provenance: Mapping[str, str]) -> list[str]:
    """One note that names all the settings that have no effect, if there are any."""
    found = []
    for name, state in SUPPORT.items():
        key = text_keys().get(name)
        if state.state == IGNORED and key is not None and value_of(config, name) != key.default:
            source = provenance.get(name, "default")
            found.append(f"{name}={value_text(value_of(config, name))} ({source}; {state.note})")
    return [f"without effect: {', '.join(found)}"] if found else []


def not_trained(config: RunConfig) -> list[Problem]:
    """One sentence that names all that keeps this config from being trained."""
    missing: dict[str, list[str]] = {}
    for name, state in SUPPORT.items():
        key = text_keys().get(name)
        if key is None or state.state != PLANS:
            continue
        value = value_of(config, name)
        if state.refuses(key, value) and not (name.endswith("parallel_size") and value == 1):
            missing.setdefault(state.note, []).append(f"{name}={str(value).lower()}")
    if config.pipeline.pp_schedule_csv is None and schedule_policy(config.pipeline.pp_schedule) in PLANNED_SCHEDULES:
        named = f"pipeline.pp_schedule={config.pipeline.pp_schedule}"
        missing.setdefault("schedules with split backwards", []).append(named)
    if not missing:
        return []
    listed = ", ".join(f"{what} ({', '.join(keys)})" for what, keys in missing.items())
    message = f"this release plans this config but cannot train it yet: missing are {listed}"
    return [Problem("PP-E118", message, f"ppctl plan +recipe={config.recipe}" if config.recipe else "ppctl plan")]

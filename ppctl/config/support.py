"""What this release supports: a setting that cannot take effect is refused by name, never ignored.

The state of each key is metadata of its field (`metadata.Support`); here is what follows from it, and the tests that
show that a key works. Must not know how a value is checked for sense: that is `checks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ppctl.config.keys import Key, as_typed, place_of, text_keys, value_of, value_text
from ppctl.config.metadata import IGNORED, LATER, NEEDS, PYTHON, WORKS
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem, pasted

MEANING = {
    WORKS: "works",
    LATER: "later: comes in a later release, and is refused until then",
    NEEDS: "needs a library or build that ppctl does not use",
    IGNORED: "ignored upstream too, or nothing to act on here: accepted, with a note",
    PYTHON: "works from Python: takes an object, which no text can set",
}
"""Each state begins with one of four words: works, later, needs, ignored."""

_SHOWN_BY = {
    "tests/dist/train/test_bitwise_law.py": {
        "test_any_cut_gives_the_bits_of_one_process": (
            "parallel.pipeline_model_parallel_size parallel.virtual_pipeline_model_parallel_size "
            "parallel.overlap_p2p_comm parallel.batch_p2p_comm parallel.variable_seq_lengths "
            "parallel.pipeline_model_parallel_comm_backend parallel.overlap_p2p_comm_warmup_flush"
        ),
        "test_any_layout_gives_the_bits_of_one_process": "parallel.pipeline_model_parallel_layout",
        "test_two_replicas_agree_with_one_process_to_a_millionth": "parallel.data_parallel_size",
        "test_schedule_and_deallocation_change_no_bit": "parallel.deallocate_pipeline_outputs pipeline.pp_schedule",
        "test_a_given_schedule_gives_the_bits_of_one_process": "pipeline.pp_schedule_csv",
        "test_several_schedule_calls_a_step_change_no_bit": "pipeline.pp_batch_size",
        "test_scaling_in_the_schedule_weighs_every_microbatch_alike": "pipeline.scale_grads_in_schedule",
        "test_a_longer_warmup_changes_no_bit": "pipeline.extra_warmup",
        "test_a_given_loss_is_a_sum_over_tokens_or_a_mean": "pipeline.loss_fn",
    },
    "tests/dist/train/test_axes.py": {
        "test_any_axes_agree_with_one_process": (
            "parallel.tensor_model_parallel_size parallel.sequence_parallel parallel.context_parallel_size "
            "parallel.hierarchical_context_parallel_sizes parallel.expert_tensor_parallel_size model.cp_comm_type "
            "parallel.cross_entropy_loss_fusion"
        ),
    },
    "tests/unit/plan/test_plan_search.py": {
        "test_more_memory_makes_an_uneven_pipeline_faster": "pipeline.schedule_memory",
        "test_fewer_weight_gradients_that_wait_take_less_memory_and_hardly_more_time": "pipeline.put_off_limit",
    },
    "tests/unit/plan/test_plan.py": {
        "test_a_group_size_counts_only_when_it_was_given": "parallel.microbatch_group_size_per_vp_stage",
        "test_the_world_and_the_batch_follow_from_what_was_given": "pipeline.pp_microbatch_size",
    },
    "tests/dist/train/test_recompute.py": {
        "test_recompute_changes_no_bit": (
            "parallel.num_microbatches_with_partial_activation_checkpoints train.recompute_granularity "
            "train.recompute_method train.recompute_num_layers train.recompute_modules train.recompute_stages"
        ),
    },
    "tests/torch/train/test_precision.py": {"test_bfloat16_training_follows_float32_training": "parallel.bf16"},
    "tests/dist/train/test_precision_ranks.py": {
        "test_two_replicas_in_float64_agree_with_one_process_to_1e_12": "parallel.params_dtype",
        "test_float16_follows_float32_under_any_scale_until_one_overflows": "parallel.fp16",
        "test_autocast_computes_in_bfloat16_and_keeps_float32": "parallel.enable_autocast parallel.autocast_dtype",
        "test_deterministic_mode_refuses_other_kernels": "parallel.deterministic_mode",
    },
    "tests/unit/plan/test_plan_split.py": {
        "test_megatrons_splits_have_the_recorded_rows": (
            "parallel.num_layers_in_first_pipeline_stage parallel.num_layers_in_last_pipeline_stage "
            "parallel.account_for_embedding_in_pipeline_split parallel.account_for_loss_in_pipeline_split"
        ),
        "test_layers_per_chunk_give_the_chunks": "parallel.num_layers_per_virtual_pipeline_stage",
        "test_layers_per_stage_are_nemos": "pipeline.layers_per_stage pipeline.round_virtual_stages_to_pp_multiple",
        "test_modules_by_name_are_a_layout": "pipeline.module_fqns_per_model_part",
    },
    "tests/dist/train/test_bitwise_models.py": {
        "test_experts_spread_over_ranks_agree_with_replicas_to_a_millionth": "parallel.expert_model_parallel_size",
        "test_exchanges_in_pairs_change_no_bit": (
            "parallel.overlap_moe_expert_parallel_comm parallel.delay_wgrad_compute"
        ),
        "test_any_cut_of_a_model_with_experts_and_mtp_gives_the_same_bits": (
            "model.num_moe_experts model.mtp_num_layers"
        ),
    },
    "tests/unit/config/test_checks.py": {
        "test_a_broken_rule_is_told_once_with_its_keys_and_a_remedy_that_mends_it": (
            "parallel.pipeline_dtype pipeline.pp_seq_len pipeline.dtype"
        ),
    },
    "tests/dist/modules/test_pipeline.py": {
        "test_a_forward_that_takes_hidden_states_is_called_as_it_is": (
            "pipeline.patch_inner_model pipeline.patch_causal_lm_model"
        ),
    },
    "tests/dist/modules/test_fully_shard.py": {
        "test_sharded_stages_sum_behind_the_last_backward_or_behind_each": (
            "pipeline.patch_stage_backward_maybe_with_nosync"
        ),
    },
    "tests/dist/megatron/test_p2p.py": {"test_activations_go_down_and_gradients_come_back": "parallel.batch_p2p_sync"},
    "tests/dist/parallel/test_sharded.py": {
        "test_every_way_of_sharding_agrees_with_replicas": "parallel.data_parallel_sharding"
    },
    "tests/dist/train/test_replica_check.py": {"test_one_bit_on_one_rank_is_found_and_named": "train.check_replicas"},
    "tests/dist/train/test_rank_order.py": {"test_any_order_of_ranks_agrees_with_one_process": "parallel.order"},
    "tests/dist/engine/test_engine.py": {"test_capacity_changes_nothing_but_time": "pipeline.p2p_capacity"},
    "tests/torch/model/test_compile.py": {"test_a_compiled_stage_agrees_to_a_millionth": "train.compile"},
    "tests/dist/train/test_dropout_cuts.py": {
        "test_dropout_has_the_bits_of_one_process_in_any_cut": (
            "model.hidden_dropout model.attention_dropout model.gated_linear_unit model.add_bias_linear "
            "model.normalization model.position_embedding_type"
        ),
    },
    "tests/dist/train/test_offload.py": {
        "test_offloading_changes_no_bit_in_any_cut": (
            "parallel.cpu_offloading parallel.cpu_offloading_num_layers parallel.cpu_offloading_activations"
        ),
    },
    "tests/dist/train/test_evaluation.py": {
        "test_training_does_not_notice": "train.eval_interval",
        "test_there_is_one_at_the_end_and_a_sample_counts_once": "train.eval_steps",
        "test_a_held_out_sample_is_never_trained_on": "data.validation_split",
    },
    "tests/dist/train/test_own_data.py": {"test_what_follows_a_documents_end_does_not_count": "data.eod_mask_loss"},
    "tests/dist/train/test_packed_documents.py": {
        "test_any_cut_of_packed_documents_gives_the_same_bits": "data.reset_position_ids data.reset_attention_mask"
    },
    "tests/unit/launch/test_script.py": {
        "test_the_script_with_every_option_is_as_recorded": (
            "launch.container_image launch.container_mounts launch.container_workdir"
        ),
    },
    "tests/torch/megatron/test_schedule_functions.py": {
        "test_the_timers_of_a_step": "parallel.timers",
        "test_a_step_stores_finalizes_and_leaves_the_config_alone": "parallel.finalize_model_grads_func",
        "test_an_exception_anywhere_leaves_no_sync_and_names_the_action": "parallel.no_sync_func",
    },
    "tests/torch/megatron/test_schedule_steps.py": {
        "test_auxiliary_losses_are_scaled_as_the_loss_is": "parallel.grad_scale_func"
    },
    "tests/dist/megatron/test_trace.py": {
        "test_a_sample_of_the_traces": "parallel.grad_sync_func parallel.param_sync_func"
    },
}
"""Test file -> test -> the keys that it shows to work: of `parallel` and `pipeline` all, of other sections some."""

SHOWN_BY = {
    key: f"{file}::{test}"
    for file, tests in _SHOWN_BY.items()
    for test, names in tests.items()
    for key in names.split()
}
"""Key -> the test that shows that it works, as pytest names it."""


def _set_to_another(config: RunConfig, *states: str) -> Iterator[tuple[Key, object]]:
    """The keys in one of these states whose value is not the default, and the value."""
    for name, key in text_keys().items():
        value = value_of(config, name)
        if key.facts.support.state in states and value != key.default:
            yield key, value


def refused(config: RunConfig, provenance: Mapping[str, str], skip: Collection[str]) -> Iterator[Problem]:
    """Values that this release does not support, each by name; `skip` are keys that have a problem already."""
    for key, value in _set_to_another(config, LATER, NEEDS):
        note = key.facts.support.note
        if key.facts.support.state == LATER:
            code, reason = "PP-E110", f"comes in a later release{f' ({note})' if note else ''}"
        else:
            code, reason = "PP-E111", f"needs {note}, which ppctl does not use"
        if key.name not in skip:
            message, remedy = f"{key.name}={value_text(value)} {reason}", as_typed(key.name, key.default)
            yield Problem(code, message, remedy, place_of(key.name, value, provenance))


def ignored(config: RunConfig, provenance: Mapping[str, str]) -> list[str]:
    """One note that names all the settings that have no effect, if there are any."""
    found = [
        f"{key.name}={value_text(value)} ({provenance.get(key.name, 'default')}; {key.facts.support.note})"
        for key, value in _set_to_another(config, IGNORED)
    ]
    return [f"without effect: {', '.join(found)}"] if found else []


def not_trained(config: RunConfig) -> list[Problem]:
    """One problem that names all features that this config needs and this release cannot train yet; none otherwise."""
    missing: dict[str, list[str]] = {}
    for what, keys in _models_without_modules(config):
        missing.setdefault(what, []).extend(keys)
    if not missing:
        return []
    listed = ", ".join(f"{what} ({', '.join(keys)})" for what, keys in missing.items())
    message = f"this release can plan this config but not train it yet; missing: {listed}"
    return [
        Problem(
            "PP-E118", message, f"ppctl plan {pasted(f'+recipe={config.recipe}')}" if config.recipe else "ppctl plan"
        )
    ]


def _models_without_modules(config: RunConfig) -> Iterator[tuple[str, Collection[str]]]:
    """(What of a model has no module or kernel yet, the keys that need it)."""
    model, width = config.model, config.model.qk_head_dim + config.model.qk_pos_emb_head_dim
    if model.multi_latent_attention and model.attention_backend == "flash" and width != model.v_head_dim:
        what = f"flash attention of keys and values of two widths, {width} and {model.v_head_dim}"
        yield what, ["model.attention_backend=flash"]
    if model.attention_dropout and model.attention_backend in ("fused", "flash"):
        what = "attention dropout in fused kernels, whose draws depend on the cut"
        yield what, [f"model.attention_backend={model.attention_backend}"]
    if model.add_bias_linear:
        for what, held in (("experts", model.num_moe_experts), ("latent attention", model.multi_latent_attention)):
            if held:
                yield f"biases of {what}", ["model.add_bias_linear=true"]
    if model.fp8 is not None and model.num_moe_experts is not None and config.launch.device == "cuda":
        yield "products of experts in 8 bits on a GPU", [f"model.fp8={model.fp8}"]

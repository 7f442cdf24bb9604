"""The tests that `make test` leaves to `make test-all`, so that it ends within ten minutes on two quiet cores.

Of every kind of test here a smoke stays. Whoever adds tests beyond the ten minutes moves others here. Grids say by
themselves which of their rows are `whole` (`pairwise.in_tiers`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

LEFT_TO_TEST_ALL: dict[str, Collection[str]] = {
    # Hostile values
    "tests/unit/cli/test_hostile_values.py::"
    "test_a_sample_of_hostile_values_meets_no_traceback_and_every_remedy_works": (),
    "tests/unit/cli/test_hostile_values.py::test_what_raised_or_hung_is_refused_with_a_remedy_that_works": (
        "+recipe=deepseek_v3 model.num_moe_experts=-1-",
        "cost.cublas_workspace_mib=nan-",
        "cp=18446744073709551617-",
        "layout=@/dev/zero-",
        "pipeline.pp_schedule_csv=/dev/zero-",
        "data.path=[1e-999999999,a,1,b]-",
    ),
    # Emulated devices
    "tests/dist/engine/test_emulated_grid.py::test_whatever_moves_first_a_step_ends_with_the_bits_of_a_plain_loop": (
        "1",
    ),
    "tests/dist/engine/test_reserved_memory.py::"
    "test_two_ranks_that_free_memory_in_one_step_hang_and_none_does_with_the_peak_reserved": ("1f1b",),
    "tests/dist/parallel/test_context_on_devices.py::test_every_order_of_hosts_and_devices_gives_the_same_numbers": (
        "rows-p2p-2",
        "documents-a2a-2",
    ),
    "tests/dist/parallel/test_owned_on_devices.py::test_owners_get_whole_sums_and_give_weights_and_no_host_waits": (
        "2",
    ),
    "tests/dist/parallel/test_tensor_on_devices.py::test_every_order_of_hosts_and_devices_gives_the_same_numbers": (
        "tp, sp-2",
    ),
    "tests/dist/train/test_emulated_model.py::"
    "test_a_step_has_the_bits_of_real_ranks_and_hosts_wait_only_for_the_sizes_of_exchanges": ("dense, MTP--False",),
    # Hangs, kills and restarts
    "tests/dist/launch/test_restarts.py::test_a_rank_that_missed_the_first_start_does_not_take_it_for_the_second": (),
    "tests/dist/launch/test_restarts.py::"
    "test_a_job_with_an_empty_latest_that_torchrun_starts_again_goes_on_from_the_newest_checkpoint": (),
    "tests/dist/launch/test_supervisor.py::test_asked_to_stop_the_ranks_save_and_the_job_ends_with_75": ("15",),
    # Checkpoints in other axes
    "tests/dist/checkpoint/test_checkpoints_across_axes.py::"
    "test_every_bit_comes_back_in_other_axes_and_the_run_goes_on": (),
    # Cuts, memory and models beyond a few of their kinds
    "tests/dist/train/test_axes_scale.py::test_a_miniature_of_all_axes_trains": (),
    "tests/dist/train/test_offload.py::test_offloading_changes_no_bit_in_any_cut": (
        "one rank",
        "pp and vpp",
        "experts, latent, mtp",
        "split",
        "tp and sp",
    ),
    "tests/dist/train/test_offload.py::test_live_storages_at_the_peak_are_the_planned_bytes": (
        "2-1-more0",
        "4-1-more1",
    ),
    "tests/dist/train/test_plan_memory.py::test_live_storages_at_the_peak_are_the_planned_bytes_on_every_rank": (
        "fp32",
        "bf16",
    ),
    "tests/dist/train/test_against_transformers.py::test_loss_and_every_gradient_equal_those_of_transformers": (
        "llama, tied, pp=4 x vpp=2",
        "mixtral, pp=1",
        "deepseek_v3, pp=4 x vpp=2",
    ),
    "tests/torch/rehearsal/test_recipes.py::test_the_plan_is_what_is_measured": (
        "deepseek_v3-layernorm",
        "llama3_8b-core_attn mlp",
        "mixtral_8x7b-moe layernorm",
        "quickstart-full 2",
    ),
    # Models of transformers
    "tests/dist/foreign/test_foreign_memory.py::test_live_storages_beside_adapters_are_the_planned_bytes": (),
    "tests/dist/foreign/test_foreign_cuts.py::test_a_models_matrices_have_the_bits_of_torchs_muon": (),
    "tests/dist/foreign/test_foreign_commands.py::"
    "test_an_imported_directory_trains_as_the_directory_and_is_exported": (),
    "tests/dist/foreign/test_foreign_commands.py::test_doctor_tries_a_model_with_dropout_without_it": (),
    "tests/dist/foreign/test_foreign_commands.py::test_what_a_frozen_stage_hands_on_is_kept_to_be_compared": (),
    "tests/dist/foreign/test_foreign_commands.py::"
    "test_a_known_family_is_imported_for_transformers_code_where_that_is_asked_for": (),
}
"""A test's id without its parameters -> the parameters that `make test` runs all the same."""


def mark_whole(items: Sequence[pytest.Item], *, complete: bool) -> None:
    """Mark the tests above as `whole`. Raises UsageError where parameters of a `complete` collection are not there."""
    missing = {name: set(kept) for name, kept in LEFT_TO_TEST_ALL.items()}
    collected = set()
    for item in items:
        name, _, parameters = item.nodeid.removesuffix("]").partition("[")
        if name not in missing:
            continue
        collected.add(name)
        if parameters in LEFT_TO_TEST_ALL[name]:
            missing[name].discard(parameters)
        else:
            item.add_marker(pytest.mark.whole)
    gone = [f"{name}[{one}]" for name in sorted(collected) for one in sorted(missing[name])]
    if complete and gone:
        raise pytest.UsageError(f"tests/helpers/tiers.py names what is no test: {', '.join(gone)}")

"""A key of another system gets a remedy with its value only where a table knows that it means the same."""

import pytest

from ppctl.config.argv import ALIASES
from ppctl.config.keys import names_of_keys, text_keys
from ppctl.config.unknown_words import no_such_key

SECTIONS = ("parallelism", "training", "optimizer", "trainer.strategy", "actor.megatron")
KNOWN = {**ALIASES, **{name: key for name, key in names_of_keys("known_as").items() if "-" not in name}}
"""Names that tables list -> the key that they mean."""
FLAGS = {**names_of_keys("known_as"), **names_of_keys("names")}
OTHERS = [
    "training.local_batch_size=8", "training.dtype=bfloat16", "training.dtype=float32", "model.name=llama3",
    "model.flavor=8B", "checkpoint.folder=x",
    "checkpoint.async_mode=async", "comm.init_timeout_seconds=3", "parallelism.data_parallel_shard_degree=2",
    "parallelism.data_parallel_replicate_degree=2", "parallelism.pipeline_parallel_layers_per_stage=2",
    "parallelism.pipeline_parallel_first_stage_less_layers=1", "parallelism.expert_tensor_parallel_degree=2",
    
    "optimizer.implementation=fused", "lr_scheduler.decay_ratio=0.8",
    "lr_scheduler.min_lr_factor=0.1", "lr_scheduler.decay_type=linear", "trainer.devices=8",
    "trainer.precision=bf16", "trainer.val_check_interval=100", "trainer.limit_val_batches=2", "exp_manager.name=x",
    "model.data.splits_string=9,1", "model.optim.sched.constant_steps=3", "train_micro_batch_size_per_gpu=4",
    "gradient_accumulation_steps=2", "train_batch_size=8", "per_device_train_batch_size=4",
    "zero_optimization.stage=1", "bf16.enabled=true", "warmup_num_steps=3", "nproc=8", "dist.timeout=3",
    "save_steps=10", "eval_step=3", "logging_steps=2", "num_layer=3", "hidden_dim=64", "vocabsize=3",
]  # fmt: skip
"""Keys of torchtitan, NeMo, DeepSpeed and transformers that no table of ours lists, and misspelt ones."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_that_a_table_lists_is_known_in_any_section(name: str) -> None:
    default = "1F1B" if "schedule" in name and "csv" not in name else "1"
    for section in SECTIONS:
        remedy = no_such_key(f"{section}.{name}", default).remedy
        key = remedy.partition("=")[0].removeprefix("ppctl explain ")
        assert ALIASES.get(key, key) in ("", KNOWN[name]), remedy


@pytest.mark.parametrize("typed", OTHERS)
def test_a_name_that_only_looks_alike_gets_no_value(typed: str) -> None:
    key, _, text = typed.partition("=")
    problem = no_such_key(key, text)
    assert not problem.remedy or problem.remedy.startswith("ppctl explain"), problem


def test_the_keys_that_once_changed_their_meaning() -> None:
    schedule, size, batch = (
        no_such_key(key, text).remedy
        for key, text in (
            ("parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
            ("parallelism.pipeline_parallel_microbatch_size", "1"),
            ("training.local_batch_size", "8"),
        )
    )
    assert schedule == "pipeline.pp_schedule=Interleaved1F1B"
    assert size == "train.micro_batch_size=1"
    assert batch.startswith("ppctl explain train.")


@pytest.mark.parametrize(
    "typed",
    [
        "model.num_layerz=3",
        "checkpoint.keeep=0",
        "model.add_bias_linearr=false",
        "train.stepz=3",
        "stepz=3",
        "optim.lrr=0.1",
    ],
)
def test_a_key_with_one_wrong_letter_keeps_its_value(typed: str) -> None:
    key, _, text = typed.partition("=")
    assert no_such_key(key, text).remedy.endswith(f"={text}")


@pytest.mark.parametrize("name", text_keys())
def test_a_field_of_ours_in_another_system_s_section_gets_no_value(name: str) -> None:
    field = name.rpartition(".")[2]
    if "." in name and field not in KNOWN and f"--{field.replace('_', '-')}" not in FLAGS:
        assert "=3" not in no_such_key(f"trainer.{field}", "3").remedy

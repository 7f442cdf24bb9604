"""Runs of a tiny model with held-out samples: their records, and the states that they went through."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from observed_runs import train_noted
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session

SEQ, STEPS = 16, 4


MODEL = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "num_query_groups": 1}


def config_of(text: Path, *, pp: int = 1, vpp: int | None = None, dp: int = 1, gbs: int = 8, **train: int) -> RunConfig:
    config = RunConfig(model=ModelConfig(**MODEL))
    config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_model_parallel_size = pp, vpp
    config.parallel.data_parallel_size, config.parallel.deallocate_pipeline_outputs = dp, True
    config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm, config.parallel.batch_p2p_sync = (
        True,
        False,
        False,
    )
    config.data.path, config.data.seq_length, config.data.validation_split = str(text), SEQ, 0.1
    config.train.steps, config.train.global_batch_size, config.train.micro_batch_size = STEPS, gbs, 2
    config.optim.lr = 1e-2
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cpu", 1, pp * dp
    for key, value in train.items():
        setattr(config.train, key, value)
    return config


def run(mapping: dict, directory: str) -> tuple[list[dict], list[str]]:
    """In a rank: the records of a whole run, and the states that it went through."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    _, notes = train_noted(session, Path(directory))
    return notes.records, [state for state in notes.states if state != "updating"]


def records_of(config: RunConfig, directory: Path) -> tuple[list[dict], list[str]]:
    world = config.parallel.pipeline_model_parallel_size * config.parallel.data_parallel_size
    return run_ranks(run, world, to_mapping(config), str(directory))[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(1).choices(["the", "stage", "rank", "and", "a"], k=570)))
    return path

"""What the GPU tests run inside a rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ppctl.config.mapping import from_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def tiny_config(text: Path, device: str) -> RunConfig:
    """One rank with two chunks of a small decoder, eight microbatches a step."""
    model = ModelConfig(num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2)
    config = RunConfig(model=model)
    config.parallel.virtual_pipeline_model_parallel_size = 2
    config.data.path, config.data.seq_length = str(text), 64
    config.train.global_batch_size, config.train.micro_batch_size = 16, 2
    config.launch.device = device
    return config


def trainer_of(mapping: dict, device: torch.device, rank: int = 0) -> Trainer:
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), rank, device)
    return Trainer(session, session.data.batches())


def waits_in_a_pipeline(mapping: dict) -> tuple[list[str], int]:
    """(what waited for the device while the third step's pipeline ran, how many kernels were launched in it)."""
    return waits_on(mapping, torch.device("cuda", torch.cuda.current_device()))


def waits_on(mapping: dict, device: torch.device) -> tuple[list[str], int]:
    trainer = trainer_of(mapping, device)
    for step in range(2):
        trainer.step(step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function("the pipeline"):
            trainer._run_pipeline(2)
            trainer.session.pipeline.settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = seen.events()
    # A trace of a GPU shows the range once more, on the device's own line.
    whole = min((event.time_range for event in events if event.name == "the pipeline"), key=lambda range: range.start)
    inside = [event.name for event in events if whole.start <= event.time_range.start <= whole.end]
    return [name for name in inside if name in WAITS], sum(
        name.startswith(("cudaLaunch", "aten::mm")) for name in inside
    )

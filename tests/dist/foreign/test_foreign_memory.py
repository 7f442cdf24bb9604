"""What a plan says that models of transformers hold, against live storages: every rank, at a step's peak, to 3 %."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from live_memory import live_and_planned
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.config.schema import DataConfig, LaunchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from ppctl.foreign.describe import describe
from ppctl.geometry.foreign_model import Adapters, ForeignModel
from ppctl.plan import RankCost

CLOSE = 0.03
LENGTH, ROWS = 128, 4
SIZES = dict(
    vocab_size=320, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=512,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GATED = dict(**SIZES, num_key_value_heads=2, intermediate_size=352)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=48)
HEADS = dict(head_dim=32)
EXPERTS = dict(num_experts_per_tok=2)

MODELS: dict[str, dict[str, Any]] = {
    "Llama": GATED,
    "Gemma2": GATED | WINDOWS | HEADS,
    "Qwen3Moe": GATED | EXPERTS | HEADS | dict(num_experts=4, moe_intermediate_size=96),
    "GraniteMoe": GATED | EXPERTS | dict(num_local_experts=4),
    "GptOss": GATED | WINDOWS | HEADS | EXPERTS | dict(num_local_experts=4),
    "GPTNeoX": SIZES | dict(intermediate_size=512),
    "Phi3": GATED,
    "StableLm": GATED,
    "Cohere2": GATED | WINDOWS,
}
WAYS: dict[str, dict[str, str | int]] = {
    "1f1b": dict(pp_schedule="1f1b"),
    "recomputed": dict(pp_schedule="1f1b", recompute_granularity="full", recompute_method="uniform"),
    "interleaved": dict(pp_schedule="interleaved_1f1b", vpp=2),
    "split": dict(pp_schedule="zb_h1"),
    "split, vpp=2": dict(pp_schedule="zbv_zero_bubble"),
    "split, recomputed": dict(pp_schedule="zb_h1", recompute_granularity="full", recompute_method="uniform"),
}
GRID = [(kind, way, width) for kind in MODELS for way in WAYS for width in ("float32", "bfloat16")]
SAMPLE = [("GptOss", "split", "float32"), ("Llama", "interleaved", "bfloat16"), ("Llama", "recomputed", "bfloat16")]


ADAPTED = {
    "everywhere": Adapters(8, 8.0, ("q_proj", "v_proj", "down_proj")),
    "last": Adapters(8, 8.0, ("q_proj", "o_proj"), (3,)),
    "second": Adapters(8, 8.0, ("k_proj", "up_proj"), (1,)),
    "dropped, beside a head": Adapters(8, 8.0, ("q_proj", "down_proj"), (), 0.1, ("lm_head",)),
    "dropped, behind an embedding": Adapters(8, 8.0, ("v_proj",), (2,), 0.1, ("embed_tokens", "mlp")),
}
WIDER = {("interleaved", "second"): 0.04}
"""Of the first rank: receives that it posts in the steady state alone are counted at its peak, which is in its warm-up,
because frozen stages run then that keep nothing. Up to 4 % too high."""
WITH_ADAPTERS = [
    ("Llama", way, width, asked)
    for way in WAYS
    for width in ("float32", "bfloat16")
    for asked in ADAPTED
    if way in ("recomputed", "split") or "dropped" not in asked
]
SAMPLE_ADAPTED = [
    ("Llama", "1f1b", "float32", "everywhere"),
    ("Llama", "interleaved", "bfloat16", "last"),
    ("Llama", "interleaved", "float32", "second"),
    ("Llama", "split", "float32", "second"),
    ("Llama", "split, vpp=2", "float32", "second"),
    ("Llama", "split", "float32", "dropped, behind an embedding"),
    ("Llama", "recomputed", "bfloat16", "dropped, behind an embedding"),
]


@cache
def described(kind: str, directory: Path, adapted: str = "") -> ForeignModel:
    import transformers  # here, because ranks that import this file need none

    getattr(transformers, f"{kind}Config")(**MODELS[kind]).save_pretrained(directory / kind)
    return describe(directory / kind, {}, ADAPTED.get(adapted))


def run_of(text: Path, kind: str, way: str, width: str, adapted: str = "") -> RunConfig:
    """The run of a case, on two pp_ranks."""
    found = described(kind, text.parent, adapted)
    config = RunConfig(
        model=ModelConfig(**found.sizes, transformers=found.to_text()),
        parallel=ParallelConfig(
            pipeline_model_parallel_size=2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            batch_p2p_sync=False,
            deallocate_pipeline_outputs=True,
            bf16=width == "bfloat16",
        ),
        data=DataConfig(path=str(text), seq_length=LENGTH),
        train=TrainConfig(global_batch_size=4 * ROWS, micro_batch_size=ROWS),
        launch=LaunchConfig(device="cpu"),
    )
    values = WAYS[way]
    config.parallel.virtual_pipeline_model_parallel_size = values.get("vpp")  # type: ignore[assignment]
    config.pipeline.pp_schedule = str(values["pp_schedule"])
    for key in ("recompute_granularity", "recompute_method"):
        setattr(config.train, key, values.get(key))
    return config


def each(mappings: list[dict[str, Any]]) -> list[tuple[int, RankCost]]:
    return in_own_worlds(live_and_planned, mappings)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "corpus.txt"
    path.write_text("every stage runs the model's own code " * 4000)
    return path


def hold(text: Path, cases: Sequence[tuple[str, ...]]) -> None:
    """All cases in the same two ranks."""
    mappings = [to_mapping(run_of(text, *case)) for case in cases]
    off = []
    for rank, found in enumerate(run_ranks(each, 2, mappings, timeout=470)):
        for case, (live, cost) in zip(cases, found, strict=True):
            above = WIDER.get((case[1], case[-1]), CLOSE)
            if not -CLOSE <= cost.peak_bytes / live - 1 <= above:
                off.append(f"{', '.join(case)}, rank {rank}: {cost.peak_bytes / live - 1:+.2%} of {live:,}: {cost}")
    assert not off, "\n".join(off)


@pytest.mark.timeout(300)
def test_live_storages_at_the_peak_are_the_planned_bytes(text: Path) -> None:
    hold(text, SAMPLE)


@pytest.mark.timeout(300)
def test_live_storages_beside_adapters_are_the_planned_bytes(text: Path) -> None:
    hold(text, SAMPLE_ADAPTED)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_live_storages_beside_adapters_are_the_planned_bytes_in_every_way(text: Path) -> None:
    hold(text, WITH_ADAPTERS)


@pytest.mark.whole
@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", MODELS)
def test_live_storages_are_the_planned_bytes_in_every_way(text: Path, kind: str) -> None:
    hold(text, [case for case in GRID if case[0] == kind])

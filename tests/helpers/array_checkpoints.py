"""Checkpoints of format 2 out of numpy's arrays, in boxes over as many files as a test wants. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ppctl.checkpoint.boxes import Box, boxes_of_run
from ppctl.checkpoint.disk import file_name, write_file
from ppctl.checkpoint.manifest import Manifest, ShardRecord, TensorRecord, record_whole
from ppctl.checkpoint.tensor_parts import TensorPart
from ppctl.runs.checkpoint_folder import MANIFEST, STATE, prepare, publish

Arrays = Mapping[str, np.ndarray]

MODEL = {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 1, "vocab_size": 8}


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights in three dtypes, a moment and a count of steps."""
    draw = np.random.default_rng(seed)
    weights = {f"layers.{layer}.attention.wq.weight": draw.standard_normal((6, 5), np.float32) for layer in (2, 10)}
    found = {f"model.{name}": value for name, value in weights.items()}
    found["model.norm.weight"] = draw.standard_normal(5).astype(ml_dtypes.bfloat16)
    found |= {f"optim.{name}.exp_avg": value / 2 for name, value in weights.items()}
    found |= {f"optim.{name}.step": np.array(seed, np.float32) for name in weights}
    return found


def save(
    directory: Path, step: int, tensors: Arrays, *, ranks: int = 2, state: Mapping[str, Any] | None = None
) -> Path:
    """Write step-`step`, each tensor in as many runs as there are ranks."""
    temporary = prepare(directory, step)
    files, found = {}, {}
    for rank in range(ranks):
        held = [(part, tensors[part.name]) for part in _held(tensors, rank, ranks)]
        held.sort(key=lambda each: -each[1].itemsize)
        values = [whole[part.box.within((0,) * whole.ndim)] for part, whole in held]
        data = [memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8)) for value in values]
        record, shards = write_file(temporary / file_name(rank), [part for part, _ in held], data)
        files[file_name(rank)] = record
        for (part, _), shard in zip(held, shards, strict=True):
            found.setdefault(part.name, []).append(shard)
    records = {name: _record(tensors[name], shards) for name, shards in found.items()}
    text = json.dumps({"step": step, "model": MODEL, "consumed_samples": 8 * step, **(state or {})}).encode()
    (temporary / STATE).write_bytes(text)
    manifest = Manifest(step, {**files, STATE: record_whole(text)}, records)
    (temporary / MANIFEST).write_text(manifest.to_text())
    return publish(directory, step)


def _held(tensors: Arrays, rank: int, ranks: int) -> Iterator[TensorPart]:
    for name, value in tensors.items():
        if not value.ndim:
            boxes = [Box((), ())] if rank == 0 else []
        else:
            each = -(-value.size // ranks)
            boxes = list(boxes_of_run(value.shape, rank * each, min((rank + 1) * each, value.size)))
        yield from (TensorPart(name, value.shape, value.dtype.name, box) for box in boxes)


def _record(value: np.ndarray, shards: list[ShardRecord]) -> TensorRecord:
    return TensorRecord(value.shape, value.dtype.name, tuple(sorted(shards, key=lambda shard: shard.box)))

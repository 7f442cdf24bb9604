"""Checkpoints written by one process that never holds more than one tensor.

Must not know models, nor where tensors come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ppctl import checkpoint_folder
from ppctl.checkpoint import shard_file
from ppctl.checkpoint.disk import seal
from ppctl.checkpoint.manifest import Manifest, TensorRecord
from ppctl.checkpoint.shards import values_of, whole_shards
from ppctl.checkpoint.state import state_text

Read = Callable[[str], Tensor]


def save_streamed(
    directory: Path, step: int, tensors: Mapping[str, Tensor], read: Read, state: Mapping[str, Any]
) -> Path:
    """Write `directory`/step-`step` from one process; returns its path.

    `tensors` are on the meta device, for shapes and dtypes by canonical global name; `read` is called for each once.
    Raises what `read` raises, and OSError; then, as after a crash, nothing is left that would be read.
    """
    parts = [shard.part for shard in whole_shards(tensors)]
    parts.sort(key=lambda part: -tensors[part.name].element_size())
    temporary = checkpoint_folder.prepare(directory, step)
    path = temporary / shard_file.file_name(0)
    try:
        record, shards = shard_file.write(path, parts, (values_of(read(part.name)) for part in parts))
        records = {
            part.name: TensorRecord(part.whole, part.dtype, (shard,)) for part, shard in zip(parts, shards, strict=True)
        }
        seal(temporary, Manifest(step, {path.name: record}, records), state_text(state))
        return checkpoint_folder.publish(directory, step)
    except BaseException:
        checkpoint_folder.discard(temporary)
        raise

"""From one of our checkpoints to a distributed checkpoint that torchtitan or Megatron-core loads, matrix by matrix.

torch's own library writes the files and `.metadata`; its planner asks for a value when it is written, so that one
matrix is in memory at a time.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ppctl.config.schema import ModelConfig
from ppctl.errors import PpctlError
from ppctl.families.directory import model_tensors
from ppctl.families.megatron_names import STACKED, STACKED_EXPERT, RowBlock, is_stacked, written
from ppctl.pretrained.conversion import Done, Progress, SavedWeights, left_out, new_directory
from ppctl.pretrained.from_dcp import in_titans_order

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_EXTRA = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Modules for which Megatron-core expects an entry `_extra_state`, which is empty without 8-bit floats."""


class _Part(NamedTuple):
    """A box of a tensor in the other format, and the function that makes its values."""

    key: str
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def export_dcp(
    checkpoint: Path,
    out: Path,
    progress: Progress,
    *,
    dtype: torch.dtype | None = None,
    mtp: bool = True,
    megatron: bool,
) -> Done:
    """Write a checkpoint's weights as a distributed checkpoint for Megatron-core if `megatron`, else for torchtitan;
    `dtype` None keeps the checkpoint's. Raises ConfigError (PP-E525), CheckpointError (PP-E502, PP-E503), OSError."""
    weights = SavedWeights(checkpoint, dtype=dtype, mtp=mtp)
    model, dtypes, counter = weights.model, weights.dtypes, count(1)

    def tensor(name: str) -> Tensor:
        progress(name, next(counter), len(dtypes))
        value = weights.tensor(name)
        return value if megatron else in_titans_order(name, value, model)

    if megatron:
        parts = _megatron_parts(model, dtypes, tensor)
        objects = _extra_states(parts)
    else:
        shapes, objects = model_tensors(model).items(), []
        parts = [
            _Part(name, each, (0,) * len(each), each, dtypes[name], partial(tensor, name)) for name, each in shapes
        ]
    with new_directory(out) as temporary:
        writer = FileSystemWriter(temporary, single_file_per_rank=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                save({}, storage_writer=writer, planner=_Planner(parts, objects), no_dist=True)
            except CheckpointException as error:
                raise _reason(error.failures[0][0]) from None
        if megatron:
            with (temporary / "common.pt").open("wb") as stream:  # torch's own errors would not name the disk's
                torch.save({"iteration": weights.manifest.step, "content_metadata": {}}, stream)
            (temporary / "metadata.json").write_text(json.dumps(_BACKENDS))
    elements = sum(map(prod, weights.shapes.values()))
    size = sum(prod(part.sizes) * part.dtype.itemsize for part in parts)
    left = left_out(name for name in weights.manifest.tensors if name.startswith("optim."))
    return Done(out, "", elements, len({part.key for part in parts}), size, left=left)


def _reason(caught: BaseException) -> BaseException:
    """What stopped torch's library, which catches every error, Ctrl-C included: ours, the disk's or the person's if
    there is one, although an error of the library's own followed it."""
    found: BaseException | None = caught
    while found is not None and not isinstance(found, PpctlError | OSError | KeyboardInterrupt):
        found = found.__context__
    return found or caught


def _megatron_parts(
    model: ModelConfig, dtypes: Mapping[str, torch.dtype], tensor: Callable[[str], Tensor]
) -> list[_Part]:
    """The parts of Megatron-core's tensors: layers of one kind, and experts, are stacked, with a part for each."""
    parts = []
    for key, (shape, names) in written(model).items():
        stacked, extents, front = _stack(key, model)
        read = partial(_joined, tensor, names, (*(1 for _ in front), *shape))
        box = ((*front, *(0 for _ in shape)), (*(1 for _ in front), *shape))
        parts.append(_Part(stacked, (*extents, *shape), *box, dtypes[next(iter(names))], read))
    return parts


def _stack(key: str, model: ModelConfig) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(the key of a tensor's stack, the stack's numbers of layers and experts, the tensor's indexes in the stack)."""
    extents, front = list[int](), list[int]()
    if expert := STACKED_EXPERT.fullmatch(key):
        key = f"{expert[1]}.{expert[3]}"
        extents, front = [model.num_moe_experts or 0], [int(expert[2])]
    layer = STACKED.fullmatch(key)
    if layer and is_stacked(model):
        key = f"{layer[1]}.{layer[3]}"
        extents, front = [model.num_layers, *extents], [int(layer[2]), *front]
    return key, tuple(extents), tuple(front)


def _joined(tensor: Callable[[str], Tensor], names: Mapping[str, RowBlock | None], shape: tuple[int, ...]) -> Tensor:
    (first, rows), *_ = names.items()
    if rows is None:
        return tensor(first).reshape(shape)
    pieces = sorted(((part, name) for name, part in names.items() if part is not None), key=lambda each: each[0].first)
    values = [tensor(name).unflatten(0, (part.groups, part.size)) for part, name in pieces]
    return torch.cat(values, 1).reshape(shape)


def _extra_states(parts: list[_Part]) -> list[str]:
    """Keys of the empty entries that Megatron-core's layers ask for: `..._extra_state/shard_1.0_2.4`."""
    keys = []
    for part in parts:
        module, _, kind = part.key.rpartition(".")
        if kind == "weight" and module.endswith(_EXTRA):
            dims = len(part.shape) - 2
            index, extents = part.offset[:dims] or (0,), part.shape[:dims] or (1,)
            place = f"{'.'.join(map(str, index))}_{'.'.join(map(str, extents))}"
            keys.append(f"{module}._extra_state/shard_{place}")
    return keys


class _Planner(DefaultSavePlanner):
    """A planner for parts that are made only when they are written."""

    def __init__(self, parts: list[_Part], objects: list[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {MetadataIndex(part.key, part.offset): part for part in parts}
        self._objects = objects

    def create_local_plan(self) -> SavePlan:
        """All parts, in their order."""
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes)),
                    properties=TensorProperties(dtype=part.dtype),
                    size=torch.Size(part.shape),
                ),
            )
            for index, part in self._parts.items()
        ]
        items += [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of a part, or the placeholder for a Megatron-core `_extra_state`."""
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([None], data)
            return data
        return self._parts[write_item.index].read().contiguous()

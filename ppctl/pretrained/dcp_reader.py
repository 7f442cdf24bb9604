"""Tensors out of torch's distributed checkpoints (DCP), which torchtitan and Megatron-core (`torch_dist`) write.

Knows their files: `.metadata`, a pickle that says which bytes of which file are which part of a tensor, and
data, each part by itself as `torch.save` writes it. Must not know models. A pickle may run any program: of `.metadata`
only the classes that DCP itself puts there are made, and parts are read by torch with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ppctl.checkpoint.boxes import Box, common
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.files import nearest_there

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {
        "Size", "device", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
        "int16", "int8", "uint8", "bool",
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "builtins": {"set", "frozenset", "list", "dict", "tuple"},
}  # fmt: skip
"""Module -> what may be taken from it: records, and values without side effects."""


class _Inert:
    """In place of a record of Megatron-core's that says nothing of tensors: keeps nothing, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _member(owner: Any, name: Any) -> Enum:
    """In place of getattr, by which Python 3.11's first releases pickle a member of an Enum: that, and nothing else."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"builtins.getattr of {owner!r} is no part of a distributed checkpoint")


class _Unpickler(pickle.Unpickler):
    """Makes nothing but `_CLASSES`. Raises UnpicklingError naming any other class."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, or one that does nothing in place of Megatron-core's."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return _Inert
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a distributed checkpoint")


class DcpReader:
    """Reads boxes of the tensors of one checkpoint. Holds the parts that it read last, one of each tensor's."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError (PP-E532) where `.metadata` is missing, damaged or names other classes."""
        self.path = path
        try:
            with open(path / METADATA, "rb") as stream:
                found = _Unpickler(stream).load()
        except OSError as error:
            raise self._refused(f"{METADATA} cannot be read: {error.strerror}") from None
        except Exception as error:  # a pickle that is damaged can raise anything
            raise self._refused(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from None
        if not isinstance(found, Metadata):
            raise self._refused(f"{METADATA} holds no description of tensors")
        self._metadata = found
        entries = found.state_dict_metadata
        self.tensors = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
        self.others = sorted(entries.keys() - self.tensors.keys())
        """Keys of what is no tensor."""
        self._last: tuple[object, Tensor] | None = None

    def kind(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor."""
        found = self.tensors[key]
        return tuple(found.size), found.properties.dtype

    def read(self, key: str, box: Box) -> Tensor:
        """The values of a box of a tensor. Raises CheckpointError (PP-E532) where they cannot be read."""
        found = self.tensors[key]
        out = torch.empty(box.shape, dtype=found.properties.dtype)
        filled = 0
        for chunk in found.chunks:
            part = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if (shared := common(part, box)) is not None:
                values = self._part(key, part)
                out[shared.within(box.offset)].copy_(values[shared.within(part.offset)])
                filled += shared.size
        if filled != box.size:
            raise self._refused(f"its parts hold {filled} of the {box.size} values of {key} that are wanted")
        return out

    def _part(self, key: str, part: Box) -> Tensor:
        """One part, as it is stored."""
        if self._last is not None and self._last[0] == (key, part):
            return self._last[1]
        self._last = None  # its memory is free for the next
        info = self._metadata.storage_data.get(MetadataIndex(key, part.offset))
        if info is None:
            raise self._refused(f"{METADATA} does not say where {key} at {list(part.offset)} is")
        file = self.path / info.relative_path
        what = f"bytes {info.offset} to {info.offset + info.length} of {info.relative_path}, of {key}"
        if file.parent != self.path or getattr(info, "transform_descriptors", None):
            raise self._refused(f"{what}, are in another directory or compressed, which is not read")
        try:
            with open(file, "rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # bytes that are damaged can raise anything
            raise self._refused(f"{what}, cannot be read ({type(error).__name__}: {error})") from None
        if not isinstance(values, Tensor) or tuple(values.shape) != part.shape:
            raise self._refused(f"{what}, hold something else than its part of shape {list(part.shape)}")
        self._last = (key, part), values.detach()
        return self._last[1]

    def _refused(self, fault: str) -> CheckpointError:
        message = f"{self.path} is no distributed checkpoint that can be read: {fault}"
        return CheckpointError(Problem("PP-E532", message, f"ls -la {pasted(nearest_there(self.path))}"))

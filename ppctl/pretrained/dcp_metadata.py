"""The index of torch's distributed checkpoints (DCP): `.metadata`, a pickle, read without running what it says.

Knows the classes that DCP itself and Megatron-core put there. Must not know what the index is read for.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ppctl.host.files import open_regular

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
        """Return the class, or one that does nothing in place of Megatron-core's."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return _Inert
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a distributed checkpoint")


def read_metadata(directory: Path) -> Metadata:
    """Read the index of a checkpoint. Raises OSError, and ValueError where it is damaged or names other classes."""
    try:
        with open_regular(directory / METADATA) as stream:
            index = _Unpickler(stream).load()
    except OSError:
        raise
    except Exception as error:  # a pickle that is damaged can raise anything
        raise ValueError(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, Metadata):
        raise ValueError(f"{METADATA} holds no description of tensors")
    return index

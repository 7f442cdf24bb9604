"""Converts a distributed checkpoint (DCP) of torchtitan or Megatron-core to ppctl's, tensor by tensor, bit for bit.

Knows torch's files: `.metadata` maps each part of a tensor to a file and its bytes there, and data files hold each part
as `torch.save` writes it. Knows the classes that DCP and Megatron-core put into `.metadata`, and how tensors are found
by ppctl's names. Must not know the command line, ranks or modules. The model's sizes come from the config, because such
a checkpoint does not record them in a form that other programs can read. `.metadata` is a pickle: it is read without
running any code in it, and torch reads the parts with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from functools import partial
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ppctl.checkpoint.boxes import Box, common
from ppctl.checkpoint.tensor_parts import ranges
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, Problem, listed, pasted
from ppctl.families.directory import model_tensors
from ppctl.families.megatron_names import SKIPPED, STACKED, STACKED_EXPERT, MegatronPlace, RowBlock, places
from ppctl.host.files import nearest_there, open_regular
from ppctl.pretrained.conversion import Done, Progress, left_out, write_weights

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
"""Module -> the names that may be taken from it: records, and values without side effects."""


class _Inert:
    """A stand-in, without state or effect, for a record of Megatron-core's that says nothing about tensors."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _member(owner: Any, name: Any) -> Enum:
    """A stand-in for getattr, with which early releases of Python 3.11 pickle members of an Enum. Raises
    UnpicklingError for anything else."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"builtins.getattr of {owner!r} is no part of a distributed checkpoint")


class _Unpickler(pickle.Unpickler):
    """Makes only `_CLASSES`. Raises UnpicklingError naming any other class."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, or `_Inert` in place of a class of Megatron-core's."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return _Inert
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a distributed checkpoint")


class DcpReader:
    """Reads boxes of the tensors of one checkpoint. Holds the part that it read last."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError (PP-E532) if `.metadata` is missing, damaged or names other classes."""
        self.path = path
        try:
            with open_regular(path / METADATA) as stream:
                metadata = _Unpickler(stream).load()
        except OSError as error:
            raise self._refused(f"{METADATA} cannot be read: {error.strerror}") from None
        except Exception as error:  # a pickle that is damaged can raise anything
            raise self._refused(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from None
        if not isinstance(metadata, Metadata):
            raise self._refused(f"{METADATA} holds no description of tensors")
        self._metadata = metadata
        entries = metadata.state_dict_metadata
        self.tensors = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
        self._last: tuple[object, Tensor] | None = None

    def kind(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor."""
        record = self.tensors[key]
        return tuple(record.size), record.properties.dtype

    def read(self, key: str, box: Box) -> Tensor:
        """The values of a box of a tensor. Raises CheckpointError (PP-E532) if they cannot be read."""
        record = self.tensors[key]
        out = torch.empty(box.shape, dtype=record.properties.dtype, device="cpu")
        filled = 0
        for chunk in record.chunks:
            part = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if (shared := common(part, box)) is not None:
                values = self._part(key, part)
                out[shared.within(box.offset)].copy_(values[shared.within(part.offset)])
                filled += shared.size
        if filled != box.size:
            raise self._refused(f"its parts hold {filled} of the {box.size} values of {key} that are wanted")
        return out

    def _part(self, key: str, part: Box) -> Tensor:
        """Return a stored part's values; the last part stays in memory. Raises CheckpointError for unreadable parts."""
        if self._last is not None and self._last[0] == (key, part):
            return self._last[1]
        self._last = None  # frees its memory for the next part
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


# A checkpoint's tensors by our names


_WORDS = ("tok_embeddings.weight", "output.weight")
"""Tables that Megatron-core stores with more rows than the vocabulary has tokens."""

_TITAN_SKIPPED = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


class _Stored(NamedTuple):
    key: str
    box: Box
    """The place of the whole stored matrix in the tensor `key`, which may stack layers and experts."""
    rows: RowBlock | None
    dim: int
    """The dim of the matrix' rows: after the indexes of layer and expert."""


def import_dcp(source: Path, out: Path, model: ModelConfig, progress: Progress, *, megatron: bool) -> Done:
    """Write the weights of a distributed checkpoint as `out`/checkpoints/step-0, in their own dtypes.

    Optimizer states and other values are left out. Raises ConfigError (PP-E525 if `out` is taken) and CheckpointError:
    PP-E532 if the checkpoint cannot be read, PP-E533 naming all tensors that are missing, unknown or of another shape
    than the model's.
    """
    reader = DcpReader(source)
    stored = _find(reader, model, megatron=megatron)
    shapes = model_tensors(model)
    specs = {
        name: torch.empty(shapes[name], dtype=reader.kind(each.key)[1], device="meta") for name, each in stored.items()
    }

    def read(name: str) -> Tensor:
        value = _values(reader, stored[name]).reshape(shapes[name])
        return value if megatron else in_our_order(name, value, model)

    state = {"model": asdict(model), "source": str(source.absolute())}
    left = left_out(key for key in reader.tensors if key.startswith("optimizer."))
    return write_weights(out, specs, read, state, progress, left=left)


def _find(reader: DcpReader, model: ModelConfig, *, megatron: bool) -> dict[str, _Stored]:
    """Return where every tensor of the model is. Raises CheckpointError (PP-E533) unless the tensors fit the model."""
    shapes = model_tensors(model)
    names = places(model) if megatron else {name: MegatronPlace(_titan_keys(name)) for name in shapes}
    stored, missing, wrong = dict[str, _Stored](), [], []
    stacks: dict[str, tuple[int, ...]] = {}  # key -> how many layers and experts the model has there
    for name, place in names.items():
        match = next((each for each in _candidates(place) if each[0] in reader.tensors), None)
        if match is None:
            missing.append(f"{name}: {place.keys[0]}")
            continue
        key, front, rows = match
        if any(index >= extent for index, extent in zip(front, reader.kind(key)[0], strict=False)):
            missing.append(f"{name}: {key} at {list(front)}")
        shape = _whole(shapes[name], rows)
        stored[name] = _Stored(key, Box((*front, *(0 for _ in shape)), (*(1 for _ in front), *shape)), rows, len(front))
        stacks[key] = tuple(map(max, zip(stacks.get(key, front), (index + 1 for index in front), strict=True)))
    for name, (key, box, _, dim) in stored.items():
        extents, shape, stack = reader.kind(key)[0], box.shape[dim:], stacks[key]
        padded = megatron and name in _WORDS and extents[1:] == shape[1:] and extents[0] >= shape[0]
        if (extents[dim:] != shape and not padded) or any(map(gt, extents, stack)):
            wrong.append(f"{name} ({key}): stored {list(extents)}, expected {[*stack, *shape]}")
    used = {each.key for each in stored.values()}
    aliases = {key for place in names.values() for key, _, _ in _candidates(place)}
    skipped = SKIPPED if megatron else _TITAN_SKIPPED
    unknown = [
        key
        for key in sorted(reader.tensors.keys() - used - aliases)
        if not key.startswith(skipped) and "_extra_state" not in key
    ]
    faults = {"lacks tensors of the model": missing, "holds tensors that the model lacks": ranges(unknown)}
    faults["holds tensors of another shape than the model's"] = wrong
    problems = [_misfit(reader, fault, lines) for fault, lines in faults.items() if lines]
    if problems:
        raise CheckpointError(problems)
    return stored


def _misfit(reader: DcpReader, fault: str, lines: list[str]) -> Problem:
    remedy = "give the model's sizes after --for, as `ppctl plan` takes them: +recipe=NAME or model.KEY=VALUE"
    return Problem("PP-E533", f"{reader.path} {fault}", remedy, listed(lines))


def _candidates(place: MegatronPlace) -> Iterator[tuple[str, tuple[int, ...], RowBlock | None]]:
    """Yield (key, indexes before the matrix, its rows): layers and experts stacked or not, halves separate or not."""
    for key in place.keys:
        for stacked, front in _stacked(key):
            yield stacked, front, place.rows
            if place.alone:
                yield stacked + place.alone, front, None


def _stacked(key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (key, indexes before the matrix): layer and expert in the key's text, or as indexes."""
    experts = STACKED_EXPERT.fullmatch(key)
    for each, behind in [(key, ()), *([(f"{experts[1]}.{experts[3]}", (int(experts[2]),))] if experts else [])]:
        yield each, behind
        if layer := STACKED.fullmatch(each):
            yield f"{layer[1]}.{layer[3]}", (int(layer[2]), *behind)


def _whole(shape: tuple[int, ...], rows: RowBlock | None) -> tuple[int, ...]:
    """The shape of the stored matrix that has these rows."""
    return shape if rows is None else (rows.groups * rows.block, *shape[1:])


def _values(reader: DcpReader, stored: _Stored) -> Tensor:
    """Read the values of one of our tensors; indexes before the matrix stay as dims of size 1."""
    rows, box, dim = stored.rows, stored.box, stored.dim
    if rows is None:
        return reader.read(stored.key, box)
    if rows.groups > 1:
        groups: Tensor = reader.read(stored.key, box).unflatten(dim, (rows.groups, rows.block))
        return groups.narrow(dim + 1, rows.first, rows.size)
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = rows.first, rows.size
    return reader.read(stored.key, Box(tuple(offset), tuple(shape)))


def _titan_keys(name: str) -> tuple[str, ...]:
    """torchtitan's possible keys of a tensor: our name, in newer versions with projections one level deeper, in older
    versions with a prefix."""
    deeper = name
    for which in "qkv":
        deeper = deeper.replace(f"attention.w{which}.", f"attention.qkv_linear.w{which}.")
    return (name, deeper, f"model.{name}", f"model.{deeper}") if deeper != name else (name, f"model.{name}")


def _paired(name: str, value: Tensor, model: ModelConfig, pairs: tuple[int, int]) -> Tensor:
    if model.rotary_interleaved or (".attention.wq." not in name and ".attention.wk." not in name):
        return value
    head = model.head_dim
    heads: Tensor = value.unflatten(0, (-1, head)).unflatten(1, pairs)
    return heads.transpose(1, 2).reshape(value.shape)


in_our_order = partial(_paired, pairs=(-1, 2))
"""Rows of queries and keys in our order of rotary pairs, from torchtitan's, where pairs are neighbours."""
in_titans_order = partial(_paired, pairs=(2, -1))
"""The inverse of `in_our_order`: pairs become neighbours."""

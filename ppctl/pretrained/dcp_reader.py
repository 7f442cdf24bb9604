"""Tensors out of torch's distributed checkpoints (DCP), which torchtitan and Megatron-core (`torch_dist`) write.

Knows their files: `.metadata`, a pickle that says which bytes of which file are which part of a tensor, and
data, each part by itself as `torch.save` writes it. Must not know models. A pickle may run any program: `.metadata`
is read by `checkpoint.dcp_metadata`, and parts by torch with `weights_only`.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ppctl.checkpoint.boxes import Box, common
from ppctl.checkpoint.dcp_metadata import METADATA, read_metadata
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.files import nearest_there


class DcpReader:
    """Reads boxes of the tensors of one checkpoint. Holds the parts that it read last, one of each tensor's."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError (PP-E532) where `.metadata` is missing, damaged or names other classes."""
        self.path = path
        try:
            found = read_metadata(path)
        except OSError as error:
            raise self._refused(f"{METADATA} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise self._refused(str(error)) from None
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

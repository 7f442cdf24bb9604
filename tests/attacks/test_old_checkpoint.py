"""A checkpoint of format 1 that somebody else has made runs nothing: its index is a pickle, its entries may be."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ppctl.checkpoint import CheckpointReader, read_manifest
from ppctl.checkpoint.dcp_metadata import read_metadata
from ppctl.errors import CheckpointError

OLD = Path(__file__).parents[1] / "golden" / "checkpoint" / "step-3"


class Harm:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def as_index(step: Path, name: str, harm: Harm) -> None:
    """In place of all of the index."""
    (step / ".metadata").write_bytes(pickle.dumps(harm))


def as_entry(step: Path, name: str, harm: Harm) -> None:
    """In place of a tensor, as what torch loads as a pickle."""
    found, data = read_metadata(step), io.BytesIO()
    torch.save(harm, data)
    (index,) = (each for each in found.storage_data if each.fqn == name)
    info = found.storage_data.pop(index)
    (step / info.relative_path).write_bytes(data.getvalue())
    found.state_dict_metadata[name] = BytesStorageMetadata()
    info.offset, info.length = 0, len(data.getvalue())
    found.storage_data[MetadataIndex(name)] = info
    (step / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("put", [as_index, as_entry])
def test_a_checkpoint_of_format_1_runs_nothing(put: Callable[[Path, str, Harm], None], tmp_path: Path) -> None:
    step = tmp_path / "step-3"
    shutil.copytree(OLD, step)
    manifest = read_manifest(step)
    name = next(iter(manifest.tensors))
    put(step, name, Harm(tmp_path / "harm"))
    with pytest.raises(CheckpointError, match=f"PP-E503: .* is damaged: {name} cannot be read"):
        CheckpointReader(step, manifest).tensor(name)
    assert not (tmp_path / "harm").exists()

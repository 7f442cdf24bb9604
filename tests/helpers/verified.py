"""A checkpoint that is as it was written, to the last byte. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.verification import examine
from ppctl.errors import CheckpointError


def verify(path: Path) -> Manifest:
    """Read every byte of the checkpoint at `path`; CheckpointError with all that is wrong."""
    checkpoint = examine(path)
    if checkpoint.problems:
        raise CheckpointError(checkpoint.problems)
    return read_manifest(path)

"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the pipeline."""

from ppctl.checkpoint.folder import latest, step_path
from ppctl.checkpoint.manifest import read_state, verify
from ppctl.checkpoint.reading import load
from ppctl.checkpoint.replicas import Tensors
from ppctl.checkpoint.writing import save

__all__ = ["Tensors", "latest", "load", "read_state", "save", "step_path", "verify"]

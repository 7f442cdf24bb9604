"""Checkpoints of sessions that no training loop saves."""

from __future__ import annotations

from pathlib import Path

from ppctl import checkpoint
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.train.session import Session
from ppctl.train.snapshot import session_shards, state_of


def save_checkpoint(
    session: Session, directory: Path, step: int, consumed_samples: int, sample_order: int = SAMPLE_ORDER
) -> Path:
    """Write `directory`/step-`step` after `step` completed steps. A collective over the world.

    Raises CheckpointError on all ranks where one cannot write; the earlier checkpoints are as they were.
    """
    config, state = session.config.checkpoint, state_of(session, step, consumed_samples, sample_order)
    return checkpoint.save(
        directory, step, session_shards(session), state, keep=config.keep, keep_every=config.keep_every
    )

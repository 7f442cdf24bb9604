"""A single save, by all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.checkpoint.saver import Saver
from ppctl.checkpoint.shards import Shard
from ppctl.data.sampler import SAMPLE_ORDER

if TYPE_CHECKING:
    from ppctl.train.session import Session


def save(directory: Path, step: int, shards: Iterable[Shard], state: Mapping[str, Any], **settings: Any) -> Path:
    """Save as a `Saver` with these settings does. Without torch.distributed this process is alone."""
    return Saver(directory, **settings).save(step, shards, state)


def save_checkpoint(
    session: Session, directory: Path, step: int, consumed_samples: int, sample_order: int = SAMPLE_ORDER
) -> Path:
    """Save what the ranks of a session hold after `step` completed steps."""
    from ppctl.train.snapshot import session_shards, state_of  # with all that trains, which few tests need

    config, state = session.config.checkpoint, state_of(session, step, consumed_samples, sample_order)
    return save(directory, step, session_shards(session), state, keep=config.keep, keep_every=config.keep_every)

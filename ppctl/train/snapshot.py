"""A session as a checkpoint sees it: every tensor under its canonical global name, and the position in the data.

Knows which tensors make up the training state. Must not know files: `ppctl.checkpoint` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ppctl.checkpoint import load, save
from ppctl.errors import CheckpointError, Problem
from ppctl.model.names import owner_of
from ppctl.train.optimizer import state_by_name
from ppctl.train.session import Session


def named_tensors(session: Session) -> dict[str, Sequence[Tensor]]:
    """`model.<name>` (float32 master) and `optim.<name>.<key>` of what this rank holds; a tied one's uses together."""
    tensors: dict[str, list[Tensor]] = {}
    moments = state_by_name(session.optimizer, session.weights.master)
    for name, parameter in session.weights.master.items():
        owner = owner_of(name, session.config.model)
        tensors.setdefault(f"model.{owner}", []).append(parameter.detach())
        for key, tensor in moments[name].items():
            tensors.setdefault(f"optim.{owner}.{key}", []).append(tensor)
    return dict(tensors)


def save_checkpoint(session: Session, directory: Path, step: int, consumed_samples: int) -> Path:
    """Write `directory`/step-`step` after `step` completed steps. A collective over the world."""
    state = {
        "step": step,
        "consumed_samples": consumed_samples,
        "seed": session.config.train.seed,
        "seq_length": session.config.data.seq_length,
        "data_digest": None if session.corpus is None else session.corpus.digest,
        "layout": session.plan.layout,
        "model": asdict(session.config.model),
    }
    tensors, keep = named_tensors(session), session.config.checkpoint.keep
    return save(directory, step, tensors, state, writer=session.own.dp_rank == 0, keep=keep)


def load_checkpoint(session: Session, path: Path) -> dict[str, Any]:
    """Fill the session from a checkpoint of any cut; returns its state. A collective over the world.

    Raises CheckpointError where the data is not what the checkpoint was trained on: its position would mean nothing.
    """
    state = load(path, named_tensors(session))
    session.weights.publish()
    now: dict[str, Any] = {"seq_length": session.config.data.seq_length, "seed": session.config.train.seed}
    if session.corpus is not None:
        now["data_digest"] = session.corpus.digest
    problems = [
        Problem(
            "PP-E741",
            f"the checkpoint's position in the data means nothing here: {key} was {state[key]} and is {value}",
            "train with the data, seq_length and seed of the checkpoint",
            place=str(path),
        )
        for key, value in now.items()
        if state[key] != value
    ]
    if problems:
        raise CheckpointError(problems)
    return state

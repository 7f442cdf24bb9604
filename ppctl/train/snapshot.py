"""A session as a checkpoint sees it: every tensor under its canonical global name, and the position in the data.

Knows which tensors make up the training state. Must not know files: `ppctl.checkpoint` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ppctl import checkpoint
from ppctl.checkpoint import read_state
from ppctl.config.keys import as_typed
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.errors import CheckpointError, Problem, TrainingError
from ppctl.geometry.canonical_names import owner_of
from ppctl.model.initialize import pieces
from ppctl.pretrained.tokenizer_files import tokenizer_path
from ppctl.topology import RankGrid
from ppctl.train.optimizer import state_by_name
from ppctl.train.session import Session
from ppctl.train.start import fill


class Part(NamedTuple):
    """A tensor of which this rank holds a part, made whole for a checkpoint."""

    name: str
    part: Tensor
    whole: Tensor


def named_tensors(session: Session, parts: list[Part] | None = None) -> dict[str, Sequence[Tensor]]:
    """`model.<name>` (float32 master) and `optim.<name>.<key>` of what this rank holds; a tied one's uses together.

    Experts go one by one, whoever holds them together here; a stack's count of optimizer steps is one number. What this
    rank holds a part of is whole, and a copy: `parts` tells which. A collective where there are such parts.
    """
    tensors: dict[str, list[Tensor]] = {}

    def add(prefix: str, name: str, tensor: Tensor, suffix: str = "") -> None:
        owner = owner_of(name, session.config.model)
        for piece, part in pieces(owner, tensor, held) if tensor.dim() else [(owner, tensor)]:
            tensors.setdefault(f"{prefix}.{piece}{suffix}", []).append(part)

    held = next((stage.held for stage in session.stages.values()), range(0))
    moments = state_by_name(session.optimizer, session.weights.master)
    for name, parameter in session.weights.master.items():
        held_here = {"": parameter.detach()} | {f".{key}": tensor for key, tensor in moments[name].items()}
        for suffix, part in held_here.items():
            whole = session.weights.whole(name, part)
            add("optim" if suffix else "model", name, whole, suffix)
            if parts is not None:
                parts.append(Part(name, part, whole))
    for stage in session.stages.values():
        for name, buffer in stage.canonical_buffers().items():
            add("model", name, buffer)
    return dict(tensors)


def save_checkpoint(
    session: Session, directory: Path, step: int, consumed_samples: int, sample_order: int = SAMPLE_ORDER
) -> Path:
    """Write `directory`/step-`step` after `step` completed steps. A collective over the world.

    `consumed_samples` and `sample_order` are the position in the data, and the rule that says which samples come next.
    Raises TrainingError on all ranks where one cannot write; the earlier checkpoints are as they were.
    """
    state = {
        "step": step,
        "consumed_samples": consumed_samples,
        "sample_order": sample_order,
        "seed": session.config.train.seed,
        "seq_length": session.config.data.seq_length,
        "data_path": session.config.data.path,
        "validation_split": session.config.data.validation_split,
        "tokenizer": session.config.data.tokenizer,
        "tokenizer_path": tokenizer_path(session.config.data.tokenizer),
        "data_digest": None if session.corpus is None else session.corpus.digest,
        "layout": session.plan.layout,
        "model": asdict(session.config.model),
        "loss_scale": None if session.loss_scale is None else session.loss_scale.state(),
    }
    tensors, keep = named_tensors(session), session.config.checkpoint.keep
    # The first replica of every parameter writes: spread experts are not all on the first data-parallel rank.
    writer = RankGrid(session.plan.sizes).coordinates(session.own.rank, "expert")["edp"] == 0
    try:
        return checkpoint.save(directory, step, tensors, state, writer=writer, keep=keep)
    except CheckpointError as error:  # nothing is wrong with what there is: the training has failed to add to it
        raise TrainingError(error.problems) from error


def start_from(session: Session, path: Path) -> None:
    """Take the weights at `path` (a model directory, or any checkpoint of the model) in place of those of the seed."""
    with _filling(session) as tensors:
        fill(tensors, path, session.config.model)


@contextmanager
def _filling(session: Session) -> Iterator[dict[str, Sequence[Tensor]]]:
    """The session's tensors, to be filled; afterwards every rank has its part, and the model its weights."""
    parts: list[Part] = []
    yield named_tensors(session, parts)
    for name, part, whole in parts:
        session.weights.keep(name, part, whole)
    session.weights.publish()


def load_checkpoint(session: Session, path: Path) -> dict[str, Any]:
    """Fill the session from a checkpoint of any cut; returns its state. A collective over the world.

    The state's `sample_order` is 1 where the checkpoint is older than that entry. Raises CheckpointError where the
    data, or the order of its samples, is not what the checkpoint was trained on: its position would mean nothing.
    """
    if read_state(path).get("weights_only"):
        start_from(session, path)
        return {"step": 0, "consumed_samples": 0, "sample_order": SAMPLE_ORDER}
    try:
        with _filling(session) as tensors:
            state = checkpoint.load(path, tensors)
    except CheckpointError as error:
        raise CheckpointError(_with_sizes(error.problems, path, session)) from error
    if session.loss_scale is not None and state.get("loss_scale") is not None:
        session.loss_scale.restore(state["loss_scale"])
    now: dict[str, Any] = {"seq_length": session.config.data.seq_length, "seed": session.config.train.seed}
    if session.corpus is not None:
        now["data_digest"] = session.corpus.digest
    problems = [
        Problem(
            "PP-E741",
            f"the checkpoint's position in the data means nothing here: {key} was {state[key]} and is {value}",
            _back(key, state, session),
            place=str(path),
        )
        for key, value in now.items()
        if state[key] != value
    ]
    state.setdefault("sample_order", 1)
    if state["sample_order"] > SAMPLE_ORDER:
        message = f"it follows version {state['sample_order']} of the order of samples, this ppctl knows {SAMPLE_ORDER}"
        problems.append(Problem("PP-E509", message, "use the version of ppctl that wrote it", place=str(path)))
    if problems:
        raise CheckpointError(problems)
    return state


def _back(key: str, state: Mapping[str, Any], session: Session) -> str:
    """What goes back to the position in the data that the checkpoint has."""
    if key != "data_digest":
        return as_typed({"seq_length": "data.seq_length", "seed": "train.seed"}[key], state[key])
    data = session.config.data
    said = {"path": data.path, "tokenizer": data.tokenizer, "validation_split": data.validation_split}
    saved = {key: state.get("data_path" if key == "path" else key, value) for key, value in said.items()}
    changed = [as_typed(f"data.{key}", value) for key, value in saved.items() if value != said[key]]
    if changed:
        return " ".join(changed)
    return "put back the files that the checkpoint was trained on: they have changed"


def _with_sizes(problems: Sequence[Problem], path: Path, session: Session) -> list[Problem]:
    """Where tensors do not fit: what makes the model as large again as the one that was saved."""
    misfits = [problem for problem in problems if problem.code == "PP-E502"]
    if not misfits:
        return list(problems)
    saved, here = read_state(path)["model"], asdict(session.config.model)
    remedy = " ".join(as_typed(f"model.{key}", value) for key, value in saved.items() if here.get(key) != value)
    return [replace(p, remedy=remedy) if remedy and p in misfits else p for p in problems]

"""A session as a checkpoint sees it: every tensor under its canonical global name, and the position in the data.

Must not know files: `ppctl.checkpoint` and `ppctl.pretrained` write and read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppctl import checkpoint
from ppctl.checkpoint import read_state
from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.replicas import copies
from ppctl.config.keys import as_typed
from ppctl.config.schema import ModelConfig
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.errors import CheckpointError, Problem, TrainingError
from ppctl.families.directory import CONFIG, open_directory
from ppctl.model.stage_model import pieces
from ppctl.pretrained.companion_files import tokenizer_path
from ppctl.pretrained.safetensors_reader import Reader
from ppctl.topology import RankGrid
from ppctl.train.session import Session


class Shard(NamedTuple):
    """A tensor as this rank holds it, and the whole tensor of a checkpoint."""

    name: str
    own: Tensor
    whole: Tensor


def named_tensors(session: Session, shards: list[Shard] | None = None) -> dict[str, Sequence[Tensor]]:
    """`model.<name>` (master) and `optim.<name>.<key>` of what this rank holds, all uses of a shared one.

    A stack of experts is taken apart into single ones; its count of optimizer steps is one number for the stack. What
    this rank holds a part of is made whole, in a copy: `shards` takes both. A collective where there are such parts.
    """
    tensors: dict[str, list[Tensor]] = {}
    experts = next((stage.experts for stage in session.stages.values()), range(0))

    def add(prefix: str, name: str, tensor: Tensor, suffix: str = "") -> None:
        row = session.rows[name]
        named = pieces(name, tensor, row, experts) if tensor.dim() else [(row.copy_of or name, tensor)]
        for piece, part in named:
            tensors.setdefault(f"{prefix}.{piece}{suffix}", []).append(part)

    for name, parameter in session.weights.master.items():
        held_here = {"": parameter.detach()} | {
            f".{key}": tensor for key, tensor in session.optimizer.state[name].items()
        }
        for suffix, own in held_here.items():
            whole = session.slices.whole(session.rows[name], session.weights.whole(name, own))
            if whole is not own:
                whole = whole.cpu()  # a copy: a device has no room for those of all
            add("optim" if suffix else "model", name, whole, suffix)
            if shards is not None:
                shards.append(Shard(name, own, whole))
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
    writer = RankGrid(session.plan.sizes).has_first_copy(session.own.rank)
    try:
        return checkpoint.save(directory, step, tensors, state, writer=writer, keep=keep)
    except CheckpointError as error:  # the existing checkpoints are good: it is training that failed
        raise TrainingError(error.problems) from error


def start_from(session: Session, path: Path) -> None:
    """Take the weights at `path` (a model directory, or any checkpoint of the model) in place of those of the seed.

    Values are cast to the masters' dtype; the optimizer's state stays. Raises CheckpointError as the sources do.
    Whether they fit the model was looked at before the first rank started.
    """
    with torch.no_grad(), _filling(session) as tensors:
        read = _source(path, session.config.model)
        for name, value in tensors.items():
            if name.startswith("model."):
                tensor = read(name)
                for each in copies(value):
                    each.copy_(tensor)


def _source(path: Path, model: ModelConfig) -> Callable[[str], Tensor]:
    """What reads a tensor by its name in checkpoints, `model.<canonical name>`."""
    if not (path / CONFIG).is_file():
        from ppctl.checkpoint.streaming import CheckpointReader  # it loads torch's checkpoint library

        return CheckpointReader(path, read_manifest(path)).tensor
    reader = Reader(open_directory(path, model=model))
    reader.check_copies()
    return lambda name: reader.tensor(name.removeprefix("model."))


@contextmanager
def _filling(session: Session) -> Iterator[dict[str, Sequence[Tensor]]]:
    """The session's tensors, to be filled; afterwards every rank has its part, and the model its weights."""
    shards: list[Shard] = []
    yield named_tensors(session, shards)
    for name, own, whole in shards:
        session.weights.keep(name, own, session.slices.own(session.rows[name], whole))
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
            _restoring(key, state, session),
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


def _restoring(key: str, state: Mapping[str, Any], session: Session) -> str:
    """The remedy that gives the run the data of the checkpoint again."""
    if key != "data_digest":
        return as_typed({"seq_length": "data.seq_length", "seed": "train.seed"}[key], state[key])
    data = session.config.data
    here = {"path": data.path, "tokenizer": data.tokenizer, "validation_split": data.validation_split}
    saved = {key: state.get("data_path" if key == "path" else key, value) for key, value in here.items()}
    changed = [as_typed(f"data.{key}", value) for key, value in saved.items() if value != here[key]]
    if changed:
        return " ".join(changed)
    return "put back the files that the checkpoint was trained on: they have changed"


def _with_sizes(problems: Sequence[Problem], path: Path, session: Session) -> list[Problem]:
    """The problems; where tensors do not fit, with the keys that give the model its saved sizes as remedy."""
    misfits = [problem for problem in problems if problem.code == "PP-E502"]
    if not misfits:
        return list(problems)
    saved, here = read_state(path)["model"], asdict(session.config.model)
    remedy = " ".join(as_typed(f"model.{key}", value) for key, value in saved.items() if here.get(key) != value)
    return [replace(p, remedy=remedy) if remedy and p in misfits else p for p in problems]

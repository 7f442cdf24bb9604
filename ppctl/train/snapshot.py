"""A session as a checkpoint sees it: every tensor under its canonical global name, and the position in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppctl.checkpoint.boxes import Box, boxes_of_run
from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.reading import CheckpointReader, fill, load
from ppctl.checkpoint.run_state import run_state
from ppctl.checkpoint.shards import Shard, whole_shards
from ppctl.checkpoint.verification import READ_AS, misplaced, with_sizes
from ppctl.config.batch_sizes import Spans
from ppctl.config.schema import ModelConfig
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.data.tokenizer import tokenizer_path
from ppctl.errors import CheckpointError, Problem, listed, pasted
from ppctl.families.directory import CONFIG, has_weights, model_tensors
from ppctl.geometry.adapters import is_adapter
from ppctl.geometry.canonical_names import expert_name, uses_of_embedding
from ppctl.geometry.foreign_model import foreign_of
from ppctl.pretrained.hugging_face import open_weights
from ppctl.runs.checkpoint_folder import AUTO, FoundCheckpoint
from ppctl.train.callback import Start
from ppctl.train.session import Session


def session_shards(session: Session) -> list[Shard]:
    """This rank's boxes of `model.<name>` (master) and `optim.<name>.<key>`, with all uses of a shared parameter. A
    stack of experts gives a tensor per expert, but one count of optimizer steps. A master that is only a run of the
    flat parameter gives several boxes. All are views of trained tensors.
    """
    shards: list[Shard] = []
    for name, master in session.replica.weights.master.items():
        places = list(_places(session, name))
        for key, tensor in {"": master.detach(), **session.replica.optimizer.state[name]}.items():
            prefix, suffix = ("optim", f".{key}") if key else ("model", "")
            if tensor.dim():
                shards += [place.shard(prefix, suffix, tensor) for place in places]
            else:
                owner = session.model.rows[name].copy_of or name
                shards.append(Shard(f"{prefix}.{owner}{suffix}", (), (), tensor))
    for stage in session.model.stages.values():
        buffers = stage.canonical_buffers()
        shards += whole_shards({f"model.{session.model.rows[name].copy_of or name}": buffers[name] for name in buffers})
    return shards


def gradient_shards(session: Session) -> list[Shard]:
    """This rank's part of every gradient, by the parameter's name; each use of a shared parameter has its own. Views of
    the accumulated gradients; zeros for a parameter without one."""
    shards: list[Shard] = []
    for name, master in session.replica.weights.master.items():
        gradient = torch.zeros_like(master) if master.grad is None else master.grad
        own = name if session.model.rows[name].copy_of else None
        for place in _places(session, name):
            shards.append(place._replace(name=own or place.name).shard("gradient", "", gradient))
    return shards


class _Place(NamedTuple):
    """A box of a tensor of the model, and its place in a rank's parameter and master."""

    name: str
    whole: tuple[int, ...]
    box: Box
    parameter: tuple[int, ...]
    """The shape of the rank's parameter."""
    local: tuple[int | slice, ...]
    """The position of the box in the rank's parameter."""
    start: int
    """The index of the box's first element in the rank's master, read flat."""

    def shard(self, prefix: str, suffix: str, own: Tensor) -> Shard:
        """The Shard of this box of a master or moment; `own` is the rank's tensor."""
        if own.shape == self.parameter:
            part = own[self.local]
        else:
            part = own[self.start : self.start + self.box.size].view(self.box.shape)
        return Shard(f"{prefix}.{self.name}{suffix}", self.whole, self.box.offset, part)


def _places(session: Session, name: str) -> Iterator[_Place]:
    """The boxes of a checkpoint's tensors that make up this rank's master of a parameter."""
    row, shape = session.model.rows[name], tuple(session.replica.weights.model[name].shape)
    origin = tuple(run.start for run in session.model.parts.runs(row))
    run, start = session.replica.weights.run(name), 0
    for box in boxes_of_run(shape, run.start, run.stop):
        local, placed = box.within((0,) * len(shape)), box.moved(origin)
        if not row.experts:
            yield _Place(row.copy_of or name, row.shape, placed, shape, local, start)
            start += box.size
            continue
        one = Box(placed.offset[1:], placed.shape[1:])
        for number in range(box.offset[0], box.end[0]):
            yield _Place(expert_name(name, origin[0] + number), row.shape, one, shape, (number, *local[1:]), start)
            start += one.size


def state_of(
    session: Session, step: int, consumed_samples: int, sample_order: int = SAMPLE_ORDER, passed: Spans = ()
) -> dict[str, Any]:
    """The state saved beside the tensors after `step` completed steps. `consumed_samples` is the position in the data,
    `sample_order` the version of the rule for the next samples. `passed` are spans to skip; those ahead are saved."""
    return {
        "step": step,
        "consumed_samples": consumed_samples,
        "passed": [list(span) for span in passed if span[1] > consumed_samples],
        "sample_order": sample_order,
        "seed": session.config.train.seed,
        "seq_length": session.config.data.seq_length,
        "data_path": session.config.data.path,
        "validation_split": session.config.data.validation_split,
        "tokenizer": session.config.data.tokenizer,
        **{f"data_{name}": getattr(session.config.data, name) for name in READ_AS},
        "tokenizer_path": tokenizer_path(session.config.data.tokenizer),
        "data_digest": None if session.data.training is None else session.data.training.digest,
        "optimizer": session.config.optim.name,
        "layout": session.plan.layout,
        "parallel": asdict(session.plan.sizes),
        "model": asdict(session.config.model),
        "norms": session.replica.limit.state(),
        "loss_scale": None if session.replica.loss_scale is None else session.replica.loss_scale.state(),
    }


def start_from(session: Session, path: Path) -> None:
    """Load the weights at `path` (a model directory, or any checkpoint of the model) in place of the weights from the
    seed.

    Values are cast to the masters' dtype; the optimizer's state stays. If a directory of transformers has no weights,
    the weights from the seed stay. Raises CheckpointError if the weights cannot be read or do not fit the model, which
    the launcher has checked before.
    """
    shards = [shard for shard in session_shards(session) if shard.name.startswith("model.")]
    if not (path / CONFIG).is_file():
        saved = CheckpointReader(path, read_manifest(path))
        _check_weights(saved, session.config.model)
        fill(saved, shards)
    elif foreign_of(session.config.model) is None or has_weights(path):
        reader = open_weights(path, model=session.config.model).reader
        _fill_from_directory(reader.tensor, [shard for shard in shards if not is_adapter(shard.name)])
    session.replica.weights.publish()


def _check_weights(reader: CheckpointReader, model: ModelConfig) -> None:
    """Raise CheckpointError (PP-E524) naming tensors that are missing or of another shape, and uses of a table that an
    untied model has saved with different values: a tied model would take only the first.
    """
    stored, shapes = reader.manifest.tensors, {f"model.{name}": shape for name, shape in model_tensors(model).items()}
    wrong = [name for name, shape in shapes.items() if name not in stored or stored[name].shape != shape]
    foreign = foreign_of(model)
    table, *uses = (f"model.{use}" for use in (foreign.anatomy.uses if foreign else uses_of_embedding(model)))
    own = [use for use in uses if table in stored and use in stored and use not in shapes]
    values = reader.tensor(table) if own else torch.empty(0, device="cpu")
    wrong += [f"{use} and {table}" for use in own if not torch.equal(values, reader.tensor(use).to(values))]
    if wrong:
        message = f"the weights at {reader.path} are not those of this model, or differ where it shares them"
        remedy = "the model's sizes and model.share_embeddings_and_output_weights as they were saved"
        raise CheckpointError(Problem("PP-E524", message, remedy, listed(wrong)))


@torch.no_grad()
def _fill_from_directory(read: Callable[[str], Tensor], shards: Sequence[Shard]) -> None:
    for name, boxes in groupby(sorted(shards, key=lambda shard: shard.name), key=lambda shard: shard.name):
        whole = read(name.removeprefix("model."))
        for shard in boxes:
            shard.tensor.copy_(whole[shard.part.box.within((0,) * whole.dim())])


def start_of(state: Mapping[str, Any], path: Path | None) -> Start:
    """The Start of a run that goes on with this state; `path` is the run's checkpoint, if there is one."""
    passed = tuple((first, end) for first, end in state.get("passed", ()))
    saved = state.get("callbacks", {})
    return Start(state["step"], state["consumed_samples"], state["sample_order"], path, passed, saved)


def load_first(
    session: Session, candidates: Callable[[], list[FoundCheckpoint]], say: Callable[[str], None] = print
) -> Start | None:
    """Load the first of the candidates, as rank 0 finds them, that is not damaged; None if there are none.

    A collective over the world. On rank 0 `say` gets a line for every skipped candidate, with the reason. Raises
    CheckpointError if all candidates are damaged, or one does not fit the run.
    """
    ranks = AgreeingRanks(None)
    given = ranks.agree("look for a checkpoint", lambda: None, lambda _: candidates(), result=list[FoundCheckpoint])
    report = say if ranks.rank == 0 else lambda line: None
    if not given and session.config.checkpoint.resume == AUTO:
        report(f"note: checkpoint.resume={AUTO}: there is no checkpoint yet, and the run begins at step 0")
    for one, following in zip_longest(given, given[1:]):
        if one.warning:
            report(f"warning: {one.warning}")
        try:
            return start_of(load_checkpoint(session, one.path), one.path)
        except CheckpointError as error:
            if following is None or any(problem.code not in _DAMAGE for problem in error.problems):
                raise
            report(f"warning: {error.problems[0].message}; going on from {following.path.name} instead")
    return None


_DAMAGE = ("PP-E501", "PP-E503")
"""Problems of single checkpoints; an earlier checkpoint would not solve a problem of the disk or of the model."""


def load_checkpoint(session: Session, path: Path) -> dict[str, Any]:
    """Fill the session from a checkpoint of any cut; returns its state. A collective over the world.

    The state's `sample_order` is 1 if the checkpoint is older than this entry. Raises CheckpointError for another model
    or optimizer, and for other data or another order of samples, in which the checkpoint's position means nothing.
    """
    saved_by = run_state(path)
    if saved_by.get("weights_only"):
        start_from(session, path)
        return {"step": 0, "consumed_samples": 0, "sample_order": SAMPLE_ORDER}
    check_optimizer(saved_by, session, path)
    try:
        state = load(path, session_shards(session))
    except CheckpointError as error:
        misfit = any(problem.code == "PP-E502" for problem in error.problems)
        saved = run_state(path)["model"] if misfit else {}
        raise CheckpointError(with_sizes(error.problems, saved, asdict(session.config.model))) from error
    return finish_load(session, state, path)


def check_optimizer(state: dict[str, Any], session: Session, path: Path) -> None:
    """Raise CheckpointError (PP-E774) if another optimizer's state was saved; a state without a name is AdamW's."""
    saved, own = state.get("optimizer", "adamw"), session.config.optim.name
    if saved != own:
        message = f"the checkpoint has the state of optim.name={saved}, but the run has optim.name={own}"
        remedy = f"{pasted(f'optim.name={saved}')}\n{pasted(f'model.from={path}')}"
        raise CheckpointError(Problem("PP-E774", message, remedy, place=str(path)))


def finish_load(session: Session, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Finish a load into this session: publish weights, restore loss scale and norms, check that the run can go on.
    Returns `state`, with `sample_order`. Raises CheckpointError (PP-E741, PP-E423, PP-E509)."""
    session.replica.weights.publish()
    if session.replica.loss_scale is not None and state.get("loss_scale") is not None:
        session.replica.loss_scale.restore(state["loss_scale"])
    session.replica.limit.restore(state.get("norms", {}))
    digest = None if session.data.training is None else session.data.training.digest
    problems = misplaced(path, state, session.config, digest)
    version = state.setdefault("sample_order", 1)
    if version > SAMPLE_ORDER:
        message = f"the checkpoint follows version {version} of the order of samples, this ppctl knows {SAMPLE_ORDER}"
        problems.append(Problem("PP-E509", message, "use the version of ppctl that wrote it", place=str(path)))
    if problems:
        raise CheckpointError(problems)
    return state

"""Starts a run from its newest copies in memory or on the disk, and saves checkpoints beside training."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ppctl.checkpoint.local_copies import LocalCopies
from ppctl.checkpoint.local_copy import CHANGED, directory_of, remove_all
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.saver import BackgroundSaver, Saved, Saver
from ppctl.checkpoint.shards import HostMemory
from ppctl.checkpoint.writer import WriterAddress
from ppctl.comm.groups import connecting_on_first_use, make_group
from ppctl.errors import CheckpointError, Problem, TrainingError
from ppctl.records.json_reader import finite
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import AUTO, FoundCheckpoint, StepBack, find, step_of, steps_back
from ppctl.train.callback import SAVE_FAILED, Callback, Start, StepResult, TrainingEnd, TrainingRun
from ppctl.train.own_callbacks import OwnCallback
from ppctl.train.session import Session
from ppctl.train.snapshot import (
    check_optimizer,
    finish_load,
    load_first,
    session_shards,
    start_from,
    start_of,
    state_of,
)

Candidates = Callable[[], list[FoundCheckpoint]]
"""A function that returns the checkpoints to try, in order; called on rank 0."""
MOST_TO_ONE = 5
"""How often a run may go back to one checkpoint."""
SETTLE = 5.0
"""Seconds for which a failing rank waits for a save under way, which delays the failure's report."""


class Saves(Callback):
    """A run's checkpoints: `start` finds and loads one, then each due step is saved.

    `writer` gives the address of the node's writer process (without one, ranks write themselves). The states of
    `followers` are saved, too. On rank 0 `say` gets lines for the user, and `note` the seconds of every save. The
    constructor makes the memory for the copies; if `checkpoint.local` is set `start` makes it, because copies of an
    earlier start may lie there. Raises CheckpointError (PP-E511) on all ranks if one rank has no memory for its copies.
    """

    def __init__(
        self,
        session: Session,
        directory: Path,
        *,
        writer: Callable[[], WriterAddress] = WriterAddress,
        followers: Sequence[OwnCallback] = (),
        say: Callable[[str], None] = print,
        note: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.session, self._note, self._directory, self._writer = session, note, directory, writer
        self._followers = followers
        leads = dist.get_rank() == 0
        self._say = say if leads else lambda line: None
        aloud = say if leads else partial(print, file=sys.stderr)
        self._warn: Callable[[Problem], None] = lambda problem: aloud(f"warning: {problem}")
        self._figures: dict[str, Any] = {}
        config = session.config.checkpoint
        self._keeps = {name: getattr(config, name) for name in ("keep", "keep_every", "keep_best")}
        self.local: LocalCopies | None = None
        """This run's copies in memory; None if `checkpoint.local` is not set."""
        self._path: Path | None = None
        self._saver: Saver | None = None
        self._background: BackgroundSaver | None = None
        if not config.in_background:
            self._saver = Saver(directory, **self._keeps)
            return
        with connecting_on_first_use():
            self._group = make_group([tuple(range(dist.get_world_size()))], backend="gloo")
        if config.local is None:
            self._make_room()
            return
        parts = [shard.part for shard in session_shards(session)]
        copies = directory_of(Path(config.local), directory.parent)
        self.local = LocalCopies(copies, parts, AgreeingRanks(self._group), replicas=config.local_replicas)

    def _make_room(self) -> HostMemory:
        """Make or map the memory for the copies, whose contents stay. A collective; raises as the constructor does."""

        def make() -> None:
            self._background = BackgroundSaver(
                self._directory,
                session_shards(self.session),
                **self._keeps,
                process_group=self._group,
                address=self._writer(),
                local=self.local,
                warn=self._warn,
            )

        AgreeingRanks(self._group).agree("make room for copies of what it saves", make, lambda _: None)
        assert self._background is not None  # set, or an error was raised
        return self._background.memory

    def start(self, candidates: Candidates) -> Start:
        """Load the first of the candidates that is not damaged, or newer copies in memory; else `model.from`. A
        collective over the world. Raises CheckpointError if all are damaged, or one does not fit the run."""
        from_disk = partial(load_first, self.session, candidates, self._say)
        start = from_disk() if self.local is None else self._load_local(self.local, candidates, from_disk)
        if start is None and (model := self.session.config.model.from_) is not None:
            start_from(self.session, Path(model))
        return self._as_rank_0(start or Start())

    def _as_rank_0(self, start: Start) -> Start:
        """`start` with rank 0's states of callbacks, and all samples that run and checkpoint skip. A collective."""
        places = {self._directory} | ({start.checkpoint.parent} if start.checkpoint else set())
        noted, states = AgreeingRanks(None).agree(
            "read which samples it passes by",
            lambda: None,
            lambda _: ([(each.first, each.end) for place in places for each in steps_back(place)], start.callbacks),
            result=tuple[list[tuple[int, int]], dict[str, str]],
        )
        return start._replace(passed=tuple(sorted({*start.passed, *noted})), callbacks=states)

    def _load_local(
        self, local: LocalCopies, candidates: Candidates, from_disk: Callable[[], Start | None]
    ) -> Start | None:
        """Load the copies that an earlier start of this run has left in memory, if all ranks have copies of one step
        and start that are newer than the checkpoint to go on from; else call `from_disk`. Rank 0 reports the choice and
        its reason. A start that names another checkpoint than the directory's newest uses the one it names. Useless
        copies are deleted, and room is made, once the start is sure to go on: a checkpoint that does not fit, another
        optimizer or other data raise before.
        """
        choice = AgreeingRanks(None).agree(
            "choose between memory and disk",
            lambda: None,
            lambda _: _choose(local, self._directory, candidates),
            result=_Choice,
        )
        loaded, memory = None, None
        if choice.takes:
            local.clear(but_chosen=True)
            memory = self._make_room()
            record = local.load(memory)
            if record is None:
                choice = _Choice(line=CHANGED)
            else:
                state = json.loads(record.state)
                check_optimizer(state, self.session, local.directory)
                memory.fill(session_shards(self.session))
                loaded = start_of(finish_load(self.session, state, local.directory), choice.newest)
        if choice.line:
            self._say(choice.line)
        used = loaded is not None
        if not used:
            loaded = from_disk()
        if memory is None:
            local.clear(but_chosen=False)
            memory = self._make_room()
        local.settle(memory if used else None)
        return loaded

    def pre_train(self, run: TrainingRun) -> None:
        """Keep where the run began, and give callbacks their saved states."""
        self._run = run
        self._restore()

    def _restore(self) -> None:
        states = dict(self._run.start.callbacks)
        for each in self._followers:
            if each.name in states:
                each.load_state_dict(json.loads(states.pop(each.name)))
        if states:
            self._say(f"note: train.callbacks does not name {', '.join(states)}, whose saved state is not used")

    def stop_requested(self) -> int:
        """SAVE_FAILED if the save under way has failed on all ranks: `post_step` then raises."""
        return SAVE_FAILED if self._background is not None and self._background.failed else 0

    def post_update(self, result: StepResult) -> None:
        """Report checkpoints that have become complete, without waiting. After a bad step, go back if the run does."""
        self._look()
        if result.goes_back:
            with _as_training_error():
                result.start = self._go_back(result.step, result.record["consumed_samples"])
            self._run = self._run._replace(start=result.start)

    def _go_back(self, bad: int, position: int) -> Start:
        """Load the newest checkpoint at least `train.on_bad_step` steps before the step `bad`, which ended at a
        position in the data, and record the skipped samples. A collective. Raises CheckpointError (PP-E736) without a
        checkpoint. If the machine dies before the record is written, nothing has changed; afterwards every start
        continues from here.
        """
        self._run.enter("loading", bad - 1)
        if self._background is not None:
            self._background.finish()
            self._look()
        found = partial(_before, self._directory, bad, self.session.replica.limit.back)
        start = load_first(self.session, found, self._say)
        assert start is not None  # set, or `_before` has raised
        back = StepBack(bad, start.step, start.consumed_samples, position)
        # Copies in memory are newer than this record, and a start would use them.
        forget = (lambda: None) if self.local is None else self.local.forget
        add = partial(checkpoint_folder.add_step_back, self._directory, back)
        AgreeingRanks(None).agree("note which samples it passes by", forget, lambda _: add())
        self._say(f"back to step {back.step}; samples {back.first:,} to {back.end - 1:,} are not read again")
        return self._as_rank_0(start)

    def log_metrics(self, record: dict[str, Any]) -> None:
        """Add the figures of saves since the previous line: `save_stall_s`, how long training waited, and step
        (`saved_step`) and seconds (`save_s`) of the checkpoint that became complete."""
        record |= self._figures
        self._figures = {}

    def post_step(self, result: StepResult) -> None:
        """Save, if a save is due after this step; returns when training may change the state. The step goes to the disk
        at `checkpoint.interval` and if the run ends with it, else only into memory. Raises TrainingError on all ranks
        if this or the previous save could not be written: earlier checkpoints are unchanged.
        """
        if result.goes_back:
            self._restore()
            return
        config, step, ends = self.session.config.checkpoint, result.step, result.last or bool(result.stop)
        on_disk, in_memory = (every > 0 and step % every == 0 for every in (config.interval, config.local_every))
        if not (on_disk or in_memory or ends):
            return
        self._run.enter("saving", step - 1)
        began, start = time.perf_counter(), self._run.start
        shards = session_shards(self.session)
        state = state_of(self.session, step, result.record["consumed_samples"], start.sample_order, start.passed)
        state["eval_loss"] = finite(result.record.get("eval_loss"))
        state["callbacks"] = {each.name: json.dumps(own) for each in self._followers if (own := each.state_dict())}
        with _as_training_error():
            if self._background is None:
                assert self._saver is not None
                path = self._saver.save(step, shards, state)
                self._take(Saved(step, path, time.perf_counter() - began), "")
            else:
                before = self._background.under_way
                if before is not None and not self._background.finish(0.0):
                    self._say(f"saving step {step} waits for step {before}, which is still being written")
                    self._background.finish()
                    self._run.enter("saving", step - 1)  # with a limit of its own
                self._background.begin(step, shards, state, to_disk=on_disk or ends)
        self._figures["save_stall_s"] = round(time.perf_counter() - began, 6)

    def post_train(self, end: TrainingEnd) -> None:
        """Wait for the last save, and put the newest checkpoint into `end`. Raises as `post_step` does."""
        if self._background is not None:
            if self._background.under_way is not None:
                self._run.enter("saving", end.step - 1)  # with a limit of its own
            with _as_training_error():
                self._background.finish()
            self._look()
        end.checkpoint = self._path or end.checkpoint

    def close(self, error: BaseException | None) -> None:
        """End saving. If the run failed, a save under way gets `SETTLE` seconds to become complete; if `error` is
        None, the copies in memory are deleted; if it is no Exception, such as Ctrl-C, neither."""
        if self._background is None:
            return
        if isinstance(error, Exception):
            with suppress(CheckpointError):
                self._background.finish(SETTLE)
            self._look()
        elif error is None and self.local is not None:
            remove_all(self.local.directory)  # the last checkpoint on the disk is just as recent
        self._background.close()

    def _look(self) -> None:
        if self._background is not None:
            for saved in self._background.news():
                self._take(saved, "in the background, ")

    def _take(self, saved: Saved, how: str) -> None:
        self._path = saved.path
        self._figures |= {"saved_step": saved.step, "save_s": round(saved.seconds, 6)}
        self._note(saved.seconds)
        self._say(f"saved step {saved.step} ({how}{saved.seconds:.1f} s)")


@contextmanager
def _as_training_error() -> Iterator[None]:
    """Turn CheckpointError into TrainingError: the existing checkpoints are good, training has failed."""
    try:
        yield
    except CheckpointError as error:
        raise TrainingError(error.problems) from error


def _before(directory: Path, bad: int, least: int) -> list[FoundCheckpoint]:
    """On rank 0: this run's checkpoints at least `least` steps before the step `bad`, newest first. Raises
    CheckpointError (PP-E736) if there is none, or the run has gone back to the first of them MOST_TO_ONE times."""
    found = [each for each in checkpoint_folder.candidates(AUTO, directory) if step_of(each.path) <= bad - least]
    why = f"no checkpoint is {least:,} or more steps before it"
    if found:
        before = sum(each.step == step_of(found[0].path) for each in steps_back(directory))
        if before < MOST_TO_ONE:
            return found
        why = f"the run has gone back to {found[0].path.name} {before} times"
    raise CheckpointError(Problem("PP-E736", f"step {bad} is bad, and {why}", "train.on_bad_step=skip", str(directory)))


class _Choice(NamedTuple):
    takes: bool = False
    newest: Path | None = None
    """The newest checkpoint on the disk."""
    line: str = ""
    """A line for the user."""


def _choose(local: LocalCopies, directory: Path, candidates: Candidates) -> _Choice:
    """On rank 0: choose copies or the disk. Raises CheckpointError (PP-E775) if all progress is in unusable copies."""
    chosen, note = local.survey.chosen, local.survey.note
    if chosen is None and not note:
        return _Choice()
    listed = candidates()
    newest, path = find(directory), listed[0].path if listed else None
    if path is not None and (newest is None or path != newest.path):
        return _Choice()  # the start names another checkpoint
    if path is None and local.survey.other:
        message = (
            f"there is no checkpoint on the disk, and the copies of step {local.survey.other} in memory are of another "
            "cut or optimizer: a start from step 0 would delete them"
        )
        remedy = "start the run once more as it was, which goes on from them\ncheckpoint.local=null"
        raise CheckpointError(Problem("PP-E775", message, remedy, place=str(local.directory)))
    on_disk = f"{path.name} on the disk" if path is not None else "no checkpoint on the disk"
    if chosen is None:
        return _Choice(line=note if note.startswith("warning") else f"{note}: going on from {on_disk}")
    if chosen.step <= step_of(path):
        return _Choice()
    return _Choice(True, path, f"going on from the copies of step {chosen.step} in memory; there is {on_disk}")

"""Saves a run's checkpoints, in the background if training continues, and reports them in log and metrics.

Knows the keys of `checkpoint` and who is told. Must not know when a checkpoint is due, nor files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from ppctl.checkpoint.local_copies import LocalCopies
from ppctl.checkpoint.local_copy import directory_of
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.saver import BackgroundSaver, Saved, Saver
from ppctl.checkpoint.shards import HostMemory
from ppctl.checkpoint.writer import WriterAddress
from ppctl.comm.groups import connecting_on_first_use, make_group
from ppctl.errors import CheckpointError, Problem, TrainingError
from ppctl.train.session import Session
from ppctl.train.snapshot import session_shards, state_of

SETTLE = 5.0
"""Seconds for which a rank that fails waits for a save under way: others learn of the failure as late."""


class Saves:
    """Saves while it is entered; called by all ranks together.

    `writer` gives the address of the node's writer (without one, ranks write themselves); `say` takes lines for the
    user on rank 0, `note` there the seconds of every save. Memory for the copies is made now, where `checkpoint.local`
    is set by `make_room`: copies of an earlier start lie there. Raises CheckpointError (PP-E511) on all ranks where one
    has none.
    """

    def __init__(
        self,
        session: Session,
        directory: Path,
        *,
        writer: Callable[[], WriterAddress] = WriterAddress,
        say: Callable[[str], None] = print,
        note: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.session, self._say, self._note, self._directory, self._writer = session, say, note, directory, writer
        self._leads = dist.get_rank() == 0
        self._figures: dict[str, Any] = {}
        config = session.config.checkpoint
        self.local: LocalCopies | None = None
        """This run's copies in memory; None where `checkpoint.local` is not set."""
        self._path: Path | None = None
        self._saver: Saver | None = None
        self._background: BackgroundSaver | None = None
        if not config.in_background:
            self._saver = Saver(directory, keep=config.keep, keep_every=config.keep_every)
            return
        with connecting_on_first_use():
            self._group = make_group([tuple(range(dist.get_world_size()))], backend="gloo")
        if config.local is None:
            self.make_room()
            return
        parts = [shard.part for shard in session_shards(session)]
        copies = directory_of(Path(config.local), directory.parent)
        self.local = LocalCopies(copies, parts, AgreeingRanks(self._group), replicas=config.local_replicas)

    def make_room(self) -> HostMemory:
        """Memory for the copies of what is saved, with what lies there. A collective; raises as making this does."""
        config = self.session.config.checkpoint

        def make() -> None:
            self._background = BackgroundSaver(
                self._directory,
                session_shards(self.session),
                keep=config.keep,
                keep_every=config.keep_every,
                process_group=self._group,
                address=self._writer(),
                local=self.local,
                warn=self._warn,
            )

        AgreeingRanks(self._group).agree("make room for copies of what it saves", make, lambda _: None)
        assert self._background is not None  # else it has raised
        return self._background.memory

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed on all ranks: the next call of `save` or `finish` raises."""
        return self._background is not None and self._background.failed

    @property
    def waits(self) -> bool:
        """Whether `finish` has a save to wait for."""
        return self._background is not None and self._background.under_way is not None

    def is_due(self, step: int) -> bool:
        """Whether something is saved after so many steps."""
        config = self.session.config.checkpoint
        return any(every > 0 and step % every == 0 for every in (config.interval, config.local_every))

    def save(
        self,
        step: int,
        consumed_samples: int,
        sample_order: int,
        *,
        last: bool,
        waited: Callable[[], None] = lambda: None,
    ) -> None:
        """Save what the ranks hold after `step` completed steps; returns when training may change it. To the disk at
        `checkpoint.interval` and where it is the `last` save, else in memory alone. `waited` is called when the save
        before this one is over.

        Raises TrainingError on all ranks where this save or the one before could not be written: the earlier
        checkpoints are as they were.
        """
        began, interval = time.perf_counter(), self.session.config.checkpoint.interval
        to_disk = last or (interval > 0 and step % interval == 0)
        shards, state = session_shards(self.session), state_of(self.session, step, consumed_samples, sample_order)
        with _as_training_error():
            if self._background is None:
                assert self._saver is not None
                path = self._saver.save(step, shards, state)
                self._take(Saved(step, path, time.perf_counter() - began), "")
            else:
                before = self._background.under_way
                if before is not None and not self._background.finish(0.0):
                    self._tell(f"saving step {step} waits for step {before}, which is still being written")
                    self._background.finish()
                    waited()
                self._background.begin(step, shards, state, to_disk=to_disk)
        self._figures["save_stall_s"] = round(time.perf_counter() - began, 6)

    def finish(self) -> Path | None:
        """Wait for the last save; the path of the newest checkpoint. Raises as `save` does."""
        if self._background is not None:
            with _as_training_error():
                self._background.finish()
            self.look()
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """No save follows. Before a process fails, a save under way gets some seconds."""
        if self._background is None:
            return
        if error is not None and issubclass(error, Exception):
            with suppress(CheckpointError):
                self._background.finish(SETTLE)
            self.look()
        elif error is None and self.local is not None:
            self.local.remove()  # the last checkpoint on the disk is as new
        self._background.close()

    def look(self) -> None:
        """Tell which checkpoints have become complete; does not wait."""
        if self._background is not None:
            for saved in self._background.news():
                self._take(saved, "in the background, ")

    def figures(self) -> dict[str, Any]:
        """What a step's record says of saves since the step before: `save_stall_s`, for how long training waited;
        `saved_step` and `save_s`, which checkpoint became complete and how long after its begin."""
        found, self._figures = self._figures, {}
        return found

    def _take(self, saved: Saved, how: str) -> None:
        self._path = saved.path
        self._figures |= {"saved_step": saved.step, "save_s": round(saved.seconds, 6)}
        if self._leads:
            self._note(saved.seconds)
        self._tell(f"saved step {saved.step} ({how}{saved.seconds:.1f} s)")

    def _tell(self, line: str) -> None:
        if self._leads:
            self._say(line)

    def _warn(self, problem: Problem) -> None:
        if self._leads:
            self._say(f"warning: {problem}")
        else:
            print(f"warning: {problem}", file=sys.stderr)


@contextmanager
def _as_training_error() -> Iterator[None]:
    """The existing checkpoints are good: it is training that failed."""
    try:
        yield
    except CheckpointError as error:
        raise TrainingError(error.problems) from error

"""Saving: agree, write beside, sync, rename, point `latest` at it, and only then delete old ones.

Knows torch's distributed checkpoint (DCP) and the order of the steps. Must not know models, optimizers or the run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ppctl import checkpoint_folder
from ppctl.checkpoint.agreement import AgreeingRanks, problems_of
from ppctl.checkpoint.manifest import FileRecord, Manifest, TensorRecord, record_file
from ppctl.checkpoint.replicas import Holding, Tensors, copies, elect_writers, hold
from ppctl.checkpoint_folder import MANIFEST, STATE
from ppctl.errors import CheckpointError, Problem


def save(
    directory: Path,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    *,
    writer: bool,
    keep: int,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `directory`/step-`step`; called by all ranks of the group together, returns its path on all of them.

    `tensors` maps canonical global names to what this rank holds (a sequence where it holds several copies of one, as
    both uses of a tied weight); a name on several ranks means copies of one tensor, which must be bit-equal. It is
    written once, by the lowest rank that holds it with `writer` true. `state` must be JSON-able and equal on all ranks;
    rank 0's is kept. `keep` older-or-equal checkpoints stay (0: all). Without torch.distributed this process is alone.

    Raises CheckpointError on every rank if anything fails on any: unequal copies, a full disk, no permission. Then, as
    after a crash at any moment, the earlier checkpoints and `latest` are as they were.
    """
    ranks = AgreeingRanks(process_group)
    what = f"write the checkpoint {checkpoint_folder.step_path(directory, step)}"
    text = json.dumps(dict(state), indent=1) + "\n"
    records: dict[str, TensorRecord] = {}

    def elect(holdings: list[Holding]) -> dict[str, int]:
        elected, found = elect_writers(holdings)
        records.update(found)  # stays on rank 0, which seals: of 188k tensors it is most of what would be broadcast
        return elected

    writers = ranks.agree(what, lambda: hold(tensors, writer=writer), elect)
    mine = {name: copies(tensors[name])[0] for name, rank in writers.items() if rank == ranks.rank}
    ranks.agree(what, lambda: None, lambda _: checkpoint_folder.prepare(directory, step))
    temporary = checkpoint_folder.temporary_path(directory, step)

    def finish(files: list[dict[str, FileRecord]]) -> Path:
        seal(
            temporary, Manifest(step, {name: record for each in files for name, record in each.items()}, records), text
        )
        return checkpoint_folder.publish(directory, step)

    try:
        _write(temporary, mine, what, ranks)
        path = ranks.agree(what, lambda: sync_files(temporary, f"__{ranks.rank}_0.distcp"), finish)
    except CheckpointError:
        if ranks.rank == 0:
            checkpoint_folder.discard(temporary)
        raise
    ranks.agree("delete old checkpoints", lambda: None, lambda _: checkpoint_folder.retain(directory, step, keep))
    return path


def _write(path: Path, tensors: Mapping[str, Tensor], what: str, ranks: AgreeingRanks) -> None:
    """DCP writes one file a rank and `.metadata`; its failures, which it shares with all ranks, become ours."""
    try:
        without_warning(
            lambda: save_with_dcp(
                dict(tensors), storage_writer=Writer(path), process_group=ranks.group, no_dist=ranks.alone
            )
        )
    except CheckpointException as failed:
        failures = sorted(failed.failures.items())
        problems = [problem for rank, (error, _) in failures for problem in problems_of(error, what, rank)]
        raise CheckpointError(problems) from failed


class Writer(FileSystemWriter):
    """Reports the file system's error; torch's own ("unexpected pos 704 vs 598") hides it behind the last one."""

    def __init__(self, path: Path) -> None:
        # One thread is one file, `__<rank>_0.distcp`, which a rank finds without listing all ranks' files.
        # DCP syncs before it has flushed; `sync_files` does both in order.
        super().__init__(path, thread_count=1, sync_files=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _file_error_behind(error) from error


def _file_error_behind(error: BaseException) -> BaseException:
    """The OSError in an exception's context, or the exception itself."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def sync_files(path: Path, pattern: str) -> dict[str, FileRecord]:
    """Bring the files that match `pattern` to the disk, and describe them as they can be read back.

    A pattern without a wildcard looks for that one file; any other lists the whole directory.
    """
    files = {}
    for file in sorted(path.glob(pattern)):
        checkpoint_folder.sync(file)
        files[file.name] = record_file(file)
    return files


def seal(path: Path, manifest: Manifest, state: str) -> None:
    """Rank 0's part: state, `.metadata` and the manifest, synced, once every file is seen from here."""
    unseen = [name for name in manifest.files if not (path / name).is_file()]
    if unseen:
        message = f"files that other ranks wrote cannot be seen from rank 0: {', '.join(sorted(unseen))}"
        remedy = "log.dir=DIR on a file system that all hosts share"
        raise CheckpointError(Problem("PP-E508", message, remedy, place=str(path)))
    (path / STATE).write_text(state)
    files = {**manifest.files, **sync_files(path, STATE), **sync_files(path, ".metadata")}
    (path / MANIFEST).write_text(Manifest(manifest.step, files, manifest.tensors).to_text())
    checkpoint_folder.sync(path / MANIFEST)
    checkpoint_folder.sync(path)


def without_warning(call: Callable[[], object]) -> None:
    """Call DCP without its remark that one process is alone, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call()

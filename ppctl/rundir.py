"""A run directory: its files, and how each is written and read.

The only module that knows these names. Must not know what the values mean: a config, a plan and a record come in and go
out whole. Both towers use it.

    runs/<name>/<id>/    config.yaml command.txt plan.json schedule.csv env.json metrics.jsonl status.json result.json
                         edges.json profile.json holder.json submit.sbatch job.json life requeue.<job>.<life>
                         logs/ heartbeats/ trace/ checkpoints/ errors/
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl import checkpoint_folder
from ppctl.errors import ConfigError, Problem
from ppctl.files import TAKEN, append, lock, release, write_atomically
from ppctl.processes import identity
from ppctl.rank_records import RankFailure

if TYPE_CHECKING:
    from ppctl.config.schema import RunConfig
    from ppctl.plan import Plan

STATES = ("queued", "starting", "running", "finished", "failed", "stopped", "interrupted")
"""What status.json may say. A scheduler holds a run that is `queued`; `starting` and `running` are of a run that lives,
the others of one that has ended."""


@dataclass(frozen=True)
class RunDir:
    """One run's directory. Makes no file by itself: `create` does."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id: the directory's own name."""
        return self.path.name

    @property
    def name(self) -> str:
        """The name that runs of one kind share (`log.name`)."""
        return self.path.parent.name

    @classmethod
    def create(cls, root: Path, name: str, fill: Callable[[RunDir], None], run_id: str | None = None) -> RunDir:
        """Make `root/name/<id>` with what `fill` writes into it; it appears complete, by one rename.

        Without `run_id` the id is the time and a random suffix. An id that is taken gets `-2`, `-3` and so on: no run
        ever writes into another's directory. Raises ConfigError (PP-E610) where the directory cannot be written.
        """
        home = Path(root).absolute() / name
        draft = home / f".{secrets.token_hex(8)}.new"
        try:
            draft.mkdir(parents=True)
            for folder in ("logs", "heartbeats", "checkpoints", "errors"):
                (draft / folder).mkdir()
            fill(cls(draft))
            return cls(_rename_to_free(draft, home, run_id))
        except OSError as error:
            message = f"the run directory cannot be written: {error.strerror} ({error.filename or home})"
            raise ConfigError(
                Problem("PP-E610", message, f"log.dir={tempfile.gettempdir()}/ppctl-runs", "log.dir")
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the run for this process: no second launcher goes on with it. Ends with the process at the latest,
        and stays if the process becomes another program.

        Raises ConfigError (PP-E613) where another process holds it. A file system without locks holds nothing.
        """
        descriptor = lock(self.path, patience=0.2)
        if descriptor == TAKEN:
            raise ConfigError(
                Problem("PP-E613", f"run {self.id} is still going on", f"ppctl runs show {self.path}", str(self.path))
            )
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
        try:
            with suppress(OSError):  # it only makes a later loss known sooner
                self._write("holder.json", json.dumps(identity()) + "\n", durable=False)
            yield
        finally:
            release(descriptor)

    def holder(self) -> dict[str, Any]:
        """The process that held the run last, as `processes.identity` says it; empty where none ever did."""
        return self._mapping("holder.json")

    def is_held(self) -> bool:
        """Whether a launcher on a machine that shares this file system's locks is running it now."""
        descriptor = lock(self.path)
        release(descriptor)
        return descriptor == TAKEN

    # Written once by the launcher, read by everyone

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml."""
        import yaml

        from ppctl.config.mapping import to_mapping

        self._write("config.yaml", yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True))

    def read_config(self) -> RunConfig:
        """Read config.yaml. Raises ConfigError where it is missing or not a config."""
        import yaml

        from ppctl.config.mapping import from_mapping

        try:
            tree = yaml.safe_load(self._read("config.yaml"))
        except yaml.YAMLError as error:
            raise self._damaged("config.yaml", error) from None
        if not isinstance(tree, dict):
            raise self._damaged("config.yaml", "it holds no mapping of keys")
        return from_mapping(tree, lambda key: f"{self.path / 'config.yaml'}: {key}")

    def write_plan(self, plan: Plan) -> None:
        """Write plan.json and schedule.csv (as executed, with messages)."""
        self._write("schedule.csv", plan.schedule.to_csv())
        self.write_plan_text(json.dumps(plan.to_json()))

    def write_plan_text(self, text: str) -> None:
        """Write plan.json as it was received from another rank."""
        self._write("plan.json", text + "\n")

    def read_plan(self) -> Plan:
        """Read plan.json. Raises ConfigError where it is missing or not a plan."""
        from ppctl.plan import Plan

        text = self._read("plan.json")
        try:
            return Plan.from_json(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._damaged("plan.json", error) from error

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """Write env.json."""
        self._write("env.json", json.dumps(record, indent=1) + "\n")

    def environment(self) -> dict[str, Any]:
        """What env.json says; empty without one."""
        return self._mapping("env.json")

    def add_command(self, line: str) -> None:
        """Append the command line that started (or resumed) the run to command.txt."""
        append(self.path / "command.txt", line + "\n")

    def commands(self) -> list[str]:
        """The command lines, oldest first."""
        return self._read("command.txt").splitlines()

    # Written while the run goes on

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one step's record to metrics.jsonl, in a single write. Numbers that are not finite become null."""
        append(self.path / "metrics.jsonl", json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl; what is no record (a line that a crash cut short) is left out."""
        return list(_records(self.path / "metrics.jsonl"))

    def drop_metrics_from(self, step: int) -> None:
        """Forget the records of `step` and later: a run that goes on from a checkpoint does these steps again."""
        if (self.path / "metrics.jsonl").exists():
            kept = [json.dumps(record) + "\n" for record in self.metrics() if record["step"] < step]
            self._write("metrics.jsonl", "".join(kept))

    def write_status(self, state: str, **more: Any) -> None:
        """Replace status.json: `state` (one of STATES), the time, and for example `step` and `message`."""
        if state not in STATES:
            raise ValueError(f"{state!r} is not one of {', '.join(STATES)}")
        self._write("status.json", json.dumps({"state": state, "time": time.time(), **more}) + "\n")

    def status(self) -> dict[str, Any]:
        """What status.json says; `{"state": "starting"}` without one."""
        return {"state": "starting"} | self._mapping("status.json")

    def write_heartbeats(self, host: str, record: Mapping[str, Any]) -> None:
        """Replace heartbeats/<host>.json. Not synced: it is overwritten in ten seconds."""
        self._write(f"heartbeats/{host}.json", json.dumps(record) + "\n", durable=False)

    def heartbeat(self, host: str) -> dict[str, Any]:
        """What one host published last; empty where nothing is there."""
        return self._mapping(f"heartbeats/{host}.json")

    def heartbeats(self) -> dict[str, dict[str, Any]]:
        """What each host published last, by host."""
        files = sorted((self.path / "heartbeats").glob("*.json"))
        return {file.stem: self.heartbeat(file.stem) for file in files}

    def write_error(self, failure: RankFailure) -> None:
        """Write errors/rank-NNNN.json: the first thing that a failing rank does."""
        (self.path / "errors").mkdir(exist_ok=True)
        write_atomically(self._error(failure.rank), json.dumps(failure.to_json()) + "\n")

    def errors(self) -> list[RankFailure]:
        """The ranks' failures, earliest first; a damaged record is left out."""
        records = [self._mapping(f"errors/{file.name}") for file in (self.path / "errors").glob("rank-*.json")]
        failures = [RankFailure.from_json(record) for record in records if "rank" in record]
        return sorted(failures, key=lambda failure: failure.time)

    def write_flight_record(self, backend: str, rank: int, record: bytes) -> None:
        """Write what torch's flight recorder of `backend` holds of a rank in a job that hangs: beside the errors."""
        write_atomically(self.flight_record(backend, rank), record, durable=False)

    def has_error(self, rank: int) -> bool:
        """Whether a failure of the rank has been told."""
        return self._error(rank).exists()

    def forget_errors(self) -> None:
        """Remove the error records, where the same life of the run begins anew."""
        for file in (self.path / "errors").glob("rank-*.json"):
            file.unlink()

    def sweep(self) -> None:
        """Remove what writers who were killed have left half-written. Only where no process of the run is left."""
        with suppress(OSError):
            for place in (self.path, self.path / "errors", self.path / "heartbeats"):
                for draft in place.glob("*.tmp"):
                    if not draft.is_dir():
                        draft.unlink(missing_ok=True)
        with suppress(OSError):
            checkpoint_folder.sweep(self.checkpoints)

    def forget_heartbeats(self) -> None:
        """Remove what the hosts published: room on a full disk for what must be written."""
        for file in (self.path / "heartbeats").glob("*.json"):
            file.unlink(missing_ok=True)

    def write_result(self, record: Mapping[str, Any]) -> None:
        """Write result.json, at the end."""
        self._write("result.json", json.dumps({k: _finite(v) for k, v in record.items()}, indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """What result.json says; empty while the run goes on."""
        return self._mapping("result.json")

    def answer(self, state: str, exit_code: int, error: str = "") -> dict[str, Any]:
        """The one object that `--json` prints at the end of a run."""
        told = {"error": error} if error else {}
        return {"run": str(self.path), "id": self.id, **self.result(), **told} | {
            "state": state,
            "exit_code": exit_code,
        }

    def begin_life(self, name: str) -> None:
        """Clear the way for another life of a submitted run: the last one's result goes, its errors are kept aside."""
        self._write("life", name)
        (self.path / "result.json").unlink(missing_ok=True)
        if self.errors():
            self._keep_errors(self._free_number())
        self.forget_heartbeats()

    def life(self) -> str:
        """The name of the life that goes on now; empty for a run that was not submitted."""
        try:
            return (self.path / "life").read_text(encoding="utf-8")
        except OSError:
            return ""

    def write_job(self, record: Mapping[str, Any]) -> None:
        """Write job.json: as what the run was submitted (`job`, `cluster`, `time`)."""
        self._write("job.json", json.dumps(record) + "\n")

    def job(self) -> dict[str, Any]:
        """What job.json says; empty for a run that was not submitted."""
        return self._mapping("job.json")

    def write_script(self, text: str) -> None:
        """Write submit.sbatch."""
        self._write("submit.sbatch", text)

    def write_edges(self, record: Mapping[str, Any]) -> None:
        """Write edges.json: how long every edge and every group took to answer before the first step."""
        self._write("edges.json", json.dumps(record) + "\n", durable=False)

    def edges(self) -> dict[str, Any]:
        """What edges.json says; empty before the ranks have met."""
        return self._mapping("edges.json")

    def write_requeue_mark(self, job: str, life: int, why: str, exclude: Iterable[str] = ()) -> None:
        """Say that life number `life` of SLURM's job `job` ended so that it can go on, without the nodes `exclude`.

        The batch script requeues on this mark alone, and prints `why`, one line.
        """
        self._write(f"requeue.{job}.{life}", f"{','.join(exclude)}\n{why}\n")

    def write_profile(self, record: Mapping[str, Any]) -> None:
        """Write profile.json: measured seconds per stage, and per message by channel."""
        self._write("profile.json", json.dumps(record) + "\n")

    # Paths of what others write

    def log(self, rank: int) -> Path:
        """The rank's log file."""
        return self.path / "logs" / f"rank-{rank:04d}.log"

    def flight_record(self, backend: str, rank: int) -> Path:
        """The file of a rank of torch's flight recorder of `backend` (gloo, nccl).

        Torch's tools want one prefix for all ranks, and the rank at the end.
        """
        return self.path / "errors" / f"flight_recorder_{backend}_rank_{rank}"

    def flight_records(self) -> list[Path]:
        """Those files that are there."""
        return sorted((self.path / "errors").glob("flight_recorder_*_rank_*"))

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def trace(self) -> Path:
        """The directory of traces (and of TensorBoard's and W&B's files)."""
        return self.path / "trace"

    @property
    def submit_script(self) -> Path:
        """The script that SLURM was given."""
        return self.path / "submit.sbatch"

    @property
    def job_log(self) -> Path:
        """What the batch script and rank 0 print."""
        return self.path / "logs" / "job.log"

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint that a start of this run goes on from, by the one rule of `checkpoint_folder.find`.

        Raises CheckpointError (PP-E505) where the directory cannot be read.
        """
        found = checkpoint_folder.find(self.checkpoints)
        return None if found is None else found.path

    def set_aside(self) -> None:
        """Keep the plan, config, errors and result of the life that has ended, as plan-1.json and so on."""
        number = self._free_number()
        for name in ("plan.json", "config.yaml", "env.json", "result.json"):
            old = self.path / name
            if old.exists():
                # A copy, not a move: the first stays readable until its successor replaces it.
                shutil.copy2(old, old.with_name(f"{old.stem}-{number}{old.suffix}"))
        (self.path / "result.json").unlink(missing_ok=True)
        self._keep_errors(number)

    def _free_number(self) -> int:
        """The first number under which nothing of an earlier life is kept: requeued lives keep errors alone."""
        kept = (_KEPT.fullmatch(path.name) for path in self.path.iterdir())
        return 1 + max((int(found[1]) for found in kept if found), default=0)

    def _keep_errors(self, number: int) -> None:
        errors = self.path / "errors"
        if errors.exists():
            errors.rename(self.path / f"errors-{number}")
        errors.mkdir()

    def _error(self, rank: int) -> Path:
        return self.path / "errors" / f"rank-{rank:04d}.json"

    def _write(self, name: str, text: str, *, durable: bool = True) -> None:
        write_atomically(self.path / name, text, durable=durable)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(name, error) from None
        except OSError as error:
            message = f"{self.path} is not a complete run directory: {name}: {error.strerror}"
            raise ConfigError(Problem("PP-E611", message, "ppctl runs")) from error

    def _damaged(self, name: str, reason: object) -> ConfigError:
        first = next(iter(str(reason).splitlines()), "")
        message = f"{self.path} is not a complete run directory: {name} is damaged: {first}"
        return ConfigError(Problem("PP-E611", message, "ppctl runs"))

    def _mapping(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


_KEPT = re.compile(r"(?:errors|plan)-([0-9]+)(?:\.json)?")


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rename_to_free(draft: Path, home: Path, run_id: str | None) -> Path:
    """Rename `draft` to the first free name. A rename onto a directory that holds something fails, so none is lost."""
    for attempt in range(1, 1000):
        name = run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        path = home / (f"{name}-{attempt}" if run_id and attempt > 1 else name)
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
        else:
            return path
    raise FileExistsError(17, "no free name", str(home / str(run_id)))

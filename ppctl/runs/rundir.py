"""A run directory: its files, and how each is written and read. `run_starts` has the lock.

runs/<name>/<id>/    config.yaml command.txt plan.json schedule.csv env.json metrics.jsonl status.json result.json
                     edges.json profile.json holder.json submit.sbatch array.sbatch job.json life
                     requeue.<job>.<restarts> submit.yaml secret
                     logs/ heartbeats/ trace/ gradients/ profile_traces/ memory_snapshot/ checkpoints/ errors/
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ppctl.errors import CONTROL, ConfigError, Problem, pasted, visible
from ppctl.host.files import MOST_READ, append, open_regular, read_json, read_text, read_whole, write_atomically
from ppctl.records.json_reader import finite, parse, read
from ppctl.records.metrics_file import MetricsFile, line_of
from ppctl.records.rank_records import RankFailure
from ppctl.records.run_records import STATES, EdgeTimes, Environment, Failure, HostStates, Job, Result, Status
from ppctl.runs import fence

if TYPE_CHECKING:
    from ppctl.config.schema import RunConfig
    from ppctl.plan import Plan

T = TypeVar("T")
_YamlTree: Any = tuple[dict[str, Any], dict[str, int]]
_MOST_OF_A_CONFIG, _MOST_OF_A_PLAN = 2**22, 2**27
_ELSEWHERE = 'log.dir="$(mktemp -d)"'


def printable(path: Path) -> Path:
    """Return `path`. Raises ConfigError (PP-E610) for control characters: scripts and logs have it in one line."""
    if CONTROL.search(str(path)):
        message = f"the run directory would have control characters in its path: {path}"
        raise ConfigError(Problem("PP-E610", message, _ELSEWHERE, "log.dir"))
    return path


@dataclass(frozen=True)
class RunDir:
    """One run's directory. The constructor makes no file; `create` does. In older starts most writers raise PP-E779."""

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
        """Make `root/name/<id>` with the files that `fill` writes; it appears complete, by one rename.

        Without `run_id` the id is the time and a random suffix. To an id that exists `-2`, `-3` and so on are appended:
        no run ever writes into another's directory. Raises ConfigError (PP-E610) if the directory cannot be written.
        """
        home = printable(Path(root).absolute() / name)
        draft = home / f".{secrets.token_hex(8)}.new"
        try:
            for folder in ("logs", "heartbeats", "checkpoints", "errors"):
                (draft / folder).mkdir(parents=True)
            fill(cls(draft))
            return cls(_rename_to_free(draft, home, run_id))
        except OSError as error:
            raise unwritable(error, home, _ELSEWHERE, "log.dir") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    # Written once by the launcher

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml."""
        import yaml

        from ppctl.config.mapping import to_mapping

        self._write("config.yaml", yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True))

    def read_config(self, name: str = "config.yaml") -> RunConfig:
        """Read config.yaml, or an earlier start's. Raises ConfigError: PP-E611 without one, else as `from_mapping`."""
        from ppctl.config.mapping import from_mapping
        from ppctl.config.yaml_file import read_yaml, shown

        file = self.path / name
        tree, lines = self._parsed(name, lambda data: read(_YamlTree, read_yaml(data.decode())), _MOST_OF_A_CONFIG)
        return from_mapping(tree, lambda key: f"{file}: {key}", lambda key: shown(file, lines.get(key)))

    def write_plan(self, plan: Plan) -> None:
        """Write plan.json and schedule.csv (as executed, with messages)."""
        self._write("schedule.csv", plan.schedule.to_csv())
        self._write_json("plan.json", plan.to_json())

    def read_plan(self, name: str = "plan.json") -> Plan:
        """Read plan.json, or the plan of an earlier start. Raises ConfigError (PP-E611) if it is missing or no plan."""
        from ppctl.plan import Plan

        return self._parsed(name, lambda data: Plan.from_json(parse(data)), _MOST_OF_A_PLAN)

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """Write env.json."""
        self._write_json("env.json", record, indent=1)

    def environment(self) -> dict[str, Any]:
        """The content of env.json; empty without one."""
        return self.read_object("env.json", Environment)

    def add_command(self, line: str) -> None:
        """Append the command line that started (or resumed) the run to command.txt."""
        append(self.path / "command.txt", line + "\n")

    def commands(self) -> list[str]:
        """The command lines, oldest first. Raises ConfigError (PP-E611) without them."""
        return self._parsed("command.txt", lambda data: data.decode().splitlines())

    def write_job(self, job: str, cluster: str, **more: str) -> None:
        """Write job.json: the number or name of the run's job, its cluster, the time, and the user."""
        self._write_json("job.json", {"job": job, "cluster": cluster, "time": time.time(), "user": os.getuid(), **more})

    def job(self) -> dict[str, Any]:
        """The content of job.json; empty for a run that was not submitted."""
        return self.read_object("job.json", Job)

    def write_script(self, text: str, name: str = "submit.sbatch") -> None:
        """Write the script `name`: submit.sbatch, array.sbatch or submit.yaml."""
        self._write(name, text)

    # Written while the run goes on

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one step's record to metrics.jsonl, in a single write. Numbers that are not finite become null."""
        fence.check()
        append(self.metrics_path, line_of(record))

    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl, without damaged lines (a crash may have cut one)."""
        return self.metrics_file().read()

    def metrics_file(self, *, last: int | None = None, at: int = 0) -> MetricsFile:
        """A reader of metrics.jsonl as it grows, from byte `at` on; its first read may have only the `last` records."""
        return MetricsFile(self.metrics_path, partial(self._leave_out, "metrics.jsonl"), last=last, at=at)

    def drop_metrics_from(self, step: int) -> None:
        """Delete the records of `step` and later: a run that continues from a checkpoint repeats these steps."""
        fence.check(at_once=True)
        if self.metrics_path.exists():
            self.metrics_file().drop_from(step)

    def write_status(self, state: str, **more: Any) -> None:
        """Replace status.json: `state` (one of STATES), the time, and for example `step` and `message`."""
        if state not in STATES:
            raise ValueError(f"{state!r} is not one of {', '.join(STATES)}")
        texts = {name: visible(value) for name, value in more.items() if isinstance(value, str)}
        self._write_json("status.json", {"state": state, "time": time.time(), **more, **texts})

    def status(self) -> dict[str, Any]:
        """The content of status.json; `{"state": "starting"}` without one."""
        return {"state": "starting"} | self.read_object("status.json", Status)

    def write_heartbeats(self, host: str, record: Mapping[str, Any]) -> None:
        """Replace heartbeats/<host>.json. Not synced: it is overwritten in ten seconds."""
        self._write_json(f"heartbeats/{host}.json", record, durable=False)

    def heartbeat(self, host: str) -> dict[str, Any]:
        """The last heartbeat of one host; empty if it has published none."""
        return self.read_object(f"heartbeats/{host}.json", HostStates)

    def heartbeats(self) -> dict[str, dict[str, Any]]:
        """The last heartbeat of each host, by host."""
        files = sorted((self.path / "heartbeats").glob("*.json"))
        return {file.stem: self.heartbeat(file.stem) for file in files}

    def forget_heartbeats(self) -> None:
        """Delete the hosts' publications: they are of an earlier start, or make room on a full disk. Raises OSError."""
        for file in (self.path / "heartbeats").glob("*.json"):
            file.unlink(missing_ok=True)

    def write_edges(self, record: Mapping[str, Any]) -> None:
        """Write edges.json: how long every edge and every group took to answer before the first step."""
        self._write_json("edges.json", record, durable=False)

    def edges(self) -> dict[str, Any]:
        """The content of edges.json; empty before the warm-up."""
        return self.read_object("edges.json", EdgeTimes)

    # How it ended

    def write_error(self, failure: RankFailure) -> None:
        """Write errors/rank-NNNN.json: the first thing that a failing rank does, in an older start as well."""
        (self.path / "errors").mkdir(exist_ok=True)
        write_atomically(self._error(failure.rank), json.dumps(failure.to_json()) + "\n")

    def errors(self) -> list[RankFailure]:
        """The ranks' failures, earliest first; a damaged record is left out."""
        files = sorted((self.path / "errors").glob("rank-*.json"))
        records = [self.read_object(f"errors/{file.name}", Failure) for file in files]
        return sorted((RankFailure.from_json(each) for each in records if each), key=lambda failure: failure.time)

    def has_error(self, rank: int) -> bool:
        """Whether the rank's failure has been written."""
        return self._error(rank).exists()

    def _error(self, rank: int) -> Path:
        return self.path / "errors" / f"rank-{rank:04d}.json"

    def write_flight_record(self, backend: str, rank: int, record: bytes) -> None:
        """Write a rank's record from torch's flight recorder of `backend`, in a job that hangs."""
        fence.check()
        write_atomically(self.flight_record(backend, rank), record, durable=False)

    def flight_record(self, backend: str, rank: int) -> Path:
        """The file with what torch's flight recorder of `backend` (gloo, nccl) has of a rank. Torch's tools need one
        prefix for all ranks, and the rank at the end."""
        return self.path / "errors" / f"flight_recorder_{backend}_rank_{rank}"

    def flight_records(self) -> list[Path]:
        """The paths of all flight records."""
        return sorted((self.path / "errors").glob("flight_recorder_*_rank_*"))

    def write_result(self, record: Mapping[str, Any]) -> None:
        """Write result.json, at the end."""
        self._write_json("result.json", finite(record), indent=1)

    def result(self) -> dict[str, Any]:
        """The content of result.json; empty while the run goes on."""
        return self.read_object("result.json", Result)

    def answer(self, state: str, exit_code: int, error: str = "") -> dict[str, Any]:
        """The one object that `--json` prints at the end of a run."""
        more = {"error": error} if error else {}
        return {"run": str(self.path), "id": self.id, **self.result(), **more, "state": state, "exit_code": exit_code}

    def write_profile(self, record: Mapping[str, Any]) -> None:
        """Write profile.json: measured seconds per stage, and per message by channel."""
        self._write_json("profile.json", record)

    def write_measured_step(self, step: int, record: Mapping[str, Any]) -> None:
        """Write trace/step-N.json: what every rank did in `step`, and a digest of plan.json, which it follows."""
        self.trace.mkdir(exist_ok=True)
        plan = _digest(self.path / "plan.json")
        self._write_json(f"trace/step-{step}.json", {**record, "plan": plan}, durable=False)

    def measured_steps(self) -> dict[int, Path]:
        """Step -> file, for all traced steps."""
        numbers = {path: path.stem.removeprefix("step-") for path in self.trace.glob("step-*.json")}
        return dict(sorted((int(number), path) for path, number in numbers.items() if number.isdecimal()))

    def plan_of(self, digest: str) -> Plan:
        """The plan with this digest, of this or an earlier start. Raises LookupError, and as `read_plan`."""
        for path in (self.path / "plan.json", *self.path.glob("plan-*.json")):
            with suppress(OSError):
                if _digest(path) == digest:
                    return self.read_plan(path.name)
        raise LookupError("the plan that it follows is not in the run's directory")

    def write_requeue_mark(self, start: str, why: str, exclude: Iterable[str] = ()) -> None:
        """Have SLURM's job requeued, without the nodes `exclude`, when its `start` (`<job>.<restarts>`) ends: the batch
        script requeues if this file exists, and prints `why`, one line."""
        self._write(f"requeue.{start}", f"{','.join(exclude)}\n{visible(why, '')}\n")

    def requeue_mark(self, start: str) -> str | None:
        """The nodes that the requeue mark of this `start` leaves out, with commas between; None without a mark."""
        mark = self.path / f"requeue.{start}"
        return read_text(mark).partition("\n")[0] if mark.exists() else None

    # Paths for other writers

    def log(self, rank: int) -> Path:
        """The rank's log file."""
        return self.path / "logs" / f"rank-{rank:04d}.log"

    @property
    def metrics_path(self) -> Path:
        """One record a step."""
        return self.path / "metrics.jsonl"

    @property
    def job_log(self) -> Path:
        """The output of the batch script and of rank 0."""
        return self.path / "logs" / "job.log"

    @property
    def submit_script(self) -> Path:
        """The script that was submitted to SLURM."""
        return self.path / "submit.sbatch"

    @property
    def trace(self) -> Path:
        """The directory of traces (and of TensorBoard's and W&B's files)."""
        return self.path / "trace"

    @property
    def gradients(self) -> Path:
        """The directory of the steps of `log.gradients`."""
        return self.path / "gradients"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.path / "checkpoints"

    # Reading and writing a file

    def _write(self, name: str, text: str, *, durable: bool = True) -> None:
        fence.check()
        write_atomically(self.path / name, text, durable=durable)

    def _write_json(self, name: str, record: Any, *, indent: int | None = None, durable: bool = True) -> None:
        self._write(name, json.dumps(record, indent=indent) + "\n", durable=durable)

    def _parsed(self, name: str, parse: Callable[[bytes], T], most: int = MOST_READ) -> T:
        """A file of the run, parsed. Raises ConfigError (PP-E611) if it is missing or damaged."""
        try:
            return parse(read_whole(self.path / name, most, follow=False))
        except (OSError, ValueError, ConfigError) as error:
            reason = getattr(error, "strerror", None) or f"it is damaged: {next(iter(str(error).splitlines()), '')}"
            message = f"{self.path} is not a complete run directory: {name}: {reason}"
            raise ConfigError(Problem("PP-E611", message, "ppctl runs")) from error

    def read_object(self, name: str, kind: Any) -> dict[str, Any]:
        """The object in a JSON file; empty if it is missing or, with a warning, damaged."""
        try:
            return dict(read_json(self.path / name, kind))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._leave_out(name, getattr(error, "strerror", None) or error)
        return {}

    def _leave_out(self, name: str, reason: object) -> None:
        warn(odd(self.path / name, f"{reason}; it is left out"))

    def check_files(self) -> None:
        """Raise ConfigError (PP-E559) if what the next start copies, replaces or appends to is no regular file."""
        names = ("config.yaml", "plan.json", "env.json", "result.json", "metrics.jsonl", "command.txt", "life")
        for file in filter(os.path.lexists, (*(self.path / name for name in names), *(self.path / "logs").glob("*"))):
            try:
                open_regular(file, follow=False).close()
            except OSError as error:
                raise ConfigError(odd(file, error.strerror)) from error


def odd(file: Path, why: object) -> Problem:
    """The problem of a file of a run that ppctl has not written."""
    remedy = f"mv {pasted(file, f'{file}.damaged')}"
    return Problem("PP-E559", f"{file} is not what ppctl writes: {why}", remedy, str(file))


def unwritable(error: OSError, directory: Path, remedy: str, place: str) -> ConfigError:
    """The error of a run directory that cannot be written."""
    message = f"the run directory cannot be written: {error.strerror or error} ({error.filename or directory})"
    return ConfigError(Problem("PP-E610", message, remedy, place))


@cache
def warn(what: Problem | str) -> None:
    """Print a warning once per process: a start may read a file several times."""
    print(f"warning: {what}", file=sys.stderr, flush=True)


def _digest(plan: Path) -> str:
    return hashlib.sha256(read_whole(plan, _MOST_OF_A_PLAN, follow=False)).hexdigest()


def new_id() -> str:
    """The id of a run that begins now: the time, and a random suffix."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def _rename_to_free(draft: Path, home: Path, run_id: str | None) -> Path:
    """Rename `draft` to the first free name; returns the path. Renaming onto non-empty directories fails."""
    for attempt in range(1, 1000):
        name = run_id or new_id()
        path = home / (f"{name}-{attempt}" if run_id and attempt > 1 else name)
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
        else:
            return path
    raise FileExistsError(17, "no free name", str(home / str(run_id)))

"""Which checkpoint each kind of start goes on from, in every state that a killed save or a hand leaves."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_states import STRANGE, killed_states, mark_of

from ppctl.cli import local_run, resume, train
from ppctl.cli import main as front
from ppctl.cli.main import main
from ppctl.cli.runs import facts
from ppctl.errors import CheckpointError
from ppctl.launch import enter, pod, run_directory
from ppctl.launch.environment import Started
from ppctl.launch.outcome import GO_ON, RESTART
from ppctl.launch.run_directory import Launch, go_on, interrupted, new_run
from ppctl.launch.weights import find_weights
from ppctl.runs.checkpoint_folder import find, step_of
from ppctl.runs.finding import find_checkpoint, last_checkpoint
from ppctl.runs.run_starts import at_rest
from ppctl.runs.rundir import RunDir

PERSON = Started("person")
NUMBERS = count()
TYPED = ["+recipe=quickstart", "launch.device=cpu", "pp=2", "vpp=1", "steps=20"]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """What is started, in a directory of its own."""
    before, home = Path.cwd(), tmp_path_factory.mktemp("starts")
    os.chdir(home)
    yield train.prepare(front.parse("train", train, TYPED), PERSON)
    os.chdir(before)


@pytest.fixture(scope="module")
def stopped(launch: Launch) -> RunDir:
    """A run without checkpoints."""
    run = new_run(launch, Started("torchrun", 0, 2, "stopped"))
    run.write_status("stopped", step=6)
    run.checkpoints.rmdir()
    return run


@pytest.fixture
def make(stopped: RunDir) -> Iterator[Callable[[Path], RunDir]]:
    """Makes a run with a copy of a directory of checkpoints (none, where there is no such directory)."""
    made = []

    def run_with(checkpoints: Path) -> RunDir:
        run = RunDir(shutil.copytree(stopped.path, stopped.path.with_name(f"job{next(NUMBERS)}")))
        made.append(run.path)
        if checkpoints.exists():
            shutil.copytree(checkpoints, run.checkpoints, symlinks=True)
        return run

    yield run_with
    for path in made:
        shutil.rmtree(path)


def again(by: str) -> Callable[[RunDir, Launch], Path | None]:
    """The same command once more in the same directory, as torchrun and SLURM start it again."""

    def start(run: RunDir, launch: Launch) -> Path | None:
        found = interrupted(launch, Started(by, 0, 2, run.id, 2))
        assert found == run
        go_on(found, launch, last_checkpoint(found))
        return resumed(run)

    return start


def another_life(run: RunDir, launch: Launch) -> Path | None:
    enter.go_on(run, "7.1")
    return resumed(run)


def resumed(run: RunDir) -> Path | None:
    """What the ranks will load: what config.yaml says."""
    text = run.read_config().checkpoint.resume
    return None if text is None else Path(text)


def named(form: str) -> Callable[[RunDir, Launch], Path | None]:
    """`checkpoint.resume=` on a command line."""

    def start(run: RunDir, launch: Launch) -> Path | None:
        return none_if_refused(lambda: find_checkpoint(form.format(run=run.path, id=run.id), Path("runs")))

    return start


def none_if_refused(call: Callable[[], Path]) -> Path | None:
    try:
        return call()
    except CheckpointError as error:
        assert error.exit_code == 3
        if error.problems[0].code != "PP-E615":
            raise
        return None


def shown(run: RunDir, launch: Launch) -> Path | None:
    path = facts(run)["checkpoint"]
    return None if path is None else Path(path)


STARTS: dict[str, Callable[[RunDir, Launch], Path | None]] = {
    "torchrun again": again("torchrun"),
    "srun again": again("slurm"),
    "the next life of a SLURM job": another_life,
    "ppctl resume": lambda run, _: none_if_refused(
        lambda: resume.prepare(front.parse("resume", resume, [str(run.path)]), run, PERSON)[1]
    ),
    "checkpoint.resume=DIRECTORY": named("{run}"),
    "checkpoint.resume=DIRECTORY/checkpoints": named("{run}/checkpoints"),
    "checkpoint.resume=ID": named("{id}"),
    "ppctl requeue": lambda run, _: last_checkpoint(run),
    "ppctl runs": shown,
}


def test_a_restart_goes_on_in_the_run_of_its_agent_though_the_id_was_used_before(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older run of the id had gone on last, and the directory `exp-3` is of the id `exp-3`."""

    def begun(agent: int, run_id: str | None) -> RunDir:
        monkeypatch.setattr(run_directory, "identity", lambda _: {"machine": "host-a", "pid": agent})
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id or "none")
        return new_run(launch, Started("torchrun", 0, 2, run_id))

    older, own, other, unnamed = (begun(*each) for each in ((1, "exp"), (2, "exp"), (3, "exp-3"), (4, None)))
    assert (older.id, own.id, other.id) == ("exp", "exp-2", "exp-3")
    os.utime(older.path / "config.yaml", (later := time.time() + 60, later))

    def restarted(agent: int, run_id: str | None, restarts: int) -> RunDir | None:
        monkeypatch.setattr(run_directory, "identity", lambda _: {"machine": "host-a", "pid": agent})
        return interrupted(launch, Started("torchrun", 0, 2, run_id, restarts))

    assert [restarted(agent, "exp", 1) for agent in (1, 2)] == [older, own]
    assert restarted(2, "exp", 0) == own, "a rank of another agent failed, which alone has counted it"
    assert restarted(4, None, 1) == unnamed
    assert (restarted(5, "exp", 0), restarted(5, None, 1)) == (None, None)
    assert restarted(5, "exp", 1) == older, "the ranks of another agent: the last started run of the id"
    os.utime(own.path / "config.yaml", (later + 1, later + 1))
    os.utime(other.path / "config.yaml", (later + 2, later + 2))
    assert restarted(5, "exp", 1) == own


def test_a_restart_takes_no_run_of_another_job_or_user(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = count(100)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "train")
    monkeypatch.setattr(run_directory, "identity", lambda _: {"machine": "host-a", "pid": next(pids)})
    runs = []
    for job in ("100", "101"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        runs.append(new_run(launch, Started("torchrun", 0, 2, "train")))
    for job, own in zip(("100", "101", "102"), (*runs, None), strict=True):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert interrupted(launch, Started("torchrun", 0, 2, "train", 1)) == own
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("SLURM_JOB_ID", "100")
    assert interrupted(launch, Started("torchrun", 0, 2, "train", 1)) is None


def test_a_run_that_goes_on_forgets_the_hosts_that_it_had(launch: Launch, make: Callable[[Path], RunDir]) -> None:
    """They may not be in the job any more: the judge and `ppctl status` would take them for silent."""
    run = make(Path("nothing"))
    run.write_heartbeats("node-1", {"host": "node-1", "time": 1.0, "ranks": []})
    assert go_on(run, launch, None).heartbeats() == {}


def test_a_restart_changes_nothing_in_a_run_that_still_goes_on(
    launch: Launch, stopped: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {path: path.read_bytes() for path in stopped.path.glob("*.*")}
    monkeypatch.setattr(train, "prepare", lambda *_: launch)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"TORCHELASTIC_RUN_ID": stopped.id, "TORCHELASTIC_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_run, "become_worker", lambda *words: sys.exit(words[1:]))
    with at_rest(stopped), pytest.raises(SystemExit) as refused:
        train.run(front.parse("train", train, TYPED))
    assert refused.value.args == ("--refuse", "2")
    assert {path: path.read_bytes() for path in stopped.path.glob("*.*")} == kept


KILLED = ("the first", "one in place of the last")
"""test_checkpoint_folder.py has them all, and says which checkpoint is to be read."""


@pytest.fixture(scope="module", params=KILLED)
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The directories that a save leaves when it is killed."""
    return killed_states(request.param, tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("kind", STARTS)
def test_after_a_kill_at_any_line_every_start_reads_the_same_checkpoint(
    states: list[Path], kind: str, make: Callable[[Path], RunDir], launch: Launch
) -> None:
    for state in states:
        found = find(state)
        chosen = STARTS[kind](make(state), launch)
        assert mark_of(chosen) == mark_of(found and found.path), state
        assert step_of(chosen) == step_of(found and found.path), state


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", STARTS)
def test_a_start_in_a_strange_directory_goes_on_from_what_is_there(
    kind: str,
    name: str,
    make: Callable[[Path], RunDir],
    launch: Launch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    strange = STRANGE[name]
    (tmp_path / "checkpoints").mkdir()
    strange.make(tmp_path / "checkpoints")
    run = make(tmp_path / "checkpoints")
    chosen = STARTS[kind](run, launch)
    expected = None if strange.name is None else run.checkpoints / strange.name
    if kind == "the next life of a SLURM job" and expected is not None and chosen != expected:
        # It is alone with the directory, and has put it in order first.
        assert expected.suffix == ".old" and not expected.exists()
        expected = expected.with_suffix("")
    assert chosen == expected
    assert expected is None or step_of(chosen) == step_of(strange.name) > 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    if kind == "ppctl runs" or not strange.warning:
        assert warnings == []
    else:
        assert len(warnings) == 1 and f"{run.checkpoints}" in warnings[0]


@pytest.mark.parametrize("kind", STARTS)
def test_where_the_directory_cannot_be_listed_no_start_takes_the_run_for_a_new_one(
    kind: str, make: Callable[[Path], RunDir], launch: Launch, tmp_path: Path
) -> None:
    """Its file system is not mounted."""
    run = make(tmp_path / "nothing")
    run.checkpoints.symlink_to("/not/mounted")
    run.add_metrics({"step": 1})
    if kind == "ppctl runs":
        assert shown(run, launch) is None
        assert main(["runs"]) == 0
        return
    with pytest.raises(CheckpointError, match="PP-E505"):
        STARTS[kind](run, launch)
    assert run.metrics() == [{"step": 1}] and not (run.path / "plan-1.json").exists()


def test_a_run_directory_that_cannot_be_written_is_no_fault_of_the_nodes(
    make: Callable[[Path], RunDir],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job's script leaves out nodes that say nothing: the first says why."""
    run = make(tmp_path / "nothing")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(run.path / "life"))

    monkeypatch.setattr(enter.run_starts, "begin_start", full)
    assert enter.main([str(run.path), "--code", enter.LIVE]) == 2
    assert capsys.readouterr().out.startswith("error PP-E610: the run directory cannot be written: No space left")


def test_a_pod_tries_again_where_the_file_system_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(pod.signal, "signal", lambda *_: None)
    monkeypatch.setattr(pod, "_Pod", lambda *_: SimpleNamespace(live=stale, go=None))
    assert pod.main([str(tmp_path), "--code", enter.LIVE, "--files", str(tmp_path), "--first", "0"]) == GO_ON


@pytest.mark.parametrize(("code", "agents"), [(RESTART, 1), (GO_ON, 6), (1, 1)])
def test_a_pod_whose_agents_end_at_once_has_the_jobset_restart(
    tmp_path: Path, code: int, agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(pod.time, "sleep", lambda _: None)
    monkeypatch.setattr(pod, "check_node", lambda *_: None)
    monkeypatch.setattr(pod._Pod, "_can_meet", lambda self: True)
    monkeypatch.setattr(pod._Pod, "_has_directory", True)
    monkeypatch.setattr(pod._Pod, "_run_agent", lambda self: started.append(1) or code)
    own = pod._Pod.__new__(pod._Pod)
    own.run, own.index, own.told_to_go = RunDir(tmp_path), 1, False
    assert own.live(enter.LIVE) == (1 if code == 1 else GO_ON)
    assert len(started) == agents


def test_a_node_tells_why_it_cannot_enter(
    make: Callable[[Path], RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "nothing")
    run.checkpoints.symlink_to("/not/mounted")
    assert enter.main([str(run.path), "--code", enter.LIVE]) == 3
    out = capsys.readouterr().out
    assert out.startswith("error PP-E505: ") and out.count("\n") == 1


@pytest.mark.parametrize(("asked", "found"), [("step-6", "step-6.old"), ("step-6.old", "step-6.old")])
def test_a_checkpoint_that_is_moved_aside_is_found_by_either_name(
    asked: str, found: str, make: Callable[[Path], RunDir], tmp_path: Path
) -> None:
    STRANGE["only one that is moved aside"].make(tmp_path)
    run = make(tmp_path)
    for look in (find_checkpoint, find_weights):
        assert look(str(run.checkpoints / asked), Path("runs")) == run.checkpoints / found


def test_a_draft_is_never_started_from(make: Callable[[Path], RunDir], tmp_path: Path) -> None:
    STRANGE["only a save that did not finish"].make(tmp_path)
    with pytest.raises(CheckpointError, match="PP-E615"):
        find_checkpoint(str(make(tmp_path).checkpoints / "step-6.tmp"), Path("runs"))

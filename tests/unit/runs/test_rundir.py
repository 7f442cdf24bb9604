"""The run directory: made at once, written whole, held by one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoint_states import mark_of, write
from full_disk import files_of_at_most

from ppctl.config.mapping import to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, visible
from ppctl.host.files import append, write_atomically
from ppctl.records.rank_records import RankFailure
from ppctl.runs.finding import last_checkpoint, list_runs
from ppctl.runs.run_starts import begin_start, hold, is_held, set_aside, sweep
from ppctl.runs.rundir import RunDir


def make(root: Path, run_id: str | None = None, name: str = "job", config: RunConfig | None = None) -> RunDir:
    return RunDir.create(root, name, lambda draft: draft.write_config(config or RunConfig()), run_id)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path)


def test_two_launches_in_the_same_second_make_two_directories(tmp_path: Path) -> None:
    assert len({make(tmp_path).path for _ in range(30)}) == 30


def test_launches_at_the_same_moment_with_the_same_id_make_directories_of_their_own(tmp_path: Path) -> None:
    made: list[RunDir] = []
    threads = [threading.Thread(target=lambda: made.append(make(tmp_path, "4711.0"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.id for run in made) == ["4711.0", *(f"4711.0-{n}" for n in range(2, 7))]


def test_a_directory_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    seen: list[list[RunDir]] = []

    def fill(draft: RunDir) -> None:
        draft.write_config(RunConfig())
        seen.append(list_runs(tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunDir.create(tmp_path, "job", fill)
    assert seen == [[]]
    assert list((tmp_path / "job").iterdir()) == [], "and leaves nothing behind"


def test_a_place_that_cannot_be_written_is_told_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file where a directory belongs")
    with pytest.raises(ConfigError, match="PP-E610: the run directory cannot be written: Not a directory"):
        make(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    write_atomically(status, "old")
    with files_of_at_most(2), pytest.raises(OSError, match="File too large"):
        write_atomically(status, "new")
    assert status.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    with pytest.raises(OSError, match="No space left"):
        append(Path("/dev/full"), "line\n")


def test_a_draft_of_a_process_with_our_number_on_another_host_is_not_ours(tmp_path: Path) -> None:
    theirs = tmp_path / f".status.json.{os.getpid()}.tmp"
    theirs.write_text("half of the")
    for private in (False, True):
        write_atomically(tmp_path / "status.json", "ours", private=private)
        assert theirs.read_text() == "half of the" and (tmp_path / "status.json").read_text() == "ours"


def test_the_config_comes_back_as_it_was_written(tmp_path: Path) -> None:
    config = RunConfig()
    config.optim.lr = 1e-5
    config.parallel.pipeline_model_parallel_layout = "Et*3|(tt|)*29,m|L"
    config.launch.env = {"NCCL_DEBUG": "INFO", "ANSWER": "042"}
    config.log.name = "yes"
    assert to_mapping(make(tmp_path, config=config).read_config()) == to_mapping(config)


def test_a_directory_that_lost_its_config_says_so(run: RunDir) -> None:
    (run.path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"PP-E611: .* is not a complete run directory: config.yaml"):
        run.read_config()


def test_metrics_are_one_valid_line_a_step_and_numbers_that_are_none_become_null(run: RunDir) -> None:
    run.add_metrics({"step": 0, "loss": 5.5, "mfu": None})
    run.add_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == run.metrics()
    assert run.metrics()[1] == {"step": 1, "loss": None, "grad_norm": None}


def test_metrics_cut_short_by_a_crash_are_forgotten_with_the_steps_that_are_done_again(run: RunDir) -> None:
    for step in range(5):
        run.add_metrics({"step": step})
    append(run.path / "metrics.jsonl", '{"step": 5, "lo')
    assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3, 4]
    run.drop_metrics_from(3)
    run.add_metrics({"step": 3})
    assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3]


def test_of_metrics_only_the_end_is_read_to_drop_steps(run: RunDir) -> None:
    """A terabyte before it, of which the disk has nothing."""
    run.add_metrics({"step": 0})
    with open(run.metrics_path, "r+b") as file:
        file.truncate(2**40)
    append(run.metrics_path, "\n")
    for step in range(1, 30_000):
        run.add_metrics({"step": step})
    run.drop_metrics_from(3)
    assert [record["step"] for record in run.metrics_file(last=5).read()] == [1, 2]


def test_metrics_of_lines_that_are_none_are_read_to_a_thousandth_of_them(run: RunDir) -> None:
    with open(run.metrics_path, "wb") as file:
        file.write(b"\n" * 200_000_000)
    append(run.metrics_path, '{"step": 7}\n')
    began = time.process_time()
    assert run.metrics() == [] and run.metrics_file(last=1).read() == []
    run.drop_metrics_from(3)
    assert time.process_time() - began < 2


def test_the_status_says_when_and_only_what_is_a_state(run: RunDir) -> None:
    assert run.status() == {"state": "starting"}
    run.write_status("stopped", step=7)
    status = run.status()
    assert (status["state"], status["step"]) == ("stopped", 7)
    assert time.time() - status["time"] < 60
    with pytest.raises(ValueError, match="'done' is not one of queued"):
        run.write_status("done")


def test_readers_never_meet_half_of_a_status(run: RunDir) -> None:
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            run.write_status("running", message="x" * 20000)

    writer = threading.Thread(target=write)
    run.write_status("running")
    writer.start()
    read = [json.loads((run.path / "status.json").read_text())["state"] for _ in range(300)]
    over.set()
    writer.join()
    assert set(read) == {"running"}


def test_errors_come_earliest_first_and_unreadable_ones_are_left_out(run: RunDir) -> None:
    run.write_error(RankFailure(2, time=20.0))
    run.write_error(RankFailure(11, time=10.0))
    (run.path / "errors" / "rank-0003.json").write_text("{")
    assert [error.rank for error in run.errors()] == [11, 2]
    assert (run.path / "errors" / "rank-0011.json").exists()


@pytest.mark.parametrize("odd", ["\0", "\udce8", "\x1b[2J"])
def test_a_failure_of_any_text_is_read_back(run: RunDir, odd: str) -> None:
    """What a user's exception says: a byte of a file, a name that is not in UTF-8."""
    text = f"bad byte {odd} in\n\tthe record of \U0001f4be"
    run.write_error(RankFailure(3, text, place=text, remedy=text, others=(text,), traceback=text))
    run.write_status("failed", message=text)
    (failure,) = run.errors()
    shown = text.replace(odd, visible(odd))
    assert (failure.message, failure.place, failure.remedy, failure.traceback) == (shown,) * 4
    assert failure.others == (shown,) and run.status()["message"] == shown and odd not in shown


def test_the_life_that_has_ended_is_kept_under_numbers(run: RunDir) -> None:
    for life in (1, 2):
        (run.path / "plan.json").write_text(f'"plan of life {life}"\n')
        run.write_error(RankFailure(0, time=float(life)))
        run.write_result({"state": "stopped"})
        set_aside(run)
        assert run.errors() == []
        assert run.result() == {}
        assert (run.path / f"plan-{life}.json").read_text() == f'"plan of life {life}"\n'
        assert (run.path / f"errors-{life}").is_dir()
    assert (run.path / "plan.json").exists(), "it is replaced, never missing"


def test_a_requeued_life_and_a_resumed_one_keep_their_errors_apart(run: RunDir) -> None:
    for number, end in enumerate(
        (lambda: begin_start(run, "7.1"), lambda: set_aside(run), lambda: begin_start(run, "8.0")), 1
    ):
        run.write_error(RankFailure(number))
        end()
        assert (run.path / f"errors-{number}" / f"rank-{number:04d}.json").exists()
        assert (run.path / "errors").is_dir(), "flight records go there, too"


def test_the_latest_checkpoint_is_the_one_that_latest_names(run: RunDir) -> None:
    assert last_checkpoint(run) is None
    for name in ("step-4", "step-12", "step-8", "step-16.tmp", "step-x"):
        write(run.checkpoints / name, name)
    assert last_checkpoint(run) == run.checkpoints / "step-12", "a crash came before the first `latest`"
    (run.checkpoints / "latest").write_text("step-4\n")
    assert last_checkpoint(run) == run.checkpoints / "step-4"


@pytest.mark.parametrize("text", ["step-99\n", "", "../../..", "step-4.tmp", "\0{"])
def test_a_latest_that_names_nothing_does_not_hide_the_checkpoints(run: RunDir, text: str) -> None:
    write(run.checkpoints / "step-4", "4")
    (run.checkpoints / "latest").write_text(text)
    assert last_checkpoint(run) == run.checkpoints / "step-4"


@pytest.mark.parametrize("name", ["config.yaml", "plan.json"])
@pytest.mark.parametrize("data", [b"", b"\0{{{: [", b"[]", b"{", b"\xff\xfe", b"3", None])
def test_a_damaged_run_directory_is_an_error_that_names_the_file(run: RunDir, name: str, data: bytes | None) -> None:
    (run.path / name).unlink(missing_ok=True)
    if data is not None:
        (run.path / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        run.read_config() if name == "config.yaml" else run.read_plan()
    (problem,) = caught.value.problems
    assert problem.code == "PP-E611"
    assert f"{run.path} is not a complete run directory: {name}" in problem.message


def test_a_config_with_wrong_values_is_refused_at_its_lines(run: RunDir) -> None:
    file = run.path / "config.yaml"
    text = file.read_text().replace("  steps: 100\n", "  steps: x\n")
    file.write_text(text)
    line = text.splitlines().index("  steps: x") + 1
    with pytest.raises(ConfigError) as caught:
        run.read_config()
    (problem,) = caught.value.problems
    assert (problem.place, problem.remedy) == (f"{file}: train.steps", f"sed -n {line - 1},{line + 2}p {file}")


def test_metrics_that_are_no_records_are_left_out(run: RunDir) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'\xff\n5\nnull\n{"a": 1}\n{"step": "x"}\n{"step": 7}\n')
    assert run.metrics() == [{"step": 7}]


def test_on_a_full_disk_no_half_line_stays(run: RunDir) -> None:
    run.add_metrics({"step": 0})
    before = (run.path / "metrics.jsonl").read_bytes()
    with files_of_at_most(len(before) + 20), pytest.raises(OSError, match=r"metrics\.jsonl"):
        run.add_metrics({"step": 1, "text": "x" * 100})
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_what_killed_writers_left_is_swept(run: RunDir) -> None:
    write(run.checkpoints / "step-4", "4")
    (run.checkpoints / "step-8.tmp").mkdir()
    for name in (
        ".status.json.7.tmp",
        "errors/.rank-0000.json.7.tmp",
        "checkpoints/step-8.tmp/x",
        "errors/rank-0001.json",
    ):
        (run.path / name).write_text("{")
    sweep(run)
    assert [path.name for path in run.path.rglob("*.tmp")] == []
    assert mark_of(last_checkpoint(run)) == "4" and (run.path / "errors" / "rank-0001.json").exists()


HOLD = """
import sys, pathlib
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir
with hold(RunDir(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_holds_a_run_and_its_death_lets_go(run: RunDir) -> None:
    assert not is_held(run)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert is_held(run)
    with pytest.raises(ConfigError, match=r"PP-E613: run .* is still going on"), hold(run):
        pass
    holder.kill()
    holder.communicate()
    with hold(run):
        assert is_held(run)


@pytest.mark.parametrize(
    ("state", "silent", "free"), [("running", 5, False), ("running", 90, True), ("failed", 5, True)]
)
@pytest.mark.parametrize("machine", ["elsewhere", None])
def test_a_run_of_another_host_is_going_on_until_it_is_quiet(
    run: RunDir, state: str, silent: int, free: bool, machine: str | None
) -> None:
    """Over NFS no lock tells, and a job of SLURM's has no launcher that holds one."""
    run.write_status(state)
    if machine is not None:
        (run.path / "holder.json").write_text(json.dumps({"machine": machine, "boot": "b", "pid": 1, "started": 2}))
    for path in (*run.path.rglob("*"), run.path):
        os.utime(path, (time.time() - silent,) * 2)
    if free:
        with hold(run, strictly=True):
            return
    with pytest.raises(
        ConfigError, match=r"PP-E613: run .* is still going on, on (elsewhere|another host): it wrote 5 s"
    ):
        hold(run, strictly=True).__enter__()
    with hold(run):
        pass  # a restart: who starts it knows that the ranks before are gone


def test_looking_at_a_run_does_not_keep_a_launcher_from_it(run: RunDir) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_held(run)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(50):
            with hold(run):
                pass
    finally:
        over.set()
        looker.join()

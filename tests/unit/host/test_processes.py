"""Which process it was, and whether it still lives: also when another one has got its number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.host import processes
from ppctl.runs.rundir import RunDir

HOLDING = """
import sys, time
from pathlib import Path
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir
with hold(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_this_process_is_not_gone() -> None:
    own = processes.identity()
    assert not processes.is_gone(own)
    assert own == processes.identity()


def test_a_name_that_is_cut_within_a_letter_hides_no_process() -> None:
    comm, own = Path("/proc/self/comm"), processes.identity()
    name = comm.read_bytes()
    try:
        comm.write_bytes(b") " + "учить".encode() * 2)  # 15 bytes of it stay
        assert comm.read_bytes() == b") \xd1\x83\xd1\x87\xd0\xb8\xd1\x82\xd1\x8c\xd1\x83\xd1\n"
        assert processes.identity() == own
    finally:
        comm.write_bytes(name.rstrip())


@pytest.mark.parametrize(
    ("other", "gone"),
    [({"started": 1}, True), ({"machine": "elsewhere", "started": 1}, False), ({"boot": "later", "started": 1}, False)],
    ids=["its number is another's now", "on another machine", "before the machine went down"],
)
def test_who_is_gone_is_told_where_it_can_be_known(other: dict[str, object], gone: bool) -> None:
    assert processes.is_gone(processes.identity() | other) is gone


def test_nobody_is_gone_whom_nobody_knows() -> None:
    assert not processes.is_gone({})


def test_a_run_whose_launcher_was_killed_is_lost_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path, "job", lambda draft: (draft.write_config(RunConfig()), draft.add_command("ppctl"))[0])
    run.write_status("running")
    with subprocess.Popen([sys.executable, "-c", HOLDING, run.path], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"held\n"
        assert told(run, capsys)["state"] == "running"
        launcher.kill()
        launcher.wait()
    assert told(run, capsys)["state"] == "lost"
    assert f"its process ({launcher.pid} on " in told(run, capsys)["message"]


def told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["status", str(run.path), "--json"]) == 0
    answer: dict[str, str] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(("said", "ranks"), [("2", 2), ("0", 1), ("-3", 1), ("many", 1), ("", 1)])
def test_a_rank_has_its_share_of_the_machine_whatever_its_environment_says(
    said: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cores, memory = processes.own_share()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert processes.own_share() == (max(1, cores // ranks), memory // ranks)

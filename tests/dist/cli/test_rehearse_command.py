"""`ppctl rehearse` as a person runs it: what it prints and refuses, and its exit codes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import TINY, ppctl
from frozen import fields, hold

from ppctl.cli.main import main
from ppctl.cli.rehearse import _planned_for_gpus, _rehearse

TWO = ("+recipe=quickstart", *(each for each in TINY if not each.startswith("launch.device")), "pp=2", "vpp=1")
KEPT = "ranks[].measured.kept_bytes_per_microbatch"


@pytest.fixture(scope="module")
def rehearsal():
    composed, plan, _ = _planned_for_gpus([*TWO, "launch.device_memory=80GiB"], [])
    return _rehearse(composed.config, plan, None)


def test_state_is_as_planned_and_both_ranks_are_rehearsed(rehearsal):
    assert [each.rank for each in rehearsal.ranks] == [0, 1]
    for each in rehearsal.ranks:
        cost = rehearsal.cost_of(each.rank)
        assert (each.weight_bytes, each.gradient_bytes, each.optimizer_bytes) == (
            cost.weight_bytes,
            cost.gradient_bytes,
            cost.optimizer_bytes,
        )
    assert rehearsal.microbatches == (4, 8)
    sent = [(part.kind, part.count) for part in rehearsal.ranks[0].traffic if part.during == "message"]
    assert sent == [("receive", 8), ("send", 8)]


def test_a_dense_model_waits_in_no_forward_or_backward(rehearsal):
    waits = [wait for each in rehearsal.ranks for wait in each.host_waits]
    assert waits
    for wait in waits:
        assert wait.during == "step"
        lines = (Path(__file__).parents[3] / wait.file).read_text().splitlines()
        assert 0 < wait.line <= len(lines), wait


def test_one_rank_in_json_that_does_not_fit(tmp_path):
    done = ppctl("rehearse", *TWO, "--json", "--rank", "1", "launch.device_memory=1MiB", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [1]
    assert found["limit_bytes"] == 2**20
    assert [problem["code"] for problem in found["problems"]] == ["PP-E801"]
    assert [row["pp_rank"] for row in found["pp_ranks"]] == [1]
    assert "rehearsing 1 of 2 ranks" in done.stderr
    assert [*tmp_path.iterdir()] == []  # no run directory
    hold("rehearse --json", fields(found, "ranks[].planned.kept_bytes_per_microbatch", KEPT))


SLOW = """
import sys
if 'ppctl.rehearsal.rank' in sys.orig_argv:
    import os, pathlib, time
    pathlib.Path(os.environ['STARTED'], str(os.getpid())).touch()
    time.sleep(600)
"""
"""Makes a child that rehearses stand still, and tell that it is there."""


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_that_are_rehearsed(tmp_path, monkeypatch, told):
    started = tmp_path / "started"
    started.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STARTED", str(started))
    command = subprocess.Popen(
        [sys.executable, "-m", "ppctl", "rehearse", *TWO], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not (children := [int(path.name) for path in started.iterdir()]):
        assert command.poll() is None, command.stderr.read()
        time.sleep(0.05)
    assert set(children) <= set(children_of(command.pid))
    children = children_of(command.pid)
    command.send_signal(told)
    _, error = command.communicate(timeout=100)
    assert command.returncode == 128 + told, error
    assert "Traceback" not in error
    for child in children:
        assert not Path(f"/proc/{child}").exists(), error


def children_of(parent):
    """The process ids that /proc names as its children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields_of_one = path.read_text().rpartition(")")[2].split()
        except OSError:  # it is gone
            continue
        if int(fields_of_one[1]) == parent:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("--rank", "2"), "the ranks are 0 to 1"),
        (("--rank", "-1"), "the ranks are 0 to 1"),
        (("parallel.enable_autocast=true", "parallel.autocast_dtype=bfloat16"), "autocast"),
        (("parallel.variable_seq_lengths=true",), "variable_seq_lengths"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(capsys, typed, message):
    assert main(["rehearse", *TWO, *typed]) == 2
    out, err = capsys.readouterr()
    assert "PP-E128" in err
    assert message in err
    assert out == ""


def test_help_names_the_command(capsys):
    assert main(["--help"]) == 0
    assert "\n  rehearse " in capsys.readouterr().out
    assert main(["rehearse", "--help"]) == 0
    assert "--all-kinds" in capsys.readouterr().out


def test_a_broken_rank_ends_the_command_with_its_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'ppctl.rehearsal.rank' in sys.orig_argv:\n"
        "    import ppctl.model.rotary, ppctl.train.session as session\n"
        "    def broken(*a, **k): raise ValueError('this stage is broken')\n"
        "    session.build_stage = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["rehearse", *TWO, "--rank", "0"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "PP-E780" in err
    assert "the rehearsal of rank 0 failed: " in err
    assert "ValueError: this stage is broken" in err

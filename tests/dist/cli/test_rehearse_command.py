"""`ppctl rehearse` as a person runs it: what it prints and refuses, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from command import TINY, ppctl
from frozen import fields, hold

from ppctl.cli.main import main
from ppctl.cli.rehearse import _failure, _planned_for_gpus, _rehearse
from ppctl.config.argv import normalise
from ppctl.errors import ConfigError

TWO = ("+recipe=quickstart", *(each for each in TINY if not each.startswith("launch.device")), "pp=2", "vpp=1")
KEPT = "ranks[].measured.kept_bytes_per_microbatch"


@pytest.fixture(scope="module")
def rehearsal():
    composed, plan, _ = _planned_for_gpus(normalise([*TWO, "launch.device_memory=80GiB"]))
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
    assert "rehearsing 1 of 2 ranks" in done.stderr and "rank 1 starts" in done.stderr
    assert [*tmp_path.iterdir()] == []  # no run directory
    hold("rehearse --json", fields(found, "ranks[].planned.kept_bytes_per_microbatch", KEPT))


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


def test_all_problems_are_reported_before_a_rank_runs(capsys):
    typed = ("--rank", "2", "--page", "nowhere/step.html", "parallel.variable_seq_lengths=true", "train.stepz=1")
    assert main(["rehearse", *TWO, *typed]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for part in ("the ranks are 0 to 1", "there is no such directory", "variable_seq_lengths", "train.stepz"):
        assert part in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"])
def test_a_signal_to_the_command_ends_its_ranks(tmp_path, number, code):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'ppctl.rehearsal.rank' in sys.orig_argv:\n"
        "    open(os.environ['STARTED'], 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "STARTED": str(fifo), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "ppctl", "rehearse", *TWO, "--rank", "0"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job's children ignore it
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heed
    ) as process:
        rank = int(fifo.read_text())  # opened once the rank has
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert not [*tmp_path.glob("ppctl-*")]


def test_a_failures_first_line_is_the_error_and_not_its_remedy():
    error = "[rank3]:   File x\n[rank3]: ppctl.errors.ConfigError: PP-E772: no such product\n[rank3]:   try: a=b\n"
    (problem,) = _failure(3, "", error).problems
    assert problem.code == "PP-E780"
    assert problem.message == "the rehearsal of rank 3 failed: ppctl.errors.ConfigError: PP-E772: no such product"


def test_what_a_rank_finds_wrong_with_the_config_keeps_its_code_and_remedy(capsys):
    typed = ("rehearse", *TWO, "model.attention_backend=flash", "parallel.bf16=false", "--rank", "0")
    assert main([*typed]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "PP-E771" in error and "PP-E780" not in error and "Traceback" not in error and "try: " in error


def test_help_names_the_command(capsys):
    assert main(["--help"]) == 0
    assert "\n  rehearse " in capsys.readouterr().out
    assert main(["rehearse", "--help"]) == 0
    assert "--all-kinds" in capsys.readouterr().out


def test_a_broken_rank_ends_the_command_with_its_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'ppctl.rehearsal.rank' in sys.orig_argv:\n"
        "    import ppctl.model.rotary, ppctl.train.rank_model as rank_model\n"
        "    def broken(*a, **k): raise ValueError('this stage is broken')\n"
        "    rank_model.build_stage = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["rehearse", *TWO, "--rank", "0"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "PP-E780" in err
    assert "the rehearsal of rank 0 failed: " in err
    assert "ValueError: this stage is broken" in err

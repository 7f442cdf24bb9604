"""`ppctl runs`: what there is, newest first."""

import json
import os
import sys
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.cli.runs import program
from ppctl.config.schema import OptimConfig, RunConfig
from ppctl.records.rank_records import RankFailure
from ppctl.runs.rundir import RunDir


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunDir]:
    monkeypatch.chdir(tmp_path)
    made = {}
    for age, (run_id, state, losses) in enumerate(
        [("old", "finished", [5.5, 4.25]), ("dead", "running", [5.5]), ("alive", "running", []), ("new", "failed", [])]
    ):

        def fill(draft: RunDir) -> None:
            draft.write_config(RunConfig(optim=OptimConfig(min_lr=3e-5)))
            draft.add_command("ppctl train")

        run = RunDir.create(Path("runs"), "job", fill, run_id)
        run.write_status(state, message="error PP-E701: rank 0 failed" if state == "failed" else "")
        for step, loss in enumerate(losses, 1):
            run.add_metrics({"step": step, "loss": loss, "tokens": 2048, "tokens_per_s": 1024.0, "step_time_s": 2.0})
        os.utime(run.path / "config.yaml", (1000.0 + age, 1000.0 + age))
        made[run_id] = run
    for path in [made["dead"].path, *made["dead"].path.rglob("*")]:
        os.utime(path, (2000.0, 2000.0))
    os.utime(made["dead"].path / "config.yaml", (1001.0, 1001.0))
    return made


@pytest.mark.usefixtures("runs")
def test_runs_are_listed_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["id", "name", "state", "step", "loss", "when"]
    assert [row[:4] for row in rows[1:]] == [
        ["new", "job", "failed", "0"],
        ["alive", "job", "running", "0"],
        ["dead", "job", "lost", "1"],
        ["old", "job", "finished", "2"],
    ]
    assert rows[4][4] == "4.2500"


@pytest.mark.usefixtures("runs")
def test_on_a_narrow_terminal_the_times_get_shorter_and_long_values_stand_below(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(optim=OptimConfig(lr=1e-3, min_lr=3e-5))
    config.checkpoint.resume = "/".join(["", *["directory"] * 9])
    runs["new"].write_config(config)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    seen = {}
    for columns in (60, 54, 50):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["runs"]) == 0
        seen[columns] = capsys.readouterr().out.splitlines()
        assert max(map(len, seen[columns])) <= columns
    assert [max(map(len, lines)) for lines in seen.values()] == [59, 53, 48]
    assert [" lr=0.0003" in line for line in seen[60][1:]] == [False, True, True, True]
    assert "differs" not in seen[54][0], "no room"
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", "--compare", "old", "new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["key", "A", "B"] and lines[4].split() == ["optim.lr", "0.0003", "0.001"]
    assert [line.split()[0] for line in lines[5:8]] == ["step", "loss", "tokens/s"]
    assert lines[8:11] == ["checkpoint.resume", "  A  null", f"  B  {config.checkpoint.resume}"]


def test_as_json(runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == ["new", "alive", "dead", "old"]
    assert (found[3]["step"], found[3]["loss"], found[3]["path"]) == (2, 4.25, str(runs["old"].path))


@pytest.mark.usefixtures("runs")
def test_one_is_shown_the_newest_unless_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show"]) == 0
    out = capsys.readouterr().out
    assert out.split()[:2] == ["id", "new"]
    assert ["message", "error", "PP-E701:"] in [line.split()[:3] for line in out.splitlines()]
    assert main(["runs", "show", "ol", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize(
    ("typed", "code"),
    [(["show", "nothing"], "PP-E611"), (["list", "old"], "PP-E105"), (["--dir", "x", "show"], "PP-E611")],
)
@pytest.mark.usefixtures("runs")
def test_mistakes_are_usage_errors(capsys: pytest.CaptureFixture[str], typed: list[str], code: str) -> None:
    assert main(["runs", *typed]) == 2
    assert code in capsys.readouterr().err


def test_no_runs_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs under runs\n"


@pytest.mark.parametrize(
    ("run", "says", "follows"),
    [
        (
            "old",
            ["finished, step 2 of 100\n", "loss 4.2500, 1,024 tokens/s\n"],
            "{program} resume {path} steps=200 optim.lr_decay_steps=100",
        ),
        ("dead", ["lost, step 1 of 100\n", "loss 5.5000, 1,024 tokens/s\n"], "ppctl train"),
        ("alive", ["running, step 0 of 100\n"], "{program} logs {path} -f"),
        ("new", ["failed, step 0 of 100\n"], "ppctl train"),
    ],
)
def test_the_status_has_loss_speed_total_and_what_to_type_next(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str], run: str, says: list[str], follows: str
) -> None:
    assert main(["status", run]) == 0
    out = capsys.readouterr().out
    assert [part for part in says if part not in out] == []
    assert out.endswith(f"\nnext: {follows.format(program=program(), path=runs[run].path)}\n")


@pytest.mark.parametrize(("beat", "told"), [(0, False), (1, True)])
def test_heartbeats_that_are_older_than_the_last_step_of_a_lost_run_are_not_told(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str], beat: int, told: bool
) -> None:
    row = {"version": 1, "rank": 0, "state": "starting", "step": beat, "index": -1, "since": 2000.0, "working": False}
    row |= {"stopped": False, "pid": 1, "exchanges": [0, 0, 0, 0]}
    runs["dead"].write_heartbeats("node", {"host": "node", "time": 2000.0, "ranks": [row]})
    os.utime(runs["dead"].path / "heartbeats" / "node.json", (2000.0, 2000.0))
    assert main(["status", "dead"]) == 0
    out = capsys.readouterr().out
    assert "lost, step 1 of 100\n" in out
    assert ("waits for" in out) is told


def test_a_run_that_goes_on_has_a_time_that_is_left(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"step": 40, "loss": 3.0, "tokens": 2048, "tokens_per_s": 1.0, "step_time_s": 2.0}
    runs["alive"].add_metrics(record)
    assert main(["status", "alive"]) == 0
    assert "loss 3.0000, 1,024 tokens/s, ETA 2:00\n" in capsys.readouterr().out, "60 steps of 2 s"


@pytest.mark.parametrize(("state", "said"), [("interrupted", ["PP-E732"]), ("failed", ["PP-E711", "PP-E732"])])
def test_connections_that_broke_because_ranks_were_ended_are_no_errors_of_a_run(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str], state: str, said: list[str]
) -> None:
    for rank, code in enumerate(("PP-E711", "PP-E732")):
        runs["alive"].write_error(RankFailure(rank, f"{code}: so", code=code))
    runs["alive"].write_status(state)
    assert main(["status", "alive", "--json"]) == 0
    assert [error["message"][:7] for error in json.loads(capsys.readouterr().out)["errors"]] == said


def test_two_runs_are_compared_by_keys_losses_and_speed(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(optim=OptimConfig(min_lr=3e-5))
    config.optim.lr = 1e-3
    runs["new"].write_config(config)
    for step in range(1, 31):
        runs["new"].add_metrics({"step": step, "loss": 5.5, "tokens_per_s": 512.0})
    assert main(["runs", "--compare", "old", "new"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [["A", "old"], ["B", "new"], [], ["key", "A", "B"], ["optim.lr", "0.0003", "0.001"]]
    assert lines[5:8] == [["step", "2", "30"], ["loss", "4.2500", "5.5000"], ["tokens/s", "1,024", "512"]]
    assert main(["runs", "--compare", "old", "new", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["keys"], found["done"]) == ({"optim.lr": [0.0003, 0.001]}, [2, 30])
    assert [step["loss"] for step in found["steps"]] == [[5.5, 5.5], [4.25, 5.5]]
    assert main(["runs", "--compare", "old", "nothing"]) == 2
    assert "PP-E611" in capsys.readouterr().err


@pytest.mark.usefixtures("runs")
def test_a_comparison_of_runs_without_steps_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--compare", "alive", "new"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["no", "key", "differs"] in lines and ["loss", "-", "-"] in lines

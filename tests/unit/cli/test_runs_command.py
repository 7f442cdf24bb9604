"""`ppctl runs`: what there is, newest first."""

import json
import os
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.rundir import RunDir


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunDir]:
    monkeypatch.chdir(tmp_path)
    made = {}
    for age, (run_id, state, losses) in enumerate(
        [("old", "finished", [5.5, 4.25]), ("dead", "running", [5.5]), ("alive", "running", []), ("new", "failed", [])]
    ):

        def fill(draft: RunDir) -> None:
            draft.write_config(RunConfig())
            draft.add_command("ppctl train")

        run = RunDir.create(Path("runs"), "job", fill, run_id)
        run.write_status(state, message="error PP-E701: rank 0 failed" if state == "failed" else "")
        for step, loss in enumerate(losses, 1):
            run.add_metrics({"step": step, "loss": loss})
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


def test_as_json(runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == ["new", "alive", "dead", "old"]
    assert (found[3]["step"], found[3]["loss"], found[3]["path"]) == (2, 4.25, str(runs["old"].path))


@pytest.mark.usefixtures("runs")
def test_one_is_shown_the_newest_unless_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show"]) == 0
    out = capsys.readouterr().out
    assert "id          new\n" in out and "message     error PP-E701" in out
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

"""`ppctl trace` on files that are damaged, of another step or of another plan: one problem, never a traceback."""

import json

import pytest
from helpers.unit_plan import plan

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.runs.rundir import RunDir

RANK, SECOND = ([0, 5, 6, 7, [[index, 1, 2]]] for index in (0, 1))


@pytest.fixture
def run(tmp_path):
    def fill(draft):
        draft.write_plan(plan(pp=2, gbs=4, mbs=1))
        draft.write_config(RunConfig())

    made = RunDir.create(tmp_path, "r", fill)
    made.write_measured_step(4, {"version": 1, "step": 4, "unit": "us", "ranks": [RANK, SECOND]})
    return made


def shown(run, capsys):
    code = main(["trace", str(run.path)])
    return code, capsys.readouterr()


def test_a_whole_file_is_shown(run, capsys):
    code, text = shown(run, capsys)
    assert code == 0
    assert "compute" in text.out


def test_of_several_pipelines_one_is_shown_by_its_own_ranks_and_the_others_are_told(run, capsys, tmp_path):
    run.write_plan(plan(pp=2, dp=2, gbs=8, mbs=1))
    (first, second) = ([0, 5, 6, 9, [[0, 1, 2]]], [0, 5, 6, 9, [[1, 3, 4]]])
    run.write_measured_step(4, {"version": 1, "step": 4, "unit": "us", "ranks": [first, first, second, second]})
    code, text = shown(run, capsys)
    assert code == 0
    lines = text.out.splitlines()
    assert "the pipeline of ranks 0, 2; another pipeline has the same stages: --pipeline RANK shows it" in lines
    assert "waiting for rank 0" in text.out and "pp_rank" not in text.out
    page = tmp_path / "step.json"
    assert main(["trace", str(run.path), "--pipeline", "3", "--timeline", str(page)]) == 0
    named = [event["args"].get("name") for event in json.loads(page.read_text())["traceEvents"] if event["ph"] == "M"]
    assert named[0].endswith("step 4 as it was measured, ranks 1, 3")
    assert "the pipeline of" not in shown_alone(tmp_path, capsys)


def shown_alone(tmp_path, capsys):
    """What is said where there is one pipeline."""

    def fill(draft):
        draft.write_plan(plan(pp=2, gbs=4, mbs=1))
        draft.write_config(RunConfig())

    alone = RunDir.create(tmp_path, "alone", fill)
    alone.write_measured_step(4, {"version": 1, "step": 4, "unit": "us", "ranks": [RANK, SECOND]})
    capsys.readouterr()
    return shown(alone, capsys)[1].out


def test_an_action_that_is_told_twice_waits_for_itself_and_is_shown(run, capsys):
    """The way back from the last action has an end."""
    (path,) = run.measured_steps().values()
    twice = [[0, 1, 2], [0, 3, 4]]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ranks": [[0, 5, 6, 7, twice], SECOND]}))
    assert shown(run, capsys)[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"step": 3}, {"step": None}, {"ranks": [RANK]}, {"ranks": [RANK] * 3}, {"ranks": 1},
        {"plan": "x"},
        {"ranks": [RANK, [0, 5, 6, 7, [[999, 1, 2]]]]}, {"ranks": [RANK, [0, 5, 6, 7, [[-1, 1, 2]]]]},
        {"ranks": [RANK, [0, 5, 6, float("inf"), []]]}, {"ranks": [RANK, ["0", 5, 6, 7, []]]},
        {"ranks": [RANK, [0, 5, 6, 7, 8]]}, {"ranks": [RANK, RANK]},
    ],
)  # fmt: skip
def test_a_file_that_no_run_wrote_is_refused(run, capsys, change):
    (path,) = run.measured_steps().values()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, text = shown(run, capsys)
    assert code == 2
    assert "PP-E643" in text.err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_refused(run, capsys, content):
    (path,) = run.measured_steps().values()
    path.write_bytes(content)
    assert shown(run, capsys)[0] == 2
    path.unlink()
    path.mkdir()
    (run.trace / "step-².json").touch()
    assert shown(run, capsys)[0] == 2


def test_a_step_is_shown_by_the_plan_of_its_own_start(run, capsys):
    before = (run.path / "plan.json").read_bytes()
    (run.path / "plan-1.json").write_bytes(before)
    run.write_plan(plan(pp=1, gbs=4, mbs=1))
    code, text = shown(run, capsys)
    assert code == 0
    assert "rank 1" in text.out
    (run.path / "plan-1.json").unlink()
    assert shown(run, capsys)[0] == 2


@pytest.mark.parametrize(
    ("trace", "steps", "said", "remedy"),
    [
        ("6:8", 10, "log.trace=6:8, but it has done 1 step", "resume {run}"),
        (None, 10, "was traced", "resume {run} log.trace=3:5"),
        (None, 2, "was traced", "resume {run} steps=4 log.trace=3:5"),
    ],
)
def test_a_run_without_a_traced_step_says_whether_it_only_has_to_go_on(tmp_path, capsys, trace, steps, said, remedy):
    def fill(draft):
        config = RunConfig()
        config.log.trace, config.train.steps = trace, steps
        draft.write_plan(plan(pp=2, gbs=4, mbs=1))
        draft.write_config(config)

    made = RunDir.create(tmp_path, "r", fill)
    made.write_status("stopped", step=1)
    code, text = shown(made, capsys)
    first, *_, last = text.err.splitlines()
    assert code == 2 and first.endswith(said) and last.endswith(remedy.format(run=made.path))

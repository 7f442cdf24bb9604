"""A schedule from a file: held against the run, proved, drawn; and a faulty one shown where it is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from remedies import mended, problems
from unit_plan import equation, plan, refusal

from ppctl.launch.planning import planned
from ppctl.plan.plan import Plan
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import to_slots

FINE = make_schedule("interleaved_1f1b", pp=3, vpp=2, num_microbatches=6)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        return str(path)

    return write


def test_the_file_gives_the_schedule_and_the_number_of_chunks(file) -> None:
    made = plan(pp=3, gbs=6, pipeline__pp_schedule_csv=file(to_slots(FINE)))
    computed = tuple(tuple(a for a in row if a.op in "FB") for row in made.schedule.actions)
    assert computed == FINE.actions
    assert (made.sizes.vpp, made.problems) == (2, ())
    assert "schedule.csv: 6 stages placed as a loop over pp 3" in equation(made, "schedule")
    assert "6 stages on 3 rows" in equation(made, "vpp")


def test_a_v_gives_its_ranks_the_stages_down_and_back_up(file) -> None:
    text = to_slots(make_schedule("zbv_zero_bubble", pp=2, vpp=2, num_microbatches=4))
    made = plan(pp=2, gbs=4, pipeline__pp_schedule_csv=file(text))
    assert [(stage.pp_rank, stage.vpp_rank) for stage in made.stages] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert made.schedule.split
    assert made.problems == ()
    assert [[s.stage for s in made.for_rank(rank).stages] for rank in (0, 1)] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (dict(pp=2, gbs=6), to_slots(FINE)),
        (dict(pp=3, gbs=7), to_slots(FINE)),
        (dict(pp=3, gbs=6, vpp=1), to_slots(FINE)),
        (dict(pp=3, gbs=6, layout="Et*4|t*4|L"), to_slots(FINE)),
        (dict(pp=1, gbs=1), "0F0,0SEND_F0,0B0\n"),
    ],
)
def test_a_file_for_another_run_is_refused(file, values: dict[str, object], text: str) -> None:
    assert refusal(**values, pipeline__pp_schedule_csv=file(text)) == ["PP-E216"]


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        ("pp=2 gbs=6", to_slots(FINE), "PP-E216"),
        ("pp=3 gbs=7", to_slots(FINE), "PP-E216"),
        ("pp=3 gbs=6 vpp=1", to_slots(FINE), "PP-E216"),
        ("pp=2 gbs=2", "(0F0;0B0)OVERLAP_F_B,0F1,0B1\n1F0,1B0,1F1,1B1\n", "PP-E318"),
        ("pp=2 gbs=2", "(0F0;0F1)OVERLAP_F_B,0B0,0B1\n1F0,1B0,1F1,1B1\n", "PP-E318"),
        ("pp=2 gbs=2", "0F0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "PP-E310"),
    ],
)
def test_the_remedies_of_a_file_work_when_they_are_typed(file, words: str, text: str, code: str) -> None:
    typed = [*words.split(), f"pipeline.pp_schedule_csv={file(text)}"]
    (problem,) = problems(typed)
    assert problem.code == code and problem.remedy
    for remedy in problem.remedy.splitlines():
        assert problems(mended(typed, problem, remedy.split())) == [], remedy


def test_a_file_that_is_not_there_is_refused() -> None:
    assert refusal(pp=2, pipeline__pp_schedule_csv="none.csv") == ["PP-E216"]


@pytest.mark.parametrize("row", ["999999999F0,1B0", "1F0,1B0,1F99999999999"])
def test_a_number_with_digits_too_many_is_an_error_and_no_endless_list(file, row: str) -> None:
    assert refusal(pp=2, gbs=1, pipeline__pp_schedule_csv=file(f"0F0,0B0\n{row}\n")) == ["PP-E310"]


def test_a_cell_that_is_no_action_is_named_by_row_and_column(file) -> None:
    assert refusal(pp=2, gbs=1, pipeline__pp_schedule_csv=file("0F0,0X0\n1F0,1B0,1F-1\n")) == ["PP-E302"] * 2


def mutated(seed: int) -> str:
    """The sound schedule with one action left out, doubled, swapped with its neighbour or moved to another rank."""
    chance = random.Random(seed)
    rows = [list(row) for row in FINE.actions]
    row = chance.choice(rows)
    at = chance.randrange(len(row) - 1)
    kind = chance.choice(("leave out", "double", "move", "backward first"))
    if kind == "leave out":
        del row[at]
    elif kind == "double":
        row.insert(chance.randrange(len(row)), row[at])
    elif kind == "move":
        other = chance.choice([r for r in rows if r is not row])
        other.insert(chance.randrange(len(other)), row.pop(at))
    else:
        backward = next(i for i, action in enumerate(row) if action.op == "B")
        row.insert(0, row.pop(backward))
    return "".join(",".join(map(str, r)) + "\n" for r in rows)


@pytest.mark.parametrize("seed", range(20))
def test_a_mutated_file_is_refused_with_the_rows_and_a_mark(file, seed: int) -> None:
    path = file(mutated(seed))
    made, problems = planned(["pp=3", "gbs=6", f"pipeline.pp_schedule_csv={path}"])[1:]
    assert made is not None
    assert problems
    for problem in problems:
        lines = problem.place.splitlines()
        assert sum("<-- here" in line for line in lines) >= 1
        assert sum(line.startswith("rank ") for line in lines) == 3
        assert f"pipeline.pp_schedule_csv = {path}" in lines[-1]


def test_overlapped_pairs_are_planned_and_trained(file) -> None:
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    words = ["pp=2", "gbs=3", f"pipeline.pp_schedule_csv={file(text)}"]
    _, made, problems = planned([*words, "launch.transport=channels"], for_training=True)
    assert problems == [] and made is not None
    assert [str(pair) for pair in made.schedule.pairs] == ["(0F2;0B0)OVERLAP_F_B"]
    _, plain, problems = planned([*words, "launch.transport=plain"], for_training=True)
    assert problems == [] and plain is not None
    assert plain.schedule.batched and not plain.schedule.pairs


@pytest.mark.parametrize(("last", "said"), [("0W0,0W1", False), ("0W1,0W0", True)])
def test_sums_in_another_order_than_the_microbatches_are_said_to_have_other_bits(file, last: str, said: bool) -> None:
    made = plan(pp=2, gbs=2, pipeline__pp_schedule_csv=file(f"0F0,0F1,0I0,0I1,{last}\n1F0,1B0,1F1,1B1\n"))
    found = [each.equation for each in made.derived if "bits are not promised" in each.equation]
    assert bool(found) == said
    assert not said or found[0].endswith("stage 0, for one, adds those of 0W1 before those of 0W0")


ZBV = to_slots(make_schedule("zbv_zero_bubble", pp=2, vpp=2, num_microbatches=4))


@pytest.mark.parametrize("named", [True, False])
def test_split_backwards_are_trained_but_not_of_compiled_stages(file, named: bool) -> None:
    how = "pipeline.pp_schedule=zbv_zero_bubble" if named else f"pipeline.pp_schedule_csv={file(ZBV)}"
    words = ["pp=2", "gbs=4", how]
    assert planned(words, for_training=True)[2] == []
    (problem,) = planned([*words, "train.compile=true"], for_training=True)[2]
    assert problem.code == "PP-E392"
    remedies = problem.remedy.splitlines()
    assert len(remedies) == 2
    for remedy in remedies:
        mended = dict(word.split("=") for word in [*words, "train.compile=true", *remedy.split()])
        assert planned([f"{key}={value}" for key, value in mended.items()], for_training=True)[2] == []


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "gpipe", "zbvzerobubble", "dualpipev", "zero_bubble"])
def test_a_dumped_schedule_reads_back_as_the_same_plan(tmp_path: Path, name: str) -> None:
    sizes = ["pp=2", f"vpp={1 if name == '1f1b' else 2}", "gbs=8"]
    words = [*sizes, f"pipeline.pp_schedule={name}", "--dump-schedule", "a.csv"]
    command = [sys.executable, "-m", "ppctl", "plan"]
    subprocess.run([*command, *words], cwd=tmp_path, check=True, capture_output=True)
    text = (tmp_path / "a.csv").read_text()
    assert len({row.count(",") for row in text.splitlines()}) == 1, "a column is a time slot"
    before = planned([*sizes, f"pipeline.pp_schedule={name}"])[1]
    after = planned([*sizes, f"pipeline.pp_schedule_csv={tmp_path / 'a.csv'}"])[1]
    assert before is not None and after is not None
    assert before.schedule.actions == after.schedule.actions
    assert before.schedule.capacities == after.schedule.capacities
    assert before.pp_ranks == after.pp_ranks


def test_a_plan_keeps_pairs_and_one_without_looks_as_before() -> None:
    """Pairs hide the exchange of experts: without one there are none."""
    dualpipev = ["pp=2", "vpp=2", "gbs=8", "pipeline.pp_schedule=dualpipev", "model.num_moe_experts=4"]
    dualpipev.append("launch.transport=channels")
    plans = [planned([*dualpipev, f"ep={ep}", f"dp={ep}"])[1] for ep in (2, 1)]
    for made, paired in zip(plans, (True, False), strict=True):
        assert made is not None
        data = json.loads(json.dumps(made.to_json()))
        assert bool(made.schedule.pairs) == ("pairs" in data["schedule"]) == paired
        read = Plan.from_json(data)
        assert (read.schedule, read.digest) == (made.schedule, made.digest)


def test_a_path_is_kept_absolute_so_that_a_run_can_be_resumed_from_anywhere(file, monkeypatch) -> None:
    path = Path(file(to_slots(FINE)))
    monkeypatch.chdir(path.parent)
    composed, _, problems = planned(["pp=3", "gbs=6", "pipeline.pp_schedule_csv=schedule.csv"])
    assert problems == []
    assert composed is not None and composed.config.pipeline.pp_schedule_csv == str(path.resolve())


def test_a_schedule_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppctl", "plan", "pp=2", "--dump-schedule", str(tmp_path / "no" / "a.csv")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error PP-E127" in done.stderr

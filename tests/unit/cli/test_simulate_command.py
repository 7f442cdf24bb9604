"""`ppctl simulate`: the figures of papers and closed forms from bare costs, its pictures, and how it refuses."""

from __future__ import annotations

import json
import runpy
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ppctl.cli import simulate_checks
from ppctl.cli.main import main
from ppctl.schedule.policies import POLICIES, make_schedule

ROOT = Path(__file__).parents[3]
PAPER = json.loads((ROOT / "tests" / "golden" / "zero_bubble_tables.json").read_text())["rows"]
SVG = "{http://www.w3.org/2000/svg}"


def simulated(capsys: Any, *words: Any) -> dict[str, Any]:
    assert main(["simulate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of_row(capsys: Any, row: dict[str, Any], *words: Any) -> dict[str, Any]:
    times = ("--tf", row["TF"], "--tb", row["TB"], "--tw", row["TW"], "--tcomm", row["Tcomm"])
    return simulated(capsys, *words, "--pp", row["p"], "--microbatches", row["m"], *times)


@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"{row['model']}-p{row['p']}-m{row['m']}")
def test_bubble_rates_are_the_papers(capsys: Any, row: dict[str, Any]) -> None:
    """Zero Bubble (arXiv 2401.10241), tables 3 to 6; interleaved there has a simpler model of messages."""
    bubble = row["bubble"]
    chunks = (row["cfg"]["layers"] + 2) // row["p"]
    assert of_row(capsys, row, "--schedule", "1f1b")["bubble_rate"] == pytest.approx(bubble["1F1B"], abs=1e-4)
    assert of_row(capsys, row, "--schedule", "zb_h1")["bubble_rate"] == pytest.approx(bubble["ZB-H1"], abs=1e-4)
    assert of_row(capsys, row, "--schedule", "zb_h2")["bubble_rate"] == pytest.approx(bubble["ZB-H2"], abs=1e-4)
    assert bubble["ZB-1p"] == bubble["ZB-H1"]
    interleaved = of_row(capsys, row, "--schedule", "interleaved_1f1b", "--vpp", chunks)
    assert interleaved["bubble_rate"] == pytest.approx(bubble["1F1B-I"], abs=0.004)


@pytest.mark.parametrize(("pp", "m"), list(product([1, 2, 3, 4, 8], [1, 2, 3, 7, 8, 24])))
def test_1f1b_takes_its_closed_form(capsys: Any, pp: int, m: int) -> None:
    figures = simulated(
        capsys, "--schedule", "1f1b", "--pp", pp, "--microbatches", m, "--tf", 3.5, "--tb", 4.25, "--tw", 1.75
    )
    assert figures["step_time_ms"] == pytest.approx((m + pp - 1) * 9.5, rel=1e-9)
    assert figures["in_flight"] == [min(pp - rank, m) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "rounds"), list(product([2, 3, 4], [2, 3], [1, 2, 4])))
def test_interleaving_takes_its_closed_form(capsys: Any, pp: int, vpp: int, rounds: int) -> None:
    m = pp * rounds
    sizes = ("--schedule", "interleaved_1f1b", "--pp", pp, "--vpp", vpp, "--microbatches", m)
    figures = simulated(capsys, *sizes, "--tf", 6, "--tb", 12)
    assert figures["step_time_ms"] == pytest.approx(18 * m + (pp - 1) * 18 / vpp, rel=1e-9)
    assert figures["in_flight"] == [min(2 * (pp - r - 1) + (vpp - 1) * pp + 1, m * vpp) for r in range(pp)]


@pytest.mark.parametrize(
    ("pp", "rounds", "times"), list(product([2, 3, 4, 8], [1, 2, 4], [(2, 2, 1), (3, 2, 2), (5, 7, 5)]))
)
def test_zb_h1_takes_its_closed_form(capsys: Any, pp: int, rounds: int, times: tuple[int, int, int]) -> None:
    m, (tf, tb, tw) = pp * rounds, times
    sizes = ("--schedule", "zb_h1", "--pp", pp, "--microbatches", m)
    figures = simulated(capsys, *sizes, "--tf", tf, "--tb", tb, "--tw", tw)
    bubble = (pp - 1) * (tf + tb - tw)
    assert figures["step_time_ms"] == pytest.approx(m * (tf + tb + tw) + bubble, rel=1e-9)
    assert figures["in_flight"] == [min(pp - rank, m) for rank in range(pp)]
    assert figures["in_flight_until_weight_gradient"] == [min(pp, m)] * pp


def test_it_says_the_same_in_words(capsys: Any) -> None:
    words = "--schedule 1f1b --pp 2 --microbatches 3 --tf 1 --tb 2"
    assert main(["simulate", *words.split()]) == 0
    text = capsys.readouterr().out
    assert "step time        12 ms" in text
    assert "bubble fraction  0.2500" in text
    assert "rank 1  stage 1 |" in text


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_it_draws(capsys: Any, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"step.{ending}"
    simulated(
        capsys,
        *("--schedule", "zbv_zero_bubble", "--pp", 2, "--microbatches", 4),
        *("--tf", 1, "--tb", 1, "--tw", 1, "--timeline", picture),
    )
    text = picture.read_text()
    if ending != "json":
        assert "zbv_zero_bubble, pp 2, 4 microbatches" in text
        return
    events = json.loads(text)["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    assert len(blocks) == 4 * 4 * 3
    assert {event["tid"] for event in blocks} == {0, 1}
    assert sum(event["dur"] for event in blocks) == pytest.approx(2 * 4 * 3 * 1000)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--schedule 1f1bb --pp 2 --microbatches 3 --tf 1 --tb 2", "there is no schedule '1f1bb'"),
        ("--schedule my.csv --tf 1 --tb 2", "PP-E216: the schedule file my.csv cannot be read"),
        ("--schedule 1f1b --tf 1 --tb 2", "--pp 4 --microbatches 8"),
        ("--compare --microbatches 4 --tf 1 --tb 2", "--pp 4"),
        ("--schedule 1f1b --pp 2 --microbatches 3 --tf -1 --tb nan", "--tf -1"),
        ("--schedule 1f1b --pp 2 --vpp 2 --microbatches 3 --tf 1 --tb 2", "one chunk per rank"),
        ("--schedule dualpipev --pp 2 --vpp 3 --microbatches 8 --tf 1 --tb 2", "--vpp 2"),
        ("--schedule 1f1b --pp 0 --microbatches 3 --tf 1 --tb 2", "--pp 0: it must be at least 1"),
        ("--schedule gpipe --pp 4096 --microbatches 99999 --tf 1 --tb 2", "a simulation holds at most"),
        ("--schedule 1f1b --pp 2 --microbatches 3 --tf 1 --tb 2 --timeline a.png", "a.html"),
        ("--schedule 1f1b --pp 2 --microbatches 3 --tf 1 --tb 2 --timeline a.svg", "a.html"),
        ("--compare --pp 2 --microbatches 3 --tf 1 --tb 2 --timeline a.html", "--schedule 1f1b"),
        ("--compare --pp 2 --microbatches 3 --tf 1 --tb 2 --extra-warmup 1", "--extra-warmup 0"),
        ("--compare --pp 2 --vpp 0 --microbatches 3 --tf 1 --tb 2", "--vpp 0: it must be at least 1"),
        ("--schedule gpipe --pp 2 --vpp -1 --microbatches 3 --tf 1 --tb 2", "--vpp -1: it must be at least 1"),
        ("--compare --pp 0 --microbatches 3 --tf 1 --tb 2", "--pp 0: it must be at least 1"),
        ("--compare --pp 512 --microbatches 999 --tf 1 --tb 2", "a simulation holds at most"),
        ("--schedule 1f1b --pp 2 --microbatches 3 --tf 1 --tb 2 --timeline /nowhere/a.html", "cannot be written"),
    ],
)
def test_it_refuses(capsys: Any, words: str, told: str) -> None:
    assert main(["simulate", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


@pytest.mark.parametrize(
    "words",
    [
        "--compare --pp 0 --microbatches 0 --vpp -1",
        "--compare --microbatches 8",
        "--schedule auto",
        "--compare --pp 2 --microbatches 8 --extra-warmup 1",
        "--compare --pp 2 --microbatches 8 --memory 2",
        "--compare --pp 2 --microbatches 8 --timeline step.html",
        "--compare --pp 32 --microbatches 999",
        "--compare --pp 999 --microbatches 99",
        "--schedule zb_h1 --pp 99999999 --microbatches 999",
        "--schedule dualpipev --pp 512 --microbatches 1024",
        "--schedule interleaved_1f1b --pp 4 --vpp 99999 --microbatches 4",
        "--schedule 1f1bb --pp 2 --microbatches 8",
        "--schedule zb_h1 --vpp 2 --pp 4 --microbatches 8",
        "--schedule gpipe --extra-warmup 1 --pp 4 --microbatches 8",
        "--schedule 1f1b --extra-warmup 9 --pp 4 --microbatches 8",
        "--schedule 1f1b --extra-warmup -1 --pp 4 --microbatches 8",
        "--schedule ScheduleZBVZeroBubble --vpp 1 --pp 4 --microbatches 8",
        "--schedule dualpipev --vpp 3 --pp 4 --microbatches 8",
        "--schedule dualpipev --pp 4 --microbatches 3",
        "--schedule v_half --vpp 1 --pp 4 --microbatches 8",
        "--schedule auto --memory 0.01 --pp 4 --microbatches 8",
        "--schedule auto --memory 0.01 --vpp 3 --pp 4 --microbatches 2",
        "--schedule auto --memory -1 --pp 4 --microbatches 8",
        "--schedule auto --pp 4 --microbatches 0",
        "--schedule auto --pp 32 --microbatches 4096",
    ],
)
def test_a_remedy_works_when_it_is_typed(
    capsys: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the command, with the first remedies of its other problems; `--schedule` in the place of `--compare`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate_checks, "MOST_ACTIONS", 400_000)  # millions take many seconds
    command = ["simulate", *words.split(), "--tf", "1", "--tb", "2", "--json"]
    assert main(command) == 2
    found: list[list[list[str]]] = [[]]
    for line in capsys.readouterr().err.splitlines():
        if line.startswith("error"):
            found.append([])
        elif line.startswith(("  try: ", "   or: ")):
            found[-1].append(line[7:].split())
    first, *more = found[1:]
    assert all((first, *more))
    rest = [word for remedies in more for word in remedies[0]]
    for remedy in first:
        kept = [word for word in command if word != "--compare" or "--schedule" not in remedy]
        assert main([*kept, *remedy, *rest]) == 0, remedy


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.trains])
def test_a_schedule_in_a_file_is_simulated_as_its_name_is(capsys: Any, name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    chunks = POLICIES[name].chunks
    file.write_text(make_schedule(name, pp=2, vpp=chunks, num_microbatches=6).to_csv())
    times = ("--tf", 3, "--tb", 4, "--tw", 2, "--tcomm", 0.5)
    named = simulated(capsys, "--schedule", name, "--pp", 2, "--microbatches", 6, *times)
    assert simulated(capsys, "--schedule", file, *times) == {**named, "schedule": "own.csv"}
    assert simulated(capsys, "--schedule", file, "--pp", 2, "--vpp", chunks, "--microbatches", 6, *times)


@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        ("0F0,0X0\n", "", "row 1 (pp_rank 0), column 2: '0X0' is not an action"),
        ("0F0,0B0\n1B0,1F0\n", "", "PP-E313: rank 1 has things before what they need: 1B0 before 1F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "", "PP-E317: the schedule hangs: rank 0 waits at 0B0, rank 1 waits"),
        ("0F0,SEND_F\n", "", "PP-E302"),
        ("0F0,0B0\n", "--pp 4 --vpp 2 --microbatches 3", "--pp 1"),
        ("0F0,0B0\n", "--extra-warmup 1", "--extra-warmup 0"),
        ("0F0,0B0\n", "--memory 2", "--schedule auto"),
        ("0F0,0B0\n", "--tw -1", "--tw -1: its weight gradient must be 0 to 1e+12 ms"),
        ("", "", "PP-E303: the schedule has no actions"),
    ],
)
def test_a_schedule_in_a_file_is_proved_first(capsys: Any, rows: str, words: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(rows)
    typed = ["simulate", "--schedule", str(tmp_path / "own.csv"), "--tf", "1", "--tb", "2", *words.split()]
    assert main(typed) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err


def test_all_schedules_that_fit_are_compared_with_1f1b(capsys: Any) -> None:
    sizes = ("--pp", 4, "--microbatches", 16, "--tf", 10, "--tb", 10, "--tw", 10)
    found = simulated(capsys, "--compare", *sizes)
    rows = {row["schedule"]: row for row in found["schedules"]}
    assert found["left_out"] == {}
    assert list(rows) == [name for name, policy in POLICIES.items() if policy.trains]
    for name, row in rows.items():
        alone = simulated(capsys, "--schedule", name, *sizes)
        assert {key: row[key] for key in ("step_time_ms", "bubble_fraction", "bubble_rate", "vpp")} == {
            key: alone[key] for key in ("step_time_ms", "bubble_fraction", "bubble_rate", "vpp")
        }
        assert row["step_of_1f1b"] == pytest.approx(row["step_time_ms"] / 570)
        assert row["activations_of_1f1b"] == max(alone["in_flight_until_weight_gradient"]) / row["vpp"] / 4
        edges = 6 if row["placement"] == "v" else 4 * row["vpp"] - 1
        assert row["messages"] == 2 * 16 * edges
    assert [rows[name]["activations_of_1f1b"] for name in ("1f1b", "zb_h1", "zb_h2", "v_half", "v_min", "gpipe")] == [
        1, 1, 7 / 4, 3 / 4, 2 / 4, 4,
    ]  # fmt: skip


def test_what_does_not_fit_is_left_out_of_the_comparison_with_its_reason(capsys: Any) -> None:
    words = "simulate --compare --pp 4 --microbatches 4 --tf 1 --tb 2"
    assert main(words.split()) == 0
    few = capsys.readouterr().out
    assert "without dualpipev: dualpipev needs 8 or more microbatches to fill a V of 8 stages, not 4" in few
    assert main([*words.split(), "--vpp", "3"]) == 0
    three = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in three if line.startswith(("gpipe", "inter", "1f1b", "v_half"))] == [
        ["interleaved_1f1b", "3"],
        ["gpipe", "3"],
        ["interleaved_zero_bubble", "3"],
    ]
    assert "without v_half: v_half runs two chunks per rank, down a V and back up, but vpp is 3" in three


def test_the_picture_of_all_schedules_is_what_its_script_draws() -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "schedules.py"))["svg"]()
    assert text == (ROOT / "docs" / "pictures" / "schedules.svg").read_text()
    root = ElementTree.fromstring(text)
    assert {
        (each.text or "").partition(",")[0] for each in root.iter(f"{SVG}text") if each.get("font-weight") == "600"
    } == {name for name, policy in POLICIES.items() if policy.trains}
    blocks = sum(path.get("d", "").count("M") for path in root.iter(f"{SVG}path") if path.get("fill-opacity"))
    schedules = [
        make_schedule(name, pp=4, vpp=policy.chunks, num_microbatches=8)
        for name, policy in POLICIES.items()
        if policy.trains
    ]
    assert blocks == sum(len(row) for schedule in schedules for row in schedule.actions)
    bars = [path for path in root.iter(f"{SVG}path") if not path.get("fill-opacity")]
    assert sum(path.get("d", "").count("M") for path in bars) == sum(len(schedule.pairs) for schedule in schedules)


@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize("row", PAPER[:3], ids=lambda row: f"{row['model']}-p{row['p']}-m{row['m']}")
def test_a_search_meets_the_papers_search(capsys: Any, row: dict[str, Any], memory: int) -> None:
    """ZB-1p and ZB-2p of the same tables, whose memory counts only part of an activation between I and W."""
    found = of_row(capsys, row, "--schedule", "auto", "--memory", memory)
    assert round(found["bubble_rate"], 4) <= row["bubble"][f"ZB-{memory}p"]
    limit = memory * min(row["p"], row["m"]) * found["vpp"]
    assert max(found["in_flight_until_weight_gradient"]) <= limit
    assert found["search"]["lower_bound_ms"] <= found["step_time_ms"] * (1 + 1e-9)
    assert found["search"]["memory"] == memory


def test_a_search_of_one_chunk_in_the_memory_of_1f1b_is_zb_h1(capsys: Any) -> None:
    words = ("--schedule", "auto", "--vpp", 1, "--memory", 1)
    assert of_row(capsys, PAPER[0], *words)["schedule"] == "zb_h1"


def test_a_search_prints_what_it_was_made_for(capsys: Any) -> None:
    words = "simulate --schedule auto --memory 0.5 --pp 3 --microbatches 4 --tf 1 --tb 1 --tw 1 --vpp 2"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "memory           0.5 x what 1F1B holds" in printed and "lower bound" in printed and "best named" in printed


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        ("--memory 0.1", "PP-E321", "--memory 0.25"),
        ("--memory 0", "PP-E128", "--memory 1"),
        ("--memory nan", "PP-E128", "--memory 1"),
        ("--extra-warmup 1", "PP-E128", "--extra-warmup 0"),
        ("--microbatches 40000", "PP-E128", "--microbatches 64"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(capsys: Any, words: str, code: str, remedy: str) -> None:
    before = ["simulate", "--schedule", "auto", "--pp", "4", "--tf", "1", "--tb", "1", "--microbatches", "8"]
    assert main([*before, *words.split()]) == 2
    refused = capsys.readouterr().err
    assert code in refused and f"try: {remedy}" in refused


def test_a_limit_without_a_search_is_refused(capsys: Any) -> None:
    assert (
        main(
            [
                "simulate",
                "--schedule",
                "1f1b",
                "--pp",
                "4",
                "--tf",
                "1",
                "--tb",
                "1",
                "--microbatches",
                "8",
                "--memory",
                "1",
            ]
        )
        == 2
    )
    assert "try: --schedule auto" in capsys.readouterr().err


def test_times_that_add_up_to_infinity_are_refused_by_name(capsys: Any) -> None:
    words = "simulate --schedule 1f1b --pp 2 --microbatches 4 --tb 1 --tf"
    assert main([*words.split(), "1e308"]) == 2
    assert "PP-E128: --tf 1e+308" in capsys.readouterr().err
    assert main([*words.split(), "1e12"]) == 0


def test_a_schedule_of_a_spreadsheet_begins_with_a_mark(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    file.write_bytes(b"\xef\xbb\xbf" + b"0F0,0B0\n")
    assert simulated(capsys, "--schedule", file, "--tf", 1, "--tb", 1)["step_time_ms"] == pytest.approx(2)


def test_the_remedy_for_a_file_that_is_no_text_simulates(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    file.write_bytes(b"\xd0\xff")
    assert main(["simulate", "--schedule", str(file), "--tf", "1", "--tb", "1"]) == 2
    remedy = capsys.readouterr().err.partition("try: ")[2].split()
    assert main(["simulate", *remedy, "--tf", "1", "--tb", "1"]) == 0


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("50", 50), ("9" * 30, 1000), ("0", 160), ("wide", 160)])
def test_a_pipe_is_as_wide_as_it_is_told(capsys: Any, monkeypatch: Any, columns: str, most: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = "simulate --schedule 1f1b --pp 2 --microbatches 8 --tf 1 --tb 1.3"
    assert main(words.split()) == 0
    widest = max(len(line) for line in capsys.readouterr().out.splitlines() if line.endswith("|"))
    assert 0.6 * most < widest <= most

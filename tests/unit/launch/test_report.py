"""The report: the culprit first, whatever its victims say and when."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppctl.launch.outcome import Exit, failures, report
from ppctl.records.rank_records import RankFailure, RankState
from ppctl.runs.rundir import RunDir

ECHOES = [
    "[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
    "Read error: Connection reset by peer",
    "PP-E711: the connection on channel 1->0 B broke: timed out",
    "NCCL error: remote process exited or there was a network error",
    "Broken pipe",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "PP-E707: rank 0 on a could not connect to all ranks of the job: the other end closed the connection",
]


def told(rank: int, at: float, message: str = "boom", **more: Any) -> RankFailure:
    return RankFailure.from_json({"rank": rank, "time": at, "type": "ValueError", "message": message} | more)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "job", lambda draft: None)


def culprit(exits: list[Exit], errors: list[RankFailure]) -> tuple[int, str]:
    first = failures(exits, errors)[0]
    return first.rank, first.code or "PP-E701"


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize(
    ("exits", "errors", "wanted"),
    [
        ([Exit(2, 1, 5.0, False)], [told(2, 4.0), told(0, 4.5, "ECHO")], (2, "PP-E701")),
        ([Exit(2, 1, 5.0, False)], [told(0, 3.9, "ECHO"), told(2, 4.0)], (2, "PP-E701")),
        ([Exit(0, 1, 4.9, False), Exit(1, -9, 5.0, False)], [told(0, 4.5, "ECHO")], (1, "PP-E702")),
        ([Exit(0, 1, 4.9, False), Exit(1, 7, 5.0, False)], [told(0, 4.5, "ECHO")], (1, "PP-E703")),
        ([Exit(1, -6, 6.0, False)], [told(2, 4.0), told(0, 4.5, "ECHO")], (2, "PP-E701")),
        ([Exit(0, 1, 5.0, False), Exit(1, -2, 6.0, True)], [told(0, 4.5, "ECHO")], (0, "PP-E701")),
        ([Exit(2, -11, 5.0, False)], [told(2, 4.0), told(0, 4.5, "ECHO")], (2, "PP-E701")),
    ],
    ids=[
        "raised first",
        "its victim's clock is behind",
        "killed, and its victim told earlier than its death was seen",
        "left without a word",
        "a victim aborted after the culprit raised",
        "only echoes: the earliest",
        "raised, then crashed on its way out",
    ],
)
def test_the_culprit_is_found(exits: list[Exit], errors: list[RankFailure], wanted: tuple[int, str], echo: str) -> None:
    code = {"code": "PP-E711"} if echo.startswith("PP-E711") else {}
    errors = [replace(error, message=echo, **code) if error.message == "ECHO" else error for error in errors]
    rank, wanted_code = wanted
    assert culprit(exits, errors) in {(rank, wanted_code), (rank, code.get("code", wanted_code))}


def test_of_two_that_fail_by_themselves_the_earlier_counts() -> None:
    assert culprit([], [told(5, 2.0), told(1, 3.0)]) == (5, "PP-E701")


def text(
    run: RunDir, exits: list[Exit], errors: list[RankFailure], states: dict[int, RankState], world: int
) -> list[str]:
    return report(run, failures(exits, errors), states, world).splitlines()


def test_a_rank_is_believed_where_it_says_what_it_did(run: RunDir) -> None:
    states = {3: RankState(3, "training", 16, 99, time.monotonic(), working=True)}
    lines = text(run, [], [told(3, 1.0, stage=5, action="5B2")], states, 1)
    assert lines[0] == "error PP-E701: rank 3 (stage 5) failed in 5B2: ValueError: boom"
    assert lines[1] == f"  at step 17; its log: {run.log(3)}"


def test_a_rank_that_failed_outside_its_list_is_not_given_its_last_action(run: RunDir) -> None:
    states = {3: RankState(3, "training", 16, 99, time.monotonic(), working=True)}
    error = told(3, 1.0, "step 17: the gradient norm is not finite", code="PP-E733", remedy="lower optim.lr")
    lines = text(run, [], [error], states, 1)
    assert lines[0] == "error PP-E733: rank 3 failed: step 17: the gradient norm is not finite"
    assert lines[1] == "  try: lower optim.lr"


@pytest.mark.parametrize("state", ["starting", "warming up", "saving"])
def test_outside_the_list_the_state_says_what_it_did(run: RunDir, state: str) -> None:
    states = {0: RankState(0, state, 0, -1, time.monotonic())}
    assert text(run, [Exit(0, -11, 1.0, False)], [], states, 1)[0] == (
        f"error PP-E702: rank 0 failed while {state}: killed by signal 11 (SIGSEGV)"
    )


def test_without_a_plan_and_a_heartbeat_the_report_comes_all_the_same(run: RunDir) -> None:
    states = {0: RankState(0, "training", 0, 4, time.monotonic(), working=True)}
    assert text(run, [Exit(0, -9, 1.0, False)], [], states, 1)[0].startswith(
        "error PP-E702: rank 0 failed in action 4:"
    )
    assert text(run, [Exit(0, -9, 1.0, False)], [], {}, 1)[0].startswith("error PP-E702: rank 0 failed: killed")


def test_many_victims_are_one_line(run: RunDir) -> None:
    errors = [told(0, 1.0), *(told(rank, 2.0 + rank, ECHOES[0]) for rank in range(1, 8))]
    lines = text(run, [], errors, {}, 8)
    assert len(lines) == 4
    assert lines[2].startswith("  followed by rank 1 (ValueError: [/x/gloo")
    assert lines[2].endswith(" and 4 more")


def test_all_that_a_rank_found_wrong_is_told_with_its_place(run: RunDir) -> None:
    others = ["PP-E403: the line is not an object\n  bad.jsonl:3\n  try: this"]
    found = failures(
        [], [told(0, 1.0, "not a JSON object", code="PP-E403", place="bad.jsonl:2", remedy="a\nb", others=others)]
    )
    assert report(run, found, {}, 1).splitlines()[:8] == [
        "error PP-E403: rank 0 failed: not a JSON object",
        "  bad.jsonl:2",
        "  try: a",
        "   or: b",
        "error PP-E403: the line is not an object",
        "  bad.jsonl:3",
        "  try: this",
        f"  its log: {run.log(0)}",
    ]

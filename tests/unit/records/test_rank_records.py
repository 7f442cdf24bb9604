"""A rank's state and a rank's failure: through JSON and back, and as older versions wrote them."""

from __future__ import annotations

import json

import pytest

from ppctl.records.rank_records import NO_ACTION, RankFailure, RankState

STATE = RankState(3, "training", 16, 5, 1e9, working=True, stopped=True, host="node1", pid=4711, exchanges=(3, 0, 1, 0))
FAILURE = RankFailure(
    2,
    "boom",
    "ValueError",
    code="PP-E711",
    time=5.0,
    exit_code=3,
    stage=5,
    action="5B2",
    place="corpus.txt:3",
    remedy="try this",
    others=("PP-E403: and this",),
    ends=(1, 2),
    traceback="  File ...",
    host="node1",
)


def test_a_state_comes_back_from_the_file_of_its_host() -> None:
    row = json.loads(json.dumps(STATE.to_json()))
    assert row["version"] == 1 and RankState.from_json(row, "node1") == STATE


def test_a_failure_comes_back_from_its_file() -> None:
    record = json.loads(json.dumps(FAILURE.to_json()))
    assert record["version"] == 1 and RankFailure.from_json(record) == FAILURE


def test_a_state_of_an_older_run_is_read() -> None:
    row = {"rank": 1, "pid": 7, "state": "saving", "step": 2, "index": NO_ACTION, "since": 9.5}
    assert RankState.from_json(row, "a") == RankState(1, "saving", 2, NO_ACTION, 9.5, host="a", pid=7)


@pytest.mark.parametrize("unknown", [{}, {"ends": None, "code": None, "stage": None, "version": 9, "more": [1]}])
def test_a_failure_of_another_version_is_read_with_what_it_has(unknown: dict) -> None:
    assert RankFailure.from_json({"rank": 4, "message": "boom"} | unknown) == RankFailure(4, "boom", time=0.0)


@pytest.mark.parametrize(
    ("read", "record"),
    [(RankFailure.from_json, {"message": "boom"}), (lambda row: RankState.from_json(row, "a"), {"rank": 0})],
)
def test_what_is_no_such_record_is_an_error(read, record: dict) -> None:
    with pytest.raises(ValueError):
        read(record)

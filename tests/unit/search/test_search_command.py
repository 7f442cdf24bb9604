"""`ppctl search` as it is typed: the answer and its lines, its files, and what it refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppctl.cli.main import INTERRUPTED, main
from ppctl.launch.planning import planned
from ppctl.search.branch import Search

SMALL = (
    *("model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=1024"),
    *("model.vocab_size=8192", "launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "seq=512", "gbs=16"),
    *("launch.device_memory=600MiB", "launch.memory_reserve=0GiB", "nodes=1", "gpus_per_node=4"),
)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["search", *SMALL, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_line_of_the_answer_is_the_command_of_the_plan_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys)["rows"]
    assert len(rows) > 2
    for row in rows:
        program, train, *words = shlex.split(row["line"])
        assert (program, train) == ("ppctl", "train")
        _, plan, problems = planned([word.removeprefix("+") for word in words])
        assert plan is not None and not problems
        assert plan.step_time_s == pytest.approx(row["step_time_s"], rel=1e-12)
        assert max(cost.peak_bytes for cost in plan.pp_ranks) == row["peak_bytes"] <= row["available_bytes"]
        assert (plan.sizes.tp, plan.sizes.pp, plan.layout) == (row["tp"], row["pp"], row["layout"])


def test_what_is_typed_stays_and_sequence_parallelism_follows_tensor_parallelism(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = answer(capsys, "tp=2", "recompute=full")["rows"]
    assert {(row["tp"], row["recomputation"]) for row in rows} == {(2, "as given")}
    assert all("sp=true" in row["line"].split() for row in rows)


def test_a_key_that_is_kept_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    everywhere = answer(capsys)["rows"]
    kept = answer(capsys, "--keep", "mbs", "pp")["rows"]
    assert {(row["micro_batch_size"], row["pp"]) for row in kept} == {(1, 1)}
    assert any(row["micro_batch_size"] > 1 for row in everywhere)


def test_the_text_says_what_was_proved_and_why_other_values_were_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "--against", "pp=4 mbs=1 recompute=full"]) == 0
    text = capsys.readouterr().out
    assert "none is more than 2% faster than the first under these prices" in text.replace("\n  ", " ")
    assert "\nwhy not\n" in text and "against: a step takes" in text
    assert "train.recompute_granularity=null: -" in text


def test_a_written_recipe_is_the_first_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "found.yaml"
    first = answer(capsys, "--write", str(path))["rows"][0]
    _, plan, problems = planned([f"recipe={path}"])
    assert plan is not None and not problems
    assert plan.step_time_s == pytest.approx(first["step_time_s"], rel=1e-12)
    assert "# found by ppctl search" in path.read_text()


def test_the_frontier_has_the_fastest_configuration_of_every_number_of_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["search", *SMALL, "--nodes", "1,2", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    alone = answer(capsys)["rows"][0]
    assert {**one["rows"][0], "line": ""} == {**alone, "line": ""}
    assert two["rows"][0]["step_time_s"] < one["rows"][0]["step_time_s"]


@pytest.mark.whole
def test_too_little_memory_exits_with_4_and_the_least_number_of_gpus_that_has_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [word.replace("600MiB", "150MiB").replace("gpus_per_node=4", "gpus_per_node=1") for word in SMALL]
    assert main(["search", *small]) == 4
    said = capsys.readouterr().err
    assert "PP-E803" in said
    remedy = next(line for line in said.splitlines() if "try:" in line).partition("try: ")[2]
    _, plan, problems = planned(shlex.split(remedy)[2:])
    assert plan is not None and not problems
    assert plan.sizes.world > 1


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["tp=3", "cp=3"], {"PP-E204", "PP-E207"}),
        (["tp=4", "pp=4"], {"PP-E204"}),
        (["layout=auto"], {"PP-E228"}),
        (["pp_schedule=auto", "nodes=null", "gpus_per_node=null"], {"PP-E228"}),
        (["--keep", "lr"], {"PP-E228"}),
        (["--nodes", "some"], {"PP-E105"}),
        (["--against", "pp"], {"PP-E105"}),
        (["trian.steps=3"], {"PP-E101"}),
        (["+recipe=nosuch"], {"PP-E104"}),
        (["launch.device_memory=null"], {"PP-E228"}),
    ],
)
def test_bad_input_is_refused_with_the_problems_of_what_was_typed(
    words: list[str], codes: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert {code for code in codes if code in said} == codes
    assert "Traceback" not in said


def test_an_interrupted_search_prints_what_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Search.run

    def interrupted(search: Search) -> Iterator[Search]:
        for _ in whole(search):
            if search.found:
                raise KeyboardInterrupt
            yield search

    monkeypatch.setattr(Search, "run", interrupted)
    assert main(["search", *SMALL]) == INTERRUPTED
    text = capsys.readouterr().out
    assert text.startswith("interrupted: of ")
    assert "no other division of the ranks was planned yet" in text
    assert "ppctl train" in text

"""`ppctl search` as it is typed: the answer and its lines, its files, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ppctl.cli.main import INTERRUPTED, main
from ppctl.config.argv import full_name, normalise
from ppctl.config.compose import compose
from ppctl.launch.planning import planned
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.violations import ConfigValues
from ppctl.search.answer import AnswerRow
from ppctl.search.branch import Planned, Search
from ppctl.search.refine import Refinement
from ppctl.search.space import Configuration, SearchSpace

SMALL = (
    *("model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=1024"),
    *("model.vocab_size=8192", "launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "seq=512", "gbs=16"),
    *("launch.device_memory=600MiB", "launch.memory_reserve=0GiB", "nodes=1", "gpus_per_node=4"),
)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["search", *SMALL, "--refine", "0", *words, "--json"]) == 0
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
    assert main(["search", *SMALL, "--refine", "0", "--against", "pp=4 mbs=1 recompute=full"]) == 0
    text = capsys.readouterr().out
    assert "within 10.5%" in text and "refined" not in text
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
        (["tp=3", "cp=3"], {"PP-E204"}),
        (["tp=4", "pp=4"], {"PP-E204"}),
        (["layout=auto"], {"PP-E228"}),
        (["pp_schedule=auto", "nodes=null", "gpus_per_node=null"], {"PP-E228"}),
        (["--keep", "lr"], {"PP-E228"}),
        (["pp_schedule_csv=schedule.csv"], {"PP-E228"}),
        (["--nodes", "some"], {"PP-E105"}),
        (["--against", "pp"], {"PP-E105"}),
        (["--refine", "-1"], {"PP-E105"}),
        (["--refine", "nan"], {"PP-E105"}),
        (["--nodes", "1,2", "--html", "found.html"], {"PP-E105"}),
        (["--nodes", "1,2", "--against", "tp=2"], {"PP-E105"}),
        (["--nodes", "1,2", "--refine", "5"], {"PP-E105"}),
        (["--nodes", "1,1"], {"PP-E105"}),
        (["--nodes", ""], {"PP-E105"}),
        (["--write", "found", "--html", "found.svg"], {"PP-E127", "PP-E129"}),
        (["--write", ""], {"PP-E127"}),
        (["--write", "no/such/directory/found.yaml", "--html", "no/such/directory/found.html"], {"PP-E127", "PP-E129"}),
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


def test_the_page_has_every_plan_in_the_window_as_a_point_and_what_was_cut_off_as_ticks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.html"
    found = answer(capsys, "--html", str(path), "log.name=<b>")
    page = path.read_text()
    root = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    points = [circle for circle in root.iter("circle") if circle.get("class") != "over"]
    first = found["rows"][0]
    assert 0 < len(points) <= found["counts"]["planned"] + 2 * len(found["rows"]) * 2
    assert [circle.findtext("title") for circle in points if circle.get("class") == "first"] == [
        f"{page_words(first)}: {first['step_time_s']:.4g} s, {first['tokens_per_s']:,.0f} tokens/s, "
        f"peak {first['peak_bytes'] / 2**30:.1f} GiB"
    ]
    by_memory = sorted(points, key=lambda circle: int(circle.get("cy", "")))
    device = next(line for line in root.iter("path") if line.get("class") == "device")
    assert int(device.get("d", "").split()[1].partition("H")[0]) <= int(by_memory[0].get("cy", ""))
    ticks = [line.findtext("title", "") for line in root.iter("path") if line.find("title") is not None]
    right = int(page.partition("so long; ")[2].partition(" more")[0].replace(",", ""))
    drawn = sum(int(tick.split()[-2].replace(",", "")) for tick in ticks)
    assert drawn + right == found["counts"]["left"] > 0


def page_words(row: dict) -> str:
    named = {name: row[name] for name in ("tp", "cp", "pp", "vpp") if row[name] > 1}
    sharded = {"none": "", "optimizer_gradients": "sharded", "full": "sharded-full"}[row["data_parallel_sharding"]]
    again = {"none": "", "modules": "recompute-modules", "full": "recompute-full"}[row["recomputation"]]
    words = [*(f"{name}{size}" for name, size in named.items()), f"mbs{row['micro_batch_size']}", again]
    return " ".join(filter(None, [*words, row["schedule"] if row["pp"] > 1 else "", sharded]))


def test_files_never_replace_what_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "elsewhere")
    words = ["--html", str(tmp_path / "pipe.html"), "--write", str(tmp_path / "link.yaml")]
    assert main(["search", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert "PP-E129" in said and "PP-E127" in said and said.count("no regular file") == 2
    assert (tmp_path / "pipe.html").is_fifo() and (tmp_path / "link.yaml").is_symlink()


UNEVEN = ("model.num_layers=9", "tp=1", "cp=1", "pp=4", "vpp=1", "pp_schedule=1f1b", "mbs=1", "recompute=null")


def test_a_schedule_is_searched_for_also_beside_one_that_the_config_lets_put_off_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composed = compose([*SMALL, "nodes=1", "gpus_per_node=2", "gbs=4", "pp_schedule=zb_h1", "pipeline.put_off_limit=1"])
    space = SearchSpace(ConfigValues(composed.config, dict.fromkeys(composed.provenance, "a recipe")))
    of = Configuration(1, 1, 2, 1, 1, 1, "none", 1, "zb_h1", "none")
    plan, tried = plan_alone(space.values_of(of)), []

    def noted(values: ConfigValues) -> Plan | None:
        tried.append((values["pipeline.pp_schedule"], values["pipeline.put_off_limit"]))
        return plan_alone(values)

    monkeypatch.setattr("ppctl.search.refine.plan_alone", noted)
    assert plan is not None and space.values_of(of)["pipeline.put_off_limit"] == 1
    assert Refinement(space, [AnswerRow(Planned(of, plan, 0.0), {}, ())], 60.0).run()
    assert ("auto", None) in tried


def test_a_refined_line_is_the_faster_plan_that_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *UNEVEN, "model.vocab_size=65536", "launch.device_memory=2GiB", "--refine", "120")
    refined = found["refined"]
    assert refined["complete"] and refined["best"]["words"] == {"layout": "auto"}
    _, plan, problems = planned(shlex.split(refined["best"]["line"])[2:])
    assert plan is not None and not problems
    assert plan.step_time_s == pytest.approx(refined["best"]["step_time_s"], rel=1e-12)
    first = found["rows"][0]["step_time_s"]
    assert plan.step_time_s < first and refined["best"]["faster"] == pytest.approx(first / plan.step_time_s - 1)
    assert main(["search", *SMALL, *UNEVEN, "model.vocab_size=65536", "launch.device_memory=2GiB"]) == 0
    text = capsys.readouterr().out
    assert f"{refined['best']['faster']:.1%} faster than the first with layout=auto:\n{refined['best']['line']}" in text


def test_refining_ends_when_too_little_is_left_for_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    refined = answer(capsys, *UNEVEN, "launch.device_memory=2GiB", "--refine", "0.000001")["refined"]
    assert (refined["complete"], refined["best"], refined["plans"]) == (False, None, 0)


def test_an_interrupt_ends_refining_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ppctl.search.refine.plan_alone", interrupted)
    refined = answer(capsys, *UNEVEN, "launch.device_memory=2GiB", "--refine", "60")["refined"]
    assert (refined["complete"], refined["best"], refined["plans"]) == (False, None, 1)


def test_a_comparison_with_what_a_rule_forbids_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Search, "run")
    assert main(["search", *SMALL, "--against", "tp=3"]) == 2
    said = capsys.readouterr()
    assert "error PP-E" in said.err and "tp" in said.err and not said.out


@pytest.mark.parametrize("asked", ["tp='8", "tp=abc", "tp=0", "recipe=quickstart", "nodes=2", ""])
def test_a_comparison_with_what_is_not_searched_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    assert main(["search", *SMALL, "--against", asked]) == 2
    assert "error PP-E105: --against" in capsys.readouterr().err


def test_lines_keep_text_that_looks_like_a_key_and_are_those_of_their_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["search", *SMALL, "log.name=a train.steps=5 b", "--nodes", "1,2", "--json"]) == 0
    each = [entry["rows"][0]["line"] for entry in json.loads(capsys.readouterr().out)]
    assert [f"nodes={number}" in line for number, line in enumerate(each, 1)] == [True, True]
    assert all("'log.name=a train.steps=5 b'" in line for line in each)


def test_a_file_is_not_written_over_the_recipe_or_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {steps: 3}\n")
    for words, option in (
        (["--write", f"{tmp_path}/mine.yaml"], "write"),
        (["--html", f"{tmp_path}/mine.yaml"], "html"),
        (["--html", f"{tmp_path}/a.yaml", "--write", f"{tmp_path}/a.yaml"], "html"),
    ):
        assert main(["search", f"+recipe={tmp_path}/mine.yaml", *SMALL, *words]) == 2
        assert f"cannot be written: it{'s' * (option == 'html')}" in (said := capsys.readouterr().err)
        assert f"try: --{option} " in said
    assert (tmp_path / "mine.yaml").read_text() == "train: {steps: 3}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


@pytest.mark.parametrize(
    ("words", "code", "remedies"),
    [
        (["tp=3"], "PP-E204", ["tp"]),
        (["tp=4", "pp=4"], "PP-E204", ["tp", "pp"]),
        (["gbs=16", "mbs=3"], "PP-E211", ["mbs"]),
        (["seq=511", "tp=2"], "PP-E208", ["tp"]),
        (["ep=2"], "PP-E206", ["ep"]),
        (["pp=1", "pp_schedule=dualpipev"], "PP-E229", ["pp", "pipeline.pp_schedule"]),
        (["vpp=2", "pp_schedule=1f1b", "tp=2", "mbs=1"], "PP-E213", ["vpp", "pipeline.pp_schedule"]),
    ],
)
def test_typed_values_that_contradict_each_other_are_one_problem_whose_remedies_leave_something(
    words: list[str], code: str, remedies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert said.count("error ") == 1 and f"error {code}: no configuration has " in said
    offered = [line.partition(": ")[2] for line in said.splitlines() if line.strip().startswith(("try: ", "or: "))]
    assert [way.partition("=")[0] for way in offered] == remedies
    cited = [line.split(" ")[2] for line in said.splitlines() if " = " in line and "(" in line and line[:2] == "  "]
    typed = [normalise([*SMALL, *words]).overrides]
    names = {word.partition("=")[0] for line in typed for word in line}
    assert cited and {full_name(line.strip()) for line in cited} <= names
    for way in offered:
        assert main(["search", *SMALL, *words, *shlex.split(way), "--refine", "0"]) == 0
    capsys.readouterr()


def test_each_contradiction_is_a_problem_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "tp=3", "cp=3", "mbs=3"]) == 2
    said = capsys.readouterr().err
    heads = [line.partition(": ")[2].partition(":")[0] for line in said.splitlines() if line.startswith("error ")]
    assert sorted(heads) == [f"no configuration has {word}" for word in ("cp=3", "mbs=3", "tp=3")]


def test_what_a_recipe_or_a_word_gives_the_least_configuration_is_no_contradiction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert {row["tp"] > 1 for row in answer(capsys, "sp=true")["rows"]} == {True}
    (tmp_path / "mine.yaml").write_text("train: {micro_batch_size: 4}\n")
    rows = answer(capsys, f"+recipe={tmp_path}/mine.yaml")["rows"]
    assert {**rows[0], "line": ""} == {**answer(capsys)["rows"][0], "line": ""}


def test_numbers_of_nodes_on_which_nothing_fits_are_named_and_exit_with_4_if_it_fits_on_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = [*(word.replace("600MiB", "130MiB") for word in SMALL), "tp=4", "cp=1", "mbs=1", "recompute=full"]
    assert main(["search", *few, "--nodes", "1,4"]) == 0
    one, four = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("4 ", "16 "))]
    assert one.endswith("nothing fits") and "tp" in four
    assert main(["search", *(word.replace("130MiB", "5MiB") for word in few), "--nodes", "1,2"]) == 4
    said = capsys.readouterr()
    assert "error PP-E803: none of " in said.err and "8 GPUs of 5MiB; nothing fits 4, 8, 16, " in said.err
    assert said.out == "" and "try: " not in said.err


def test_a_recipe_that_is_there_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "found.yaml").write_text("train: {steps: 3}\n")
    assert main(["search", *SMALL, "--write", f"{tmp_path}/found.yaml"]) == 2
    said = capsys.readouterr().err
    assert "it exists, and a search replaces no recipe" in said and f"try: --write {tmp_path}/found-2.yaml" in said
    assert (tmp_path / "found.yaml").read_text() == "train: {steps: 3}\n"


def test_on_a_pipe_the_best_so_far_is_a_line_of_stderr_and_json_stays_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppctl.cli.search._SECONDS_BETWEEN_LINES", 0.0)
    assert main(["search", *SMALL, "--refine", "0", "--json"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)["rows"]
    last = said.err.splitlines()[-1]
    assert " decided for 4 GPUs; " in last
    assert last.endswith(f"best so far {rows[0]['tokens_per_s']:,.0f} tokens/s: {page_words(rows[0])}")


def test_an_interrupt_after_the_search_leaves_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ppctl.cli.search.moved", interrupted)
    assert main(["search", *SMALL, "--refine", "0"]) == 0
    text = capsys.readouterr().out
    assert "none is more than 2% faster" in text.replace("\n  ", " ") and "priced again" not in text


def test_an_interrupted_search_tells_what_was_seen_from_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = answer(capsys)["counts"]["total"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    whole = Search.run

    def once_counted(search: Search) -> Iterator[Search]:
        for each in whole(search):
            if each.counted:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(Search, "run", once_counted)
    assert main(["search", *SMALL]) == INTERRUPTED
    assert capsys.readouterr().out.startswith(f"interrupted: of {total:,} configurations ")
    monkeypatch.setattr(Search, "run", whole)
    monkeypatch.setattr(SearchSpace, "count", interrupted)
    assert main(["search", *SMALL]) == INTERRUPTED
    assert capsys.readouterr().out.startswith("interrupted: of the 0 configurations looked at until then ")


def test_the_table_of_a_narrow_terminal_has_no_line_beyond_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["search", *SMALL, "--refine", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "ppctl train" not in line)
    assert sum(line.lstrip().startswith(("tp", "cp", "pp", "mbs")) for line in lines) > 2

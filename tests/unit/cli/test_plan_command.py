"""`ppctl plan` in its own process: what it prints, where, its exit codes, and what it never imports."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from ppctl.cli.local_run import first_screen as summary
from ppctl.cli.main import main
from ppctl.cli.plan_text import blocks
from ppctl.cli.timeline import unwritable
from ppctl.config.schema import ModelConfig
from ppctl.families.config_json import write_config
from ppctl.launch.planning import planned

LAYOUT = "layout=Et*3|(tt|)*29,m|L"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["plan", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_deepseek_v3_in_json(capsys) -> None:
    code, out, err = run(capsys, "+recipe=deepseek_v3", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert (data["params_total"], data["params_mtp"]) == (671_026_419_200, 11_610_068_224)
    assert (data["params_hf"], data["params_active"]) == (684_489_845_504, 37_552_297_472)
    assert data["world_size"] == 2048
    sizes = {"pp": 16, "vpp": 2, "tp": 1, "cp": 1, "dp": 128, "ep": 64, "etp": 1, "edp": 2}
    assert data["parallel"] == sizes | {"order": "tp-cp-ep-dp-pp"}
    assert data["stages"][31]["layers"] == ["mtp.0", "loss"]
    assert data["replicated_params"][31] == 926_679_040
    assert data["schedule"]["name"] == "dualpipev"
    equations = {derived["equation"] for derived in data["derived"]}
    assert "world 2048 = nodes 256 x 8 = tp 1 x cp 1 x pp 16 x dp 128" in equations


def test_the_text_shows_the_vocabulary_equations_table_and_schedule(capsys) -> None:
    code, out, _ = run(capsys, "+recipe=deepseek_v3")
    assert code == 0
    lines = out.splitlines()
    for part in (
        "world 2048 = nodes 256 x 8 = tp 1 x cp 1 x pp 16 x dp 128",
        "global_batch_size 15360 = dp 128 x num_microbatches 120 x micro_batch_size 1",
        "recipes/deepseek_v3.yaml",
        "m multi-token prediction",
        "schedule dualpipev: 120 microbatches, bubble",
        "uncalibrated",
        "vocabulary 129,280 (conf/model/deepseek_v3.yaml:",
    ):
        assert part in out
    assert "published and here" not in out, "that table is of `ppctl recipes show`"
    (row,) = [line for line in lines if line.startswith("15 ")]
    assert "46.03 B" in row
    assert " 33 " in row
    assert all(line == line.rstrip() for line in lines)


def test_a_plan_of_nothing_says_that_nothing_was_given(capsys) -> None:
    code, _, err = run(capsys)
    assert code == 0
    assert "no arguments: this is the plan of the defaults" in err
    assert "no arguments" not in run(capsys, "pp=1")[2]


def test_a_small_pipeline_is_drawn(capsys) -> None:
    _, out, _ = run(capsys, "+recipe=quickstart")
    assert "rank 0  stage 0" in out
    assert "each row is a process, each column a chunk that it owns" in out


def test_no_line_is_wider_than_a_page_for_many_chunks(capsys) -> None:
    _, out, _ = run(capsys, "pp=2", "vpp=12", "model.num_layers=48")
    assert "chunks, first to last" in out


@pytest.mark.parametrize("recipe", ["quickstart", "llama3_8b", "deepseek_v3"])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_plan_is_no_wider_than_the_terminal(recipe: str, width: int) -> None:
    composed, plan, _ = planned([f"+recipe={recipe}"])
    assert composed is not None and plan is not None
    shown = blocks(plan, composed.config, width)
    assert [line for block in shown for line in block.splitlines() if len(line) > width] == []


@pytest.mark.parametrize("args", [("pp=8", "vpp=1"), ("pp=8", "vpp=2"), ("pp=4",)])
def test_overriding_a_recipes_sizes_derives_another_layout_and_says_so(capsys, args) -> None:
    plain = ("pipeline.pp_schedule=interleaved_1f1b", "pipeline.put_off_limit=null", "launch.device_memory=null")
    code, out, err = run(capsys, "+recipe=deepseek_v3", *args, *plain, "--json")
    data = json.loads(out)
    assert code == 0
    assert len(data["stages"]) == data["parallel"]["pp"] * data["parallel"]["vpp"]
    assert data["stages"][-1]["layers"][-2:] == ["mtp.0", "loss"]
    assert sum(name.startswith("decoder") for stage in data["stages"] for name in stage["layers"]) == 61
    assert "set aside" in err
    assert any("set aside" in derived["equation"] for derived in data["derived"])


def test_a_typed_layout_that_disagrees_is_refused_with_numbers_sources_and_two_ways_out(capsys) -> None:
    code, out, err = run(capsys, "+recipe=deepseek_v3", "pp=8", "vpp=1", LAYOUT)
    assert code == 2
    for part in ("32", "pp 8", "vpp 1", "vpp=4", "command line", "PP-E220"):
        assert part in err
    assert "PP-E220" in out


def test_problems_of_flags_keys_values_and_sizes_come_together(capsys) -> None:
    args = ("+recipe=quickstart", "--bogus", "optim.bta1=0.5", "optim.beta2=2", "gbs=7", "layout=Et|tL")
    code, out, err = run(capsys, *args, "--json")
    codes = [problem["code"] for problem in json.loads(out)["problems"]]
    assert code == 2
    assert codes[0] == "PP-E107"
    assert {"PP-E101", "PP-E103", "PP-E211", "PP-E220", "PP-E015"} <= set(codes)
    assert len(codes) == len(set(codes))
    assert all(code in err for code in codes)


def test_the_json_of_a_refused_config_has_the_same_keys(capsys) -> None:
    _, refused, _ = run(capsys, "+recipe=quickstart", "gbs=7", "--json")
    _, planned_, _ = run(capsys, "+recipe=quickstart", "--json")
    assert json.loads(planned_).keys() - json.loads(refused).keys() == {"p2p_capacity"}
    assert json.loads(refused)["problems"][0].keys() >= {"code", "message", "remedy"}


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("+recipe=quickstart",), 0),
        (("+recipe=quickstart", "launch.device_memory=1MiB"), 4),
        (("+recipe=quickstart", "launch.device_memory=1MiB", "--force"), 0),
        (("+recipe=quickstart", "launch.device_memory=1MiB", "optim.beta1=2"), 2),
        (("+recipe=quickstart", "optim.beta1=2", "--force"), 2),
        (("+recipe=quickstrat",), 2),
        (("pp=0",), 2),
    ],
)
def test_exit_codes(capsys, args, code: int, form) -> None:
    found, out, err = run(capsys, *args, *form)
    assert found == code
    assert out.strip()
    assert ("error PP-E" in err) == (code != 0 or "--force" in args)


def test_memory_over_the_limit_still_shows_the_plan(capsys) -> None:
    _, out, _ = run(capsys, "+recipe=quickstart", "launch.device_memory=1MiB", "--json")
    data = json.loads(out)
    assert data["problems"][0]["code"] == "PP-E801"
    assert len(data["pp_ranks"]) == 2


def test_the_first_screen_of_a_run_explains_its_letters() -> None:
    _, plan, _ = planned(["recipe=quickstart"])
    assert plan is not None
    screen = summary(plan)
    assert screen.startswith("E embedding, t layer, L loss; each row is a process, each column a chunk that it owns")
    assert "Ett [0-1]" in screen
    assert "ttL [6-7]" in screen


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("1", False)])
def test_a_terminal_gets_the_same_text_in_colour_unless_it_must_not(capsys, no_color, coloured: bool) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150"} | (
        {"NO_COLOR": no_color} if no_color else {}
    )
    keyboard, terminal = pty.openpty()
    args = ("+recipe=quickstart", "launch.device_memory=1MiB")
    command = [sys.executable, "-m", "ppctl", "plan", *args]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    seen = b""
    while chunk := _read(keyboard):
        seen += chunk
    os.close(keyboard)
    assert process.wait(timeout=60) == 4
    text = seen.decode()
    assert bool(re.search(r"\x1b\[[0-9;]*31m", text)) == coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")
    _, out, _ = run(capsys, *args)
    assert plain.split("last digit")[0] == out.split("last digit")[0]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux tells the end of a closed terminal like this
        return b""


def test_a_plan_in_json_imports_neither_torch_nor_rich_nor_numpy() -> None:
    code = (
        "import sys; from ppctl.cli.main import main; main(['plan', '+recipe=deepseek_v3', '--json']);"
        "print(sorted({'torch', 'rich', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["world_size"] == 2048


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_the_step_is_drawn(capsys, tmp_path, ending):
    path = tmp_path / f"step.{ending}"
    assert main(["plan", "+recipe=quickstart", "--timeline", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["name"] == "interleaved_1f1b"
    text = path.read_text()
    assert "quickstart: interleaved_1f1b, pp 2 x vpp 2, 8 microbatches" in text
    assert ending == "txt" or "embedding, decoder 0-1" in text


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["--timeline", "no/step.html"], "PP-E129"),
        (["--timeline", ""], "PP-E129"),
        (["--timeline", "."], "PP-E129"),
        (["--timeline", "a\0.txt"], "PP-E129"),
        (["--dump-schedule", ""], "PP-E127"),
        (["--dump-schedule", "."], "PP-E127"),
        (["--dump-schedule", "one.txt", "--timeline", "./one.txt"], "PP-E129"),
    ],
)
def test_what_cannot_be_written_is_a_problem_with_a_way_out(typed, code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "pp=2", *typed]) == 2
    told = capsys.readouterr().err
    assert f"error {code}" in told
    assert "  try: --" in told


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_no_pipe_and_no_link_is_replaced_by_a_schedule(kind, capsys, tmp_path) -> None:
    (tmp_path / "mine").write_text("precious")
    path = tmp_path / "s.csv"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("mine")
    assert run(capsys, "pp=2", "--dump-schedule", str(path))[0] == 2
    assert (tmp_path / "mine").read_text() == "precious" and (path.is_fifo() or path.is_symlink())


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ([], True),
        (["pipeline.pp_schedule=zb_h1", "vpp=null", "pipeline.put_off_limit=8"], False),
        (["train.batch_rampup=[4,4,64]"], False),
    ],
)
def test_the_note_on_a_written_schedule_works_when_pasted(words, runs, capsys, tmp_path) -> None:
    words = ["+recipe=quickstart", *words]
    code, _, err = run(capsys, *words, "--dump-schedule", str(tmp_path / "a b.csv"))
    said = re.search("wrote the schedule to .*; (.*) runs it", err)
    assert code == 0 and (said is not None) == runs
    if said is not None:
        code, out, _ = run(capsys, *words, *shlex.split(said[1]))
        assert code == 0 and "schedule csv" in out


def test_a_schedule_that_hangs_has_no_times(capsys, tmp_path) -> None:
    """Rank 0 waits for a gradient that rank 1 computes only behind what rank 0 sends later."""
    (tmp_path / "s.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, out, _ = run(capsys, "pp=2", "gbs=2", f"pipeline.pp_schedule_csv={tmp_path}/s.csv")
    assert code == 2
    (line,) = [line for line in out.splitlines() if "it deadlocks" in line]
    assert line.startswith("schedule ") and line.endswith(": 2 microbatches; it deadlocks, so it has no times")
    assert not [line for line in out.splitlines() if "step about" in line or "tokens/s" in line]


def test_without_the_model_that_was_asked_for_there_is_no_plan_of_another(capsys) -> None:
    code, out, err = run(capsys, "model.from=nowhere", "pp=2")
    assert (code, out.splitlines()[0]) == (2, "no plan: 1 problem, PP-E520")
    assert "error PP-E520" in err


def test_a_plan_says_that_the_weights_beside_its_model_are_damaged(capsys, tmp_path) -> None:
    _, config = write_config(ModelConfig())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(5))
    code, _, err = run(capsys, f"model.from={tmp_path}")
    assert code == 0 and "note: a run cannot begin with these weights: PP-E523" in err


def test_the_page_on_migrating_shows_what_is_printed(capsys) -> None:
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    lines = f"--num-layers {page.partition('    ppctl plan --num-layers ')[2]}".splitlines()
    shown = [line.removeprefix("    ") for line in takewhile(lambda line: line[:4].strip() == "", lines[2:])]
    code, _, err = run(capsys, *lines[0].split())
    assert code == 2
    assert [line.rstrip() for line in err.strip().splitlines()] == "\n".join(shown).strip().splitlines()


def test_the_page_on_migrating_shows_what_becomes_of_a_config(capsys, monkeypatch, tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    page = (tests.parent / "docs" / "migrating.md").read_text().partition("    ppctl plan --from ")[2]
    shown = [line.strip() for line in takewhile(lambda line: line[:4].strip() == "", page.splitlines()[1:])]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    words = page.splitlines()[0].split()
    Path(words[0]).write_text((tests / "golden" / "other_configs" / "titan_llama3_405b.toml").read_text())
    code, out, err = run(capsys, "--from", *words)
    assert code == 0
    printed = {line.strip() for line in (out + err).splitlines()}
    assert [line for line in shown if line not in ("", "...") and line not in printed] == []


@pytest.mark.whole
@pytest.mark.parametrize(
    ("page", "command", "begin"),
    [
        ("planning", "plan +recipe=llama3_70b --lost 1,2,8", "if nodes are lost"),
        ("searching", "search +recipe=llama3_8b nodes=1 gpus_per_node=8 cost.device=h100", "refined ("),
    ],
)
def test_the_pages_show_what_is_printed_of_lost_nodes_and_of_refining(
    page, command, begin, monkeypatch, capsys
) -> None:
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text()
    shown = text[text.index(f"    {begin}") :].partition("\n\n")[0]
    monkeypatch.setenv("COLUMNS", "150")
    assert main(command.split()) == 0
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    assert [line for line in shown.splitlines() if line.strip() not in printed] == []


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_picture_replaces_no_pipe_and_no_link(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("elsewhere.json")
    (problem,) = unwritable(path)
    assert problem.code == "PP-E129" and "no regular file" in problem.message


@pytest.mark.parametrize(
    ("typed", "codes"),
    [
        (("+recipe=mixtral_8x7b", "tp=2", "--sequence-parallel"), "PP-E107"),
        (("+recipe=llama3_8b", "--lr-wsd-decay-samples", "10", "--lr-decay-style", "WSD"), "PP-E107"),
        (("+recipe=mixtral_8x7b", "tp=2", "--no-such-flag"), "PP-E107, PP-E224"),
    ],
    ids=["a switch", "a number", "another key"],
)
def test_a_key_that_has_its_default_because_its_flag_was_refused_is_no_further_problem(capsys, typed, codes) -> None:
    code, out, _ = run(capsys, *typed)
    assert (code, out.splitlines()[0]) == (2, f"no plan: {codes.count('PP')} problem{'s' * (',' in codes)}, {codes}")


def test_a_world_of_unknown_size_is_enlarged_before_experts_are_put_together(capsys) -> None:
    _, _, err = run(capsys, "model.num_layers=4", "model.num_moe_experts=8", "ep=4")
    assert "PP-E205" in err and "  try: dp=4\n   or: ep=1\n" in err


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["+recipe=llama3_70b", "nodes=1", "tp=1", "pp=8"], "ppctl search +recipe=llama3_70b launch.nodes=1"),
        (["+recipe=quickstart", "launch.device_memory=1MiB"], "launch.device_memory"),
    ],
    ids=["eight GPUs", "no number of nodes"],
)
def test_a_model_that_needs_a_larger_device_is_searched_first(capsys, typed, remedy) -> None:
    code, out, _ = run(capsys, *typed, "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"]) == (4, "PP-E801")
    first, *others = problem["remedy"].splitlines()
    assert first.startswith(remedy) and all(line.startswith("launch.device_memory=") for line in others)


NUMBERS = "takes whole numbers from 1 on, with commas between"


def test_lost_nodes_are_answered_in_a_table_and_in_json_before_the_run(capsys) -> None:
    code, out, err = run(capsys, "+recipe=llama3_8b", "--lost", "2,1")
    assert (code, err) == (0, "")
    table = out[out.index("if nodes are lost") :].splitlines()
    assert table[0] == "if nodes are lost, with the global batch of 512 samples"
    assert [line.split()[:4] for line in table[2:4]] == [["2", "2", "2", "8"], ["1", "3", "4", "6"]]
    assert table[4] == "  2 lost: nodes=2"
    assert "1 lost: pp=6 layout=null nodes=3; global_batch_size 512 = dp 3 x num_microbatches" in table[5]
    code, out, _ = run(capsys, "+recipe=llama3_8b", "--lost", "2", "--json")
    data = json.loads(out)
    (lost,) = data["lost"]
    assert code == 0 and (lost["lost"], lost["nodes"], lost["fits"], lost["why"]) == (2, 2, True, "")
    assert (lost["parallel"]["dp"], lost["num_microbatches"], lost["words"]) == (2, 256, {"launch.nodes": 2})
    assert lost["of_the_whole"] == pytest.approx(lost["tokens_per_s"] / data["timing"]["tokens_per_s"])
    assert 0 < lost["peak_bytes"] <= lost["available_bytes"] < data["limit_bytes"]


@pytest.mark.parametrize(
    ("words", "code", "message", "remedy"),
    [
        (["+recipe=llama3_8b", "--lost", "4"], "PP-E105", "the plan has 4 nodes, but one must be left", "--lost 3"),
        (["+recipe=llama3_8b", "--lost", "1,x"], "PP-E105", f"--lost 1,x: {NUMBERS}", "--lost 1,2"),
        (["+recipe=llama3_8b", "--lost", "0"], "PP-E105", f"--lost 0: {NUMBERS}", "--lost 1,2"),
        (["+recipe=llama3_8b", "--lost", "1,2,1"], "PP-E105", "--lost 1,2,1: one number stands twice", "--lost 1,2"),
        (["+recipe=quickstart", "--lost", "1"], "PP-E105", "the plan has 1 node, but one must be left", ""),
        (
            ["+recipe=llama3_70b", "--lost", "8,15"],
            "PP-E230",
            "nothing fits 1 of 16 nodes: at least 4 are needed",
            "--lost 12",
        ),
    ],
)
def test_losses_that_cannot_be_answered_are_refused_with_what_can(capsys, words, code, message, remedy) -> None:
    exit_code, out, err = run(capsys, *words, "--json")
    (problem,) = json.loads(out)["problems"]
    assert exit_code == 2 and (problem["code"], problem["remedy"]) == (code, remedy)
    assert message in problem["message"] and f"error {code}" in err

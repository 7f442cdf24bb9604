"""`ppctl layout`: what it draws, what it prints as JSON, and how it refuses."""

import argparse
import json
import shlex

import pytest

from ppctl.cli import layout as command
from ppctl.cli.main import main


def run(capsys, *argv):
    parser = argparse.ArgumentParser(prog="ppctl layout")
    command.add_arguments(parser)
    code = command.run(parser.parse_args(argv))
    out, err = capsys.readouterr()
    return code, out, err


DRAWN = """\
Et*3|(tt|)*29m|L
32 stages = pp 16 x vpp 2; 61 layers, 1 MTP layer
E embedding, t transformer layer, m multi-token prediction, L loss; a row is a pipeline rank, a column a chunk

pp_rank  chunk 0     chunk 1
0        Et*3 [0-2]  tt [33-34]
1-13     tt [3-28]   tt [35-60]
14       tt [29-30]  m
15       tt [31-32]  L
"""


def test_it_draws_a_layout(capsys):
    arguments = ("Et*3|(tt|)*29,m|L", "--pp", "16", "--num-layers", "61", "--mtp-num-layers", "1")
    assert run(capsys, *arguments) == (0, DRAWN, "")


def test_it_draws_empty_stages_and_single_layers(capsys):
    code, out, _ = run(capsys, "E||t|L", "--pp", "2")
    assert code == 0
    assert out.splitlines()[-3:] == ["pp_rank  chunk 0  chunk 1", "0        E        t [0]", "1        (empty)  L"]


def test_a_wide_table_is_cut_into_blocks(capsys):
    code, out, _ = run(capsys, "E|(t|)*62L", "--pp", "1")
    assert code == 0 and max(map(len, out.splitlines())) <= 120
    assert all(f"chunk {chunk} " in out + " " or f"chunk {chunk}\n" in out for chunk in range(64))


def test_json_holds_every_stage(capsys):
    code, out, err = run(capsys, "Et|t,|tm|L", "--pp", "2", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "layout": "Et|t|tm|L",
        "pp": 2,
        "vpp": 2,
        "stages": [
            {"stage": 0, "pp_rank": 0, "vpp_rank": 0, "layers": ["embedding", "decoder.0"]},
            {"stage": 1, "pp_rank": 1, "vpp_rank": 0, "layers": ["decoder.1"]},
            {"stage": 2, "pp_rank": 0, "vpp_rank": 1, "layers": ["decoder.2", "mtp.0"]},
            {"stage": 3, "pp_rank": 1, "vpp_rank": 1, "layers": ["loss"]},
        ],
        "problems": [],
    }


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        (("Et*1,0|L", "--pp", "2"), ["PP-E002"]),
        (("Et|t|L", "--pp", "2"), ["PP-E012"]),
        (("Et|tL", "--pp", "0"), ["PP-E011"]),
        (("t|tL|", "--pp", "3", "--num-layers", "3"), ["PP-E013", "PP-E014", "PP-E015"]),
        (("Et|tL", "--pp", "2", "--mtp-num-layers", "1"), ["PP-E016"]),
    ],
)
def test_a_bad_layout_is_exit_2_with_all_problems_on_stderr_and_in_the_json(capsys, argv, codes):
    code, _, err = run(capsys, *argv)
    assert code == 2 and [line[:7] for line in err.splitlines() if line.startswith("PP-E")] == codes
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 2 and [problem["code"] for problem in json.loads(out)["problems"]] == codes


@pytest.mark.parametrize("argv", [("Et*1,0|L", "--pp", "2"), ("Et|t|L", "--pp", "2"), ("t|tL|", "--pp", "3")])
def test_the_remedy_can_be_pasted(capsys, argv):
    err = run(capsys, *argv)[2]
    remedy = next(line for line in err.splitlines() if "try: " in line).partition("try: ")[2]
    assert run(capsys, *shlex.split(remedy), *argv[1:])[0] == 0


def test_it_suggests_the_fastest_layout_of_a_config(capsys):
    assert main(["layout", "--suggest", "+recipe=llama3_8b", "--pp", "4", "nodes=2"]) == 0
    out = capsys.readouterr().out
    assert "4 stages = pp 4 x vpp 1; 32 layers" in out
    assert "simulated step" in out
    assert "even split Et*8|t*8|t*8|t*8L" in out
    assert main(["layout", "--suggest", "model.num_layers=9", "--pp", "2", "vpp=2", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["vpp"] == 2
    assert sum(len(stage["layers"]) for stage in described["stages"]) == 11


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--suggest", "foo"], "foo is not an override"),
        (["--suggest", "modle.num_layers=3"], "modle"),
        (["Et*4|t*4L"], "--suggest"),
        (["Et*3|t*5L"], "try: ppctl layout 'Et*3|t*5L' --pp 2\n"),
        (["--pp", "2"], "--suggest"),
    ],
)
def test_it_says_what_is_missing(capsys, words, told):
    assert main(["layout", *words]) == 2
    assert told in capsys.readouterr().err

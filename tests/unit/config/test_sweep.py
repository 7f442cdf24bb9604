"""Lists of values on the command line: Hydra's choices and ranges, one command line for each combination."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from ppctl.config.argv import normalise
from ppctl.config.hydra_source import MOST_RUNS, combinations
from ppctl.errors import ConfigError

OWN = {"-m": False, "--multirun": False}


def swept(*typed: str) -> list[list[str]]:
    line = normalise(["-m", *typed], OWN)
    assert line.problems == []
    return [each.overrides for each in combinations(line)]


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("optim.lr=1e-3,3e-3", ["optim.lr=0.001", "optim.lr=0.003"]),
        ("optim.lr=choice(1e-3, 2)", ["optim.lr=0.001", "optim.lr=2"]),
        ("steps=range(1,4)", ["train.steps=1", "train.steps=2", "train.steps=3"]),
        ("optim.lr=range(0.5,2,0.5)", ["optim.lr=0.5", "optim.lr=1.0", "optim.lr=1.5"]),
        ("steps=sort(3,1,2,reverse=true)", ["train.steps=3", "train.steps=2", "train.steps=1"]),
        ("log.name='a b',c", ["log.name='a b'", "log.name='c'"]),
        ("--micro-batch-size=1,2", ["train.micro_batch_size=1", "train.micro_batch_size=2"]),
        ("parallel.data_parallel_size=null,2", ["parallel.data_parallel_size=null", "parallel.data_parallel_size=2"]),
        ("steps=1,2,1", ["train.steps=1", "train.steps=2"]),
        ("+recipe=a,b", ["recipe=a", "recipe=b"]),
    ],
)
def test_a_list_has_the_values_that_hydra_reads(typed: str, values: list[str]) -> None:
    assert swept(typed) == [[value] for value in values]


def test_the_last_list_varies_fastest_and_one_value_stays() -> None:
    assert swept("steps=1,2", "pp=4", "lr=3,4") == [
        ["parallel.pipeline_model_parallel_size=4", f"train.steps={steps}", f"optim.lr={lr}"]
        for steps in (1, 2) for lr in (3, 4)
    ]  # fmt: skip


def test_the_last_word_about_a_key_counts() -> None:
    assert swept("steps=1,2", "lr=1,2", "steps=7") == [["train.steps=7", f"optim.lr={lr}"] for lr in (1, 2)]
    assert swept("steps=7", "steps=1,2") == [["train.steps=1"], ["train.steps=2"]]
    line = normalise(["-m", "steps=1,2", "steps=7"], OWN)
    assert [problem.code for problem in line.problems] == ["PP-E106"], "no list is left"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["optim.lr=interval(0,1)"], "PP-E106: optim.lr=interval\\(0,1\\) has no list of values"),
        (["optim.lr=glob(*)"], "PP-E106: optim.lr=glob"),
        (["steps=1,2)"], "PP-E105"),
        (["steps=range(1,1000000000)"], f"PP-E106: {MOST_RUNS + 1} of train.steps are too many runs"),
        (["steps=range(1,100)", "lr=range(1,100)"], "PP-E106: 99 of train.steps x 99 of optim.lr are too many runs"),
    ],
)
def test_what_is_no_list_or_too_long_is_refused(typed: list[str], says: str) -> None:
    line = normalise(["-m", *typed], OWN)
    with pytest.raises(ConfigError, match=says):
        combinations(line)


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (
            ["+recipe=quickstart", "steps=1,2", "log.name=a b"],
            ["-m", "+recipe=quickstart", "steps=1,2", "log.name=a b"],
        ),
        (["-m", "steps=1"], ["steps=1"]),
    ],
)
def test_lists_without_m_and_m_without_lists_have_a_remedy_that_works(typed: list[str], remedy: list[str]) -> None:
    (problem,) = normalise(typed, OWN).problems
    assert (problem.code, shlex.split(problem.remedy)) == ("PP-E106", ["ppctl", "train", *remedy])
    assert normalise(remedy, OWN).problems == []


def test_a_loop_for_a_command_without_m_has_a_variable_for_each_list() -> None:
    (problem,) = normalise(["steps=1,2", "gbs=3,4", "steps=5,6"], command="plan").problems
    script = "ppctl() { echo $*; }; " + problem.remedy
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    last = [dict(word.split("=") for word in line.split()[1:]) for line in said]
    assert [(each["gbs"], each["steps"]) for each in last] == [("3", "5"), ("3", "6"), ("4", "5"), ("4", "6")]

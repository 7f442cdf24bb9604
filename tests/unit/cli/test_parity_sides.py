"""What `ppctl parity` runs: a run's config or what is typed, with overrides, in the cut and on one rank."""

import pytest

from ppctl.cli import main as front
from ppctl.cli import parity, train
from ppctl.config.compose import compose
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import new_run
from ppctl.plan.parity import other_keys

CPU = ["+recipe=quickstart", "launch.device=cpu"]


def sides(*typed):
    return parity._planned(front.parse("parity", parity, list(typed)))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = [*CPU, "steps=20", "log.trace=10:12", "log.interval=10", "checkpoint.local=/dev/shm/x"]
    started = Started("person")
    return new_run(train.prepare(front.parse("train", train, [*typed, "checkpoint.local_every=2"]), started), started)


def test_a_runs_config_is_cut_as_it_is_typed_and_its_one_process_has_the_same_stages(run):
    (alone, one), (config, cut) = sides(str(run.path), "tp=2", "steps=7", "--steps", "2")
    assert (cut.sizes.tp, cut.sizes.pp, cut.sizes.world, one.sizes.world) == (2, 2, 4, 1)
    assert one.layout == cut.layout and len(one.stages) == 4
    for each in (alone, config):
        assert (each.train.steps, each.log.gradients, each.log.interval, each.log.trace) == (2, "1:3", 1, None)
        assert (each.checkpoint.local, each.checkpoint.local_every, each.checkpoint.local_replicas) == (None, 0, 0)


@pytest.mark.parametrize("length", ["train.tokens=1e6", "train.samples=640"])
def test_a_run_whose_length_is_said_in_data_is_compared(length):
    assert [config.train.steps for config, _ in sides(*CPU, length)] == [3, 3]


def test_the_last_of_two_words_about_a_key_counts(run):
    _, (config, cut) = sides(str(run.path), "tp=4", "parallel.tensor_model_parallel_size=2")
    assert (config.parallel.tensor_model_parallel_size, cut.sizes.tp) == (2, 2)
    assert cut.provenance["parallel.tensor_model_parallel_size"] == "command line, replacing tp=4"


@pytest.mark.parametrize(
    "typed",
    [
        ["model.num_layers=7", "parallel.account_for_embedding_in_pipeline_split=true"],
        ["model.num_layers=8", "pipeline.layers_per_stage=4", "pipeline.pp_schedule=1f1b"],
        ["model.num_moe_experts=4", "ep=2", "dp=2", "parallel.overlap_moe_expert_parallel_comm=true"],
    ],
)
def test_what_only_a_cut_can_do_is_left_out_in_one_process(typed):
    (_, alone), (_, cut) = sides(*CPU, "layout=null", "vpp=1", "launch.transport=channels", *typed)
    assert (alone.layout, alone.sizes.world) == (cut.layout, 1)


def test_two_runs_that_do_not_compute_the_same_are_told_in_which_keys():
    one, other = (compose([*CPU, *more]).config for more in ([], ["pp=4", "vpp=1", "steps=9", "optim.lr=1.0"]))
    assert other_keys(one, other) == ["optim.lr"]
    report = {
        "runs": [None, None], "cuts": ["a", "b"], "failures": ["", ""], "axes": [], "same": False, "steps": [],
        "keys": ["optim.lr"], "checkpoints": {"step": 3, "same": False},
    }  # fmt: skip
    lines = parity._head(report)
    assert lines[:3] == ["A  a", "B  b", "the runs compute different things: optim.lr (`ppctl runs compare A B`)"]

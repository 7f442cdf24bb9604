"""How messages may travel: modes that exclude each other are told with a remedy that mends it."""

import pytest

from ppctl.config.compose import compose
from ppctl.config.parallel_rules import in_batches
from ppctl.config.schema import ParallelConfig
from ppctl.errors import ConfigError

BROKEN = [
    (["parallel.batch_p2p_comm=true"], "cannot overlap with computation", "parallel.overlap_p2p_comm=false"),
    (["parallel.batch_p2p_sync=true"], "which is off", "parallel.batch_p2p_sync=false"),
    (
        ["parallel.overlap_p2p_comm=false", "pipeline.p2p_capacity=4"],
        "no message overlaps with computation",
        "pipeline.p2p_capacity=null",
    ),
    (
        ["parallel.pipeline_model_parallel_comm_backend=glo"],
        "must be one of nccl, gloo, ucc; did you mean gloo?",
        "parallel.pipeline_model_parallel_comm_backend=gloo",
    ),
    (
        ["parallel.pipeline_model_parallel_comm_backend=nccl", "launch.device=cpu"],
        "the device is the CPU",
        "parallel.pipeline_model_parallel_comm_backend=null",
    ),
]


@pytest.mark.parametrize(("typed", "text", "remedy"), BROKEN)
def test_a_broken_rule_is_told_once_with_a_remedy_that_mends_it(typed, text, remedy):
    with pytest.raises(ConfigError) as caught:
        compose(typed)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E103" and text in problem.message and "command line" in problem.place
    assert problem.remedy == remedy
    kept = [one for one in typed if one.partition("=")[0] != remedy.partition("=")[0]]
    compose([*kept, remedy])


@pytest.mark.parametrize(
    "typed",
    [
        ["parallel.batch_p2p_comm=true", "parallel.overlap_p2p_comm=false"],
        ["parallel.batch_p2p_comm=true", "parallel.batch_p2p_sync=true", "parallel.overlap_p2p_comm=false"],
        ["parallel.overlap_p2p_comm=false"],
        ["parallel.overlap_p2p_comm_warmup_flush=true"],
        ["parallel.variable_seq_lengths=true"],
        ["parallel.pipeline_model_parallel_comm_backend=gloo"],
    ],
)
def test_modes_that_go_together_are_accepted(typed):
    compose(typed, for_training=True)


@pytest.mark.parametrize(
    ("batch", "overlap", "expected"),
    [(True, False, True), (False, False, True), (False, True, False)],
)
def test_what_must_not_overlap_is_waited_for(batch, overlap, expected):
    assert in_batches(ParallelConfig(batch_p2p_comm=batch, overlap_p2p_comm=overlap)) is expected

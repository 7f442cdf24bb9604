"""How messages may travel: modes that exclude each other are told with a remedy that mends it."""

import pytest

from ppctl.config.compose import compose
from ppctl.config.parallel_rules import in_batches
from ppctl.config.schema import LaunchConfig, ParallelConfig, RunConfig
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
        ["launch.transport=plain", "pipeline.p2p_capacity=4"],
        "no message overlaps with computation",
        "launch.transport=channels",
    ),
    (
        ["launch.transport=channels", "parallel.batch_p2p_comm=true", "parallel.overlap_p2p_comm=false"],
        "channels have connections each",
        "launch.transport=auto",
    ),
    (["launch.transport=fast"], "must be one of auto, plain, channels", "launch.transport=auto"),
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
    assert remedy in problem.remedy.splitlines()
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
        ["launch.transport=channels", "pipeline.p2p_capacity=4"],
        ["launch.device=cpu", "pipeline.p2p_capacity=4"],
        ["launch.transport=plain", "parallel.batch_p2p_comm=true", "parallel.overlap_p2p_comm=false"],
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
    parallel, launch = ParallelConfig(batch_p2p_comm=batch, overlap_p2p_comm=overlap), LaunchConfig(device="cpu")
    assert in_batches(RunConfig(parallel=parallel, launch=launch)) is expected


@pytest.mark.parametrize(
    ("transport", "device", "expected"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("auto", "any", False),
        ("channels", "cuda", False),
        ("plain", "cuda", True),
        ("plain", "cpu", True),
    ],
)
def test_the_transport_is_plain_on_cuda_unless_the_config_says_otherwise(transport, device, expected):
    parallel = ParallelConfig(batch_p2p_comm=False, overlap_p2p_comm=True)
    assert in_batches(RunConfig(parallel=parallel, launch=LaunchConfig(device=device, transport=transport))) is expected

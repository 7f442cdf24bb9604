"""`train.check_replicas`: copies of a parameter on several ranks are compared, and the first that differ are named."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from axis_runs import MaskedBatches, config_of
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import TrainingError
from ppctl.plan.build import build_plan
from ppctl.train.replica_check import ReplicaCheck, bit_sum
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

PIPELINE = dict(pp=2, layout="Et*2|t*2L", dp=2)
HALF = dict(params_dtype="bfloat16", bf16=True, data_parallel_sharding="optimizer_gradients")
ETP = "parallel.expert_tensor_parallel_size"

CASES = {
    "a norm, whole on every rank": (
        ("grouped", dict(tp=2, sp=True, dp=2), "master", "layers.2.attention_norm.weight", 3),
        "layers.2.attention_norm.weight that must have the same bits differ: those of ranks 0, 1 and 2, of rank 3",
    ),
    "a matrix, whole on two": (
        ("grouped", dict(tp=2, sp=True, dp=2), "master", "layers.1.attention.wq.weight", 1),
        "layers.1.attention.wq.weight that must have the same bits differ: those of rank 1, of rank 3",
    ),
    "keys that fewer groups than ranks leave whole": (
        ("grouped", dict(tp=4, sp=True), "master", "layers.0.attention.wk.weight", 1),
        "layers.0.attention.wk.weight that must have the same bits differ: those of ranks 0, 2 and 3, of rank 1",
    ),
    "a part of a norm, on the ranks that have this part": (
        ("grouped", dict(tp=2, sp=True, dp=2, data_parallel_sharding="full"), "master", "norm.weight", 2),
        "norm.weight (master) that must have the same bits differ: those of rank 2, of rank 3",
    ),
    "a weight in bfloat16 beside sharded masters": (
        ("biases", dict(tp=2, cp=2) | HALF, "model", "layers.3.ffn_norm.weight", 0),
        "layers.3.ffn_norm.weight that must have the same bits differ: those of ranks 1, 2 and 3, of rank 0",
    ),
    "a tied output, on another stage": (
        ("biases", PIPELINE, "master", "output.weight", 3),
        "tok_embeddings.weight that must have the same bits differ: those of ranks 0, 1 and 2, of rank 3",
    ),
    "experts, whole on two": (
        ("experts", dict(tp=2, sp=True, dp=2, ep=2, etp=1), "master", "layers.1.moe.experts.w2", 2),
        "layers.1.moe.experts.w2 that must have the same bits differ: those of rank 0, of rank 2",
    ),
}


def step_of_each(cases):
    """Runs in a rank: of each case what comparing said before and after a bit was turned on one rank."""
    return [_steps(from_mapping(mapping), *turned) for mapping, *turned in cases]


def _steps(config, where, name, rank):
    given = {ETP: "command line"} if config.parallel.expert_tensor_parallel_size else {}
    session = build_session(config, build_plan(config, given), dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, MaskedBatches(config, session.own.dp_rank))
    check, results = ReplicaCheck(session), [trainer.step(0), trainer.step(1)]
    for result in results:
        check.post_update(result)
    if dist.get_rank() == rank:
        tensor = getattr(session.replica.weights, where)[name].data
        bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        bits[0] ^= 1
    try:
        check.compare(3)
        said = None
    except TrainingError as error:
        said = str(error)
    session.pipeline.close()
    return [result.record.get("replicas_compared") for result in results], said


@cache
def results():
    cases = []
    for (kind, axes, *turned), _ in CASES.values():
        cases.append((to_mapping(config_of(kind, **axes, check_replicas=2)), *turned))
    return run_ranks(step_of_each, 4, cases, timeout=110)


@pytest.mark.shows("train.check_replicas")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_one_bit_on_one_rank_is_found_and_named(case):
    for rank in results():
        compared, said = rank[list(CASES).index(case)]
        assert compared[0] is None  # every second step
        assert compared[1] > 10
        assert said is not None
        assert "PP-E734" in said
        assert CASES[case][1] in said, said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_single_bit_changes_the_sum(dtype):
    tensor = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = bit_sum(tensor).item()
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in range(8 * tensor.element_size()):
        mask = torch.tensor(1, dtype=torch.int64) << place
        bits[7] ^= mask.to(bits.dtype)
        assert bit_sum(tensor).item() != before
        bits[7] ^= mask.to(bits.dtype)
    assert bit_sum(tensor).item() == before

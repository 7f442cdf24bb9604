"""Groups that leave a machine are priced over the network, wherever the order of the axes and the nodes put them."""

import pytest

from ppctl.config.compose import compose
from ppctl.cost.setting import Setting
from ppctl.cost.times import Machine
from ppctl.launch.planning import planned
from ppctl.plan.prices import machine_for
from ppctl.topology import ParallelSizes, RankGrid

MODEL = ["model.num_layers=8", "model.hidden_size=1024", "model.num_attention_heads=8", "model.ffn_hidden_size=4096"]
RUN = [
    *MODEL,
    "model.vocab_size=8192",
    "launch.device=cuda",
    "parallel.bf16=true",
    "gbs=64",
    "mbs=1",
    "cost.device=h100",
]


def step(*words: str) -> float:
    plan = planned([*RUN, *words])[1]
    assert not plan.problems
    return plan.step_time_s


def machine(sizes: ParallelSizes, *words: str) -> Machine:
    return machine_for(compose([*RUN, *words]).config, Setting(1, 512, 2, sizes))


@pytest.mark.parametrize(
    ("split", "near", "far"),
    [
        ("tp=8 pp=2 dp=2 sp=true", "nodes=4", "nodes=8 gpus_per_node=4"),
        ("tp=4 pp=2 dp=1 sp=true", "nodes=1", "nodes=8"),
        ("tp=8 pp=2 dp=2 sp=true", "nodes=4", "nodes=4 parallel.order=dp-tp-cp-ep-pp"),
        ("pp=4 dp=1", "nodes=1", "nodes=4"),
        ("cp=4 dp=4", "nodes=2", "nodes=8"),
        ("cp=4 dp=4 model.cp_comm_type=a2a", "nodes=2", "nodes=8"),
        ("dp=4", "nodes=1", "nodes=4"),
        ("dp=8 ep=4 model.num_moe_experts=8", "nodes=2", "nodes=4"),
        ("dp=8 ep=4 model.num_moe_experts=8 cost.stack=megatron", "nodes=2", "nodes=4"),
        ("dp=8 ep=4 model.num_moe_experts=8 gbs=512", "nodes=2", "nodes=2 parallel.order=tp-cp-dp-ep-pp"),
    ],
)
def test_a_step_takes_longer_if_groups_leave_their_machine(split: str, near: str, far: str) -> None:
    assert step(*split.split(), *near.split()) < step(*split.split(), *far.split())


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "pp-tp-cp-ep-dp"])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
def test_links_are_fast_where_all_groups_are_on_one_machine(order: str, per_node: int) -> None:
    sizes = ParallelSizes(48, tp=2, cp=2, dp=6, pp=2, ep=4, edp=6, order=order)
    made = machine(sizes, f"nodes={48 // per_node}", f"gpus_per_node={per_node}")
    for axes in (("tp",), ("cp",), ("dp",), ("dp", "cp"), ("pp",), ("ep",), ("edp",)):
        groups = RankGrid(sizes).groups(*axes)
        alone = all(len({rank // per_node for rank in group}) == 1 for group in groups)
        assert (made.link(sizes.block(*axes)) > made.device.network) == alone, axes


def test_the_links_of_a_rack_reach_over_its_machines() -> None:
    sizes = ParallelSizes(256, tp=8, dp=32, ep=64, edp=4)
    made = machine(sizes, "nodes=64", "gpus_per_node=4", "cost.device=gb200")
    assert made.link(sizes.block("ep")) == made.link(sizes.block("tp")) > made.link(sizes.block("dp"))

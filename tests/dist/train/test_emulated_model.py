"""ppctl's own stages over devices that compute later: the bits of real ranks, and hosts that hardly ever wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from emulated_nccl import Backend
from emulated_pipeline import EmulatedCommunicator, EmulatedConnections, emulation
from emulated_world import World
from expert_runs import config_of
from pairwise import in_tiers
from ranks import run_ranks

from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import make_group
from ppctl.comm.modes import Modes
from ppctl.config.schema import RunConfig
from ppctl.data.batches import StepBatch
from ppctl.engine.interpreter import run_schedule
from ppctl.geometry.rows import Parts, Place
from ppctl.model.kernels import ON_CPU
from ppctl.model.recompute import recompute
from ppctl.model.stage import build_stage
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan import Plan
from ppctl.plan.build import build_plan
from ppctl.schedule.action import F
from ppctl.topology import RankGrid
from ppctl.train.programs import StagePrograms

CPU = torch.device("cpu")
MICROBATCHES = 2
EACH_GROUP = "linear.py: for_each_group"
"""Takes sizes to the host on the CPU alone: bfloat16 on CUDA goes through one kernel."""
EXCHANGE = "dispatch.py: sizes"

Bits = tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]
"""Losses by microbatch, gradients by name."""

RUNS = {
    "dense, MTP": ("Et|t|tt|tmL", 2, 1),
    "softmax": ("Et|t|tt|tL", 2, 2),
    "deepseek": ("Ettt|ttmL", 2, 2),
}
"""Kind of model -> layout, pp, ep (of as many replicas)."""
PAIRS = {"overlap_moe_expert_parallel_comm": True}
ORDERS = {
    "": (MICROBATCHES, {}),
    "pairs": (4, PAIRS),
    "pairs, W behind them": (4, PAIRS | {"delay_wgrad_compute": True}),
    "dualpipev": (5, {"pp_schedule": "dualpipev"}),
}
"""Microbatches and keys of `parallel` or `pipeline`."""
GRID = [(kind, order, recomputed) for kind in RUNS for order in ORDERS for recomputed in (False, True)
        if not order or kind == "softmax"]  # fmt: skip
SAMPLE = [("dense, MTP", "", False), ("softmax", "dualpipev", False)]


def config(kind: str, order: str, recomputed: bool) -> RunConfig:
    (layout, pp, ep), (microbatches, keys) = RUNS[kind], ORDERS[order]
    made = config_of(Path("unread"), kind, microbatches, layout, pp, dp=ep, ep=ep)
    for key, value in keys.items():
        setattr(made.pipeline if key == "pp_schedule" else made.parallel, key, value)
    made.train.recompute_granularity = "full" if recomputed else None
    if recomputed:
        made.train.recompute_method, made.train.recompute_num_layers = "uniform", 1
    return made


def plan_of(made: RunConfig) -> Plan:
    plan = build_plan(made, {})
    assert not plan.problems, plan.problems
    return plan


class Rank:
    """One rank's stages, with their programs as training makes them, and its batch."""

    def __init__(self, made: RunConfig, plan: Plan, rank: int) -> None:
        self.model = made.model
        self.plan, self.own, grid = plan, plan.for_rank(rank), RankGrid(plan.sizes)
        parts = Parts(ep=Place(grid.coordinates(rank, "expert")["ep"], plan.sizes.ep))
        self.stages = {
            spec.stage: build_stage(spec, made.model, seed=1, dtype=torch.float32, device=CPU, parts=parts)
            for spec in self.own.stages
        }
        session = SimpleNamespace(
            groups=SimpleNamespace(split=None),
            config=made,
            plan=plan,
            own=self.own,
            device=CPU,
            model=SimpleNamespace(
                stages=self.stages,
                recompute={number: recompute(stage, made.train, number) for number, stage in self.stages.items()},
                kernels=ON_CPU,
            ),
            replica=SimpleNamespace(gathered=None, loss_scale=None),
            microbatches_of_all=plan.num_microbatches * plan.sizes.dp,
        )
        self.programs = StagePrograms(session)
        self.programs.begin(batch_of(made, plan.num_microbatches, self.own.dp_rank))

    def step(self, communicator: Communicator, exchange: ExpertExchange | None) -> Bits:
        for stage in self.stages.values():
            if exchange is not None:
                stage.spread_experts(exchange)
        run_schedule(self.plan.schedule, self.programs.make(0), communicator)
        grads = {n: p.grad for stage in self.stages.values() for n, p in stage.canonical_parameters().items()}
        return self.programs.losses, grads


def batch_of(made: RunConfig, microbatches: int, dp_rank: int) -> StepBatch:
    draw = torch.Generator().manual_seed(dp_rank)
    shape = (microbatches, made.train.micro_batch_size, made.data.seq_length)
    tokens, labels = (torch.randint(made.model.vocab_size, shape, generator=draw) for _ in range(2))
    mask = (torch.rand(shape, generator=draw) > 0.2).float()
    return StepBatch(tokens, labels, mask, total_tokens=100, checksum=0)


def on_gloo(kind: str, order: str, recomputed: bool) -> Bits:
    """A step of this rank over real messages."""
    made = config(kind, order, recomputed)
    plan = plan_of(made)
    grid = RankGrid(plan.sizes)
    pp_group = make_group(grid.groups("pp"))
    ep_group = make_group(grid.groups("ep")) if plan.sizes.ep > 1 else None
    communicator = Communicator(pp_group, channels=plan.schedule.capacities, device=CPU)
    own = Rank(made, plan, dist.get_rank())
    return own.step(communicator, None if ep_group is None else ExpertExchange({"ep": ep_group}, made.model))


class Pipelines(EmulatedConnections):
    """The connections of a rank's pipeline among several."""

    def __init__(self, world: World, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(world, ranks.index(rank), len(ranks))
        self.ranks = ranks

    def _get(self, kind, what, members):
        if what not in self._made:
            ranks = [self.ranks[member] for member in members]
            self._made[what] = Backend(self.world, self.ranks[self.rank], self.name_of(what, members), ranks)
        return self._made[what]


def on_devices(ranks: Sequence[Rank], plan: Plan, world: World) -> list[Bits]:
    """A step of all ranks on the devices of a world."""
    grid, model = RankGrid(plan.sizes), ranks[0].model

    def host(rank: int) -> Bits:
        connections = Pipelines(world, grid.group_of("pp", rank), rank)
        communicator = EmulatedCommunicator(connections, plan.schedule, Modes())
        experts = grid.group_of("ep", rank) if plan.sizes.ep > 1 else ()
        exchange = None
        if experts:
            groups = {"ep": Backend(world, rank, f"experts of {experts}", experts)}
            exchange = ExpertExchange(groups, model)  # type: ignore[arg-type]  # a backend as a group
        return ranks[rank].step(communicator, exchange)

    with emulation(world):
        return world.run(host)


def exchanges(rank: Rank) -> int:
    """Forwards of layers with experts in a rank's list."""
    row = rank.plan.schedule.actions[rank.own.pp_rank]
    return sum(len(rank.stages[action.stage].routers()) for action in row if action.op is F)


def same(found: Mapping, expected: Mapping) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("kind", "order", "recomputed"), in_tiers(GRID, SAMPLE))
def test_a_step_has_the_bits_of_real_ranks_and_hosts_wait_only_for_the_sizes_of_exchanges(
    kind: str, order: str, recomputed: bool
) -> None:
    """A dense model's hosts never wait; with experts over ranks they wait once for each layer's forward."""
    made = config(kind, order, recomputed)
    plan = plan_of(made)
    world = World(plan.sizes.world, seed=1)
    ranks = [Rank(made, plan, rank) for rank in range(plan.sizes.world)]
    found = on_devices(ranks, plan, world)
    assert bool(plan.schedule.pairs) == bool(order)
    real = run_ranks(on_gloo, plan.sizes.world, kind, order, recomputed)
    assert any(losses for losses, _ in found)
    for rank, (own, expected) in enumerate(zip(found, real, strict=True)):
        assert same(own[0], expected[0]) and same(own[1], expected[1]), rank
        waits = Counter(world.gpus[rank].waits)
        del waits["at the end"], waits[EACH_GROUP]
        times = exchanges(ranks[rank]) * (1 + recomputed) if plan.sizes.ep > 1 else 0
        assert waits == (Counter({EXCHANGE: times}) if times else Counter()), rank

"""Whole steps of training over devices that compute later: pipeline, norm over the ranks and update, bit by bit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from command import TINY
from emulated_hosts import current_actor
from emulated_nccl import Backend
from emulated_pipeline import EmulatedCommunicator, EmulatedConnections, emulation
from emulated_world import Deadlock, World
from pairwise import in_tiers
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppctl.comm.modes import Modes
from ppctl.config.schema import RunConfig
from ppctl.data.batches import StepBatch
from ppctl.engine import interpreter, pace
from ppctl.engine.pace import DevicePace
from ppctl.launch.planning import planned
from ppctl.plan import Plan
from ppctl.train import bad_steps, grad_norm, reports
from ppctl.train.session import Session, SessionParts, build_session, reads_data
from ppctl.train.step import Trainer

CPU = torch.device("cpu")
STEPS = 2


class Drawn:
    """The batches of every step."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        draw = torch.Generator().manual_seed(0)
        count = plan.gradient_accumulation_steps * plan.num_microbatches
        shape = (count, config.train.micro_batch_size, config.data.seq_length)
        tokens = torch.randint(config.model.vocab_size, shape, generator=draw)
        mask = torch.ones(shape)
        self.batch = StepBatch(tokens, tokens.roll(-1, -1), mask, total_tokens=mask.numel(), checksum=0)

    def step(self, step: int) -> StepBatch:
        return self.batch


class Reports:
    """The gather of the ranks' reports, which goes between CPUs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rows: defaultdict[int, dict[int, Sequence[float]]] = defaultdict(dict)
        self.calls: Counter[int] = Counter()

    def gather(self, row: Sequence[float], rank: int, groups: object) -> torch.Tensor:
        rows = self.rows[self.calls[rank]]
        self.calls[rank] += 1
        rows[rank] = list(row)
        current_actor().wait(lambda: len(rows) == self.world, "for the reports")
        return torch.tensor([rows[rank] for rank in range(self.world)], dtype=torch.float64)


def all_gather(rows: Sequence[torch.Tensor], own: torch.Tensor, *, group: Backend) -> None:
    """As NCCL has it: one group of sends and receives."""
    others = [peer for peer in range(group.size()) if peer != group.position]
    moves = [(own, peer, True) for peer in others] + [(rows[peer], peer, False) for peer in others]
    group.start(moves).wait()
    rows[group.position].copy_(own)


def composed(pp: int, *more: str) -> tuple[RunConfig, Plan]:
    found, plan, problems = planned(["+recipe=quickstart", *TINY, f"pp={pp}", "vpp=1", *more], for_training=True)
    assert plan is not None and not problems, problems
    return found.config, plan


def session_of(rank: int, config: RunConfig, plan: Plan, connect: Callable) -> Session:
    dist.init_process_group("fake", rank=rank, world_size=plan.sizes.world, store=FakeStore())
    try:
        parts = SessionParts(connect=connect, load_data=lambda data: None, clock_offset=lambda: 0.0)
        return build_session(config, plan, rank, CPU, parts=parts)
    finally:
        dist.destroy_process_group()


def train(
    session: Session, steps: int = STEPS, *, reserves: bool | None = None
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, norm) of every step, and the weights behind them; `reserves`: after a dry pass, as on a GPU, or without
    the memory that it reserves behind it."""
    reads = any(reads_data(spec, session.config.data) for spec in session.own.stages)
    trainer = Trainer(session, Drawn(session.config, session.plan) if reads else None)
    if reserves is not None:
        trainer.on_gpu = reserves
        trainer.dry_pass(0)
    free = torch.cuda.mem_get_info() if reserves else None
    records = [trainer.step(step).record for step in range(steps)]
    assert free is None or torch.cuda.mem_get_info() == free, "the driver was asked in a step"
    return [(record["loss"], record["grad_norm"]) for record in records], dict(session.replica.weights.model)


@contextmanager
def trained_on(monkeypatch: pytest.MonkeyPatch, world: World, *more: str) -> Iterator[list[Session]]:
    """The sessions of a pipeline on a world's devices, which may run."""
    pp = len(world.gpus)
    config, plan = composed(pp, *more)
    sessions = []
    for rank in range(pp):
        connections = EmulatedConnections(world, rank, pp)
        communicator = EmulatedCommunicator(connections, plan.schedule, Modes())
        session = session_of(rank, config, plan, connect=lambda *_, made=communicator: made)
        session.replica.norm.group = Backend(world, rank, "norm", range(pp))
        sessions.append(session)
    with emulation(world), monkeypatch.context() as patch:
        patch.setattr(reports, "gather_rows", Reports(pp).gather)
        patch.setattr(grad_norm, "dist", SimpleNamespace(all_gather=all_gather))
        yield sessions


def test_with_the_plans_peak_reserved_full_devices_train_and_else_they_hang(monkeypatch) -> None:
    """All but weights and optimizer is allocated while it runs."""

    def trained(*, reserves: bool) -> None:
        world = World(2, full="frees")
        with trained_on(monkeypatch, world) as sessions:
            for gpu, session in zip(world.gpus, sessions, strict=True):
                own = session.plan.pp_ranks[gpu.rank]
                gpu.memory.in_use = gpu.memory.mapped = own.weight_bytes + own.optimizer_bytes
            world.run(lambda rank: train(sessions[rank], 1, reserves=reserves))

    with pytest.raises(Deadlock, match=r"(?s)to free memory.*to free memory"):
        trained(reserves=False)
    trained(reserves=True)


@pytest.mark.parametrize(("pp", "seed"), in_tiers([(2, 1), (2, 2), (4, 1), (4, 2)], [(2, 2)]))
def test_training_over_devices_has_the_bits_of_one_process(monkeypatch, pp: int, seed: int) -> None:
    numbers, weights = train(session_of(0, *composed(1), connect=lambda *_: None))
    assert numbers[0] != numbers[1]
    world = World(pp, seed=seed)
    with trained_on(monkeypatch, world) as sessions:
        found = world.run(lambda rank: train(sessions[rank]))
    together: dict[str, torch.Tensor] = {}
    for own_numbers, own in found:
        assert own_numbers == numbers
        together |= own
    assert together.keys() == weights.keys()
    assert all(torch.equal(together[name], weights[name]) for name in weights)


CALLS = "pipeline.pp_batch_size=4"
"""Two schedule calls a step."""
OF_THE_HOST = ("optimizer.py", "reports.py: gather_reports", "reports.py: most_updates")
"""Counts of updates, and reports: a real device has no part in them, here every tensor is on one."""


def test_a_host_waits_once_a_step_however_many_schedule_calls_it_has(monkeypatch) -> None:
    """The calls are enqueued one behind the other; the device's own bound (`pace`) is no wait for it to be through."""
    numbers, weights = train(session_of(0, *composed(1, CALLS), connect=lambda *_: None))
    world = World(2, seed=3)
    with trained_on(monkeypatch, world, CALLS) as sessions:
        assert sessions[0].plan.gradient_accumulation_steps == 2
        found = world.run(lambda rank: train(sessions[rank]))
    for gpu, (own_numbers, own) in zip(world.gpus, found, strict=True):
        assert own_numbers == numbers
        assert all(torch.equal(own[name], weights[name]) for name in own)
        waits = {place: count for place, count in gpu.waits.items() if not place.startswith(OF_THE_HOST)}
        assert waits == {"host_numbers.py: read": STEPS, "at the end": 1}


def test_what_is_waited_for_was_enqueued_before_the_update(monkeypatch) -> None:
    """The device is followed through the lists and no further: the end of a pipeline is not the end of an update."""
    order: list[str] = []

    class Passed:
        def record(self) -> None:
            order.append("mark")

        def synchronize(self) -> None:
            pass

    def make_pace(device, length, heartbeat):
        return DevicePace(length, heartbeat or pace._Silence(), Passed)

    monkeypatch.setattr(interpreter, "make_pace", make_pace)
    session = session_of(0, *composed(1, CALLS), connect=lambda *_: None)
    optimizer = session.replica.optimizer
    optimizer.fused = optimizer.skips_on_device = True
    update = optimizer.step

    def step(left_out=None) -> None:
        order.append("update")
        update(left_out)

    monkeypatch.setattr(optimizer, "step", step)
    result = Trainer(session, Drawn(session.config, session.plan)).step(0)
    assert order[-1] == "update" and "mark" in order
    started, pipeline_end, agreed, ended = result.phases
    assert started < pipeline_end < agreed < ended


def half(first_scale: float) -> tuple[str, ...]:
    return ("parallel.fp16=true", f"optim.initial_loss_scale={first_scale}", "optim.hysteresis=1")


@pytest.mark.parametrize(
    ("more", "leaves_out"),
    [(half(2.0**27), True), (half(2.0**4), False), (("train.on_bad_step=skip", "train.spike_factor=0.98"), True)],
    ids=["overflows", "fits", "spikes"],
)
def test_what_the_device_leaves_out_is_what_the_host_would_have(monkeypatch, more, leaves_out: bool) -> None:
    """Steps that overflow, or spike: an update that is enqueued before the host knows, and one that is not."""
    monkeypatch.setattr(bad_steps, "NEEDED", 3)
    outcomes = []
    for ahead in (True, False):
        session = session_of(0, *composed(1, *more), connect=lambda *_: None)
        optimizer = session.replica.optimizer
        optimizer.fused, optimizer.skips_on_device = True, ahead
        trainer = Trainer(session, Drawn(session.config, session.plan))
        records = [trainer.step(step).record for step in range(10)]
        told = [(r["loss"], r["grad_norm"], r["lr"], r["skipped"], r.get("loss_scale")) for r in records]
        outcomes.append((told, session.replica.weights.master, optimizer.state))
    (told, masters, state), (wanted, expected, its_state) = outcomes
    assert [str(row) for row in told] == [str(row) for row in wanted]  # a norm may be nan
    assert any(row[3] for row in told) == leaves_out and not all(row[3] for row in told)
    for name in masters:
        assert torch.equal(masters[name], expected[name]), name
        assert all(torch.equal(state[name][key], its_state[name][key]) for key in state[name]), name

"""`ppctl.TorchSchedule` on torch's own stages: the bits of torch's runtime, under torch's schedules and ppctl's.

And the reverse: a schedule that ppctl found is a CSV that torch's runtime loads and runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks
from torch import Tensor, nn

import ppctl
from ppctl.errors import PpctlError
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.lane_orders import Task
from ppctl.schedule.order_search import find_schedule
from ppctl.schedule.policies import POLICIES, schedule_policy
from ppctl.schedule.simulate import Costs

WIDTH, MICROBATCH = 6, 2

TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SINGLE = ("GPipe", "1F1B")


class Block(nn.Module):
    """One stage: a product with a bias, a norm, and a factor that comes by keyword to every stage."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first, self.norm, self.second = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = self.second(torch.tanh(self.norm(self.first(x))))
        return x + (y if factor is None else y * factor)


def loss_of(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * ((output - target) ** 2).mean()


def stages_of(kind: str, chunks: int, make: Any = Block) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage

    pp, rank = dist.get_world_size(), dist.get_rank()
    place = Placement(kind, pp, pp * chunks)
    return [PipelineStage(make(i), i, place.num_stages, torch.device("cpu")) for i in place.stages_of(rank)]


def placement_kind(name: str) -> str:
    policy = schedule_policy(name)
    return POLICIES[policy].placement if policy in POLICIES else "loop"


def torchs_schedule(name: str, stages: list[Any], n: int, **more: Any) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)(stages[0] if name in SINGLE else stages, n, loss_of, **more)


def data(n: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(MICROBATCH * n, WIDTH, generator=generator) for _ in range(3))  # type: ignore[return-value]


def results(schedule: Any, stages: list[Any], n: int, kind: str, **more: Any) -> dict[str, Any]:
    """What two steps and an evaluation leave: losses, gradients that add up, outputs."""
    first, last = stages[0].is_first, any(stage.is_last for stage in stages)
    found: dict[str, Any] = {}
    for step in range(2):
        x, target, factor = data(n, step)
        losses: list[Tensor] = []
        given = {"target": target, "losses": losses} if last else {}
        output = schedule.step(*((x,) if first else ()), **given, factor=factor, **more)
        found[f"losses {step}"] = [loss.detach().clone() for loss in losses]
        found[f"output {step}"] = None if output is None else output.detach().clone()
    for stage in stages:  # before the evaluation, in which torch's runtime divides them once more
        for name, parameter in stage.submod.named_parameters():
            found[f"{stage.stage_index}.{name}"] = parameter.grad.clone()
    x, target, factor = data(n, 9)
    losses = []
    given = {"target": target, "losses": losses} if last else {}
    if isinstance(schedule, ppctl.TorchSchedule) or kind == "loop":
        output = schedule.eval(*((x,) if first else ()), **given, factor=factor)
    else:  # torch's runtime raises: "can't steal_bwd_input if this stage doesn't have backward"
        output = by_hand(stages[0].num_stages, x, target, factor, losses) if last else None
    found["evaluated"] = None if output is None else output.detach().clone()
    found["evaluated losses"] = [loss.detach() for loss in losses]
    return found


def by_hand(num_stages: int, *given: Any) -> Tensor:
    """An evaluation without a pipeline; its losses are added to the last argument."""
    *batch, losses = given
    outputs = []
    for x, target, factor in zip(*(each.split(MICROBATCH) for each in batch), strict=True):
        with torch.no_grad():
            for index in range(num_stages):
                x = Block(index)(x, factor)
        outputs.append(x)
        losses.append(loss_of(x, target))
    return torch.cat(outputs)


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, list):
            return len(a) == len(b) and all(map(torch.equal, a, b))
        return a is b if a is None or b is None else torch.equal(a, b)

    return sorted(one.keys() ^ other.keys()) + [key for key in one if key in other and not same(one[key], other[key])]


def against_torch(names: tuple[str, ...], n: int, more: dict[str, Any]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        chunks = 1 if name in SINGLE else 2
        kind = placement_kind(name)
        theirs, ours = (stages_of(kind, chunks) for _ in range(2))
        expected = results(torchs_schedule(name, theirs, n, **more), theirs, n, kind)
        schedule = ppctl.TorchSchedule(ours, n, loss_of, schedule=name, **more)
        found[name] = unlike(expected, results(schedule, ours, n, kind))
        assert len(expected) > 6  # gradients are there
    return found


@pytest.mark.parametrize(
    ("names", "pp", "n", "more"),
    [
        (("LoopedBFS", "ZBVZeroBubble"), 2, 4, {}),
        *(
            pytest.param(TORCHS, pp, n, more, marks=pytest.mark.whole)
            for pp, n, more in ((2, 4, {}), (2, 4, {"scale_grads": False}), (3, 6, {}), (4, 8, {}))
        ),
    ],
)
def test_every_schedule_of_torch_gives_the_bits_of_torchs_runtime(
    names: tuple[str, ...], pp: int, n: int, more: dict[str, Any]
) -> None:
    for found in run_ranks(against_torch, pp, names, n, more, timeout=120):
        assert found == {name: [] for name in names}


def ours_against_torchs(names: list[str], n: int) -> dict[str, list[str]]:
    """Every policy, a file and `auto` against torch's 1F1B, interleaved 1F1B or ZBV on the same placement."""
    found = {}
    for name in names:
        policy = POLICIES.get(name)
        kind, chunks = ("v", 2) if policy is None else (policy.placement, policy.chunks)
        like = {"v": "ZBVZeroBubble", "loop": "1F1B" if chunks == 1 else "Interleaved1F1B"}[kind]
        theirs, ours = (stages_of(kind, chunks) for _ in range(2))
        expected = results(torchs_schedule(like, theirs, n), theirs, n, kind)
        schedule = ppctl.TorchSchedule(ours, n, loss_of, schedule=name, memory=2.0 if name == "auto" else 1.0)
        found[name] = unlike(expected, results(schedule, ours, n, kind))
        if name == "auto":
            assert not schedule._measures and schedule._schedule is not None
        schedule.close()
    return found


TRAINS = [name for name, policy in POLICIES.items() if policy.trains]


@pytest.mark.parametrize("names", [["zb_h2"], pytest.param(TRAINS, marks=pytest.mark.whole)], ids=["some", "all"])
def test_every_policy_a_file_and_auto_give_the_bits_of_torchs_runtime(names: list[str], tmp_path: Path) -> None:
    csv = tmp_path / "found.csv"
    csv.write_text(searched("v", 2, 4).to_csv())
    for found in run_ranks(ours_against_torchs, 2, [*names, "auto", str(csv)], 4, timeout=120):
        assert len(found) == len(names) + 2 and not any(found.values()), found


def searched(kind: str, pp: int, n: int) -> Schedule:
    """An order that no policy has: of stages that take different times."""
    place = Placement(kind, pp, 2 * pp)
    seconds = [1.0 + 0.3 * stage for stage in range(place.num_stages)]
    costs = Costs(seconds, [2.1 * each for each in seconds], message=0.2)
    task = Task(place, n, costs, [1.0] * place.num_stages, [float(3 * pp)] * pp)
    return find_schedule(task, 200_000).schedule


def loaded_by_torch(kind: str, n: int, csv: str) -> list[str]:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    theirs, loaded = (stages_of(kind, 2) for _ in range(2))
    like = "ZBVZeroBubble" if kind == "v" else "Interleaved1F1B"
    expected = results(torchs_schedule(like, theirs, n), theirs, n, kind)
    runtime = _PipelineScheduleRuntime(loaded, n, loss_of)
    runtime._load_csv(csv)
    return unlike(expected, results(runtime, loaded, n, kind))


@pytest.mark.parametrize(
    ("kind", "pp"), [("v", 2), *(pytest.param(k, 4, marks=pytest.mark.whole) for k in ("loop", "v"))]
)
def test_torchs_runtime_loads_a_found_schedule_and_gives_the_same_bits(kind: str, pp: int, tmp_path: Path) -> None:
    csv = tmp_path / "found.csv"
    found = searched(kind, pp, 2 * pp)
    assert found.name == "auto" and found.split
    csv.write_text(found.to_csv())
    assert run_ranks(loaded_by_torch, pp, kind, 2 * pp, str(csv), timeout=120) == [[]] * pp


def replicated(kind: str, name: str) -> list[str]:
    """Two replicas of a pipeline of two ranks: stages in fully_shard or DistributedDataParallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, of_replicas = mesh.get_group("pp"), mesh.get_group("dp")
    n, chunks = 4, 2 if kind == "fully_shard" else 1

    def made() -> list[Any]:
        stages = []
        for index in Placement(placement_kind(name), 2, 2 * chunks).stages_of(dist.get_rank(group)):
            module: Any = Block(index)
            if kind == "fully_shard":
                fully_shard(module, mesh=mesh["dp"])
            else:
                module = nn.parallel.DistributedDataParallel(module, process_group=of_replicas)
            stages.append(PipelineStage(module, index, 2 * chunks, torch.device("cpu"), group=group))
        return stages

    def gradients(schedule: Any, stages: list[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step in range(2):
            x, target, _ = data(n, 10 * step + dist.get_rank(of_replicas))
            losses: list[Tensor] = []
            given = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
            schedule.step(*((x,) if stages[0].is_first else ()), **given)
            found[f"losses {step}"] = [loss.detach().clone() for loss in losses]
        for stage in stages:
            for key, parameter in stage.submod.named_parameters():
                gradient = parameter.grad
                found[f"{stage.stage_index}.{key}"] = getattr(gradient, "_local_tensor", gradient).clone()
        return found

    theirs, ours = made(), made()
    expected = gradients(torchs_schedule(name, theirs, n), theirs)
    return unlike(expected, gradients(ppctl.TorchSchedule(ours, n, loss_of, schedule=name), ours))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fully_shard", "Interleaved1F1B"),
        ("fully_shard", "InterleavedZeroBubble"),
        ("fully_shard", "ZBVZeroBubble"),
        ("replicas", "1F1B"),
    ],
)
def test_sharded_and_replicated_stages_have_the_bits_of_torchs_runtime(kind: str, name: str) -> None:
    assert run_ranks(replicated, 4, kind, name, timeout=120) == [[]] * 4


class Marks(Block):
    """Hands on whole numbers beside its result."""

    def forward(self, x: Tensor, marks: Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if marks is not None else (y, torch.arange(len(x)))


def refused(what: str) -> list[str]:
    """The code and message of every refusal, in order."""
    found, n = [], 4
    last = dist.get_rank() == 1

    def note(run: Any) -> None:
        try:
            run()
            found.append("nothing")
        except PpctlError as error:
            found.append(f"{error.problems[0].code}: {error.problems[0].message}")

    def step_of(stages: list[Any], batch: int = MICROBATCH * n, **more: Any) -> None:
        schedule = ppctl.TorchSchedule(stages, n, loss_of, **more)
        x = torch.randn(batch, WIDTH)
        schedule.step(*((x,) if stages[0].is_first else ()), **({"target": x} if last else {}))

    if what == "places":
        note(lambda: step_of(stages_of("loop", 2), schedule="zbv_zero_bubble"))
        note(lambda: step_of(stages_of("v", 2), schedule="interleaved_1f1b"))
        note(lambda: step_of(stages_of("loop", 1), schedule="1f1b" if last else "zb_h1"))
        note(lambda: step_of(stages_of("loop", 2), schedule="1f1b"))
        note(lambda: ppctl.TorchSchedule(stages_of("loop", 1), n, loss_of, schedule="one_f"))
        note(lambda: ppctl.TorchSchedule([nn.Linear(1, 1)], n, loss_of))
        note(lambda: ppctl.TorchSchedule(stages_of("loop", 1), n, loss_of, schedule="zb_h1", memory=2.0))
    if what == "tensors":
        note(lambda: step_of(stages_of("loop", 1, Marks)))
    if what == "shapes":
        step_of(stages_of("loop", 1), batch=MICROBATCH * n + 1)  # raises on one rank, and ends the other
    return found


def test_what_torchs_stages_cannot_do_is_refused_by_name_on_all_ranks() -> None:
    one, other = run_ranks(refused, 2, "places")
    assert one == other
    assert [each[:7] for each in one] == ["PP-E130"] * 3 + ["PP-E305", "PP-E304", "PP-E130", "PP-E396"], one
    assert "rank 0 [0, 2]; rank 1 [1, 3], but zbv_zero_bubble runs rank 0 [0, 3]; rank 1 [1, 2]" in one[0]
    assert "rank 0 [0, 3]; rank 1 [1, 2], but interleaved_1f1b runs rank 0 [0, 2]; rank 1 [1, 3]" in one[1]
    assert "ask for different schedules: rank 0 ('zb_h1'" in one[2] and "1f1b runs one chunk per rank" in one[3]
    assert "there is no schedule 'one_f'" in one[4] and "stages are this rank's stages" in one[5]
    assert "memory is only for a schedule that is searched for" in one[6]
    for found in run_ranks(refused, 2, "tensors"):
        assert found[0].startswith("PP-E130") and "sends tensor 1, torch.int64 [2], requires no gradient" in found[0]


@pytest.mark.whole
def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(RanksFailed, match=r"PP-E712.*stage 0 put float32\[2, 6\] on its edge to stage 1"):
        run_ranks(refused, 2, "shapes")

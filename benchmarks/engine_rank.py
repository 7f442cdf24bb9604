"""One rank of the engine benchmark: all contenders in the same processes, alternating step by step.

Started by `engine.py` with a cell as JSON. A step begins at an instant of CLOCK_MONOTONIC that all ranks agreed on, and
its time is the last rank's end minus that instant. The harness's own messages have a process group of their own. The
result goes to stdout of rank 0 as one JSON object.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from engine_costs import measured_costs, usual_message
from engine_megatron import Megatron
from engine_workloads import Cell, Gpt, Sleep, Split, sleep_exactly, workload
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ppctl.engine.interpreter import run_schedule
from ppctl.engine.recorder import make_recorder
from ppctl.engine.stage import StageProgram
from ppctl.host.private_files import own_directory, shared_memory
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.plan.schedule_choice import least_warmup, simulated_steps
from ppctl.runs.heartbeat import HeartbeatFile
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import message_times, step_time

CPU = torch.device("cpu")

TORCHS = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Torch's schedule for each of our policies that has one."""


class Harness:
    """What all contenders share: rank, clock, and the harness's own group."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.rank = dist.get_rank()
        self.group = dist.new_group(list(range(cell.pp)), backend="gloo")

    def agree(self, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.group)
        return float(tensor)

    def timed(self, step: Callable[[], None]) -> tuple[float, float]:
        """(seconds from the agreed instant to the last rank's end, CPU seconds of all ranks)."""
        start = self.agree(time.monotonic()) + 0.02
        cpu = time.process_time()
        time.sleep(max(0.0, start - time.monotonic()))
        step()
        end, used = time.monotonic(), time.process_time() - cpu
        return self.agree(end) - start, self.agree(used, dist.ReduceOp.SUM)


class Ppctl:
    """ppctl's engine as `ppctl train` runs it: recorder and heartbeat on, an engine made anew for every step."""

    def __init__(self, harness: Harness, work: Sleep | Gpt, *, extra: int = 0, batched: bool = False) -> None:
        cell, self.work = work.cell, work
        self.schedule = lower(compute_only(cell, extra), batched=batched)
        group = dist.new_group(list(range(cell.pp)), backend="gloo")
        config = SimpleNamespace(batch_p2p_comm=batched, overlap_p2p_comm=not batched, pipeline_dtype=torch.float32)
        self.communicator = P2PCommunicator(group, config, channels=self.schedule.capacities)
        self.modules = {s: work.module(s) for s in self.schedule.placement.stages_of(harness.rank)}
        self.inputs, self.targets = work.inputs(), work.targets()
        self.losses: dict[int, Tensor] = {}
        self.programs = [self._program(stage) for stage in self.modules]
        self.recorder = make_recorder(harness.rank, self.schedule.actions[harness.rank], CPU)
        self.at_end = ExitStack()
        self.heartbeat = HeartbeatFile(self.at_end.enter_context(own_directory(shared_memory())), harness.rank)

    def _program(self, stage: int) -> StageProgram:
        cell, module, edge = self.work.cell, self.modules[stage], (self.work.spec(),)
        last = cell.stages - 1

        def forward(mb: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            output = module(received[0] if received else self.inputs[mb])
            if stage < last:
                return (output,)
            loss = self.work.loss(output, self.targets[mb])
            self.losses[mb] = loss.detach()
            return (loss / cell.microbatches,)

        # As in `ppctl train`: products of ppctl's own models ask where their weight gradients go.
        found = not isinstance(self.work, Gpt)
        return StageProgram(stage, forward, edge if stage else (), edge if stage < last else (), intercept=found)

    def step(self) -> None:
        self.losses.clear()
        run_schedule(
            self.schedule,
            self.programs,
            self.communicator,
            deallocate_pipeline_outputs=True,
            recorder=self.recorder,
            heartbeat=self.heartbeat,
        )

    def result(self) -> list[float]:
        return [float(self.losses[mb]) for mb in sorted(self.losses)]

    def close(self) -> None:
        self.heartbeat.close()
        self.at_end.close()


class Torch:
    """torch.distributed.pipelining, with its schedule of the same name."""

    def __init__(self, harness: Harness, work: Sleep | Gpt) -> None:
        cell, self.work = harness.cell, work
        group = dist.new_group(list(range(cell.pp)), backend="gloo")
        own = placement(cell).stages_of(harness.rank)
        made = partial(work.module, torchs=True) if isinstance(work, Split) else work.module
        self.modules: dict[int, nn.Module] = {s: made(s) for s in own}
        self.inputs, self.targets = torch.cat(work.inputs()), torch.cat(work.targets())
        self.first, self.last = 0 in self.modules, cell.stages - 1 in self.modules
        self.losses: list[Tensor] = []
        shape = torch.zeros(work.spec().shape, requires_grad=True)
        token = work.inputs()[0]
        stages = []
        for stage, module in self.modules.items():
            fed = token if stage == 0 else shape
            given = {} if stage < cell.stages - 1 else {"output_args": module(fed).detach()}
            given = given or {"output_args": shape}
            stages.append(PipelineStage(module, stage, cell.stages, CPU, input_args=(fed,), group=group, **given))
        given = stages[0] if cell.vpp == 1 else stages
        self.schedule = TORCHS[cell.schedule](given, n_microbatches=cell.microbatches, loss_fn=work.loss)

    def step(self) -> None:
        self.losses.clear()
        arguments = (self.inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=self.targets, losses=self.losses)
        else:
            self.schedule.step(*arguments)

    def result(self) -> list[float]:
        return [float(loss.detach()) for loss in self.losses]

    def close(self) -> None:
        """Nothing to hand back."""


class Alone:
    """No communication: one rank at a time runs its forwards and backwards on data that was made before."""

    def __init__(self, harness: Harness, work: Sleep | Gpt) -> None:
        self.cell, self.work, self.harness = harness.cell, work, harness
        self.modules = {s: work.module(s) for s in placement(harness.cell).stages_of(harness.rank)}
        self.inputs, self.targets = work.inputs(), work.targets()
        self.received = torch.zeros(work.spec().shape, requires_grad=True)
        self.gradient = torch.zeros(work.spec().shape)

    def step(self) -> None:
        for mb in range(self.cell.microbatches):
            for stage, module in self.modules.items():
                self.received.grad = None
                output = module(self.received if stage else self.inputs[mb])
                if stage < self.cell.stages - 1:
                    output.backward(self.gradient)
                else:
                    (self.work.loss(output, self.targets[mb]) / self.cell.microbatches).backward()

    def bound(self) -> float:
        """No step with these stages is shorter: see `least_step`. Sleeping stages take at least what they sleep."""
        cell = self.cell
        busy = 3 * cell.forward * cell.microbatches
        if cell.kind == "split":  # weight gradients can fill the last rank's end
            return busy + (cell.pp - 1) * cell.forward / cell.vpp
        if cell.kind == "sleep":
            return least_step([busy] * cell.pp, cell)
        turns = range(cell.pp)
        alone = [self.harness.timed(self.step if turn == self.harness.rank else _nothing)[0] for turn in turns]
        return least_step(alone, cell)

    def close(self) -> None:
        """Nothing to hand back."""


def _nothing() -> None:
    """What a rank does while another has its turn."""


def least_step(alone: list[float], cell: Cell) -> float:
    """The bound that follows from what each rank computes by itself in a step, in seconds.

    The first microbatch reaches a rank through one chunk of every rank before it, and leaves the same way. With equal
    ranks: (m + (p - 1) / v) (tf + tb).
    """
    chunk = [seconds / (cell.microbatches * cell.vpp) for seconds in alone]
    return max(seconds + sum(chunk[:rank]) for rank, seconds in enumerate(alone))


def placement(cell: Cell) -> Placement:
    return Placement(POLICIES[cell.schedule].placement, cell.pp, cell.stages)


def compute_only(cell: Cell, extra: int = 0) -> Schedule:
    schedule = make_schedule(
        cell.schedule, pp=cell.pp, vpp=cell.vpp, num_microbatches=cell.microbatches, extra_warmup=extra
    )
    return replace(schedule, pairs=frozenset())  # as plans have it where experts are not exchanged


def bubbles(harness: Harness, contender: Ppctl, seconds: float) -> dict[str, float]:
    """Of stages that sleep: the share of the ranks' time that is none of their stated times, measured and simulated.

    `simulated` knows the stated times, and what messages took; `replayed` what actions, hosts and messages took.
    """
    cell, schedule = contender.work.cell, contender.schedule
    rows: list = [None] * cell.pp
    dist.all_gather_object(rows, contender.recorder.spans(), group=harness.group)
    usual, messages = usual_message(rows, schedule.placement)
    times = ([part * contender.work.forward] * cell.stages for part in (1, 2))
    stated = Costs(*times, message=usual, messages=messages)
    spent = measured_costs(rows, schedule.placement)
    busy = 3 * cell.forward * cell.microbatches
    return {
        "measured": 1 - busy / seconds,
        "simulated": 1 - busy / step_time(simulate(schedule, stated)),
        "replayed": 1 - busy / step_time(simulate(schedule, spent)),
    }


def chosen_warmup(harness: Harness, work: Sleep | Gpt, plain: Ppctl, steps: int = 3) -> int:
    """extra_warmup=auto as a plan chooses it, from what `ppctl train` measures: times of stages and messages."""
    cell = harness.cell
    measured, traces = {}, []
    for _ in range(steps):
        forget_gradients(plain.modules)
        harness.timed(plain.step)
        totals = plain.recorder.totals()
        rows: list = [None] * cell.pp
        dist.all_gather_object(rows, (totals.forward, totals.backward, plain.recorder.spans()), group=harness.group)
        for forward, backward, _ in rows:
            measured |= {stage: (forward[stage], backward[stage]) for stage in forward}
        traces.append([span for *_, spans in rows for span in spans])
    messages = message_times(traces)
    usual = statistics.median(messages.values()) if messages else 0.0
    costs = Costs(*([measured[s][half] for s in sorted(measured)] for half in (0, 1)), message=usual, messages=messages)
    return least_warmup(simulated_steps(cell.pp, costs, partial(compute_only, cell)))


def forget_gradients(modules: dict[int, nn.Module]) -> None:
    for module in modules.values():
        module.zero_grad(set_to_none=True)


def make(name: str, harness: Harness, work: Sleep | Gpt, made: dict[str, object]) -> object:
    if name == "torch":
        return Torch(harness, work)
    if name == "megatron":
        return Megatron(harness.rank, work)
    if name == "alone":
        return Alone(harness, work)
    if name == "ppctl_1f1b":
        return Ppctl(harness, workload(replace(work.cell, policy="", vpp=1)))
    extra = chosen_warmup(harness, work, made["ppctl"]) if name == "ppctl_auto" else 0
    contender = Ppctl(harness, work, extra=extra, batched=name == "ppctl_batched")
    contender.extra = extra
    return contender


def checked(contender: object) -> str:
    """One step that is not timed: what is wrong with its losses and gradients."""
    forget_gradients(contender.modules)
    contender.step()
    return "" if isinstance(contender, Alone) else contender.work.check(contender.result(), contender.modules)


def peak_bytes(step: Callable[[], None]) -> int:
    """How far the largest resident set of a few steps is above what was there before (Linux)."""

    def status(key: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status("VmRSS")
    for _ in range(3):
        step()
    return status("VmHWM") - before


def main() -> None:
    arguments = json.loads(sys.argv[1])
    cell, repeats = Cell(**arguments["cell"]), arguments["repeats"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sleep_exactly()
    harness, work = Harness(cell), workload(cell)
    made: dict[str, object] = {}
    report: dict[str, dict] = {}
    for name in (*cell.contenders, "alone"):
        made[name] = make(name, harness, work, made)
        if cell.memory and name != "alone":
            mine = [0.0] * cell.pp
            dist.all_gather_object(mine, peak_bytes(made[name].step), group=harness.group)
            report[name] = {"peaks": mine}
            continue
        wrong = "" if name == "alone" and cell.kind in ("sleep", "split") else checked(made[name])
        harness.agree(float(bool(wrong)))
        report[name] = {"times": [], "cpu": [], "wrong": wrong, "extra": getattr(made[name], "extra", None)}
    for repeat in range(0 if cell.memory else repeats):
        order = list(made) if repeat % 2 == 0 else list(made)[::-1]
        for name in order:
            forget_gradients(made[name].modules)
            if name == "alone":
                report[name]["times"].append(made[name].bound())
                continue
            seconds, cpu = harness.timed(made[name].step)
            report[name]["times"].append(seconds)
            report[name]["cpu"].append(cpu)
            if cell.kind == "split" and isinstance(made[name], Ppctl):
                report[name].setdefault("bubbles", []).append(bubbles(harness, made[name], seconds))
    wrongs: list[dict] = [{}] * cell.pp
    dist.all_gather_object(wrongs, {name: row.get("wrong", "") for name, row in report.items()}, group=harness.group)
    for name, row in report.items():
        row["wrong"] = "; ".join(filter(None, (wrong[name] for wrong in wrongs)))
    for contender in made.values():
        contender.close()
    if harness.rank == 0:
        report["maxrss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(report))
    dist.barrier(group=harness.group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

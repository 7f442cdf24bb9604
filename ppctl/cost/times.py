"""Seconds of work on a device, and of messages between ranks.

Knows presets' rates and how ranks lie on a machine. Must not know schedules. Operations, bytes through
memory, kernels and communication are added up, each at the stated share of its peak: nothing is taken to hide behind
another, but context parallelism's ring behind its scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ppctl.accelerators import Device, Efficiency, efficiency_of
from ppctl.config.schema import ModelConfig
from ppctl.cost.work import Work
from ppctl.topology import ParallelSizes

ACCUMULATED = 8
"""Bytes that adding one gradient in fp32 moves: read and write."""

BACKWARD_SCORES = 2.5
"""A fused attention's backward makes the scores again: five products for the forward's two."""


NARROWED = 4
"""Bytes that making one 16-bit element an 8-bit one moves: read once, written for rows and for columns."""


class Machine(NamedTuple):
    """A device as kernels find it, and how the groups of its ranks lie on the machine."""

    device: Device
    efficiency: Efficiency
    sizes: ParallelSizes
    matmul: float
    """Operations per second in products with weights."""
    weight_bytes: int
    """Bytes of a weight as products read it."""
    narrow: bool
    """8-bit products: their inputs are narrowed first, and dispatched so."""
    topk: int = 1
    """Experts that a token goes to."""
    expert_groups: int | None = None
    """Most domains that a token's experts lie on, where routing is limited to groups."""

    @property
    def memory(self) -> float:
        """Bytes per second."""
        return self.device.memory_bandwidth * self.efficiency.memory

    def link(self, ranks: int) -> float:
        """Bytes per second one way within a group of `ranks` neighbours."""
        device = self.device
        return (device.fast_link if ranks <= device.domain else device.network) * self.efficiency.link


def machine_of(device: Device, matmul_dtype: str, sizes: ParallelSizes, model: ModelConfig) -> Machine:
    """The machine for weights of `float32`, `bfloat16`, or products in `fp8`."""
    efficiency = efficiency_of(device)
    groups = model.moe_router_group_topk if model.moe_router_num_groups else None
    routing = (model.moe_router_topk, groups or None)
    if matmul_dtype == "fp8":
        return Machine(device, efficiency, sizes, device.fp8_flops * efficiency.fp8_matmul, 1, True, *routing)
    narrow = matmul_dtype != "float32" or device.name == "cpu"
    rate = device.bf16_flops * (1 if narrow else 0.5) * efficiency.matmul  # TF32 runs at half of bf16's rate
    return Machine(device, efficiency, sizes, rate, 2 if narrow else 4, False, *routing)


def expert_seconds(size: float, machine: Machine) -> float:
    """One dispatch or combine of `size` bytes of tokens: within domains, and once to every other domain it goes to."""
    device, efficiency, group = machine.device, machine.efficiency, machine.sizes.ep * machine.sizes.etp
    if size == 0.0 or group == 1:
        return 0.0
    ranks = group * (1 - (1 - 1 / group) ** machine.topk)
    domains = max(1.0, group / device.domain)
    reached = domains * (1 - (1 - 1 / domains) ** machine.topk)
    if machine.expert_groups is not None:
        reached = min(reached, machine.expert_groups)
    outside = size * reached * (domains - 1) / domains / (device.network * efficiency.dispatch)
    inside = size * ranks * (1 - 1 / min(group, device.domain)) / (device.fast_link * efficiency.dispatch)
    return max(outside, inside) + device.latency


class PartSeconds(NamedTuple):
    """Of one part, for one microbatch."""

    forward: float
    input_gradient: float
    weight_gradient: float


def part_seconds(work: Work, machine: Machine) -> PartSeconds:
    """Forward, and the two halves of the backward."""
    device, efficiency, sizes = machine.device, machine.efficiency, machine.sizes
    rate = machine.matmul * (efficiency.grouped if work.module == "moe" else 1.0)
    product = work.matmul / rate + work.weights * machine.weight_bytes / machine.memory if work.matmul else 0.0
    product += work.inputs * NARROWED / machine.memory if machine.narrow else 0.0
    scores = work.scores / (device.bf16_flops * efficiency.attention)
    ring = work.context / machine.link(sizes.tp * sizes.cp) if work.context else 0.0
    again = work.scores * BACKWARD_SCORES / (device.bf16_flops * efficiency.attention_backward)
    sent = efficiency.tensor_exposed * work.tensor / machine.link(sizes.tp)
    dispatched = expert_seconds(work.experts / (2 if machine.narrow else 1), machine)
    combined = expert_seconds(work.experts, machine)
    plain = work.traffic / machine.memory + work.kernels * efficiency.kernel + sent + dispatched + combined
    added = work.weights * ACCUMULATED / machine.memory
    return PartSeconds(
        product + max(scores, ring) + plain,
        product + max(again, 2 * ring) + plain + work.traffic / machine.memory,
        work.matmul / rate + added,
    )


def layer_seconds(works: Iterable[Work], machine: Machine, recomputed: Collection[str] | None = ()) -> PartSeconds:
    """The sum over parts; `recomputed` parts (none: all) run their forward again before their input gradient."""
    forward = backward = weights = 0.0
    for work in works:
        one = part_seconds(work, machine)
        forward += one.forward
        backward += one.input_gradient
        weights += one.weight_gradient
        if recomputed is None or work.module in recomputed:
            backward += one.forward
    return PartSeconds(forward, backward, weights)


def message_seconds(size: float, machine: Machine) -> float:
    """A message of `size` bytes to the next pp_rank, in a domain of fast links where all ranks are in one."""
    return machine.device.latency + size / machine.link(machine.sizes.world)


def reduce_seconds(dense: float, experts: float, bytes_each: float, machine: Machine) -> float:
    """A reduce-scatter (or gather) of parameters' bytes over the ranks that hold the same ones."""
    sizes, total = machine.sizes, 0.0
    for count, ranks, width in (
        (dense, sizes.dp * sizes.cp, sizes.tp * sizes.dp * sizes.cp),
        (experts, sizes.edp, sizes.ep * sizes.etp * sizes.edp),
    ):
        if count and ranks > 1:
            total += machine.device.latency + count * bytes_each * (ranks - 1) / ranks / machine.link(width)
    return total


def optimizer_seconds(weights: float, gradients: float, optimizer: float, device: Device) -> float:
    """An AdamW step over this much state: gradients are read, moments and masters read and written, weights written."""
    return (weights + gradients + 2 * optimizer) / (device.memory_bandwidth * efficiency_of(device).memory)

"""Seconds of work on a device, and of messages between ranks.

Knows presets' rates and how ranks lie on a machine. Must not know schedules or configs. Operations, bytes through
memory, kernels and communication are added up, each at the stated share of its peak: nothing is taken to hide behind
another, but context parallelism's ring behind its scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ppctl.cost.devices import Device, Efficiency, efficiency_of
from ppctl.cost.work import Work

ACCUMULATED = 8
"""Bytes that adding one gradient in fp32 moves: read and write."""

BACKWARD_SCORES = 2.5
"""A fused attention's backward makes the scores again: five products for the forward's two."""


NARROWED = 4
"""Bytes that making one 16-bit element an 8-bit one moves: read once, written for rows and for columns."""


class Rates(NamedTuple):
    """A device as kernels find it."""

    device: Device
    efficiency: Efficiency
    matmul: float
    """Operations per second in products with weights."""
    weight_bytes: int
    """Bytes of a weight as products read it."""
    narrow: bool
    """8-bit products: their inputs are narrowed first, and dispatched so."""

    @property
    def memory(self) -> float:
        """Bytes per second."""
        return self.device.memory_bandwidth * self.efficiency.memory


def rates_of(device: Device, matmul_dtype: str) -> Rates:
    """The rates for weights of `float32`, `bfloat16`, or products in `fp8`."""
    efficiency = efficiency_of(device)
    if matmul_dtype == "fp8":
        return Rates(device, efficiency, device.fp8_flops * efficiency.fp8_matmul, 1, True)
    narrow = matmul_dtype != "float32" or device.name == "cpu"
    rate = device.bf16_flops * (1 if narrow else 0.5) * efficiency.matmul  # TF32 runs at half of bf16's rate
    return Rates(device, efficiency, rate, 2 if narrow else 4, False)


class Layout(NamedTuple):
    """How the groups of a rank lie on the machine."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    edp: int = 1
    pp: int = 1
    topk: int = 1
    expert_groups: int | None = None
    """Most domains that a token's experts lie on, where routing is limited to groups."""

    @property
    def stride(self) -> int:
        """Ranks between pipeline neighbours."""
        return self.tp * self.cp * self.dp


def link(device: Device, efficiency: Efficiency, ranks: int) -> float:
    """Bytes per second one way within a group of `ranks` neighbours."""
    return (device.fast_link if ranks <= device.domain else device.network) * efficiency.link


def expert_seconds(size: float, rates: Rates, layout: Layout) -> float:
    """One dispatch or combine of `size` bytes of tokens: within domains, and once to every other domain it goes to."""
    device, group = rates.device, layout.ep * layout.etp
    if size == 0.0 or group == 1:
        return 0.0
    ranks = group * (1 - (1 - 1 / group) ** layout.topk)
    domains = max(1.0, group / device.domain)
    reached = domains * (1 - (1 - 1 / domains) ** layout.topk)
    if layout.expert_groups is not None:
        reached = min(reached, layout.expert_groups)
    outside = size * reached * (domains - 1) / domains / (device.network * rates.efficiency.dispatch)
    inside = size * ranks * (1 - 1 / min(group, device.domain)) / (device.fast_link * rates.efficiency.dispatch)
    return max(outside, inside) + device.latency


class PartSeconds(NamedTuple):
    """Of one part, for one microbatch."""

    forward: float
    input_gradient: float
    weight_gradient: float


def part_seconds(work: Work, rates: Rates, layout: Layout) -> PartSeconds:
    """Forward, and the two halves of the backward."""
    device, efficiency = rates.device, rates.efficiency
    rate = rates.matmul * (efficiency.grouped if work.module == "moe" else 1.0)
    product = work.matmul / rate + work.weights * rates.weight_bytes / rates.memory if work.matmul else 0.0
    product += work.inputs * NARROWED / rates.memory if rates.narrow else 0.0
    scores = work.scores / (device.bf16_flops * efficiency.attention)
    ring = work.context / link(device, efficiency, layout.tp * layout.cp) if work.context else 0.0
    again = work.scores * BACKWARD_SCORES / (device.bf16_flops * efficiency.attention_backward)
    sent = efficiency.tensor_exposed * work.tensor / link(device, efficiency, layout.tp)
    dispatched = expert_seconds(work.experts / (2 if rates.narrow else 1), rates, layout)
    combined = expert_seconds(work.experts, rates, layout)
    plain = work.traffic / rates.memory + work.kernels * efficiency.kernel + sent + dispatched + combined
    added = work.weights * ACCUMULATED / rates.memory
    return PartSeconds(
        product + max(scores, ring) + plain,
        product + max(again, 2 * ring) + plain + work.traffic / rates.memory,
        work.matmul / rate + added,
    )


def layer_seconds(
    works: Iterable[Work], rates: Rates, layout: Layout, recomputed: Collection[str] | None = ()
) -> PartSeconds:
    """The sum over parts; `recomputed` parts (none: all) run their forward again before their input gradient."""
    forward = backward = weights = 0.0
    for work in works:
        one = part_seconds(work, rates, layout)
        forward += one.forward
        backward += one.input_gradient
        weights += one.weight_gradient
        if recomputed is None or work.module in recomputed:
            backward += one.forward
    return PartSeconds(forward, backward, weights)


def message_seconds(size: float, device: Device, layout: Layout) -> float:
    """A message of `size` bytes to the next pp_rank."""
    within = layout.stride * layout.pp <= device.domain
    rate = device.fast_link if within else device.network
    return device.latency + size / (rate * efficiency_of(device).link)


def reduce_seconds(dense: float, experts: float, bytes_each: float, device: Device, layout: Layout) -> float:
    """A reduce-scatter (or gather) of parameters' bytes over the ranks that hold the same ones."""
    efficiency = efficiency_of(device)
    total = 0.0
    for count, ranks, width in (
        (dense, layout.dp * layout.cp, layout.tp * layout.dp * layout.cp),
        (experts, layout.edp, layout.ep * layout.etp * layout.edp),
    ):
        if count and ranks > 1:
            total += device.latency + count * bytes_each * (ranks - 1) / ranks / link(device, efficiency, width)
    return total


def optimizer_seconds(weights: float, gradients: float, optimizer: float, device: Device) -> float:
    """An AdamW step over this much state: gradients are read, moments and masters read and written, weights written."""
    return (weights + gradients + 2 * optimizer) / (device.memory_bandwidth * efficiency_of(device).memory)

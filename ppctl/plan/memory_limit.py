"""Whether the plan fits the device's memory, and changes that would make it fit.

Texts of amounts are made here; data (`--json`, plan.json) have bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ppctl.config.gpu_environment import loads_all_kernels
from ppctl.config.parallel_rules import is_plain
from ppctl.config.quantities import memory_bytes
from ppctl.config.schema import RunConfig
from ppctl.geometry.layers import DEFAULT_MODULES
from ppctl.host.devices import machines
from ppctl.plan.dispatch_nodes import dispatch_nodes
from ppctl.plan.types import DeviceLimit, RankCost
from ppctl.plan.violations import ConfigValues, Overrides, Violation
from ppctl.schedule.policies import POLICIES, schedule_policy
from ppctl.topology import ParallelSizes, axes_with_groups

LIMIT = "launch.device_memory"
SHARING = "launch.share_gpu"
PUT_OFF = "pipeline.put_off_limit"
GRANULARITY, MODULES = "train.recompute_granularity", "train.recompute_modules"
SHARDING = "parallel.data_parallel_sharding"
SHARDINGS = ("none", "optimizer_gradients", "full")
"""Kinds of sharding; each holds less between steps than the previous."""
_DOUBLINGS = 6
"""How many times expert parallelism is doubled in search of a size that fits."""


class Unit(NamedTuple):
    """A unit of memory."""

    name: str
    size: int

    def of(self, size: int) -> str:
        """How many of this unit `size` bytes are."""
        return f"{size / self.size:.2f}"


MIB = 2**20
GIB = Unit("GiB", 2**30)
_SMALLER = (Unit("MiB", MIB), Unit("KiB", 2**10))

RESERVE = "launch.memory_reserve"
AUTO = "auto"

# Memory outside torch's allocator
CONTEXT = 1664 * MIB
"""CUDA's context with the kernels and libraries of a step, 767 MiB, and 841 MiB that an H100 of 80 GB lacks of 80 GiB;
both measured (benchmarks/results-gpu-2026-11-26.md)."""
ALL_KERNELS = 736 * MIB
"""Further bytes that CUDA_MODULE_LOADING=EAGER takes; 731 MiB were measured there."""
PAIR, RING = 544 * MIB, 688 * MIB
"""A communicator of two ranks, and of more, after an all-reduce: measured on four A100 with NVLink (NVIDIA/nccl#964). A
ring has two neighbours with any number of ranks, so this does not grow (#986)."""
CONNECTION = 12 * MIB
"""One NCCL channel to one peer: buffers of 10 and of 2 MiB (NVIDIA/nccl#1685)."""
PEER_CHANNELS, PEERS = 32, 7
"""Channels to each peer in an all-to-all on eight H100, and the number of peers (the same issue: 3.28 GB in all). A
message round a ring is assumed to need as many to a neighbour."""
NETWORK = 512 * MIB
"""The buffer that all peers on other machines share (NVIDIA/nccl#2363)."""
MESSAGE_ENDS = 8
"""Ends of a pipeline's channels on one rank: activations and gradients, in and out, at two neighbours."""
MESSAGE_CHANNELS = 4
"""NCCL channels of each such end: `MAX_CTAS` of `ppctl.comm.connections`."""


def unit_for(largest: int) -> Unit:
    """The unit of a sum or a column: the largest unit of which its largest number has at least one; else KiB."""
    return next((unit for unit in (GIB, *_SMALLER) if largest >= unit.size), _SMALLER[-1])


def amount(size: int) -> str:
    """One number with its unit."""
    unit = unit_for(size)
    return f"{unit.of(size)} {unit.name}"


def size_text(size: int) -> str:
    """The text of `amount`; below a MiB, the number of bytes."""
    return amount(size) if size >= MIB else f"{size:,} bytes"


def device_limit(config: RunConfig, sizes: ParallelSizes) -> DeviceLimit | None:
    """The device memory that one rank may use; None if `launch.device_memory` is null, or is no amount. Ranks that
    share GPUs are counted as if all ranks of a machine shared one GPU, since the number of GPUs is unknown."""
    launch = config.launch
    if launch.device_memory is None:
        return None
    ranks = machines(launch.nodes, launch.gpus_per_node, sizes.world)[1] if launch.share_gpu else 1
    try:
        return DeviceLimit(memory_bytes(launch.device_memory) // ranks, reserve_bytes(config, sizes), ranks)
    except ValueError:
        return None  # `config.checks` reports it


def memory_violations(
    values: ConfigValues, sizes: ParallelSizes, ranks: Callable[[], Sequence[RankCost]], least: bool = False
) -> list[Violation]:
    """The violation of the highest peak; none if it fits. Its candidates go from the smallest change to a larger
    device. `ranks` is called only if there is a limit; `least` says that ranks run in the order that holds least."""
    limit = device_limit(values.config, sizes)
    if limit is None:
        return []
    costs = ranks()
    worst = max(costs, key=lambda cost: cost.peak_bytes)
    if worst.peak_bytes <= limit.available_bytes:
        return []
    too_large = sum(cost.peak_bytes > limit.available_bytes for cost in costs)
    alone = ", also with one microbatch after another, the order that holds least" if least else ""
    message = (
        f"pp_rank {worst.pp_rank} is planned to need {amount(worst.peak_bytes)} at its peak{alone}, but "
        f"{available_text(limit)} ({too_large} of {len(costs)} pp_ranks are over)"
    )
    held = f"{peak_terms(worst)} {unit_for(worst.peak_bytes).name} ({worst.in_flight} in flight)"
    needed = (worst.peak_bytes + limit.reserve_bytes) * limit.ranks
    larger: Overrides = {LIMIT: f"{-(-needed // GIB.size)}GiB"}
    smaller = _smaller(values)
    place = f"{held}\n{values.cite(LIMIT, RESERVE, 'pp', 'mbs')}"
    return [Violation("PP-E801", LIMIT, message, place, *_usual(values), *smaller, larger)]


def available_text(limit: DeviceLimit) -> str:
    """The memory that a rank may use, and how it is computed: `a device has 77.50 GiB (80.00 GiB - 2.50 GiB ...)`."""
    whole, who = amount(limit.limit_bytes), "a device"
    if limit.ranks > 1:
        whole, who = f"{whole} of a device that {limit.ranks} ranks share", "a rank"
    if not limit.reserve_bytes:
        return f"{who} has {whole}"
    kept = f"{amount(limit.reserve_bytes)} kept for CUDA's context and communicators"
    return f"{who} has {amount(max(limit.available_bytes, 0))} ({whole} - {kept})"


def used_text(limit: DeviceLimit | None, peak_bytes: int) -> list[str]:
    """A line on the memory that a rank may use and the share of it that a peak takes; none if no limit is known."""
    if limit is None or limit.available_bytes <= 0:
        return []
    return [f"{available_text(limit)}: {peak_bytes / limit.available_bytes:.1%} of it is used"]


def _usual(values: ConfigValues) -> Iterator[Overrides]:
    """Overrides that undo those of the user's settings that leave a rank less memory."""
    if values[RESERVE] != AUTO:
        yield {RESERVE: AUTO}
    if values[SHARING]:
        yield {SHARING: False}


def peak_terms(cost: RankCost) -> str:
    """The terms of a pp_rank's peak, in the unit of the peak, with `+` between them. If they do not exist together,
    commas are between them: with `full` sharding, weights and gradients are the most that is whole at any time."""
    unit = unit_for(cost.peak_bytes)
    sizes = {
        "weights": cost.weight_bytes,
        "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes,
        "activations": cost.activation_bytes,
        "buffers": cost.buffer_bytes + cost.message_bytes,
    }
    joint = " + " if sum(sizes.values()) == cost.peak_bytes else ", "
    return joint.join(f"{name} {unit.of(size)}" for name, size in sizes.items())


def _smaller(values: ConfigValues) -> Iterator[Overrides]:
    pp, mbs, ep = values["pp"], values["mbs"], values["ep"]
    if values["pipeline.extra_warmup"] not in (0, "auto"):
        yield {"pipeline.extra_warmup": "auto"}
    if mbs > 1:
        yield {"mbs": mbs // 2}
        yield {"mbs": 1}
    yield from ({PUT_OFF: limit} for limit in _put_off_limits(values))
    yield from _experts_again(values)
    recompute = {GRANULARITY: "full"} if values[GRANULARITY] is None else {}
    weaker = SHARDINGS[SHARDINGS.index(values[SHARDING]) + 1 :]
    if recompute:
        yield recompute
    for sharding in weaker:
        yield {SHARDING: sharding}
    if values["model.num_moe_experts"]:
        for doubling in range(1, _DOUBLINGS + 1):
            yield {"ep": ep << doubling}
    for sharding in weaker if recompute else ():
        yield {**recompute, SHARDING: sharding}
    yield {"pp": 2 * pp, "layout": None}
    yield {"pp": 4 * pp, "layout": None}


def _experts_again(values: ConfigValues) -> Iterator[Overrides]:
    """Overrides that recompute experts from their rows, if neither experts nor whole blocks are recomputed."""
    now = [] if values[GRANULARITY] is None else list(values[MODULES] or DEFAULT_MODULES)
    if values["model.num_moe_experts"] and values[GRANULARITY] != "full" and not {"moe", "experts"} & {*now}:
        yield {GRANULARITY: "selective", MODULES: [*(name for name in now if name != "moe_act"), "experts"]}


def _put_off_limits(values: ConfigValues) -> list[int]:
    """Limits of deferred weight gradients below the present one; on a V in 1F1B's memory a rank defers up to pp."""
    policy = POLICIES.get(schedule_policy(values["pipeline.pp_schedule"]) or "")
    if policy is None or not policy.splits or values["pipeline.pp_schedule_csv"] is not None:
        return []
    now, pp = values[PUT_OFF], values["pp"]
    return [limit for limit in dict.fromkeys((pp // 2, pp // 4, 1, 0)) if now is None or limit < now]


def reserve_bytes(config: RunConfig, sizes: ParallelSizes) -> int:
    """Bytes of `launch.memory_reserve`; `auto` is 0 on the CPU. Raises ValueError for an invalid amount."""
    launch = config.launch
    if launch.memory_reserve != AUTO:
        return memory_bytes(launch.memory_reserve)
    if launch.device == "cpu":
        return 0
    context = CONTEXT + ALL_KERNELS * loads_all_kernels(config, sizes.pp, routed=bool(config.model.num_moe_experts))
    # Ranks that share a GPU send through host memory.
    return context if launch.share_gpu else context + communicators(config, sizes)


def communicators(config: RunConfig, sizes: ParallelSizes) -> int:
    """Bytes that NCCL takes on one rank for messages and for the rank's groups, all of which the warm-up uses."""
    total = sum(map(_group, _group_sizes(config, sizes))) + sum(map(_connections, _peers(config, sizes)))
    return total + (MESSAGE_ENDS * MESSAGE_CHANNELS * CONNECTION if sizes.pp > 1 and not is_plain(config) else 0)


def _group_sizes(config: RunConfig, sizes: ParallelSizes) -> Iterator[int]:
    model = config.model
    for axes in axes_with_groups(sizes, experts=bool(model.num_moe_experts)):
        yield prod(getattr(sizes, axis) for axis in axes.split("-"))
    yield from config.parallel.hierarchical_context_parallel_sizes or ()
    if (nodes := dispatch_nodes(config, sizes)) > 1:
        yield from (nodes, sizes.ep // nodes)
    # Uses of the token embedding: the input, a tied output, and the copies of all MTP modules.
    yield min(sizes.pp, 1 + model.share_embeddings_and_output_weights + bool(model.mtp_num_layers))


def _peers(config: RunConfig, sizes: ParallelSizes) -> Iterator[int]:
    """Per group, the number of ranks with which a rank exchanges messages other than collectives round a ring."""
    if config.model.num_moe_experts:
        yield sizes.ep - 1
        yield sizes.etp - 1
    yield min(sizes.pp - 1, 2) if is_plain(config) else 0
    named = config.model.cp_comm_type
    kinds = {named} if isinstance(named, str) else set(named)
    inner, outer = config.parallel.hierarchical_context_parallel_sizes or (1, 1)
    yield sizes.cp - 1 if "a2a" in kinds else min(sizes.cp - 1, 2) if "p2p" in kinds else 0
    yield inner - 1
    yield min(outer - 1, 2)


def _group(size: int) -> int:
    return 0 if size == 1 else PAIR if size == 2 else RING


def _connections(peers: int) -> int:
    return min(peers, PEERS) * PEER_CHANNELS * CONNECTION + (NETWORK if peers > PEERS else 0)

"""The work of one device for one microbatch in one layer, the seconds of that work, and the seconds of messages.

Work is counted by part of a layer, under the names that recomputation uses, so that repeated work has a price.
Operations, bytes through memory, kernels and communication are added up, each at the stated share of the device's peak:
nothing overlaps, except context parallelism's ring with its scores, and a share of tensor parallelism's collectives
with products in a stack that has kernels for it. Must not know schedules or stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import ContextTraffic, context_traffic
from ppctl.cost.flops import attention_flops, feed_forward_flops, score_flops
from ppctl.cost.parameter_counts import held
from ppctl.cost.setting import Setting
from ppctl.cost.traffic import layer_passes
from ppctl.geometry.expert_reach import expert_runs, reached
from ppctl.geometry.foreign_model import LayerCost
from ppctl.geometry.layers import Kind, foreign_cost, made_again_by
from ppctl.geometry.parameters import Sizes, kind_parameters
from ppctl.geometry.rows import Parameter
from ppctl.host.accelerators import MEGATRON, PPCTL, Device, Efficiency, efficiency_of
from ppctl.topology import ParallelSizes

ACCUMULATED = 8
"""Bytes that adding one gradient in fp32 moves: read and write."""

BACKWARD_SCORES = 2.5
"""A fused attention's backward computes the scores again: five products for the forward's two."""


NARROWING = 6
"""Kernels that cast one expert's rows to 8 bits in a forward: amax, cast and transposed cast of two inputs."""

NARROWED = 4
"""Bytes moved to cast one 16-bit element to 8 bits: read once, written for rows and for columns."""


class Work(NamedTuple):
    """The work of one part's forward."""

    module: str
    matmul: float = 0.0
    """Operations in products with weights; the backward needs as many for its inputs and again for the weights, unless
    `back` says otherwise."""
    scores: float = 0.0
    """Operations of attention's scores and weighted values; the backward needs 2.5 times as many, for its inputs."""
    inputs: float = 0.0
    """Elements that the products read: cast first for 8-bit products, as their gradients are in the backward."""
    traffic: float = 0.0
    """Bytes through memory of operations other than products."""
    weights: float = 0.0
    """Parameters that are read, and whose gradients are accumulated."""
    kernels: int = 0
    groups: float = 0.0
    """Experts of the device: 8-bit products cast the rows of each by separate kernels."""
    tensor: float = 0.0
    """Bytes that a device sends to its tensor-parallel group in a forward."""
    tensor_back: float = 0.0
    """Bytes sent to the tensor-parallel group in a backward, without gathers that overlap with products."""
    context: ContextTraffic = ContextTraffic()
    """Bytes that attention sends to its context-parallel group."""
    back: tuple[float, float] | None = None
    """If some weights are frozen: operations of a backward for inputs (attention's included) and for weights."""
    trained: float | None = None
    """The number of `weights` whose gradients are accumulated; None means all of them."""
    experts: float = 0.0
    """Bytes of one copy of the layer's tokens, in 16 bits: dispatch and combine each send several copies."""


def layer_work(model: ModelConfig, kind: Kind, setting: Setting) -> list[Work]:
    """The work of one device in one layer, part by part."""
    h, tokens, element, tp = model.hidden_size, setting.tokens, setting.element, setting.sizes.tp
    if kind.name == "embedding":
        rows = model.vocab_size / tp
        return [Work("embedding", traffic=tokens * 3 * h * element, weights=rows * h, kernels=4)]
    if kind.name == "loss":
        columns = model.vocab_size / tp
        logits = tokens * columns * model.outputs
        # Logits are written, widened, and read twice for a log-softmax.
        return [
            Work("layernorm", traffic=2 * tokens * h * element / setting.sp, kernels=2),
            Work("loss", matmul=2 * logits * h, inputs=tokens * h, weights=columns * h),
            Work("loss", traffic=12 * logits, kernels=10),
        ]
    if (foreign := foreign_cost(model, kind, setting.element, setting.seq_length)) is not None:
        return _measured(kind_parameters(Sizes.of(model), kind), foreign, setting)
    works = [*_attention(model, kind, setting), *_feed_forward(model, kind.moe, setting)]
    works.append(Work("layernorm", traffic=10 * tokens * h * element / setting.sp, kernels=4))
    if tp > 1:
        works.append(_sent("tensor", model, kind._replace(name="decoder"), setting))
    if kind.name == "mtp":
        own = tokens / setting.sp
        works.append(Work("mtp", matmul=4 * own * h * h, traffic=8 * own * h * element, weights=2 * h * h, kernels=6))
        works.append(_sent("mtp", model, kind._replace(name="embedding"), setting))
    return works


def _sent(module: str, model: ModelConfig, kind: Kind, setting: Setting) -> Work:
    """What a kind of layer sends to the tensor-parallel group."""
    passes = layer_passes(model, kind, setting)
    return Work(module, tensor=passes.forward.sent("tp"), tensor_back=passes.inputs.sent("tp"))


def _measured(rows: Sequence[Parameter], cost: LayerCost, setting: Setting) -> list[Work]:
    """The work of a transformers model's layer: products, scores, and what it keeps, written once and read twice."""
    batch, length, flops = setting.micro_batch_size, setting.seq_length, cost.flops
    weights = sum(row.elements for row in rows)
    matmul, scores = batch * length * flops.token, batch * length**2 * flops.pair
    kernels = 4 * len(rows)  # a product, and three other kernels
    traffic = 3 * cost.kept.of(batch, length)
    back = None if cost.back is None else (cost.back[0].of(batch, length), cost.back[1].of(batch, length))
    trained = None if back is None else sum(row.elements for row in rows if row.gradient != "none")
    return [
        Work("mlp", matmul, weights=weights, traffic=traffic, kernels=kernels, back=back, trained=trained),
        Work("core_attn", scores=scores, kernels=2, back=None if back is None else (0.0, 0.0)),
    ]


def _attention(model: ModelConfig, kind: Kind, setting: Setting) -> Iterator[Work]:
    """The products of one attention on one device, by the module whose recomputation repeats them. FLOPs and bytes are
    of one microbatch's forward."""
    sizes, tokens, element = Sizes.of(model), setting.tokens, setting.element
    h, heads, tp, parts = sizes.hidden, sizes.heads, setting.sizes.tp, setting.sizes.tp * setting.sizes.cp
    flops = attention_flops(model, setting.micro_batch_size, setting.seq_length) / parts
    scores = score_flops(sizes, setting.micro_batch_size, setting.seq_length) / parts
    rows = _rows(sizes, "attention", moe=False)
    up = 2 * tokens * _held([row for row in rows if row.recomputed and row.is_matrix], setting.sizes)
    if sizes.latent:
        moved = 2 * heads * (2 * sizes.query_head + sizes.v_head) / tp
        latent = tokens * ((sizes.q_rank or 0) + sizes.kv_rank)
        yield Work("mla_up_proj", matmul=up, inputs=latent, traffic=tokens * moved * element, kernels=10)
    else:
        yield Work("attention", traffic=2 * tokens * (heads + sizes.groups) * sizes.head / tp * element, kernels=6)
    inputs, weights = tokens * (h + heads * sizes.value_head / tp), _held(rows, setting.sizes)
    yield Work("attention", matmul=flops - scores - up, inputs=inputs, weights=weights, kernels=4)
    context = context_traffic(model, kind.cp_comm_type, tokens * element, setting.sizes, setting.levels)
    yield Work("core_attn", scores=scores, context=context, kernels=2)


def _feed_forward(model: ModelConfig, moe: bool, setting: Setting) -> Iterator[Work]:
    """The products and traffic of one feed-forward on one device, by the module whose recomputation repeats them."""
    sizes, axes, tokens, element = Sizes.of(model), setting.sizes, setting.tokens, setting.element
    h, tp, matrices = sizes.hidden, axes.tp, 3 if sizes.gated else 2
    flops = feed_forward_flops(model, moe, setting.micro_batch_size, setting.seq_length) / (tp * axes.cp)
    block, local = ("moe", sizes.experts / axes.ep) if moe else ("feed_forward", 0.0)
    weights = _held([row for row in _rows(sizes, block, moe) if row.role in ("matrix", "expert")], axes)
    if not moe:
        width = sizes.ffn / tp
        yield Work("mlp", matmul=flops, inputs=tokens * (h + width), weights=weights, kernels=3)
        yield Work("mlp", traffic=matrices * tokens * width * element, kernels=2)
        return
    inner = model.moe_router_topk * sizes.expert / tp
    copies = model.moe_router_topk * h * axes.etp / tp
    # shared experts' and the router's products
    beside = 2 * tokens * h * (matrices * sizes.shared + sizes.experts) / tp
    yield Work("moe", matmul=beside)
    yield Work(
        "experts", matmul=flops - beside, inputs=tokens * (copies + inner), weights=weights, kernels=12, groups=local
    )
    moved = 2 * copies + copies + h / tp
    yield Work("moe", traffic=tokens * (moved * element + 16 * sizes.experts / tp), kernels=30)
    yield Work("moe_act", traffic=matrices * tokens * (inner + sizes.shared / tp) * element, kernels=3)
    if axes.ep * axes.etp > 1:
        yield Work("moe", experts=tokens * h * 2 * axes.etp / tp, kernels=8)


def _rows(sizes: Sizes, block: str, moe: bool) -> list[Parameter]:
    return [row for row in kind_parameters(sizes, Kind("decoder", moe)) if row.inside(block)]


def _held(rows: list[Parameter], sizes: ParallelSizes) -> float:
    """Elements on one device."""
    return sum(held(row.elements, row.axes, sizes) for row in rows)


class Dispatch(NamedTuple):
    """Copies of a token on its way to experts or back: over the network, and between ranks over fast links."""

    outside: float
    inside: float
    at_once: bool
    """Whether messages over the network and over fast links run at the same time, not one after the other."""
    narrow: bool = False
    """Whether rows go to experts in 8 bits if products are in 8 bits; results come back in 16."""


class Machine(NamedTuple):
    """A device's rates as kernels reach them, and how its ranks' groups lie on the machine."""

    device: Device
    efficiency: Efficiency
    sizes: ParallelSizes
    matmul: float
    """Operations per second in products with weights."""
    weight_bytes: int
    """Bytes of a weight as products read it."""
    narrow: bool
    """Whether products are in 8 bits or less: inputs are cast before a product."""
    dispatch: Dispatch = Dispatch(1.0, 1.0, at_once=True)

    @property
    def memory(self) -> float:
        """Bytes per second of device memory, at the efficiency of kernels."""
        return self.device.memory_bandwidth * self.efficiency.memory

    def link(self, block: int) -> float:
        """Bytes per second one way in groups that lie in blocks of consecutive ranks: over fast links if each block is
        in one domain."""
        device, near = self.device, _domains(self.device, self.sizes, block) == 1.0
        return (device.fast_link if near else device.network) * self.efficiency.link


def machine_of(
    device: Device, matmul_dtype: str, sizes: ParallelSizes, model: ModelConfig, nodes: int = 1, stack: str = PPCTL
) -> Machine:
    """The machine for weights of `float64`, `float32`, `bfloat16`, or products in `fp8`, `mxfp8` or `nvfp4`, as `stack`
    uses it. ppctl sends tokens by `nodes`, in 16 bits; Megatron as DeepEP does: once to each domain, and at the same
    time to each rank there."""
    efficiency = efficiency_of(device, stack)
    routing = _fused_dispatch(device, sizes, model) if stack == MEGATRON else _dispatch(device, sizes, model, nodes)
    peaks = {"fp8": device.fp8_flops, "mxfp8": device.fp8_flops, "nvfp4": device.fp4_flops or device.fp8_flops}
    if matmul_dtype in peaks:
        rate = peaks[matmul_dtype] * device.sustained * efficiency.fp8_matmul
        return Machine(device, efficiency, sizes, rate, 1, True, routing)
    rate = device.bf16_flops * device.sustained * efficiency.matmul
    if matmul_dtype == "float64":  # as on A100 and H100; a CPU's vectors hold half as many
        rate *= 0.5 if device.name == "cpu" else 1 / 16
        return Machine(device, efficiency, sizes, rate, 8, False, routing)
    narrow = matmul_dtype != "float32" or device.name == "cpu"
    rate *= 1 if narrow else 0.5  # TF32 runs at half of bf16's rate
    return Machine(device, efficiency, sizes, rate, 2 if narrow else 4, False, routing)


def _domains(device: Device, sizes: ParallelSizes, block: int) -> float:
    """The number of domains over which blocks of consecutive ranks lie. Machines are filled one after the other; of
    racks a job takes as much as whole blocks fill."""
    whole = block <= device.domain if device.wide else sizes.within(block, device.domain)
    return 1.0 if whole else max(2.0, block / device.domain)


def _expert_domains(device: Device, sizes: ParallelSizes) -> tuple[float, float]:
    """(the number of domains over which the ranks of an expert dispatch lie, how many of them are in each)."""
    group = sizes.ep * sizes.etp
    domains = min(_domains(device, sizes, sizes.block("ep", "etp")), float(group))
    return domains, group / domains


def _fused_dispatch(device: Device, sizes: ParallelSizes, model: ModelConfig) -> Dispatch:
    """Copies of a token that a kernel sends: one to each rank reached, over the network one to each domain."""
    topk, group = model.moe_router_topk, sizes.ep * sizes.etp
    domains, near = _expert_domains(device, sizes)
    ranks = group * (1 - (1 - 1 / group) ** topk)
    domains_reached = domains * (1 - (1 - 1 / domains) ** topk)
    if model.moe_router_num_groups and model.moe_router_group_topk:
        domains_reached = min(domains_reached, model.moe_router_group_topk)
    return Dispatch(domains_reached * (domains - 1) / domains, ranks * (1 - 1 / near), at_once=True, narrow=True)


def _dispatch(device: Device, sizes: ParallelSizes, model: ModelConfig, nodes: int) -> Dispatch:
    """Copies of a token that ppctl sends: with one node one for each expert, else by node."""
    topk, (domains, near) = model.moe_router_topk, _expert_domains(device, sizes)
    if nodes == 1:
        return Dispatch(topk * (1 - 1 / domains), topk / domains * (1 - 1 / near), at_once=True)
    # both directions
    between = (reached(model, nodes) + reached(model, expert_runs(model).number)) / 2 * (nodes - 1) / nodes
    inside, fast = topk * (1 - nodes / sizes.ep), domains == 1.0
    return Dispatch(0.0 if fast else between, inside + between if fast else inside, at_once=False)


def expert_seconds(size: float, machine: Machine) -> float:
    """Seconds of one dispatch or combine of `size` bytes of tokens, by the copies over each kind of link."""
    device, efficiency, dispatch = machine.device, machine.efficiency, machine.dispatch
    if size == 0.0 or machine.sizes.ep * machine.sizes.etp == 1:
        return 0.0
    outside = size * dispatch.outside / (device.network * efficiency.dispatch)
    inside = size * dispatch.inside / (device.fast_link * efficiency.dispatch)
    return max(outside, inside) + device.latency if dispatch.at_once else outside + inside + 2 * device.latency


class PartSeconds(NamedTuple):
    """Seconds of one part for one microbatch."""

    forward: float
    input_gradient: float
    weight_gradient: float
    exchanged: float = 0.0
    """The part of `forward` that is dispatch to experts and back."""
    exchanged_back: float = 0.0
    """The part of `input_gradient` that is dispatch to experts and back."""


def part_seconds(work: Work, machine: Machine) -> PartSeconds:
    """The seconds of a part's forward, and of the two halves of its backward."""
    device, efficiency, sizes = machine.device, machine.efficiency, machine.sizes
    rate = machine.matmul * (efficiency.grouped if work.module in ("moe", "experts") else 1.0)
    product = work.matmul / rate + work.weights * machine.weight_bytes / machine.memory if work.matmul else 0.0
    product += work.inputs * NARROWED / machine.memory if machine.narrow else 0.0
    peak = device.bf16_flops * device.sustained
    scores = work.scores / (peak * efficiency.attention)
    ring = work.context.ring / machine.link(sizes.block("cp"))
    gathered = work.context.gathered / machine.link(sizes.block("cp"))
    again = work.scores * BACKWARD_SCORES / (peak * efficiency.attention_backward)
    sent, sent_back = (
        efficiency.tensor_exposed * size / machine.link(sizes.block("tp")) for size in (work.tensor, work.tensor_back)
    )
    rows_in_8_bits = machine.narrow and machine.dispatch.narrow
    exchanged = expert_seconds(work.experts / (2 if rows_in_8_bits else 1), machine)
    exchanged += expert_seconds(work.experts, machine)
    kernels = work.kernels + (NARROWING * work.groups if machine.narrow else 0)
    plain = work.traffic / machine.memory + kernels * efficiency.kernel + exchanged
    plain += gathered + work.context.heads / machine.link(sizes.stride("cp") * work.context.exchanging)
    added = (work.weights if work.trained is None else work.trained) * ACCUMULATED / machine.memory
    ahead = product + max(scores, ring) + plain + sent
    # measured: frozen weights have no gradient, nor has anything before the first trained weight
    if work.back is not None:
        inputs, weights = (operations / rate for operations in work.back)
        beside = plain + work.traffic / machine.memory
        return PartSeconds(ahead, inputs + beside if inputs else 0.0, weights + added if weights else 0.0)
    return PartSeconds(
        ahead,
        product + max(again, 2 * ring) + gathered + plain + sent_back + work.traffic / machine.memory,
        work.matmul / rate + added,
        exchanged,
        exchanged,
    )


def layer_seconds(works: Iterable[Work], machine: Machine, recomputed: Collection[str] | None = ()) -> PartSeconds:
    """The sum over parts; `recomputed` parts (None: all of the layer itself, without what an MTP module has around it)
    run their forward again before their input gradient."""
    parts = []
    for work in works:
        one = part_seconds(work, machine)
        made_again = work.module != "mtp" if recomputed is None else made_again_by(work.module, recomputed)
        if made_again:
            again, sent_again = one.input_gradient + one.forward, one.exchanged_back + one.exchanged
            one = one._replace(input_gradient=again, exchanged_back=sent_again)
        parts.append(one)
    return PartSeconds(*map(sum, zip(*parts, strict=True)))


def host_seconds(size: float, machine: Machine) -> float:
    """Seconds of `size` bytes one way between a device and its host."""
    return size / (machine.device.host_link * machine.efficiency.link)


def beside_copies(seconds: PartSeconds, copies: float) -> PartSeconds:
    """A stage's seconds if each forward and backward takes at least `copies` seconds."""
    inputs = max(seconds.input_gradient, copies - seconds.weight_gradient)
    return seconds._replace(forward=max(seconds.forward, copies), input_gradient=inputs)


def message_seconds(size: float, machine: Machine) -> float:
    """Seconds of a message of `size` bytes to the next pp_rank, over fast links if each pipeline is in one domain."""
    return machine.device.latency + size / machine.link(machine.sizes.block("pp"))


def reduce_seconds(dense: float, experts: float, bytes_each: float, machine: Machine) -> float:
    """Seconds of a reduce-scatter (or gather) of parameters' bytes over the ranks that hold the same parameters."""
    sizes, total = machine.sizes, 0.0
    for count, ranks, block in (
        (dense, sizes.dp * sizes.cp, sizes.block("dp", "cp")),
        (experts, sizes.edp, sizes.block("edp")),
    ):
        if count and ranks > 1:
            total += machine.device.latency + count * bytes_each * (ranks - 1) / ranks / machine.link(block)
    return total


def newton_schulz_seconds(operations: float, device: Device, stack: str = PPCTL) -> float:
    """Seconds of `operations` operations of Muon's iteration, in bfloat16."""
    return operations / (device.bf16_flops * efficiency_of(device, stack).matmul)


def optimizer_seconds(weights: float, gradients: float, optimizer: float, device: Device, stack: str = PPCTL) -> float:
    """Seconds of an AdamW step: gradients are read, moments and masters read and written, weights written."""
    return (weights + gradients + 2 * optimizer) / (device.memory_bandwidth * efficiency_of(device, stack).memory)

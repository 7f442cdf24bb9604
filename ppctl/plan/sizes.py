"""The world and the batch: the sizes that follow from others, each by one equation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, isqrt, prod

from ppctl.config.argv import PLACE
from ppctl.config.checks import beyond_limits
from ppctl.config.metadata import MOST_RANKS, MOST_STAGES
from ppctl.host.devices import machines
from ppctl.plan.expert_dispatch import derive_dispatch
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Overrides, Violation, Violations
from ppctl.topology import ORDER, ParallelSizes, axes_of

AXES = ("tp", "cp", "pp")
"""The axes that divide one replica of the model; dp is the number of replicas."""

CALL = "pipeline.pp_batch_size"
"""Samples of one schedule call on a dp rank, if the user set it: else a step is one call."""

CONTEXT = "PP-E223"
"""The code for ways to exchange a sequence that do not fit the sizes."""
KINDS, LEVELS = "model.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"

RANK_ORDER = "parallel.order"

TOO_MUCH = "PP-E214"
"""The code for products of sizes that are too large to plan."""

_LONGEST_SEARCH = 100_000
"""The largest divisor tried: a typing error may be any number, and its remedy must not take a minute."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How a global batch is cut."""

    micro_batch_size: int
    num_microbatches: int
    """Microbatches of one schedule call, on every data-parallel rank."""
    accumulation: int
    """Schedule calls per optimizer step."""
    derived: tuple[Derived, ...]


def beyond(values: ConfigValues) -> Violations:
    """The violations of values beyond their keys' limits, so that no remedy leads to such values."""
    return [
        Violation("PP-E103", key, f"{key} is beyond its limit", values.cite(key))
        for key in beyond_limits(values.config)
    ]


def derive_world(
    values: ConfigValues, violations: Violations
) -> tuple[ParallelSizes, tuple[Derived, ...]] | tuple[None, tuple[()]]:
    """How each axis divides the world, with one chunk per rank, and the equations; (None, ()), with a violation, if it
    cannot. A replica has tp x cp x pp ranks, the job has nodes x gpus_per_node, and dp is the ratio of the two."""
    replica = prod(values[axis] for axis in AXES)
    needed = replica * (values["dp"] or 1)
    nodes, gpus = values["nodes"], values["gpus_per_node"]
    if nodes is None and gpus is None:
        world, product = needed, ""
    else:
        nodes, gpus = machines(nodes, gpus, needed)
        world, product = nodes * gpus, f" = nodes {nodes} x {gpus}"
    dp = values["dp"] or world // replica
    factors = " x ".join(f"{axis} {values[axis]}" for axis in AXES)
    if world != replica * dp or dp < 1:
        violations.append(_mismatch(values, world, product, factors, nodes or 1, gpus or needed))
        return None, ()
    equation = f"world {world}{product} = {factors} x dp {dp}"
    if not product:
        equation += "; neither launch.nodes nor launch.gpus_per_node was given"
    if world > MOST_RANKS:
        violations.append(_too_many_ranks(values, equation))
        return None, ()
    derived = [Derived("world_size", world, equation), Derived("data_parallel_size", dp, equation)]
    expert = _experts(values, values["tp"] * values["cp"] * dp, violations)
    if expert is None:
        return None, ()
    ep, etp, edp = expert
    if values["model.num_moe_experts"]:
        text = f"tp {values['tp']} x cp {values['cp']} x dp {dp} = etp {etp} x ep {ep} x edp {edp}"
        derived.append(Derived("expert_data_parallel_size", edp, text))
    order = values[RANK_ORDER]
    sizes = ParallelSizes(world, values["pp"], 1, values["tp"], values["cp"], dp, ep, etp, edp, order)
    if values["model.num_moe_experts"] and values["pp"] > 1 and len({*sizes.pipeline_strides}) > 1:
        violations.append(_pipelines_apart(values, sizes))
        return None, ()
    if nodes is not None and gpus is not None and nodes > 1:
        derived.append(_across_nodes(values, sizes, gpus))
    derived += derive_dispatch(values, sizes, violations)
    return sizes, tuple(derived)


def _too_many_ranks(values: ConfigValues, equation: str) -> Violation:
    """The violation of a job with more than MOST_RANKS ranks; `equation` shows how many it has."""
    replica = prod(values[axis] for axis in AXES)
    unset: Overrides = {"nodes": None, "gpus_per_node": None}
    one = {axis: 1 for axis in ("tp", "cp", "ep") if values[axis] > 1}
    return Violation(
        TOO_MUCH,
        "ranks",
        f"{equation}; a job has at most {MOST_RANKS} ranks",
        values.cite("nodes", "gpus_per_node", *AXES, "dp"),
        {"dp": max(1, MOST_RANKS // replica), **unset},
        {"dp": None, **unset},
        {**one, "dp": None, "etp": None, **unset},
    )


def check_stages(values: ConfigValues, violations: Violations) -> None:
    """Add a violation for more stages than a plan may have, before anything is built from them."""
    pp, vpp = values["pp"], values["vpp"] or 1
    if pp * vpp > MOST_STAGES:
        message = f"pp {pp} x vpp {vpp} = {pp * vpp} stages; a plan holds at most {MOST_STAGES}"
        ways = ({"vpp": MOST_STAGES // pp}, {"vpp": 1}, {"vpp": None}, {"pp": MOST_STAGES // vpp})
        violations.append(Violation(TOO_MUCH, "stages", message, values.cite("pp", "vpp"), *ways, {"pp": 1, "vpp": 1}))


def _mismatch(values: ConfigValues, world: int, machines: str, factors: str, nodes: int, gpus: int) -> Violation:
    """The violation of a world that the axes do not divide (PP-E204), or that contradicts a given dp (PP-E203)."""
    replica, dp = prod(values[axis] for axis in AXES), values["dp"]
    code = "PP-E203" if dp else "PP-E204"
    right = f"{factors} x dp {dp} = {replica * dp}" if dp else f"{factors} = {replica} ranks per replica of the model"
    verb = "is not" if dp else "is not a multiple of"
    return Violation(
        code,
        "world",
        f"the job's world {world}{machines} {verb} {right}",
        values.cite("nodes", "gpus_per_node", *AXES, "dp"),
        *_worlds(values, world, nodes, gpus),
    )


def _worlds(values: ConfigValues, world: int, nodes: int, gpus: int) -> Iterator[Overrides]:
    replica, dp = prod(values[axis] for axis in AXES), values["dp"]
    if dp and world % replica == 0:
        yield {"dp": world // replica}
    needed = replica * (dp or max(1, world // replica))
    if values["nodes"] is not None or needed % gpus == 0:
        yield {"nodes": max(1, round(needed / gpus))}
    yield {"gpus_per_node": max(1, needed // nodes)}
    yield {"nodes": 1, "gpus_per_node": needed}
    for axis in reversed(AXES):
        rest = replica // values[axis] * (dp or 1)
        if world % rest == 0:
            for size in nearest_divisors(world // rest, values[axis]):
                yield {axis: size}


def _experts(values: ConfigValues, dense: int, violations: Violations) -> tuple[int, int, int] | None:
    """(ep, etp, edp) with etp x ep x edp = tp x cp x dp; None, with a violation, if they do not divide."""
    experts, ep = values["model.num_moe_experts"] or 0, values["ep"]
    etp = values["etp"] if values.is_set("etp") else values["tp"]
    if ep > 1 and experts == 0:
        message = f"expert parallelism of {ep} has no experts to spread: model.num_moe_experts is not set"
        violations.append(Violation("PP-E206", "ep", message, values.cite("ep", "model.num_moe_experts"), {"ep": 1}))
        return None
    if ep > 1 and experts % ep:
        message = f"{experts} experts cannot be spread evenly over ep {ep}"
        remedies = [{"ep": size} for size in nearest_divisors(experts, ep)]
        violations.append(Violation("PP-E206", "ep", message, values.cite("ep", "model.num_moe_experts"), *remedies))
        return None
    if dense % (etp * ep):
        message = f"tp {values['tp']} x cp {values['cp']} x dp {dense // values['tp'] // values['cp']} = {dense} ranks "
        message += f"are not a multiple of etp {etp} x ep {ep} = {etp * ep}"
        place = values.cite("tp", "cp", "dp", "etp", "ep", "nodes", "gpus_per_node")
        violations.append(Violation("PP-E205", "ep", message, place, *_expert_worlds(values, dense, etp, ep)))
        return None
    return ep, etp, dense // etp // ep


def _expert_worlds(values: ConfigValues, dense: int, etp: int, ep: int) -> Iterator[Overrides]:
    """Overrides with which ep and etp divide the world: another ep, no division of experts, or a larger world. The
    larger world comes first if nothing sets the world's size, or if neither ep nor nodes was typed: the number of nodes
    in a script is often a default that its shell replaces."""
    dp = -(-dense // (etp * ep)) * etp * ep // (values["tp"] * values["cp"])
    world, gpus = dp * prod(values[axis] for axis in AXES), values["gpus_per_node"]
    if not (values["nodes"] or gpus or values["dp"]):
        yield {"dp": dp}
    more_nodes: list[Overrides] = []
    if values["nodes"] and gpus and values["dp"] is None and world % gpus == 0:
        more_nodes.append({"nodes": world // gpus})
    if not any(values.source(name).startswith(PLACE) for name in ("ep", "nodes")):
        yield from more_nodes
    for size in nearest_divisors(dense, ep):
        yield {"ep": size}
    yield {"ep": 1, "etp": 1}
    yield from more_nodes
    yield {"dp": dp, "nodes": None, "gpus_per_node": None}


def _pipelines_apart(values: ConfigValues, sizes: ParallelSizes) -> Violation:
    """The violation of an order that makes different pipelines for experts and for the rest of the model."""
    dense, expert = sizes.pipeline_strides
    message = (
        f"{RANK_ORDER} {sizes.order} makes two kinds of pipelines: neighbours are {dense} ranks apart, "
        f"but {expert} for experts"
    )
    last = "-".join([*(axis for axis in axes_of(sizes.order) if axis != "pp"), "pp"])
    place = values.cite(RANK_ORDER, "tp", "cp", "dp", "etp", "ep")
    return Violation("PP-E225", RANK_ORDER, message, place, {RANK_ORDER: last}, {RANK_ORDER: ORDER})


def _across_nodes(values: ConfigValues, sizes: ParallelSizes, ranks: int) -> Derived:
    """The line that says which axes have groups within a node and which across nodes, beside the order of the axes."""
    experts = ("etp", "ep", "edp") if values["model.num_moe_experts"] else ()
    axes = [axis for axis in ("tp", "cp", "dp", "pp", *experts) if getattr(sizes, axis) > 1]
    crossing = [axis for axis in axes if sizes.crosses(axis, ranks)]
    inside = [axis for axis in axes if axis not in crossing]
    text = f"order {sizes.order} ({values.source(RANK_ORDER)}) on nodes of {ranks} ranks: "
    parts = {"within a node": inside, "across nodes": crossing}
    text += "; ".join(f"{', '.join(listed)} {where}" for where, listed in parts.items() if listed)
    return Derived("axes_across_nodes", crossing, text)


def divide_model(values: ConfigValues, violations: Violations, etp: int) -> None:
    """Add violations for sizes that tp, cp or etp do not divide, and for ranks without tokens of the vocabulary."""
    tp, cp = values["tp"], values["cp"]
    experts = values["model.num_moe_experts"] or 0
    pieces = cp * tp if values[SEQUENCE] else cp
    split = [(key, tp) for key in ("model.num_attention_heads", "model.ffn_hidden_size")]
    if experts:
        split.append(("model.moe_shared_expert_intermediate_size", tp))
        split.append(("model.moe_ffn_hidden_size", etp))
    common = gcd(*(values[key] for key, ranks in split if values[key] and ranks == tp))
    for key, ranks in split:
        if values[key] and values[key] % ranks:
            axis = "etp" if key == "model.moe_ffn_hidden_size" else "tp"
            divisors = (*nearest_divisors(values[key], ranks), *nearest_divisors(common, ranks))
            message = f"{axis} {ranks} does not divide {key} {values[key]}"
            ways = [{axis: size} for size in divisors]
            violations.append(Violation("PP-E207", key, message, values.cite("tp", "etp", key), *ways, {axis: 1}))
    _divide_groups(values, violations)
    words = values["model.vocab_size"]
    if -(-words // tp) * (tp - 1) >= words:
        message = f"tp {tp} leaves ranks without any of the {words} tokens of model.vocab_size"
        place = values.cite("tp", "model.vocab_size")
        violations.append(Violation("PP-E207", "model.vocab_size", message, place, {"tp": isqrt(words)}, {"tp": 1}))
    if experts and tp > 1 and not values[SEQUENCE]:
        message = (
            "experts with tensor parallelism need sequence parallelism: else all ranks send the same tokens to them"
        )
        place = values.cite("tp", SEQUENCE, "model.num_moe_experts")
        violations.append(Violation("PP-E224", SEQUENCE, message, place, {SEQUENCE: True}, {"tp": 1}))
    if cp > 1 and values["seq"] % (2 * cp):
        message = f"seq {values['seq']} is not a multiple of 2 x cp {cp} (each rank takes an early and a late piece)"
        remedies = [{"seq": size} for size in nearest_multiples(2 * pieces, values["seq"])]
        violations.append(Violation("PP-E208", "seq", message, values.cite("seq", "cp"), *remedies, {"cp": 1}))
    elif values["seq"] % pieces:
        message = f"seq {values['seq']} is not a multiple of the cp {cp} x tp {tp} pieces of sequence_parallel"
        remedies = [{"seq": size} for size in nearest_multiples(pieces * (2 if cp > 1 else 1), values["seq"])]
        place = values.cite("seq", "tp", "cp", SEQUENCE)
        violations.append(Violation("PP-E208", "seq", message, place, *remedies, {SEQUENCE: False}, {"tp": 1}))
    _divide_context(values, violations)


SEQUENCE = "parallel.sequence_parallel"


def _divide_groups(values: ConfigValues, violations: Violations) -> None:
    """Add a violation unless tp divides the number of key/value groups or is a multiple of it (ranks share groups)."""
    key, tp = "model.num_query_groups", values["tp"]
    groups = values[key]
    if values["model.multi_latent_attention"] or not groups or groups % tp == 0 or tp % groups == 0:
        return
    message = f"tp {tp} does not divide {key} {groups}, and {groups} does not divide tp"
    ways = [{"tp": size} for size in (*nearest_divisors(groups, tp), groups)]
    violations.append(Violation("PP-E207", key, message, values.cite("tp", key), *ways, {"tp": 1}))


def _divide_context(values: ConfigValues, violations: Violations) -> None:
    """Add violations if the levels of context parallelism do not make cp or have no effect, or if the ranks that
    exchange heads cannot share these evenly."""
    cp, listed, levels = values["cp"], values[KINDS], values[LEVELS]
    kinds = {listed} if isinstance(listed, str) else set(listed)
    hierarchical, place = "a2a+p2p" in kinds, values.cite("cp", KINDS, LEVELS)
    pairs = [[size, cp // size] for size in nearest_divisors(cp, 2) if 1 < size < cp]
    if levels is not None and not hierarchical:
        message = f"{LEVELS} has no effect: no layer has {KINDS} a2a+p2p"
        violations.append(Violation(CONTEXT, "levels", message, place, {LEVELS: None}, {KINDS: "a2a+p2p"}))
    elif hierarchical and prod(levels or [1]) != cp:
        message = f"{KINDS} a2a+p2p needs {LEVELS} with a product of cp {cp}"
        message += f", but {' x '.join(map(str, levels))} = {prod(levels)}" if levels else ""
        ways: list[Overrides] = [{LEVELS: pair} for pair in pairs]
        ways += [{"cp": prod(levels)}] if levels else []
        violations.append(Violation(CONTEXT, "levels", message, place, *ways, {KINDS: "p2p", LEVELS: None}))
    else:
        _divide_heads(values, violations, cp if "a2a" in kinds else levels[0] if levels else 1, pairs)


def _divide_heads(values: ConfigValues, violations: Violations, ranks: int, pairs: list[list[int]]) -> None:
    """Add a violation if `ranks` ranks cannot share heads evenly; `pairs` are the possible levels of cp."""
    tp, heads = values["tp"], values["model.num_attention_heads"]
    if heads % tp or heads // tp % ranks == 0:
        return
    own = heads // tp
    message = f"{ranks} ranks cannot share model.num_attention_heads {heads} / tp {tp} = {own} heads"
    ways: list[Overrides] = [{LEVELS: pair} for pair in pairs if own % pair[0] == 0 and values[LEVELS]]
    ways += [{"cp": size} for size in nearest_divisors(own, values["cp"]) if not values[LEVELS]]
    place = values.cite("tp", "cp", KINDS, LEVELS, "model.num_attention_heads")
    violations.append(Violation(CONTEXT, "heads", message, place, *ways, {KINDS: "p2p", LEVELS: None}))


def derive_batch(values: ConfigValues, dp: int, violations: Violations) -> BatchSplit | None:
    """The batch, from global_batch_size = dp x num_microbatches x micro_batch_size; None with a violation. With
    pp_batch_size, a schedule call takes that many samples of a dp rank; gradient_accumulation_steps calls make a
    step."""
    key = "pipeline.pp_microbatch_size"
    if not values.is_set(key) or values.is_set("mbs"):
        key = "mbs"
    mbs, gbs = values[key], values["gbs"]
    call = values[CALL] if values.is_set(CALL) else None
    if call is not None and call % mbs:
        violations.append(_ragged_call(values, key, call, gbs // dp))
        return None
    if gbs % (dp * (call or mbs)):
        violations.append(_ragged_batch(values, key, dp))
        return None
    count = (call or gbs // dp) // mbs
    calls = gbs // (dp * mbs * count)
    times = "" if call is None else f"gradient_accumulation_steps {calls} x "
    equation = f"global_batch_size {gbs} = dp {dp} x {times}num_microbatches {count} x micro_batch_size {mbs}"
    derived = [Derived("num_microbatches", count, equation)]
    if call is not None:
        derived.append(Derived("gradient_accumulation_steps", calls, equation))
    return BatchSplit(mbs, count, calls, tuple(derived))


def _ragged_call(values: ConfigValues, key: str, call: int, share: int) -> Violation:
    """The violation of a pp_batch_size that is no whole number of microbatches; `share` is a dp rank's batch."""
    mbs = values[key]
    message = f"{CALL} {call} = num_microbatches x micro_batch_size {mbs} has no whole solution"
    fitting = [size for size in nearest_divisors(share, call) if size % mbs == 0]
    ways = [{CALL: size} for size in (*fitting, *nearest_multiples(mbs, call))]
    return Violation("PP-E211", CALL, message, values.cite(CALL, key), *ways, {CALL: share})


def _ragged_batch(values: ConfigValues, key: str, dp: int) -> Violation:
    """The violation of a global batch that gives a dp rank no whole number of microbatches, or of schedule calls."""
    mbs, gbs, call = values[key], values["gbs"], values[CALL] if values.is_set(CALL) else None
    terms = f"num_microbatches x micro_batch_size {mbs}"
    if call is not None:
        terms = f"gradient_accumulation_steps x num_microbatches {call // mbs} x micro_batch_size {mbs}"
    message = f"global_batch_size {gbs} = dp {dp} x {terms} has no whole solution"
    place = values.cite("gbs", key, *[CALL] * (call is not None))
    place += f"\ndata_parallel_size = {dp} ({values.source('dp') if values['dp'] else 'derived'})"
    ways = [{"gbs": size} for size in nearest_multiples(dp * (call or mbs), gbs)]
    if gbs % dp == 0:
        sizes = nearest_divisors(gbs // dp, call or mbs)
        # The nearest multiple may leave fewer microbatches than the schedule needs.
        ways += [{key: size} for size in (*sizes, 1)] if call is None else [{CALL: size} for size in sizes]
    return Violation("PP-E211", "gbs", message, place, *ways)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number`, the one nearest to `wanted` first, at most four."""
    small = [size for size in range(1, min(isqrt(number), _LONGEST_SEARCH) + 1) if number % size == 0]
    divisors = {*small, *(number // size for size in small)}
    return sorted(divisors, key=lambda size: (abs(size - wanted), size))[:4]


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The multiples of `unit` around `wanted`: below (if there is one) and above."""
    below = wanted // unit * unit
    return [size for size in (below, below + unit) if size > 0]

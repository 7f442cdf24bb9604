"""Collectives and messages of one rank for a microbatch: their number and bytes, by axis and kind.

Bytes are those that one rank of n sends in a ring, for a tensor of S bytes: all_gather and reduce_scatter S (n - 1) /
n; all_reduce twice that; broadcast S (n - 1) / n; all_to_all all but the rank's own part; send S. Rows to experts are
spread evenly; a dispatch by node reaches the expected number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import context_traffic, exchanging
from ppctl.cost.setting import Setting
from ppctl.geometry.expert_reach import expert_runs, reached
from ppctl.geometry.layers import Kind, Layer, layer_kinds, recomputed_modules, recomputed_runs
from ppctl.geometry.parameters import Sizes

COUNT = 8
"""Bytes of a number of rows."""

EXPERT = 4
"""Bytes of an expert's number."""

Key = tuple[str, str]
"""(axis, kind): `tp`, `cp`, `ep` (by node `ep-outer` between nodes and `ep-inner` within one), `etp`, `dp`, `cp-dp`,
`edp`, `pp` or `ties` (the stages that share a table), and a collective by torch's name, or `send`."""


class Traffic(dict[Key, tuple[int, float]]):
    """(number, bytes that a rank sends) by axis and kind."""

    def note(self, axis: str, kind: str, size: float, number: int = 1) -> Traffic:
        """Add `number` exchanges that send `size` bytes together; returns itself."""
        count, total = self.get((axis, kind), (0, 0.0))
        self[axis, kind] = count + number, total + size
        return self

    def add(self, other: Traffic, times: int = 1) -> Traffic:
        """Add another rank's or layer's traffic in place, `times` times (-1: subtract it); returns itself."""
        for (axis, kind), (number, size) in other.items():
            self.note(axis, kind, times * size, times * number)
        return self

    def sent(self, axis: str) -> float:
        """Bytes along an axis."""
        return sum(size for (own, _), (_, size) in self.items() if own == axis)

    @property
    def shown(self) -> list[tuple[Key, tuple[int, int]]]:
        """The entries in order of their names, in whole bytes."""
        return [(key, (number, round(size))) for key, (number, size) in sorted(self.items()) if number]


class Passes(NamedTuple):
    """Traffic of one microbatch's forward and backward."""

    forward: Traffic
    inputs: Traffic
    """The backward without `weights`, recomputation included."""
    weights: Traffic
    """The traffic of W, for weight gradients, if backwards are split."""

    @property
    def all(self) -> Traffic:
        """Traffic of a forward and a backward together."""
        return Traffic().add(self.forward).add(self.inputs).add(self.weights)


def _nothing() -> Passes:
    return Passes(Traffic(), Traffic(), Traffic())


class _TensorAxis(NamedTuple):
    """Exchanges of the ranks that divide weights, by the width of the exchanged vectors; none for one rank."""

    setting: Setting

    def gather(self, width: float) -> Traffic:
        if self.setting.sp == 1:
            return Traffic()
        return Traffic().note("tp", "all_gather", self._whole(width))

    def total(self, width: float) -> Traffic:
        """A sum over the ranks: a reduce-scatter if each keeps only its own tokens, else an all-reduce."""
        if self.setting.sizes.tp == 1:
            return Traffic()
        if self.setting.sp > 1:
            return Traffic().note("tp", "reduce_scatter", self._whole(width))
        return Traffic().note("tp", "all_reduce", 2 * self._whole(width))

    def numbers(self, size: float) -> Traffic:
        ranks = self.setting.sizes.tp
        return Traffic().note("tp", "all_reduce", 2 * size * (ranks - 1) / ranks) if ranks > 1 else Traffic()

    def _whole(self, width: float) -> float:
        ranks = self.setting.sizes.tp
        return self.setting.tokens * width * self.setting.element * (ranks - 1) / ranks


def layer_passes(model: ModelConfig, kind: Kind, setting: Setting) -> Passes:
    """Traffic of one layer, without recomputation."""
    tensor, h, found = _TensorAxis(setting), model.hidden_size, _nothing()
    if kind.name == "loss":
        for _ in range(model.outputs):
            _column_parallel_input(found, tensor, h, waits=False)
            # the maxima of logits, and then the sums
            found.forward.add(tensor.numbers(setting.wide_bytes * setting.tokens))
            found.forward.add(tensor.numbers(2 * setting.wide_bytes * setting.tokens))
        return found
    if kind.name in ("embedding", "mtp"):
        _row_parallel_output(found, tensor, h)
    if kind.name == "embedding":
        return found
    for part in (_expansion(model, setting), _context(model, kind, setting)):
        _join(found, part)
    _row_parallel_output(found, tensor, h)
    _join(found, _experts(model, setting) if kind.moe else _block(tensor, h))
    return found


def _join(into: Passes, part: Passes) -> None:
    for own, other in zip(into, part, strict=True):
        own.add(other)


def _column_parallel_input(found: Passes, tensor: _TensorAxis, width: float, *, waits: bool = True) -> None:
    """Add a column-parallel product's traffic: it gathers its input. `waits`: whether its weight gradient is W's."""
    found.forward.add(tensor.gather(width))
    found.inputs.add(tensor.total(width))
    (found.weights if waits else found.inputs).add(tensor.gather(width))


def _row_parallel_output(found: Passes, tensor: _TensorAxis, width: float) -> None:
    """Add a row-parallel product's traffic: the sum of its outputs forward, a gather of their gradient backward."""
    found.forward.add(tensor.total(width))
    found.inputs.add(tensor.gather(width))


def _block(tensor: _TensorAxis, width: float) -> Passes:
    found = _nothing()
    _column_parallel_input(found, tensor, width)
    _row_parallel_output(found, tensor, width)
    return found


def _expansion(model: ModelConfig, setting: Setting) -> Passes:
    """Traffic of an attention's inputs: hidden states, or compressed vectors."""
    sizes, tensor, found = Sizes.of(model), _TensorAxis(setting), _nothing()
    if not sizes.latent:
        _column_parallel_input(found, tensor, sizes.hidden)
        return found
    _column_parallel_input(found, tensor, sizes.q_rank or sizes.hidden)
    _column_parallel_input(found, tensor, sizes.kv_rank)
    found.forward.add(tensor.gather(sizes.turned))  # the part of keys that all heads share, read by no product
    found.inputs.add(tensor.total(sizes.turned))
    return found


def _context(model: ModelConfig, kind: Kind, setting: Setting) -> Passes:
    """Traffic of one layer's attention along cp: a gather, or a ring of sends, and exchanges of heads."""
    found, size = _nothing(), setting.tokens * setting.element
    traffic = context_traffic(model, kind.cp_comm_type, size, setting.sizes, setting.levels)
    hops = setting.sizes.cp // traffic.exchanging - 1
    if traffic.gathered:
        found.forward.note("cp", "all_gather", traffic.gathered)
        found.inputs.note("cp", "all_gather", traffic.gathered).note("cp", "reduce_scatter", traffic.gathered)
    elif hops:
        found.forward.note("cp", "send", traffic.ring, hops)
        found.inputs.note("cp", "send", 2 * traffic.ring, 2 * hops)
    if traffic.exchanging > 1:
        for each in (found.forward, found.inputs):
            each.note("cp", "all_to_all", traffic.heads, 2)
    return found


def _experts(model: ModelConfig, setting: Setting) -> Passes:
    """Traffic of the router, of rows sent to experts, and of shared experts."""
    found, axes, sizes = _nothing(), setting.sizes, Sizes.of(model)
    if model.moe_router_load_balancing_type != "none" and model.moe_aux_loss_coeff:
        sequences = setting.micro_batch_size if model.moe_router_load_balancing_type == "seq_aux_loss" else 1
        counts = 2 * sequences * sizes.experts * setting.wide_bytes
        for axis, ranks in (("tp", setting.sp), ("cp", axes.cp)):
            if ranks > 1:
                found.forward.note(axis, "all_reduce", counts * (ranks - 1) / ranks)
    if axes.ep > 1:
        # by node: the node's experts, rows to the node, and sums from it
        numbers = sizes.experts / axes.ep if setting.nodes == 1 else sizes.experts / setting.nodes + 2
        found.forward.note("ep", "all_to_all", COUNT * numbers * (axes.ep - 1))
    if axes.etp > 1:
        found.forward.note("etp", "all_gather", COUNT * sizes.experts * (axes.etp - 1))
    _rows_to_experts(found, model, setting)
    if sizes.shared:
        _join(found, _block(_TensorAxis(setting), sizes.hidden))
    return found


def _rows_to_experts(found: Passes, model: ModelConfig, setting: Setting) -> None:
    """Add rows and weights sent to experts, and results sent back; a backward sends gradients the opposite ways."""
    axes, nodes, topk = setting.sizes, setting.nodes, model.moe_router_topk
    tokens = setting.tokens / setting.sp
    row, weight = model.hidden_size * setting.element, setting.element
    if nodes > 1:
        out, back = tokens * reached(model, nodes), tokens * reached(model, expert_runs(model).number)
        weights, over_network = out * topk * weight, (nodes - 1) / nodes
        # A row travels with its experts' numbers and weights; sums of runs travel back.
        found.forward.note("ep-outer", "all_to_all", out * topk * EXPERT * over_network)
        for each in (found.forward, found.inputs):
            each.note("ep-outer", "all_to_all", (weights + (out + back) * row) * over_network, 3)
    ranks, axis = axes.ep // nodes, "ep" if nodes == 1 else "ep-inner"
    for each in (found.forward, found.inputs):
        if ranks > 1:
            each.note(axis, "all_to_all", tokens * topk * (2 * row + weight) * (ranks - 1) / ranks, 3)
        if axes.etp > 1:
            each.note("etp", "all_to_all", tokens * topk * (2 * row + weight) * (axes.etp - 1), 3)


def stage_passes(model: ModelConfig, layers: Iterable[Layer], setting: Setting, stage: int = 0) -> Passes:
    """Traffic of one microbatch on a stage, recomputation included, without messages of the pipeline."""
    found, own = _nothing(), tuple(layers)
    modules, runs = recomputed_modules(setting.train, stage), recomputed_runs(setting.train, stage, own)
    inside = {layer for run in runs for layer in run}
    for layer, kind in zip(own, layer_kinds(model, own), strict=True):
        _join(found, layer_passes(model, kind, setting))
        if kind.name in ("decoder", "mtp") and layer not in inside:
            for again in _modules_again(model, kind, setting, modules):
                found.inputs.add(again)
    for run in runs:
        for kind in layer_kinds(model, run):
            # An MTP module's parts around its layer are not recomputed.
            found.inputs.add(layer_passes(model, kind._replace(name="decoder"), setting).forward)
        found.inputs.add(_unneeded(model, kind, setting), -1)
    return found


def _modules_again(model: ModelConfig, kind: Kind, setting: Setting, modules: Sequence[str]) -> Iterator[Traffic]:
    """Exchanges that the recomputed modules of a layer make again."""
    if "core_attn" in modules:
        context = _context(model, kind, setting).forward
        if ("cp", "all_to_all") in context:  # the exchange of results comes after all that the backward needs
            sizes, ranks = Sizes.of(model), exchanging(kind.cp_comm_type, setting.sizes, setting.levels)
            result = sizes.heads / setting.sizes.tp * sizes.value_head * (ranks - 1) / ranks
            context.note("cp", "all_to_all", -result * setting.tokens * setting.element, -1)
        yield context
    if "mla_up_proj" in modules and Sizes.of(model).latent:
        expansion = _expansion(model, setting).forward
        if Sizes.of(model).q_rank is None:  # the queries' product is outside the recomputed module
            expansion.add(_TensorAxis(setting).gather(model.hidden_size), -1)
        yield expansion
    block = "moe" if kind.moe else "mlp"
    if block in modules:
        again = (_experts(model, setting) if kind.moe else _block(_TensorAxis(setting), model.hidden_size)).forward
        yield again.add(_unneeded(model, kind, setting, inside=True), -1)


def _unneeded(model: ModelConfig, kind: Kind, setting: Setting, *, inside: bool = False) -> Traffic:
    """The sum over tp at the end of a recomputed forward, which recomputation skips: torch stops after the last saved
    tensor. Empty if something later is saved: an auxiliary loss, or dropout unless only the feed-forward block is
    recomputed (`inside`)."""
    balanced = model.moe_router_load_balancing_type != "none" and model.moe_aux_loss_coeff
    kept = kind.moe and (balanced or model.moe_z_loss_coeff or not model.moe_shared_expert_intermediate_size)
    if kept or (model.hidden_dropout and not inside):
        return Traffic()
    return _TensorAxis(setting).total(model.hidden_size)

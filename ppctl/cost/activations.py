"""Bytes of one microbatch's activations on one device, by stage: what is kept for the backward, and the peaks.

They come layer by layer from `layer_parts` (kept) and `working_memory`; for transformers models from measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.layer_parts import final_norm_bytes, layer_parts, norm_sizes
from ppctl.cost.setting import Setting
from ppctl.cost.working_memory import drawn, in_backward, in_forward
from ppctl.geometry.foreign_model import LayerCost, foreign_of, measured_for, most
from ppctl.geometry.layers import (
    LOSS_ROWS,
    Kind,
    Layer,
    foreign_cost,
    has_backward,
    holds_final_norm,
    layer_kinds,
    made_again_by,
    offloaded_layers,
    recomputed_modules,
    recomputed_runs,
)
from ppctl.geometry.parameters import Sizes


class LayerBytes(NamedTuple):
    """Bytes of one microbatch in a piece: a layer, or a run of layers that is recomputed as one."""

    stays: float
    """From its forward to its backward."""
    forward: float
    """Further bytes while its forward runs, at most."""
    backward: float
    """Further bytes while its backward runs, at most."""


class StageActivations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    kept: int
    """From its forward to its backward."""
    in_forward: int
    """The most bytes while the forward runs: `kept`, or the peak in the stage's last layers."""
    in_backward: int
    """Further bytes while the backward runs: the largest recomputed piece, with its gradients."""
    offloaded: int = 0
    """Bytes on the host from the forward to the backward; `kept` does not include them."""


class StagePieces(NamedTuple):
    """Bytes that one microbatch keeps on a stage, layer by layer."""

    by_place: Mapping[int, LayerBytes]
    """By the place in the stage of the piece's first layer."""
    offloaded: int
    """Bytes that are offloaded to the host."""
    passed: float
    """Bytes outside layers."""


def stage_activations(
    model: ModelConfig, layers: Iterable[Layer], setting: Setting, stage: int = 0, price: KindPricer | None = None
) -> StageActivations:
    """Return the bytes of one microbatch on a stage, on one device. Empty stages and recomputed layers keep their
    input. `price` is `kind_pricer(model, setting)`, which stages may share."""
    held, hidden = tuple(layers), setting.hidden_bytes(model)
    if not held:
        return StageActivations(hidden, hidden, 0)
    pieces, offloaded, passed = stage_pieces(model, held, setting, stage, price)
    whole = sum(piece.stays for piece in pieces.values())
    in_forward, in_backward, behind = whole, 0.0, 0.0
    for number, (_, (stays, forward, backward)) in enumerate(sorted(pieces.items(), reverse=True)):
        # Later pieces hold nothing in the forward; in the backward they are free, except for a gradient.
        in_forward = max(in_forward, whole - behind + forward)
        ahead = hidden - behind if number and setting.allocator.backward else 0.0
        in_backward = max(in_backward, backward + ahead)
        behind += stays
    kept = passed + whole if any(has_backward(model, layer) for layer in held) else 0.0
    return StageActivations(round(kept), round(passed + in_forward), round(in_backward), offloaded)


KindPricer = Callable[[Kind, tuple[str, ...]], tuple[float, float, float, float]]
"""(kind of layer, its recomputed modules) -> bytes of a microbatch: those that stay, those that recomputing the layer
makes again, those that live only in its forward, and those that live only in its backward."""


def kind_pricer(model: ModelConfig, setting: Setting) -> KindPricer:
    """Return a function that prices each kind of layer once."""
    tokens = setting.tokens

    @cache
    def price(kind: Kind, modules: tuple[str, ...]) -> tuple[float, float, float, float]:
        if (foreign := foreign_cost(model, kind, setting.element, setting.seq_length)) is not None:
            return _foreign_running(model, kind, foreign, setting)
        parts = layer_parts(model, kind, setting)
        again: dict[str, float] = {}
        for module, size in parts:
            if (made := made_again_by(module, modules)) is not None:
                again[made] = again.get(made, 0.0) + tokens * size
        whole = tokens * sum(part.size for part in parts)
        outside = tokens * sum(part.size for part in parts if part.module == "mtp")
        running = in_forward(model, kind.name, kind.moe, setting, again), in_backward(model, kind, setting, again)
        return whole - sum(again.values()), whole - outside, *running

    return price


def stage_pieces(
    model: ModelConfig, held: tuple[Layer, ...], setting: Setting, stage: int, price: KindPricer | None = None
) -> StagePieces:
    """Return what one microbatch keeps on a stage, layer by layer; layers recomputed together are one piece."""
    hidden, modules = setting.hidden_bytes(model), recomputed_modules(setting.train, stage)
    price = price or kind_pricer(model, setting)
    # A layer without a backward keeps nothing, and is computed once.
    runs = [run for run in recomputed_runs(setting.train, stage, held) if has_backward(model, run[-1])]
    kinds = layer_kinds(model, held)
    places = {layer: place for place, layer in enumerate(held)}

    pieces: dict[int, LayerBytes] = {}
    for run in runs:
        priced = [price(kinds[places[layer]], modules) for layer in run]
        outside = sum(max(0.0, stays - made) for stays, made, _, _ in priced)
        again = sum(made for _, made, _, _ in priced) - hidden
        running = max(backward for *_, backward in priced)
        if foreign_of(model) is not None:  # the second forward may need more than the backward
            running = max(running, *(forward for _, _, forward, _ in priced))
        pieces[places[run[0]]] = LayerBytes(hidden + outside, 0.0, again + running)
    recomputed = {layer for run in runs for layer in run}
    for place, (layer, kind) in enumerate(zip(held, kinds, strict=True)):
        if layer not in recomputed:
            stays, _, *more = price(kind, modules)
            pieces[place] = LayerBytes(stays, *more)
    moved = _moved(pieces, held, setting, hidden, {run[0] for run in runs})
    decoder = sum(held[place].kind == "decoder" for place in pieces)
    pieces = _on_device(pieces, moved, decoder) if moved else pieces
    if foreign_of(model) is not None:
        return _with_tables(pieces, model, held, setting, recomputed)
    return StagePieces(pieces, round(sum(moved.values())), _passed_on(model, held, setting))


def _with_tables(
    pieces: Mapping[int, LayerBytes],
    model: ModelConfig,
    held: tuple[Layer, ...],
    setting: Setting,
    recomputed: Collection[Layer],
) -> StagePieces:
    """Return the pieces of a transformers model's stage, whose forward makes all tables and keeps those that backwards
    need."""
    kinds = [(kind, layer in recomputed) for layer, kind in zip(held, layer_kinds(model, held), strict=True)]
    made, kept, keeps_input = _foreign_tables(model, kinds, setting)
    hidden = setting.hidden_bytes(model)
    costs = [foreign_cost(model, kind, setting.element, setting.seq_length) for kind, _ in kinds]
    keeps = [again or cost is None or cost.keeps_input for (_, again), cost in zip(kinds, costs, strict=True)]
    first = int(held[0].kind == "embedding")
    # A stage without the embedding has zeros in place of the embedding's result. Elsewhere the first layer keeps that
    # result, or the result lives as long.
    more = made - kept - (hidden if first and keeps[1:2] == [True] else 0)
    running = {}
    for place, piece in pieces.items():
        decoder = held[place].kind == "decoder"
        # A layer's input that no backward keeps lives while it is read.
        given = hidden if decoder and place > first and not keeps[place] else 0
        running[place] = piece._replace(forward=max(0.0, piece.forward + given + (more if decoder else 0.0)))
    arrived = 0 if held[0].kind == "embedding" or keeps_input or held[0] in recomputed else hidden
    return StagePieces(running, 0, kept + arrived + _router_logits(model, held, setting))


def _moved(
    pieces: Mapping[int, LayerBytes], held: tuple[Layer, ...], setting: Setting, hidden: int, runs: Collection[Layer]
) -> dict[int, float]:
    """Bytes that pieces offload, by place: all that stays, except the stage's input, which is a message."""
    offloaded = offloaded_layers(setting.parallel, held)
    moved = {place: piece.stays for place, piece in pieces.items() if held[place] in offloaded}
    reads_input = held[0] in runs or norm_sizes(setting)[0] == setting.element  # else the norm reads a copy in float32
    if 0 in moved and reads_input:
        moved[0] -= hidden
    return moved


def _on_device(pieces: Mapping[int, LayerBytes], moved: Mapping[int, float], decoder: int) -> dict[int, LayerBytes]:
    """`pieces` by place in the stage, without the bytes in `moved`, which wait on the host.

    While a layer computes, its own bytes are on the device, and so are the previous layer's: on their way out in the
    forward, on their way back in the backward. If all `decoder` pieces move, nothing waits for the last one's copies:
    they stay until the next layer's end, or until a backward fetches.
    """
    lasting = moved[max(moved)] if len(moved) == decoder else 0.0
    kept: dict[int, LayerBytes] = {}
    beside, fetches = lasting, False
    for place, (stays, forward, backward) in sorted(pieces.items()):
        own = moved.get(place, 0.0)
        kept[place] = LayerBytes(stays - own, forward + own + beside, backward + own + (beside if fetches else 0.0))
        fetches |= place in moved
        beside = moved.get(place, lasting)
    return kept


def _passed_on(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> float:
    """Bytes outside layers: rotary tables for a rank's own positions, which each microbatch selects; in models with MTP
    the final norm after the decoder, and states that go to the loss."""
    tables = _tables(model, held, setting)
    if not model.mtp_num_layers:
        return tables
    normed = setting.tokens * final_norm_bytes(setting) * model.hidden_size / setting.sp
    first = next((layer.index for layer in held if layer.kind == "mtp"), None)
    states = 0 if first is None or Layer("loss") in held else 1 + first
    return tables + normed * holds_final_norm(model, held) + states * setting.hidden_bytes(model)


def _router_logits(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> float:
    """Bytes of router logits that arrived beside the hidden state; on the loss's stage also of all softmaxes."""
    foreign = foreign_of(model)
    assert foreign is not None
    every = foreign.anatomy.count
    if Layer("embedding") in held:
        arrived = 0
    else:
        arrived = next((layer.index for layer in held if layer.kind == "decoder"), every)
    kept = every if Layer("loss") in held else 0
    return sum(foreign.routed_bytes(each, setting.tokens, setting.element) for each in (arrived, kept))


def _tables(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> float:
    """Bytes of cosines and sines for the positions of ranks that share sequences; other ranks share one table."""
    turns = model.position_embedding_type == "rope" and any(layer.kind in ("decoder", "mtp") for layer in held)
    if setting.sizes.cp == 1 or not turns or not setting.allocator.backward:
        return 0.0
    sizes = Sizes.of(model)
    width = sizes.turned if sizes.latent else int(sizes.head * model.rotary_percent)
    return 2 * setting.element * width * -(-setting.seq_length // setting.sizes.cp)


_LABEL = 8
"""Bytes of a token's number, and as many of its label."""


def _foreign_running(
    model: ModelConfig, kind: Kind, cost: LayerCost, setting: Setting
) -> tuple[float, float, float, float]:
    """Return bytes of a microbatch: (that stay, recomputed with the input, further in forward, further in backward)."""
    batch, length, hidden = setting.micro_batch_size, setting.seq_length, setting.hidden_bytes(model)
    inside = cost.kept.of(batch, length)
    stays = inside + (hidden if cost.keeps_input and kind.name != "embedding" else 0)
    draws, back = _adapters_draws(model, kind, setting), cost.in_inputs if setting.deferred else cost.in_backward
    forward, backward = (
        max(most(peak, batch, length), most(cost.drawing[at], batch, length, draws))
        for at, peak in ((0, cost.in_forward), (2 if setting.deferred else 1, back))
    )
    if kind.name == "embedding":
        return inside + _LABEL * setting.tokens, 0.0, forward, backward
    if kind.name == "loss":  # the logits, whose gradient takes their place; blocks of them in float32
        block = setting.wide_bytes * min(LOSS_ROWS, setting.tokens) * model.vocab_size
        logits = setting.element * setting.tokens * model.vocab_size
        stays += logits + _LABEL * setting.tokens
        if cost.back is not None:  # measured with the gradient of the logits, which is gone after the head's product
            backward = max(0.0, backward - logits)
        # The head's output counts as its forward's, but stays.
        losses = setting.wide_bytes * setting.tokens
        return stays, 0.0, max(forward - logits, 2 * block), max(backward, 3 * block + losses)
    return stays, inside + hidden, forward, backward


def _adapters_draws(model: ModelConfig, kind: Kind, setting: Setting) -> float:
    """Bytes of the draws of the adapter with the widest input in a layer of this kind; 0 without dropout."""
    foreign = foreign_of(model)
    if foreign is None or foreign.adapters is None or not foreign.adapters.dropout:
        return 0.0
    rows = [row for row in foreign.kinds[kind.structure].rows if row.start == "adapter"]
    return drawn(setting, setting.tokens * max((row.shape[1] for row in rows), default=0))


def _foreign_tables(
    model: ModelConfig, kinds: Sequence[tuple[Kind, bool]], setting: Setting
) -> tuple[float, float, bool]:
    """(bytes of the tables and other values that a stage's forward makes once for its layers, bytes that backwards keep
    of them, whether the first layer keeps its input). `kinds`: each layer's kind, and whether it is recomputed and so
    keeps its arguments."""
    foreign = foreign_of(model)
    assert foreign is not None
    measured = measured_for(foreign.measured, setting.element, setting.seq_length)
    kept: set[int] = set()
    keeps_input = False
    for place, (kind, recomputed) in enumerate(kinds):
        if (cost := measured.cost(kind.name, kind.structure)) is not None:
            kept |= {*(cost.reads if recomputed else cost.keeps)}
            keeps_input |= place == 0 and cost.keeps_input
    batch, length = setting.micro_batch_size, setting.seq_length
    sizes = [table.of(batch, length) for table in measured.tables]
    return sum(sizes) + measured.before.of(batch, length), sum(sizes[number] for number in kept), keeps_input

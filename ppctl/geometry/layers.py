"""Layers as values: their kinds, which of them have experts, and which of them a stage recomputes or offloads."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from ppctl.geometry.foreign_model import LayerCost, described, first_trained, foreign_of, measured_for

KindName = Literal["embedding", "decoder", "mtp", "loss"]
"""embedding: the token table; mtp: a multi-token prediction module; loss: the output projection and cross entropy."""

NUMBERED = ("decoder", "mtp")
"""Kinds of which a model has several; both are built around a decoder layer."""

LOSS_ROWS = 256
"""Tokens whose logits the loss has in float32 at once: two for each multiprocessor of a GPU, which takes a row at a
time, and fewer bytes than the output's weight gradient from a hidden size of 1,536 on (decision 33)."""

SCORES = 2**24
"""Scores that attention with dropout has of a microbatch at once: 64 MiB in float32."""

DRAWN = 2**22
"""Elements of a hidden state whose draws dropout has at once: 32 MiB, as two numbers of 32 bits each."""
DRAWN_ON_CPU = 2**16
"""Elements whose draws dropout has at once on a CPU: within a core's cache, twice as fast there."""

SMALLEST_OFFLOADED = 2**10
"""Bytes of the smallest offloaded storage: smaller ones are scalars and counts, which plans do not know."""


def score_rows(heads: int, length: int) -> int:
    """How many queries' scores attention with dropout has at once, per head; `heads` counts all samples' heads."""
    return max(1, min(length, SCORES // (heads * length)))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model, as a stage holds it."""

    kind: KindName
    index: int = 0
    """The layer's number among the model's layers of its kind, from 0; 0 for the embedding and the loss."""

    def __str__(self) -> str:
        """`decoder.3`, `embedding`: the form in plan.json, in other files and in messages."""
        return f"{self.kind}.{self.index}" if self.kind in NUMBERED else self.kind

    @classmethod
    def parse(cls, text: str) -> Layer:
        """The layer of a text of `str`. Raises ValueError for any other text."""
        name, _, index = text.partition(".")
        for kind in get_args(KindName):
            if name == kind and index.isdecimal() == (kind in NUMBERED):
                layer = cls(kind, int(index or 0))
                if str(layer) == text:
                    return layer
        raise ValueError(f"{text!r} is no layer; layers are embedding, decoder.N, mtp.N and loss")


def parse_layers(texts: Iterable[str]) -> tuple[Layer, ...]:
    """Several layers from their texts, in order. Raises ValueError as `Layer.parse`."""
    return tuple(map(Layer.parse, texts))


def count_of(kind: KindName, layers: Iterable[Layer]) -> int:
    """How many of these layers are of this kind."""
    return sum(layer.kind == kind for layer in layers)


class Kind(NamedTuple):
    """A kind of layer: layers of one kind have the same parameters and costs wherever they stand."""

    name: KindName
    moe: bool
    """Whether the layer's feed-forward is a mixture of experts."""
    cp_comm_type: str = "p2p"
    """How ranks that share a sequence exchange it for the layer's attention."""
    structure: int = 0
    """For a transformers model: the index in `ForeignModel.kinds`."""


def kind_name(kind: Kind) -> str:
    """A kind's name for a person: `decoder`, `decoder with experts`, `mtp`, `decoder of kind 2`."""
    name = f"{kind.name} with experts" if kind.moe else kind.name
    name += f", cp {kind.cp_comm_type}" if kind.cp_comm_type != "p2p" else ""
    return f"{name} of kind {kind.structure}" if kind.structure else name


def layer_kinds(model: ModelConfig, layers: Iterable[Layer]) -> list[Kind]:
    """The kind of each of these layers."""
    foreign = foreign_of(model)
    if foreign is not None:
        structure = foreign.layers
        return [
            Kind(each.kind, False, "p2p", structure[each.index] if each.kind == "decoder" else 0) for each in layers
        ]
    pattern = moe_layer_pattern(model)
    return [Kind(layer.kind, _has_experts(layer, pattern), cp_comm_type(model, layer)) for layer in layers]


def routers_with_losses(model: ModelConfig, layers: Iterable[Layer]) -> int:
    """How many of these layers have a router with an auxiliary loss. If a transformers model's code adds one such loss
    over all layers, 1 on the stage with the loss, else 0."""
    if (foreign := foreign_of(model)) is not None:
        return int(bool(foreign.anatomy.routers) and Layer("loss") in layers)
    balanced = model.moe_aux_loss_coeff and model.moe_router_load_balancing_type != "none"
    if not (model.num_moe_experts and (balanced or model.moe_z_loss_coeff)):
        return 0
    return sum(kind.moe for kind in layer_kinds(model, layers))


def foreign_cost(model: ModelConfig, kind: Kind, element: int, length: int) -> LayerCost | None:
    """Costs of a transformers model's layer in numbers of `element` bytes; None for ppctl's own layers."""
    foreign = foreign_of(model)
    return None if foreign is None else measured_for(foreign.measured, element, length).cost(kind.name, kind.structure)


def has_backward(model: ModelConfig, layer: Layer) -> bool:
    """Whether this layer needs a backward: something in it or in an earlier layer is trained."""
    if model.transformers is None or layer.kind == "loss":
        return True
    foreign, first = described(model.transformers), first_trained(model.transformers)
    if layer.kind == "embedding":
        return any(row.gradient != "none" for row in foreign.first)
    return layer.index >= first


def cp_comm_type(model: ModelConfig, layer: Layer) -> str:
    """How ranks that share a sequence exchange it for this layer's attention. MTP layers do as the last decoder layer;
    layers without attention have `p2p`. A list of one is for all layers, as with Megatron's flag."""
    if layer.kind not in NUMBERED:
        return "p2p"
    listed = [model.cp_comm_type] if isinstance(model.cp_comm_type, str) else model.cp_comm_type
    return str(listed[min(layer.index, len(listed) - 1)] if layer.kind == "decoder" else listed[-1])


def mtp_is_moe(model: ModelConfig) -> bool:
    """Whether MTP's decoder layer has experts: it has them if the model's last layer has."""
    return _has_experts(Layer("mtp"), moe_layer_pattern(model))


def _has_experts(layer: Layer, pattern: tuple[bool, ...]) -> bool:
    if layer.kind == "decoder":
        return pattern[layer.index]
    return layer.kind == "mtp" and pattern[-1:] == (True,)


def holds_final_norm(model: ModelConfig, layers: Collection[Layer]) -> bool:
    """Whether a stage has the final norm: before the output, or in a model with MTP after the last decoder layer. MTP
    modules read the normalised state, as in Megatron and in the published weights of DeepSeek-V3."""
    return (Layer("decoder", model.num_layers - 1) if model.mtp_num_layers else Layer("loss")) in layers


DEFAULT_MODULES = ("core_attn",)


def recomputed_runs(train: TrainConfig, stage: int, layers: Sequence[Layer]) -> tuple[tuple[Layer, ...], ...]:
    """Under `full`: the runs of layers that keep only the first layer's input; () if there are none.

    `uniform` makes runs of `recompute_num_layers` (1 by default) out of all decoder layers; each MTP layer is a run of
    one, because it has other inputs. `block` takes the first `recompute_num_layers` decoder and MTP layers (all by
    default), each as a run of one. `layers` are the stage's, in model order.
    """
    if train.recompute_granularity != "full" or not _chosen(train, stage):
        return ()
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    mtp = [(layer,) for layer in layers if layer.kind == "mtp"]
    number = train.recompute_num_layers
    if train.recompute_method == "block":
        return tuple([*((layer,) for layer in decoder), *mtp][:number])
    width = number or 1
    runs = [tuple(decoder[first : first + width]) for first in range(0, len(decoder), width)]
    return (*runs, *mtp)


def alike(model: ModelConfig, train: TrainConfig, stage: int, layers: Sequence[Layer]) -> Hashable:
    """A key, equal for stages that hold, compute and send equally much, wherever their layers are in the model."""
    if model.transformers is not None:
        return tuple(layers), _chosen(train, stage)
    kinds = zip(layer_kinds(model, layers), layers, strict=True)
    numbered = tuple((kind, 0 if layer.kind == "decoder" else layer.index) for kind, layer in kinds)
    return numbered, holds_final_norm(model, layers), _chosen(train, stage)


def recomputed_modules(train: TrainConfig, stage: int) -> tuple[str, ...]:
    """Under `selective`: the modules recomputed in every layer of the stage, in Megatron's names; () if none."""
    if train.recompute_granularity != "selective" or not _chosen(train, stage):
        return ()
    return tuple(train.recompute_modules or DEFAULT_MODULES)


_INSIDE = {"moe_act": ("experts", "moe"), "experts": ("moe",)}


def made_again_by(part: str, modules: Collection[str]) -> str | None:
    """The recomputed module that makes a part of a layer again: the part itself or one around it; None if none does."""
    return next((module for module in (*reversed(_INSIDE.get(part, ())), part) if module in modules), None)


def _chosen(train: TrainConfig, stage: int) -> bool:
    return train.recompute_stages is None or stage in train.recompute_stages


def offloaded_layers(parallel: ParallelConfig, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The decoder layers among a stage's `layers`, in model order, whose activations are moved to host memory."""
    if not (parallel.cpu_offloading and parallel.cpu_offloading_activations):
        return ()
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    return tuple(decoder[: parallel.cpu_offloading_num_layers])

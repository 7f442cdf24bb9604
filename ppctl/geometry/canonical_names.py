"""Canonical names: the rows of the table of parameters by stage and by name, and which names are uses of one tensor.

A canonical name is global: `layers.37.attention.wq.weight` means the same parameter in every cut. A tied parameter has
one name per use; the first use in canonical order owns it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from ppctl.config.schema import ModelConfig
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Kind, Layer, holds_final_norm, layer_kinds
from ppctl.geometry.parameters import Sizes, beside_layers, final_norm, kind_parameters, mtp_embedding
from ppctl.geometry.rows import EMBEDDING, MTP_EMBEDDING, OUTPUT, Parameter, stack_name


def uses_of_embedding(model: ModelConfig) -> tuple[str, ...]:
    """The names under which the token embedding may be used, in canonical order; the first owns it."""
    foreign = foreign_of(model)
    if foreign is None:
        return EMBEDDING, OUTPUT, MTP_EMBEDDING
    return foreign.anatomy.uses if foreign.adapters is None else foreign.anatomy.uses[:1]  # frozen uses stay equal


def stage_rows(model: ModelConfig, layers: Iterable[Layer]) -> list[tuple[Parameter, int]]:
    """The rows of a stage, tied copies included, each with how many of the stage's layers have it."""
    held, sizes = tuple(layers), Sizes.of(model)
    kinds = Counter(layer_kinds(model, held))
    counted = [(row, number) for kind, number in kinds.items() for row in kind_parameters(sizes, kind)]
    if holds_final_norm(model, held):
        counted += [(row, 1) for row in final_norm(sizes)]
    if any(kind.name == "mtp" for kind in kinds):
        counted.append((mtp_embedding(sizes), 1))
    return counted


def stage_parameters(model: ModelConfig, layers: Iterable[Layer]) -> dict[str, Parameter]:
    """Canonical name -> row of everything that a stage holds, copies included, in canonical order. Experts have the
    name of their stack. Over all of a model's layers the order is the model's."""
    held, sizes = tuple(layers), Sizes.of(model)
    kinds = dict(zip(held, layer_kinds(model, held), strict=True))
    rows_of_names: dict[str, Parameter] = {}

    def add(rows: Iterable[Parameter], layer: int = 0) -> None:
        rows_of_names.update((row.called(layer), row) for row in rows)

    def add_layers(name: str) -> None:
        for layer in held:
            if layer.kind == name:
                add(kind_parameters(sizes, kinds[layer]), layer.index)

    add_layers("embedding")
    add_layers("decoder")
    if holds_final_norm(model, held):
        add(final_norm(sizes))
    if any(layer.kind == "mtp" for layer in held):
        add([mtp_embedding(sizes)])
    add_layers("mtp")
    add_layers("loss")
    return rows_of_names


def canonical_names(model: ModelConfig, layers: Iterable[Layer]) -> tuple[str, ...]:
    """The names of the parameters that a stage trains by gradients; over all of a model's layers in the model's
    order."""
    return tuple(name for name, row in stage_parameters(model, layers).items() if row.gradient != "none")


_EXPERT = re.compile(r"\.experts\.\d+\.")


def parameter_of(name: str, model: ModelConfig) -> Parameter:
    """The row of a canonical name, which may be one expert's or a stack's. Raises LookupError for an unknown name."""
    sizes, foreign = Sizes.of(model), foreign_of(model)
    general = _EXPERT.sub(".experts.{expert}.", name) if foreign is None else name
    decoder = "layers" if foreign is None else foreign.anatomy.layers
    row: Parameter | None = None
    if match := re.fullmatch(rf"({re.escape(decoder)}|mtp)\.(\d+)\.(.+)", general):
        layer = Layer("decoder" if match[1] == decoder else "mtp", int(match[2]))
        if layer.index < (model.num_layers if layer.kind == "decoder" else model.mtp_num_layers or 0):
            (kind,) = layer_kinds(model, [layer])
            row = _by_name(sizes, kind).get(f"{match[1]}.{{layer}}.{match[3]}")
    else:
        row = next((each for each in beside_layers(sizes) if each.name == name), None)
    if row is None:
        raise LookupError(f"the table of parameters, ppctl/geometry/parameters.py, has no row for {name}")
    return row


@cache
def _by_name(sizes: Sizes, kind: Kind) -> Mapping[str, Parameter]:
    rows = kind_parameters(sizes, kind)
    return {row.name: row for row in rows} | {stack_name(row.name): row for row in rows if row.experts}


def owner_of(name: str, model: ModelConfig) -> str:
    """The name of the parameter that `name` uses: itself, or the token embedding for MTP's copy and a tied output."""
    return parameter_of(name, model).copy_of or name


def embedding_uses(model: ModelConfig, layers: Iterable[Layer]) -> tuple[str, ...]:
    """The names under which a stage uses the token embedding, in the order of `uses_of_embedding`."""
    names, beside = uses_of_embedding(model), [layer for layer in layers if layer.kind != "decoder"]
    rows = stage_rows(model, beside) if beside else ()
    uses = {row.name for row, _ in rows if names[0] in (row.name, row.copy_of)}
    return tuple(name for name in names if name in uses)


def expert_name(stack: str, expert: int) -> str:
    """The canonical name of one expert's matrix in a stack: `layers.3.moe.experts.7.w1.weight` of `...experts.w1`."""
    experts, _, matrix = stack.rpartition(".")
    return f"{experts}.{expert}.{matrix}.weight"


def stack_of(name: str) -> str:
    """The stack's name for one expert's tensor, since optimizer steps are counted by stack; other names unchanged."""
    return stack_name(_EXPERT.sub(".experts.{expert}.", name)) if _EXPERT.search(name) else name

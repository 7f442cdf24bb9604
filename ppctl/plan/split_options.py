"""Megatron's and NeMo's options for splitting the layers, each compiled to a layout, the one source of truth.

Each option has the meaning of its own system (source: Megatron-core's and NeMo Automodel's documented behaviour), but
is refused if it would lose layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ppctl.config.keys import value_text
from ppctl.config.pipeline_config import StageCountError, calculate_virtual_stages
from ppctl.errors import LayoutError, some
from ppctl.geometry.foreign_model import Anatomy, foreign_of
from ppctl.layout import even_layout
from ppctl.layout.letters import MAX_ITEMS, canonical_text
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Overrides, Violation, Violations
from ppctl.schedule.policies import AUTO, POLICIES, schedule_policy

FIRST = "parallel.num_layers_in_first_pipeline_stage"
LAST = "parallel.num_layers_in_last_pipeline_stage"
EMBEDDING = "parallel.account_for_embedding_in_pipeline_split"
LOSS = "parallel.account_for_loss_in_pipeline_split"
PER_CHUNK = "parallel.num_layers_per_virtual_pipeline_stage"
PER_STAGE = "pipeline.layers_per_stage"
ROUND = "pipeline.round_virtual_stages_to_pp_multiple"
NAMES = "pipeline.module_fqns_per_model_part"

OPTIONS = (FIRST, LAST, EMBEDDING, LOSS, PER_CHUNK, PER_STAGE, ROUND, NAMES)

WITHOUT: Overrides = {key: False if key in (EMBEDDING, LOSS) else None for key in OPTIONS}
"""No option, as a given layout needs it."""

_COMPATIBLE = ({FIRST, LAST}, {EMBEDDING, LOSS, PER_CHUNK}, {PER_STAGE, ROUND}, {NAMES})
"""Options that may be set at the same time."""

_MODULE = re.compile(
    r"(?:model\.)?(?:(?P<embedding>embed_tokens|tok_embeddings)|layers\.(?P<layer>[0-9]+)|(?P<norm>norm)"
    r"|(?P<head>lm_head|output)|rotary_emb)",
    re.ASCII,
)


class Unfit(Exception):
    """Says why the options cannot be followed; `candidates` are overrides to try instead."""

    def __init__(self, message: str, *candidates: Overrides, code: str = "PP-E222") -> None:
        super().__init__(message)
        self.candidates = candidates
        self.code = code


def used_options(values: ConfigValues) -> list[str]:
    """The split options that are set."""
    return [key for key in OPTIONS if values[key] is not None and values[key] is not False]


def compile_split(values: ConfigValues, violations: Violations) -> tuple[str, Derived] | None:
    """The layout by the split options, and its equation; None without options or, with a violation, if none fits."""
    used = used_options(values)
    if not used:
        return None
    try:
        layout, why = _compiled(values, used)
    except (Unfit, StageCountError, LayoutError) as error:
        code = error.code if isinstance(error, Unfit) else "PP-E222"
        message = str(error) if isinstance(error, Unfit) else error.problems[0].message
        candidates = error.candidates if isinstance(error, Unfit) else ()
        place = values.cite(*used, "layout", "pp", "vpp", "model.num_layers")
        off = {key: WITHOUT[key] for key in used}
        both = {**off, "layout": None, "vpp": None}
        violations.append(Violation(code, "split", message, place, *candidates, off, both))
        return None
    return layout, Derived("layout", layout, f"layout {layout}: {why}")


def _compiled(values: ConfigValues, used: list[str]) -> tuple[str, str]:
    """(layout, reason) by the options in `used`. Raises Unfit, StageCountError or LayoutError if they do not fit."""
    if values["layout"] is not None:
        names = ", ".join(f"{key}={value_text(values[key])}" for key in used)
        raise Unfit(f"a layout already determines what {names} set; use only one of them", {"layout": None})
    if not any(set(used) <= compatible for compatible in _COMPATIBLE):
        names = " and ".join(f"{key}={value_text(values[key])}" for key in used)
        raise Unfit(f"{names} divide the layers in different ways; use only one of them")
    if NAMES in used:
        return _by_names(values), f"{NAMES} names the modules of every stage"
    if PER_STAGE in used or ROUND in used:
        return _by_layers_per_stage(values)
    counts, why = _ends(values) if {FIRST, LAST} & set(used) else _accounted(values)
    return _layout(counts, values), why


def _layout(counts: list[int], values: ConfigValues) -> str:
    """The layout with these numbers of layers per stage. Raises Unfit if it would be too long."""
    if sum(counts) + len(counts) > MAX_ITEMS:
        raise Unfit(f"{values['model.num_layers']:,} layers in {len(counts):,} stages are more than a layout holds")
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * (values["model.mtp_num_layers"] or 0) + "L"
    return canonical_text(tuple(stages))


def _ends(values: ConfigValues) -> tuple[list[int], str]:
    """(layers per stage, reason): the first and last pp_rank as set, even shares for the others; the chunks of a
    pp_rank share its layers evenly. Raises Unfit."""
    layers, pp, vpp = values["model.num_layers"], values["pp"], values["vpp"] or 1
    ends = {key: values[key] for key in (FIRST, LAST) if values[key] is not None}
    for key, count in ends.items():
        if count % vpp:
            raise Unfit(f"{key}={count} is no multiple of vpp {vpp}", {key: max(1, count // vpp) * vpp})
    ranks, rest = pp - len(ends), layers - sum(ends.values())
    if ranks < 0 or rest < 0 or (ranks == 0) != (rest == 0) or (ranks and rest % (ranks * vpp)):
        unit = f"{ranks} ranks x vpp {vpp}"
        chosen = " and ".join(f"{key}={count}" for key, count in ends.items())
        message = (
            f"{chosen} leave {rest} of {layers} layers for the other {unit} of pp {pp}, which cannot be split evenly"
        )
        fitted = layers - rest + max(1, round(rest / max(1, ranks * vpp))) * ranks * vpp
        raise Unfit(message, *({"model.num_layers": fitted},) if ranks > 0 else ())
    middle = rest // ranks if ranks else 0
    per_rank = [middle] * pp
    if FIRST in ends:
        per_rank[0] = ends[FIRST]
    if LAST in ends:
        per_rank[-1] = ends[LAST]
    fixed = " and ".join(f"{count} layers on the {'first' if key == FIRST else 'last'}" for key, count in ends.items())
    why = f"{fixed} of {pp} pp_ranks{f', {middle} on each other' if ranks else ''}"
    return [count // vpp for count in per_rank] * vpp, why + (f", in {vpp} chunks" if vpp > 1 else "")


def _accounted(values: ConfigValues) -> tuple[list[int], str]:
    """(layers per stage, reason) of an even split; embedding and loss count as a layer each if the options say so."""
    layers, pp = values["model.num_layers"], values["pp"]
    extra = [name for key, name in ((EMBEDDING, "the embedding"), (LOSS, "the loss")) if values[key]]
    total = layers + len(extra)
    per_chunk = values[PER_CHUNK]
    what = f"{layers} layers{''.join(f' and {name}' for name in extra)}"
    if total % pp or (per_chunk and total // pp % per_chunk):
        unit = pp * (per_chunk or values["vpp"] or 1)
        each = f" in pieces of {per_chunk}" if per_chunk else ""
        fitted = {"model.num_layers": max(1, round(total / unit)) * unit - len(extra)}
        raise Unfit(f"{what} cannot be shared evenly by {pp} pp_ranks{each}", fitted)
    vpp = total // pp // per_chunk if per_chunk else values["vpp"] or 1
    if values["vpp"] is not None and values["vpp"] != vpp:
        message = (
            f"{PER_CHUNK}={per_chunk} makes {vpp} chunks of {total // pp} layers per pp_rank, not vpp {values['vpp']}"
        )
        raise Unfit(message, {"vpp": vpp}, {"vpp": None})
    if total // pp % vpp:
        fitted = {"model.num_layers": max(1, round(total / pp / vpp)) * pp * vpp - len(extra)}
        raise Unfit(f"{what} make {total // pp} on each pp_rank, which vpp {vpp} chunks cannot share evenly", fitted)
    counts = [total // (pp * vpp)] * (pp * vpp)
    counts[0] -= bool(values[EMBEDDING])
    counts[-1] -= bool(values[LOSS])
    if min(counts) < 0:
        raise Unfit(f"{what} are one stage, which cannot give up a layer for each", {EMBEDDING: False, LOSS: False})
    return counts, f"even split of {what} over {pp * vpp} stages (pp {pp} x vpp {vpp})"


def _by_layers_per_stage(values: ConfigValues) -> tuple[str, str]:
    """(layout, reason) by NeMo's rule: ceil(layers / layers_per_stage) stages, rounded if asked, then split evenly."""
    layers, pp, size, mode = values["model.num_layers"], values["pp"], values[PER_STAGE], values[ROUND]
    if size is None:
        raise Unfit(f"{ROUND}={mode} rounds the stages of {PER_STAGE}, which is not set", {ROUND: None})
    policy = schedule_policy(values["pipeline.pp_schedule"]) if values.is_set("pipeline.pp_schedule") else None
    single = POLICIES[policy].chunks == 1 if policy and policy != AUTO else -(-layers // max(size, 1)) <= pp
    stages, vpp = calculate_virtual_stages(layers, size, pp, single, mode)
    if stages > layers:
        raise Unfit(f"{stages} stages are more than the {layers} layers", {PER_STAGE: None, ROUND: None})
    if values["vpp"] not in (None, vpp):
        message = f"{PER_STAGE}={size} makes {vpp} stages per pp_rank, not vpp {values['vpp']}"
        raise Unfit(message, {"vpp": vpp}, {"vpp": None})
    text = even_layout(layers, stages, values["model.mtp_num_layers"] or 0)
    rounded = f", rounded {mode}" if mode and stages != -(-layers // size) else ""
    return text, f"{layers} layers in stages of {size} make {stages} stages{rounded}, split evenly"


def _by_names(values: ConfigValues) -> str:
    """The layout by modules' names. Raises Unfit if its stages do not fit pp and vpp."""
    parts: Any = values[NAMES]
    foreign = foreign_of(values.config.model)
    stages = stages_by_names(parts, values["model.num_layers"], None if foreign is None else foreign.anatomy)
    if len(stages) % values["pp"] or (values["vpp"] is not None and len(stages) != values["pp"] * values["vpp"]):
        vpp = "" if values["vpp"] is None else f" x vpp {values['vpp']}"
        raise Unfit(f"{NAMES} has {len(stages)} parts, which do not fit pp {values['pp']}{vpp}", {"vpp": None})
    return canonical_text(stages)


def stages_by_names(parts: Sequence[Sequence[str]], num_layers: int, anatomy: Anatomy | None) -> tuple[str, ...]:
    """The letters of each stage (`Ett`) from the names of its modules, in ppctl's decoder or in the model of `anatomy`.
    Raises Unfit for unknown names, missing or misplaced layers, and a final norm without the head beside it."""
    stages, order = [], []
    for number, part in enumerate(parts):
        modules = list(_modules(number, part, anatomy))
        order += [layer for layer in modules if isinstance(layer, int)]
        head = {"norm", "head"} & set(map(str, modules))
        if len(head) == 1:
            alone = "norm" if "norm" in head else "lm_head"
            raise Unfit(f"stage {number} names {alone} alone: the final norm and the output are one unit, L")
        stages.append(
            "E" * ("embedding" in modules) + "t" * sum(isinstance(m, int) for m in modules) + "L" * bool(head)
        )
    if order != list(range(num_layers)):
        message = f"{NAMES} must name the {num_layers} layers in order, each once; it names {some(order, 12) or 'none'}"
        raise Unfit(message)
    return tuple(stages)


def _modules(number: int, part: Any, anatomy: Anatomy | None) -> Iterator[str | int]:
    """The modules of one part: decoder layers as numbers, others by name. Raises Unfit for a name unknown to the
    model."""
    for name in part:
        if anatomy is not None:
            yield from _foreign_module(number, str(name), anatomy)
            continue
        match = _MODULE.fullmatch(str(name))
        if match is None:
            known = "embed_tokens, layers.N, norm, lm_head and rotary_emb, with or without model. before"
            raise Unfit(f"{NAMES} names {name!r} in part {number}; this decoder has {known}")
        if match["layer"] is not None:
            yield int(match["layer"])
        elif match.lastgroup is not None:
            yield match.lastgroup


def _foreign_module(number: int, name: str, anatomy: Anatomy) -> Iterator[str | int]:
    """Yield the layer or module of a name, with or without the inner model's prefix. Raises Unfit if it is unknown."""
    inner = anatomy.layers.partition(".")[0]
    full = {name, f"{inner}.{name}"}
    layer = next((each.rpartition(".")[2] for each in full if each.startswith(f"{anatomy.layers}.")), "")
    if layer.isdecimal() and full & {anatomy.layer(int(layer))}:
        yield int(layer)
    elif full & set(anatomy.first):
        yield "embedding"
    elif full & set(anatomy.last):
        yield "head" if anatomy.head in full else "norm"
    elif not name.endswith("rotary_emb"):
        known = ", ".join((*anatomy.first, f"{anatomy.layers}.N", *anatomy.last))
        raise Unfit(f"{NAMES} names {name!r} in part {number}; this model has {known}")

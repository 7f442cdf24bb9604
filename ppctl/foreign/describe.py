"""A model directory of transformers as the value that plans, stages and checkpoints read (`ForeignModel`).

Knows in which order a model is read, proved and measured. Must not know the command line, ranks or weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.foreign.adapters import add_adapters, shapes_of
from ppctl.foreign.anatomy import CannotCut, further_names
from ppctl.foreign.foreign_stage import row_of
from ppctl.foreign.library import ConfigFails, library_version, make_model, read_own_config
from ppctl.foreign.measure import measure, rough
from ppctl.foreign.proof import Proof, drops_of, prove
from ppctl.foreign.routers import router_logits
from ppctl.foreign.small_model import CODE_FAILS, line_of
from ppctl.foreign.traits import names_of, training_of, traits_of
from ppctl.geometry.adapters import frozen, with_adapters
from ppctl.geometry.foreign_model import Adapters, Anatomy, ForeignModel, LayerKind, RouterLogits
from ppctl.geometry.rows import Parameter

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_k")
_POSITIONS = ("max_position_embeddings", "max_seq_len", "n_positions")
_OTHER_MODEL = "one process trains it with transformers alone; docs/architectures.md lists the architectures that run"
_UNBOUNDED = 1 << 20
"""Positions of a model whose config names no limit."""


def proved(config: Any, directory: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> Proof:
    """The proof that a model can be cut. Raises ConfigError (PP-E528) naming what stands against it; `overrides` are
    the fields that were typed, which may not fit each other."""
    try:
        return prove(config)
    except CannotCut as error:
        raise _uncut(config, directory, error, overrides) from error


def _uncut(
    config: Any, directory: Path, error: CannotCut, overrides: Mapping[str, str] = MappingProxyType({})
) -> ConfigError:
    typed = ", ".join(f"model.hf_overrides.{name}={value}" for name, value in overrides.items())
    beside = f" with {typed}" if typed else ""
    message = f"{config.model_type} at {directory}{beside} cannot be cut into stages: {error}"
    routers = "router" in str(error) and getattr(config, "output_router_logits", False)
    remedy = "'model.hf_overrides={}'" if overrides else _OTHER_MODEL  # by its own values it may be cut
    remedy = "model.hf_overrides.output_router_logits=false" if routers else remedy
    return ConfigError(Problem("PP-E528", message, remedy, str(directory)))


def refuse_dropout(config: Any, directory: Path) -> None:
    """Raise ConfigError (PP-E529) for a model that drops something in training."""
    drops = drops_of(config)
    if drops:
        listed = ", ".join(f"{name}={value}" for name, value in drops.items())
        message = f"{config.model_type} at {directory} has {listed}: its draws would depend on the cut"
        remedy = pasted(*(f"model.hf_overrides.{name}={_zero(config, name)}" for name in drops))
        raise ConfigError(Problem("PP-E529", message, remedy, str(directory)))


def _zero(config: Any, name: str) -> str:
    """0 as a config takes it: some want a number with a point."""
    try:
        setattr(deepcopy(config), name, 0)
    except ConfigFails:
        return "0.0"
    return "0"


def describe(directory: Path, overrides: Mapping[str, str], adapters: Adapters | None = None) -> ForeignModel:
    """Read, prove and measure, with adapters where these are trained.

    Raises ConfigError: as `read_own_config`, PP-E528, PP-E529 for dropout, and as `add_adapters`.
    """
    config = read_own_config(directory, overrides)
    refuse_dropout(config, directory)
    proof = proved(config, directory, overrides)
    anatomy = proof.anatomy
    blank = make_model(config, "meta").train()
    further = further_names(blank).keys() - {*anatomy.uses}
    every = (*dict(blank.named_parameters(remove_duplicate=False)), *_saved_buffers(blank))
    named = [name for name in every if name not in further]
    _compare(anatomy, named, directory)
    rows = {name: row_of(blank, anatomy, name)._replace(start=proof.starts.get(name, "normal")) for name in named}
    structures, traits = [_inside(anatomy, rows, index) for index in range(anatomy.count)], traits_of(blank, anatomy)
    experts = _experts(config)
    notes = list(_notes(anatomy, experts))
    if adapters is not None:
        rows = {name: frozen(row) for name, row in rows.items()}
        structures = _adapted(blank, anatomy, adapters, structures)
        traits = [(*own, *more) for own, more in zip(traits, training_of(structures), strict=True)]
        notes.append(_trained(structures, adapters))
    different = list(dict.fromkeys(zip(structures, traits, strict=True)))
    size = int(getattr(config, "hidden_size", 0) or rows[anatomy.uses[0]].shape[1])
    positions = next((n for name in _POSITIONS if isinstance(n := getattr(config, name, None), int)), _UNBOUNDED)
    examples = [[*zip(structures, traits, strict=True)].index(each) for each in different]
    try:
        measured = measure(*_without_routers(config, anatomy), examples, size, positions, adapters)
    except (*CODE_FAILS, NotImplementedError) as error:
        measured = rough([kind for kind, _ in different], size, partial(_active, experts=experts))
        notes.append(f"its costs are estimated from its matrices, since its code reads values ({type(error).__name__})")
    named = names_of([found for _, found in different])
    kinds = tuple(LayerKind(name, kind) for name, (kind, _) in zip(named, different, strict=True))
    outside = {name: row for name, row in rows.items() if not name.startswith(f"{anatomy.layers}.")}
    first = tuple(row for name, row in outside.items() if name.rpartition(".")[0] in anatomy.first)
    last = tuple(row for name, row in outside.items() if name.rpartition(".")[0] in anatomy.last)
    active = sum(_active(rows, experts) for rows in (*structures, first, last))
    return ForeignModel(
        config=json.dumps(config.to_diff_dict() | {"model_type": config.model_type}, sort_keys=True),
        overrides=dict(overrides),
        transformers=library_version(),
        stages=proof.stages,
        gradients=proof.gradients,
        anatomy=anatomy,
        first=first,
        last=last,
        layers=tuple(different.index(each) for each in zip(structures, traits, strict=True)),
        kinds=kinds,
        measured=measured,
        sizes={
            "num_layers": anatomy.count,
            "hidden_size": size,
            "vocab_size": rows[anatomy.uses[0]].shape[0],
            "share_embeddings_and_output_weights": anatomy.tied,
            "max_position_embeddings": min(positions, _UNBOUNDED),
            "init_method_std": float(getattr(config, "initializer_range", None) or 0.02),
        },
        active=active,
        notes=tuple(notes),
        adapters=adapters,
        router_logits=_router_logits(config, directory, anatomy, size, examples),
    )


def _adapted(
    blank: nn.Module, anatomy: Anatomy, adapters: Adapters, structures: Sequence[tuple[Parameter, ...]]
) -> list[tuple[Parameter, ...]]:
    """By layer, its rows with those of its adapters, and all others frozen. Changes the model."""
    shapes = shapes_of(add_adapters(blank, adapters, anatomy, torch.float32))
    found = []
    for index, rows in enumerate(structures):
        prefix, pattern = f"{anatomy.layer(index)}.", f"{anatomy.layers}.{{layer}}."
        own = {name.replace(prefix, pattern, 1): shape for name, shape in shapes.items() if name.startswith(prefix)}
        found.append(with_adapters(rows, own))
    return found


def _trained(structures: Sequence[Sequence[Parameter]], adapters: Adapters) -> str:
    """What is trained, in words."""
    trained = sum(row.size for rows in structures for row in rows if row.gradient != "none")
    where = f" in {len(adapters.layers)} of {len(structures)} layers" if adapters.layers else ""
    named = f"{trained:,} parameters of adapters of rank {adapters.rank} on {', '.join(adapters.targets)}{where}"
    return f"{named} are trained, all others are frozen"


def _compare(anatomy: Anatomy, names: Sequence[str], directory: Path) -> None:
    """Refuse a miniature of other parts than the model. Raises ConfigError (PP-E528)."""
    outside = {name.rpartition(".")[0] for name in names if not name.startswith(f"{anatomy.layers}.")}
    wrong = sorted(outside ^ {*anatomy.first, *anatomy.last})
    if wrong:
        message = f"{directory}: {', '.join(wrong)} is in its miniature or in the model, and not in both"
        raise ConfigError(Problem("PP-E528", message, place=str(directory)))


def _without_routers(config: Any, anatomy: Anatomy) -> tuple[Any, Anatomy]:
    """The model without what it adds to the loss: what hops and stages hold for that is told by `router_logits`."""
    if not anatomy.routers:
        return config, anatomy
    plain = deepcopy(config)
    plain.output_router_logits = False
    return plain, replace(anatomy, routers=())


def _router_logits(
    config: Any, directory: Path, anatomy: Anatomy, size: int, layers: Iterable[int]
) -> RouterLogits | None:
    """What routers record for a loss that the model's own code adds; looked up in one layer of each kind.

    Raises ConfigError (PP-E528) where a hop cannot carry it.
    """
    routed = [index for index in layers if anatomy.routers and anatomy.routers[index]]
    try:
        found = {router_logits(config, anatomy, index, size) for index in routed}
        if len(found) > 1:
            raise CannotCut("its routers record tensors of several shapes or dtypes, but a message carries one kind")
    except CannotCut as error:
        raise _uncut(config, directory, error) from error
    except (*CODE_FAILS, NotImplementedError) as error:
        unseen = CannotCut(f"what its routers record is not seen on tensors without values: {line_of(error)}")
        raise _uncut(config, directory, unseen) from error
    return next(iter(found), None)


def _notes(anatomy: Anatomy, experts: tuple[int, int] | None) -> tuple[str, ...]:
    if anatomy.routers:
        return ("what it adds to the loss itself is added as aux_loss, the mean over the microbatches",)
    if experts is None:
        return ()
    return (
        "its experts are trained without a load-balancing loss (transformers' default, output_router_logits=false)",
    )


def _saved_buffers(model: nn.Module) -> list[str]:
    return [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    ]


def _inside(anatomy: Anatomy, rows: Mapping[str, Parameter], index: int) -> tuple[Parameter, ...]:
    """The rows of one layer, by the patterns of their names."""
    prefix = f"{anatomy.layer(index)}."
    own = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
    return tuple(row._replace(name=f"{anatomy.layers}.{{layer}}.{name}") for name, row in own.items())


def _experts(config: Any) -> tuple[int, int] | None:
    """Routed experts, and how many of them a token goes to; None for a model without."""
    number = next((value for name in _EXPERTS if isinstance(value := getattr(config, name, None), int)), None)
    chosen = next((value for name in _CHOSEN if isinstance(value := getattr(config, name, None), int)), None)
    return None if not number or not chosen or number < 2 else (number, chosen)


def _active(rows: Sequence[Parameter], experts: tuple[int, int] | None) -> int:
    """Parameters of a layer that one token meets, tied ones once."""
    total = 0
    for row in rows:
        routed = experts is not None and (
            (len(row.shape) == 3 and row.shape[0] == experts[0]) or ".experts." in row.name.rpartition(".")[0] + "."
        )
        total += 0 if row.copy_of else row.size * experts[1] // experts[0] if routed and experts else row.size
    return total

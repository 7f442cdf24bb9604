"""Describes a transformers model in a directory as the value that plans, stages and checkpoints read (`ForeignModel`).

Layers are told apart by the classes of their modules and the plain values in these, without knowing their meaning.

`python -m ppctl.foreign.describe DIR OUT` writes the answer as JSON: the description, or the problems of DIR.
`model.from=DIR` starts it (`ppctl/launch/described.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ppctl.errors import ConfigError, PpctlError, Problem, pasted
from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.cut import further_names, saved_buffers
from ppctl.foreign.foreign_stage import row_of
from ppctl.foreign.library import ConfigFails, library_version, make_model, read_own_config
from ppctl.foreign.measure import Say, measure, rough, router_logits
from ppctl.foreign.miniature import CODE_FAILS, line_of
from ppctl.foreign.miniature_proof import CutProof, drops_of, prove
from ppctl.foreign.peft_adapters import add_adapters, shapes_of
from ppctl.geometry.adapters import frozen, is_adapter, trained_whole, with_adapters
from ppctl.geometry.foreign_model import Adapters, Anatomy, ForeignModel, LayerKind, RouterLogits
from ppctl.geometry.rows import Parameter
from ppctl.records.json_reader import read

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_k")
_POSITIONS = ("max_position_embeddings", "max_seq_len", "n_positions")
_OTHER_MODEL = "one process trains it with transformers alone"
_UNBOUNDED = 1 << 20
"""Positions of a model whose config names no limit."""


def proved(config: Any, directory: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> CutProof:
    """Return the proof that a model can be cut. Raises ConfigError (PP-E528) naming the obstacle and the `overrides`,
    the fields that the user has typed: these may contradict each other."""
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
    remedy = "'model.hf_overrides={}'" if overrides else _OTHER_MODEL  # without the overrides it may be cut
    remedy = "model.hf_overrides.output_router_logits=false" if routers else remedy
    return ConfigError(Problem("PP-E528", message, remedy, str(directory)))


def refuse_dropout(config: Any, directory: Path) -> None:
    """Raise ConfigError (PP-E529) for a model with dropout in training."""
    drops = drops_of(config)
    if drops:
        listed = ", ".join(f"{name}={value}" for name, value in drops.items())
        message = f"{config.model_type} at {directory} has {listed}: its draws would depend on the cut"
        remedy = pasted(*(f"model.hf_overrides.{name}={_zero(config, name)}" for name in drops))
        raise ConfigError(Problem("PP-E529", message, remedy, str(directory)))


def _zero(config: Any, name: str) -> str:
    """Return the text of 0 for a field: some configs accept 0.0 alone."""
    try:
        setattr(deepcopy(config), name, 0)
    except ConfigFails:
        return "0.0"
    return "0"


def describe(
    directory: Path, overrides: Mapping[str, str], adapters: Adapters | None = None, say: Say = lambda _: None
) -> ForeignModel:
    """Read a model, prove that it can be cut, and measure its layers; return its description. `say` is called with each
    step. Raises ConfigError as `read_own_config`, `refuse_dropout`, `proved` and `add_adapters` do."""
    say("reading it with transformers")
    config = read_own_config(directory, overrides)
    say("proving with a miniature that it can be cut")
    refuse_dropout(config, directory)
    proof = proved(config, directory, overrides)
    anatomy, blank = proof.anatomy, make_model(config, "meta").train()
    rows = _rows(blank, proof, directory)
    structures, traits = [_inside(anatomy, rows, index) for index in range(anatomy.count)], traits_of(blank, anatomy)
    experts, notes = _experts(config), _notes(config, anatomy)
    if adapters is not None:
        rows, structures, training = _adapted(blank, anatomy, adapters, rows, structures)
        traits = [(*own, *more) for own, more in zip(traits, training, strict=True)]
        notes.append(_trained(structures, rows.values(), adapters))
    layers = [*zip(structures, traits, strict=True)]
    different = list(dict.fromkeys(layers))
    sizes = _sizes(config, anatomy, rows[anatomy.uses[0]].shape)
    examples, size, positions = [*map(layers.index, different)], sizes["hidden_size"], sizes["max_position_embeddings"]
    try:
        measured = measure(*_without_routers(config, anatomy), examples, size, positions, adapters, say)
    except (*CODE_FAILS, NotImplementedError) as error:
        measured = rough([kind for kind, _ in different], size, partial(_active, experts=experts))
        notes.append(f"its costs are estimated from its matrices, since its code reads values ({type(error).__name__})")
    names = names_of([kind_traits for _, kind_traits in different])
    first, last = (
        tuple(row for name, row in rows.items() if name.rpartition(".")[0] in modules)
        for modules in (anatomy.first, anatomy.last)
    )
    return ForeignModel(
        config=json.dumps(config.to_diff_dict() | {"model_type": config.model_type}, sort_keys=True),
        overrides=dict(overrides),
        transformers=library_version(),
        stages=proof.stages,
        gradients=proof.gradients,
        anatomy=anatomy,
        first=first,
        last=last,
        layers=tuple(map(different.index, layers)),
        kinds=tuple(LayerKind(name, kind) for name, (kind, _) in zip(names, different, strict=True)),
        measured=measured,
        sizes=sizes,
        active=sum(_active(each, experts) for each in (*structures, first, last)),
        notes=tuple(notes),
        adapters=adapters,
        router_logits=_router_logits(config, directory, anatomy, size, examples),
    )


def _rows(blank: nn.Module, proof: CutProof, directory: Path) -> dict[str, Parameter]:
    """The row of every parameter and saved buffer, by name, a shared parameter once. Raises ConfigError (PP-E528) if
    the model has other parts than its miniature."""
    anatomy = proof.anatomy
    further = further_names(blank).keys() - {*anatomy.uses}
    buffers = [f"{path}.{key}" for path, module in blank.named_modules() for key, _ in saved_buffers(module)]
    every = (*dict(blank.named_parameters(remove_duplicate=False)), *buffers)
    names = [name for name in every if name not in further]
    outside = {name.rpartition(".")[0] for name in names if not name.startswith(f"{anatomy.layers}.")}
    if wrong := sorted(outside ^ {*anatomy.first, *anatomy.last}):
        message = f"{directory}: {', '.join(wrong)} is in the model or in its miniature, but not in both"
        raise ConfigError(Problem("PP-E528", message, place=str(directory)))
    return {name: row_of(blank, anatomy, name)._replace(start=proof.starts.get(name, "normal")) for name in names}


def _sizes(config: Any, anatomy: Anatomy, table: Sequence[int]) -> dict[str, Any]:
    """The fields of ModelConfig that follow from the model; `table` is the shape of its embedding."""
    positions = next((n for name in _POSITIONS if isinstance(n := getattr(config, name, None), int)), _UNBOUNDED)
    return {
        "num_layers": anatomy.count,
        "hidden_size": int(getattr(config, "hidden_size", 0) or table[1]),
        "vocab_size": table[0],
        "share_embeddings_and_output_weights": anatomy.tied,
        "max_position_embeddings": min(positions, _UNBOUNDED),
        "init_method_std": float(getattr(config, "initializer_range", None) or 0.02),
    }


def _adapted(
    blank: nn.Module,
    anatomy: Anatomy,
    adapters: Adapters,
    rows: Mapping[str, Parameter],
    structures: Sequence[tuple[Parameter, ...]],
) -> tuple[dict[str, Parameter], list[tuple[Parameter, ...]], list[Traits]]:
    """Add the adapters to `blank`; return (rows by name, each layer's rows, each layer's traits of training) of the
    result. Rows of the base are frozen, unless they are trained whole."""
    shapes = shapes_of(add_adapters(blank, adapters, anatomy, torch.float32))
    rows = {name: row if trained_whole(name, adapters) else frozen(row) for name, row in rows.items()}
    adapted = []
    for index, inside in enumerate(structures):
        prefix, pattern = f"{anatomy.layer(index)}.", f"{anatomy.layers}.{{layer}}."
        own = {name.replace(prefix, pattern, 1): shape for name, shape in shapes.items() if name.startswith(prefix)}
        whole = [row.name for row in inside if trained_whole(row.called(index), adapters)]
        adapted.append(with_adapters(inside, own, whole))
    before = any(row.gradient != "none" and anatomy.place(name) == 0 for name, row in rows.items())
    return rows, adapted, training_of(adapted, before=before)


def _trained(layers: Sequence[Sequence[Parameter]], base: Iterable[Parameter], adapters: Adapters) -> str:
    """A line that counts the trained parameters: those of adapters in the layers, and those of the base."""
    own = sum(row.size for rows in layers for row in rows if is_adapter(row.name))
    whole = sum(row.size for row in base if row.gradient != "none")
    where = f" in {len(adapters.layers)} of {len(layers)} layers" if adapters.layers else ""
    named = f"{own:,} parameters of adapters of rank {adapters.rank} on {', '.join(adapters.targets)}{where}"
    more = f", and {whole:,} of {', '.join(adapters.modules_to_save)}," if whole else ""
    return f"{named}{more} are trained, all others are frozen"


def _without_routers(config: Any, anatomy: Anatomy) -> tuple[Any, Anatomy]:
    """Return config and anatomy without the routers' loss: `ForeignModel.router_logits` counts its bytes separately."""
    if not anatomy.routers:
        return config, anatomy
    plain = deepcopy(config)
    plain.output_router_logits = False
    return plain, replace(anatomy, routers=())


def _router_logits(
    config: Any, directory: Path, anatomy: Anatomy, size: int, layers: Iterable[int]
) -> RouterLogits | None:
    """The form of the logits that routers record for the model's own loss; None without routers. `layers` has one of
    each kind. Raises ConfigError (PP-E528) if messages cannot carry them, or routers cannot be watched."""
    routed = [index for index in layers if anatomy.routers and anatomy.routers[index]]
    try:
        logits = {router_logits(config, anatomy, index, size) for index in routed}
        if len(logits) > 1:
            raise CannotCut("its routers record tensors of several shapes or dtypes, but a message carries one kind")
    except CannotCut as error:
        raise _uncut(config, directory, error) from error
    except (*CODE_FAILS, NotImplementedError) as error:
        unseen = CannotCut(f"its routers cannot be watched on tensors without values: {line_of(error)}")
        raise _uncut(config, directory, unseen) from error
    return next(iter(logits), None)


def _notes(config: Any, anatomy: Anatomy) -> list[str]:
    if anatomy.routers:
        return ["what it adds to the loss itself is added as aux_loss, the mean over the microbatches"]
    if _experts(config) is None:
        return []
    return ["its experts are trained without a load-balancing loss (transformers' default, output_router_logits=false)"]


def _inside(anatomy: Anatomy, rows: Mapping[str, Parameter], index: int) -> tuple[Parameter, ...]:
    """Return the rows of one layer, with `{layer}` for its index in their names."""
    prefix = f"{anatomy.layer(index)}."
    own = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
    return tuple(row._replace(name=f"{anatomy.layers}.{{layer}}.{name}") for name, row in own.items())


def _experts(config: Any) -> tuple[int, int] | None:
    """(the number of routed experts, how many of them a token goes to); None for a model without experts."""
    number = next((value for name in _EXPERTS if isinstance(value := getattr(config, name, None), int)), None)
    chosen = next((value for name in _CHOSEN if isinstance(value := getattr(config, name, None), int)), None)
    return None if not number or not chosen or number < 2 else (number, chosen)


def _active(rows: Sequence[Parameter], experts: tuple[int, int] | None) -> int:
    """The number of parameters of a layer that one token meets; a tied parameter counts once."""
    total = 0
    for row in rows:
        routed = experts is not None and (
            (len(row.shape) == 3 and row.shape[0] == experts[0]) or ".experts." in row.name.rpartition(".")[0] + "."
        )
        total += 0 if row.copy_of else row.size * experts[1] // experts[0] if routed and experts else row.size
    return total


Traits = tuple[tuple[str, str], ...]
"""(place in a layer, value there) for all places where layers differ."""

_SHOWN = 3
"""The most values in the name of a kind."""


def traits_of(model: nn.Module, anatomy: Anatomy) -> list[Traits]:
    """Return for each layer the values in which layers differ, except values that merely number the layers."""
    by_layer = [_values(model.get_submodule(anatomy.layer(index))) for index in range(anatomy.count)]
    places = dict.fromkeys(place for values in by_layer for place in values)
    telling = [
        place for place in places if _tells([values[place] for values in by_layer if place in values], len(by_layer))
    ]
    return [tuple((place, str(values[place])) for place in telling if place in values) for values in by_layer]


def _values(layer: nn.Module) -> dict[str, Any]:
    """Return the classes and the plain attributes of a layer's modules, by where they are."""
    by_place: dict[str, Any] = {}
    for path, module in layer.named_modules():
        by_place[path or "layer"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str)):
                by_place[f"{path}.{name}" if path else name] = value
    return by_place


def _tells(values: Sequence[Any], layers: int) -> bool:
    """Whether the values at one place, which some of `layers` layers may lack, tell kinds apart, not just layers."""
    different = len(set(values))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    numbered = numbers and different == len(values) > 1
    return not numbered and (different > 1 or len(values) < layers)


def training_of(layers: Sequence[Sequence[Parameter]], *, before: bool = False) -> list[Traits]:
    """Return for each layer of a model with frozen weights the part of a full backward that it has: none before
    the first trained layer, the gradients of its weights in that layer (all if something `before` the layers is
    trained), the gradient of its input in later layers without trained weights. Something must be trained."""
    trained = [any(row.gradient != "none" for row in rows) for rows in layers]
    first = -1 if before else trained.index(True)
    traits: list[Traits] = []
    for index, own in enumerate(trained):
        backward = "none" if index < first else "of its weights" if index == first else "" if own else "of its input"
        traits.append((("backward", backward),) if backward else ())
    return traits


def names_of(kinds: Sequence[Traits]) -> list[str]:
    """Return a name for each kind of layer, made of the traits that not all kinds share; "" if there is one kind."""
    if len(kinds) < 2:
        return [""] * len(kinds)
    shared = set.intersection(*map(set, kinds))
    return [_name({place: value for place, value in kind if (place, value) not in shared}) for kind in kinds]


def _name(values: Mapping[str, str]) -> str:
    """Return the first traits as a name: classes before numbers and switches, without traits inside a named module."""
    order = sorted(values, key=lambda place: (not _is_word(values[place]), place.count("."), len(place)))
    outer = [place for place in order if not any(place.startswith(f"{other}.") for other in values)]
    return ", ".join(f"{place}={values[place]}" for place in outer[:_SHOWN])


def _is_word(value: str) -> bool:
    return value not in ("True", "False", "None") and not value.replace(".", "").replace("-", "").isdigit()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the description or the problems into a file; returns 0 for both."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.foreign.describe")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--overrides", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--adapters", type=json.loads, metavar="JSON")
    args = parser.parse_args(argv)
    args.out.write_text(_described(args.directory, args.overrides, args.adapters), encoding="utf-8")
    return 0


def _described(directory: Path, overrides: Mapping[str, str], adapters: Sequence[Any] | None) -> str:
    """Return JSON: an object with the description as text (`model`), or with `problems`."""
    say = partial(print, file=sys.stderr, flush=True)
    try:
        asked = None if adapters is None else read(Adapters, adapters)
        return json.dumps({"model": describe(directory, overrides, asked, say).to_text()})
    except PpctlError as error:
        return json.dumps({"problems": [problem.to_json() for problem in error.problems]})


if __name__ == "__main__":
    sys.exit(main())

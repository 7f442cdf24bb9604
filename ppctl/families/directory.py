"""A Hugging Face model directory: its family, its model, and where every canonical tensor is, checked before use."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, ConfigError, Problem, listed, pasted
from ppctl.families.config_json import read_config
from ppctl.families.family_table import MTP_COPIES, Family, stored_name
from ppctl.families.safetensors import INDEX, SINGLE, Stored, read_directory
from ppctl.geometry.layers import Layer, layer_kinds
from ppctl.geometry.parameters import Sizes, beside_layers, kind_parameters
from ppctl.geometry.rows import EMBEDDING, Parameter
from ppctl.host.files import nearest_there, read_whole

Shape = tuple[int, ...]

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SCALE = "_scale_inv"
"""The suffix of the tensor with the inverse scales, one per block, of a matrix in 8-bit floats."""

_FLOATS = ("F64", "F32", "BF16", "F16")
_BLOCK = (128, 128)
UNREAD = ("rotary_emb.inv_freq",)
"""Suffixes of tensors in old files that are not needed."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory whose headers fit its config.json."""

    path: Path
    family: Family
    model: ModelConfig
    stored: Mapping[str, Stored]
    names: Mapping[str, str]
    """Canonical name -> stored name, of every tensor of the model."""
    copies: Mapping[str, str]
    """Stored name of a copy -> canonical name of the original."""
    block: tuple[int, int]
    """Rows and columns that share one scale in 8-bit matrices."""


def read_config_file(directory: Path) -> dict[str, Any]:
    """Read the directory's config.json. Raises ConfigError (PP-E520) if it cannot be read or holds no mapping."""
    path = directory / CONFIG
    try:
        config = json.loads(read_whole(path))
        if isinstance(config, dict):
            return config
        reason = "it holds no mapping"
    except OSError as error:
        reason = str(error.strerror)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    message = f"{directory} is no model directory: {CONFIG} cannot be read ({reason})"
    raise ConfigError(Problem("PP-E520", message, f"ls {pasted(nearest_there(directory))}", str(path)))


def open_directory(path: Path, *, model: ModelConfig | None = None, mtp: bool = True) -> ModelDirectory:
    """Read config.json and all headers, and check them against each other; no tensor is read.

    The weights are those of `model`, or if it is None of config.json's model; without `mtp` those of multi-token
    prediction are left out, even if they are stored. Raises ConfigError as `read_config`, CheckpointError (PP-E523 for
    damaged files, PP-E524 naming every tensor that is missing, unknown or misshapen).
    """
    config = read_config_file(path)
    family, described = read_config(config, str(path / CONFIG))
    stored = read_directory(path)
    model = described if model is None else model
    model = model if mtp else replace(model, mtp_num_layers=None)
    skipped = described.mtp_num_layers if not model.mtp_num_layers else model.mtp_num_layers
    whole = replace(model, mtp_num_layers=skipped)
    known = {*_copies(whole), *stored_names(family, whole).values()}
    copies = {name: first for name, first in _copies(model).items() if name in stored}
    opened = ModelDirectory(path, family, model, stored, stored_names(family, model), copies, _block(config, path))
    if problems := list(_misfits(opened, known)):
        raise CheckpointError(problems)
    return opened


def _block(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Rows and columns that share a scale, by default `_BLOCK`. Raises ConfigError (PP-E521) for invalid sizes."""
    said = config.get("quantization_config") or {}
    block = (said.get("weight_block_size") or _BLOCK) if isinstance(said, Mapping) else ()
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    message = "quantization_config must be a mapping, and its weight_block_size two whole numbers of 1 or more"
    remedy = f"grep -A9 quantization_config {pasted(path / CONFIG)}"
    raise ConfigError(Problem("PP-E521", f"{message}; here it is {json.dumps(said)[:80]}", remedy, str(path / CONFIG)))


def quantised_note(path: Path) -> str:
    """A note on a directory whose config says that weights are quantised, although they are stored as plain floats (a
    common leftover of converting them; transformers would go by the config); else empty."""
    said = read_config_file(path).get("quantization_config")
    dtypes = {stored.dtype for stored in read_directory(path).values()} if said and has_weights(path) else set()
    if not dtypes or not dtypes <= {*_FLOATS}:
        return ""
    method = said.get("quant_method", "no named method") if isinstance(said, Mapping) else said
    kinds = ", ".join(sorted(dtypes))
    return f"{CONFIG} has quantization_config ({method}), but all tensors are plain {kinds}: they are read as they are"


def has_weights(path: Path) -> bool:
    """Whether a directory has weights beside its config."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


def model_tensors(model: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape, for the whole model with its multi-token prediction, in canonical order. Every expert is
    a tensor of its own. A tied output and MTP's copy of the embedding are left out."""
    sizes = Sizes.of(model)
    layers = [Layer("decoder", index) for index in range(model.num_layers)]
    layers += [Layer("mtp", depth) for depth in range(model.mtp_num_layers or 0)]
    first, *last = (row for row in beside_layers(sizes) if row.copy_of is None)
    shapes = {first.name: first.shape}
    for layer, kind in zip(layers, layer_kinds(model, layers), strict=True):
        shapes.update(_layer_tensors(kind_parameters(sizes, kind), layer.index))
    return shapes | {row.name: row.shape for row in last}


def _layer_tensors(rows: tuple[Parameter, ...], layer: int) -> Iterator[tuple[str, Shape]]:
    """Yield (name, shape) of one layer's tensors: expert by expert for rows of experts."""
    for experts, run in groupby(rows, key=lambda row: row.experts):
        alike = list(run)
        for expert in range(experts or 1):
            for row in alike:
                yield row.name.format(layer=layer, expert=expert), row.shape


def stored_names(family: Family, model: ModelConfig) -> dict[str, str]:
    """Canonical name -> the family's name, for the whole model."""
    return {name: stored_name(name, model.num_layers, family.names) for name in model_tensors(model)}


def mtp_tables(model: ModelConfig) -> dict[str, str]:
    """Stored name of each table in MTP modules -> the canonical tensor of which it is a copy."""
    tied = model.share_embeddings_and_output_weights
    modules = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
    copies = {f"model.layers.{module}.{name}": first for module in modules for name, first in MTP_COPIES.items()}
    return {name: EMBEDDING if tied else first for name, first in copies.items()}


def _copies(model: ModelConfig) -> dict[str, str]:
    """Stored name -> canonical name, for copies that may also be stored and must equal the original."""
    tied = {"lm_head.weight": EMBEDDING} if model.share_embeddings_and_output_weights else {}
    return mtp_tables(model) | tied


def _misfits(opened: ModelDirectory, known: Collection[str]) -> Iterator[Problem]:
    shapes = model_tensors(opened.model)
    expected = {name: shapes[first] for first, name in opened.names.items()}
    expected |= {name: shapes[first] for name, first in opened.copies.items()}
    missing = [name for name in expected if name not in opened.stored]
    unknown = [name for name in opened.stored if name.removesuffix(SCALE) not in known and not name.endswith(UNREAD)]
    if missing:
        yield _misfit(opened, "lacks tensors of the model", missing)
    if unknown:
        yield _misfit(opened, "holds tensors that the model lacks", unknown)
    wrong = [
        f"{name} ({stored.file.name}): {stored.dtype}{list(stored.shape)} stored, {list(shape)} expected"
        for name, shape in expected.items()
        if (stored := opened.stored.get(name)) is not None and not _fits(opened, name, stored, shape)
    ]
    if wrong:
        yield _misfit(opened, "holds tensors of another shape or dtype than the model's", wrong)


def _fits(opened: ModelDirectory, name: str, stored: Stored, shape: Shape) -> bool:
    if stored.shape != shape:
        return False
    if stored.dtype in _FLOATS:
        return True
    scale = opened.stored.get(name + SCALE)
    grid = tuple(-(-extent // block) for extent, block in zip(shape, opened.block, strict=False))
    return stored.dtype == "F8_E4M3" and scale is not None and (scale.dtype, scale.shape) == ("F32", grid)


def _misfit(opened: ModelDirectory, fault: str, names: list[str]) -> Problem:
    remedy = f"compare the model's sizes with {pasted(opened.path / CONFIG)}, and that with the weights"
    return Problem("PP-E524", f"{opened.path} {fault}", remedy, listed(names))

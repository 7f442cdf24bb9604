"""The source of a run's first weights (`model.from`): which model it holds, and whether that model fits the run.

Also the tensors of a run's checkpoint. Reads headers and manifests, not weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ppctl.checkpoint.manifest import damaged, read_manifest
from ppctl.checkpoint.run_state import run_state
from ppctl.config.precision import weight_dtype
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.errors import CheckpointError, ConfigError, Problem, listed
from ppctl.families.config_json import TRAINING, known_families, read_config
from ppctl.families.directory import (
    CONFIG,
    TOKENIZER,
    has_weights,
    model_tensors,
    open_directory,
    quantised_note,
    read_config_file,
)
from ppctl.families.safetensors import read_directory
from ppctl.geometry.adapters import WrongAdapters, read_adapters
from ppctl.geometry.canonical_names import parameter_of, stack_of
from ppctl.geometry.foreign_model import Adapters, ForeignModel, foreign_of
from ppctl.host.files import expanded
from ppctl.launch.described import absent, describe
from ppctl.runs.checkpoint_folder import STATE
from ppctl.runs.finding import find_checkpoint

KEY = "model.from"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_weights(text: str, root: Path = Path("runs")) -> Path:
    """The absolute path of a directory with a config.json, else of a checkpoint. Raises ConfigError (PP-E520)."""
    try:
        path = expanded(text).absolute()
        return path if (path / CONFIG).is_file() else find_checkpoint(text, root)
    except (CheckpointError, ConfigError, OSError):
        message = f"{KEY}={text} is neither a directory with a {CONFIG} nor a checkpoint nor a run"
        if not _HUB_NAME.fullmatch(text):
            raise ConfigError(Problem("PP-E520", message, f"{KEY}=null", KEY)) from None
        bare_name = text.partition("/")[2]
        message += "; it looks like a name on the Hugging Face Hub, from which ppctl downloads nothing"
        download = f"hf download {text} --local-dir {bare_name}\n{KEY}={bare_name}"
        raise ConfigError(Problem("PP-E520", message, download, KEY)) from None


def model_values(
    text: str,
    implementation: str = "auto",
    overrides: Mapping[str, str] = MappingProxyType({}),
    lora: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """The fields of ModelConfig that the source sets; a directory is read with `implementation`, overrides and
    adapters. Raises ConfigError as `read_config`, `describe` and `asked_adapters`, CheckpointError (PP-E503) if a
    checkpoint has no model."""
    path = find_weights(text)
    if not (path / CONFIG).is_file():
        known, saved = {field.name for field in fields(ModelConfig)} - {"from_"}, run_state(path).get("model")
        if saved is None:
            raise CheckpointError(damaged(path, f"{STATE} has no model"))
        return {name: value for name, value in saved.items() if name in known}
    config = read_config_file(path)
    if implementation == "transformers" or (
        implementation == "auto" and config.get("model_type") not in known_families()
    ):
        found = ForeignModel.from_text(describe(path, overrides, asked_adapters(lora) if lora else None))
        return {**found.sizes, "transformers": found.to_text()}
    family, model = read_config(config, str(path / CONFIG))
    not_set = TRAINING - {field.ours for field in family.fields}
    return {name: value for name, value in asdict(model).items() if name not in not_set}


def values_of(text: str, implementation: str, overrides: Mapping[str, str], lora: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the source sets, by dotted key: those of its model and, if it has one, its tokenizer. Raises as
    `find_weights` and `model_values`."""
    tokenizer = tokenizer_of(find_weights(text))
    values = {f"model.{name}": value for name, value in model_values(text, implementation, overrides, lora).items()}
    return values if tokenizer is None else values | {"data.tokenizer": tokenizer}


def asked_adapters(lora: Mapping[str, Any]) -> Adapters:
    """The adapters of `model.lora`. Raises ConfigError: PP-E540 for invalid values, PP-E541 without peft."""
    try:
        found = read_adapters(lora)
    except WrongAdapters as error:
        raise ConfigError(Problem("PP-E540", f"model.lora: {error}", error.remedy, "model.lora")) from None
    if problem := absent("lora", "model.lora"):
        raise ConfigError(problem)
    return found


def unread_weights(path: Path) -> list[str]:
    """Notes if a run could not read a directory's weights, for commands that need only its config."""
    try:
        if has_weights(path):
            read_directory(path)
    except CheckpointError as error:
        return [f"a run cannot begin with these weights: {one.code} {one.message}" for one in error.problems]
    return []


def check_weights(path: Path, model: ModelConfig) -> list[str]:
    """Check that the tensors stored at `path` are those that `model` needs; returns notes for the user. Raises
    CheckpointError naming those that do not fit, and ConfigError as `open_directory`."""
    if (path / CONFIG).is_file():
        if foreign_of(model) is None:
            open_directory(path, model=model)
        elif has_weights(path):
            read_directory(path)  # the names are transformers' own: the ranks, which import it, compare them
        quantised = quantised_note(path)
        return [f"{path}: {quantised}"] if quantised else []
    manifest = read_manifest(path)
    cut = [
        f"{path / name}: {_size(path / name):,} bytes instead of {record.bytes:,}"
        for name, record in manifest.files.items()
        if _size(path / name) != record.bytes
    ]
    if cut:
        raise CheckpointError(damaged(path, "files are missing or cut short", "\n".join(cut)))
    shapes = model_tensors(model)
    stored = {name.removeprefix("model."): record.shape for name, record in manifest.tensors.items()}
    wrong = [
        f"{name}: {list(stored[name]) if name in stored else 'not'} stored, {list(shape)} needed"
        for name, shape in shapes.items()
        if stored.get(name) != shape
    ]
    if wrong:
        message = f"the weights at {path} are not those of this model"
        remedy = f"leave out what changes the model's sizes: {KEY} gives them"
        raise CheckpointError(Problem("PP-E524", message, remedy, listed(wrong)))
    return []


def checkpoint_tensors(config: RunConfig, *, optimizer: bool = True) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of all tensors in a checkpoint of a run, as its ranks' `session_shards` make them up.
    Masters and moments have the sums' dtype: float64 for a model in float64, else float32."""
    model, sums = config.model, "float64" if weight_dtype(config.parallel) == "float64" else "float32"
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in model_tensors(model).items():
        frozen = parameter_of(name, model).frozen
        found[f"model.{name}"] = (shape, weight_dtype(config.parallel) if frozen else sums)
        if optimizer and parameter_of(name, model).gradient != "none":
            matrix = config.optim.name == "muon" and parameter_of(name, model).hidden_matrix
            moments = ("momentum_buffer",) if matrix else ("exp_avg", "exp_avg_sq")
            found |= {f"optim.{name}.{key}": (shape, sums) for key in moments}
            found[f"optim.{stack_of(name)}.step"] = ((), "float32")
    return found


def tokenizer_of(path: Path) -> str | None:
    """The tokenizer that a directory or a checkpoint comes with, as `data.tokenizer` names it; None without one."""
    if (path / CONFIG).is_file():
        return str(path) if (path / TOKENIZER).is_file() else None
    state = run_state(path)
    named: str | None = state.get("tokenizer_path")
    return named or ("byte" if state.get("tokenizer") == "byte" else None)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0

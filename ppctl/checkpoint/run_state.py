"""state.json: the state that a checkpoint has beside its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ppctl.checkpoint.manifest import Manifest, check_files, damaged, read_manifest
from ppctl.config.keys import keys
from ppctl.config.mapping import converted_value
from ppctl.errors import CheckpointError
from ppctl.host.files import MOST_READ, is_file, read_whole
from ppctl.records.json_reader import Count, Line, parse, read
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import STATE


class _SavedModel(TypedDict):
    from_: Line | None


def _check_model(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are values of ModelConfig. Unknown fields, of a later version, are not checked."""
    read(_SavedModel, {"from_": None, **values})
    for key in keys().values():
        if key.name.startswith("model.") and key.attribute in values and not key.is_callable:
            value = converted_value(key.name, values[key.attribute])
            if key.limit and not key.allows(value):
                raise ValueError(f"{key.name} takes {key.limit.words}, not {value!a:.60}")


class _Scale(TypedDict):
    scale: float
    good_steps: Count
    chances: int


class _Norms(TypedDict, total=False):
    usual: list[float]
    in_a_row: Count


class RunState(TypedDict, total=False):
    """The entries that a run, or a command that makes weights, saves; older versions saved less."""

    step: Count
    consumed_samples: Count
    passed: list[tuple[Count, Count]]
    eval_loss: float | None
    sample_order: Count
    seed: int
    seq_length: Count
    data_path: str | list[str | float | list[str | float] | dict[str, str | float]] | None
    validation_split: float
    tokenizer: Line
    tokenizer_path: Line | None
    data_format: Line | None
    data_text_key: str | None
    data_chat_template: str | None
    data_pack: bool | None
    data_too_long: Line | None
    data_digest: Line | None
    optimizer: Line
    layout: str
    parallel: dict[Line, Count | Line]
    model: Annotated[dict[Line, Any], _check_model]
    norms: _Norms
    loss_scale: _Scale | None
    callbacks: dict[Line, str]
    weights_only: bool
    source: Line
    averaged: list[Line]


def state_text(state: Mapping[str, Any]) -> bytes:
    """Return the bytes of `state.json`."""
    return (json.dumps(dict(state), indent=1) + "\n").encode()


def read_state(path: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return the state, of any program, that was saved with the checkpoint at `path`. Raises CheckpointError."""
    state: dict[str, Any] = _checked(path, manifest or read_manifest(path), dict[str, Any])
    return state


def run_state(path: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return ppctl's own state, as `read_state`. Raises CheckpointError (PP-E503) if ppctl cannot have saved it."""
    manifest = manifest or read_manifest(path)
    state: dict[str, Any] = _checked(path, manifest, RunState)
    steps = {manifest.step, state.get("step", manifest.step)}
    if checkpoint_folder.is_step(path):
        steps.add(checkpoint_folder.step_of(path))
    if len(steps) > 1:
        named = ", ".join(map(str, sorted(steps)))
        raise CheckpointError(damaged(path, f"its name, its manifest and {STATE} name different steps ({named})"))
    return state


def _checked(path: Path, manifest: Manifest, kind: Any) -> Any:
    """Return the saved state as `kind`, once its digest is checked. Raises CheckpointError (PP-E503), OSError."""
    check_files(path, manifest, [STATE])
    try:
        return read(kind, parse(read_whole(path / STATE, MOST_READ, follow=False)))
    except ValueError as error:
        raise CheckpointError(damaged(path, f"{STATE}: {error}")) from None


def lineage(state: Mapping[str, Any]) -> Iterator[Path]:
    """Yield where the weights of a checkpoint's `state` came from, then where the weights of that checkpoint came from,
    and so on: paths of checkpoints, the last perhaps a model's. Stops at a checkpoint that cannot be read, or that is
    not this user's to read."""
    seen: set[str] = set()
    while (named := state.get("source") or state.get("model", {}).get("from_")) and named not in seen:
        seen.add(named)
        yield Path(named)
        if not is_file(Path(named) / STATE):
            return
        try:
            state = dict(run_state(Path(named)))
        except (CheckpointError, OSError):
            return

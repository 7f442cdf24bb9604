"""Whether a checkpoint is complete and undamaged, and fits a run; torch-free, for login nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.checkpoint.chunks import ChunkReader
from ppctl.checkpoint.manifest import Manifest, check_files, damaged, in_file_order, read_manifest
from ppctl.checkpoint.tensor_parts import ranges, text_of
from ppctl.config.batch_sizes import BatchSizes, as_from_the_start
from ppctl.config.keys import as_typed
from ppctl.config.schema import RunConfig
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.runs.checkpoint_folder import STATE

Kind = tuple[tuple[int, ...], str]
"""A tensor's whole shape, and its dtype by torch's name."""

_MOST_DAMAGED = 100
"""The most damaged files that are named; then no further files are checked."""

READ_AS = ("format", "text_key", "chat_template", "pack", "too_long")
"""Fields of `data` that decide how files are read; a checkpoint's state has them with the prefix `data_`."""


class Verified(NamedTuple):
    """The result of `examine`."""

    problems: list[Problem]
    read: int
    """Bytes of values that were read."""


def examine(
    path: Path,
    manifest: Manifest | None = None,
    *,
    values: bool = True,
    progress: Callable[[int], None] = lambda size: None,
) -> Verified:
    """Check everything (without `values`: sizes, headers and the manifest's digest); returns all that is wrong.

    `progress` is called with the number of bytes of each chunk of values that was read. Raises CheckpointError if the
    manifest cannot be read, OSError if the disk fails.
    """
    manifest = manifest or read_manifest(path)
    problems: list[Problem] = []
    bad: set[str] = set()
    for name in sorted(manifest.files):
        if len(problems) >= _MOST_DAMAGED:
            problems.append(damaged(path, f"not all of its {len(manifest.files)} files were looked at"))
            return Verified(problems, 0)
        try:
            check_files(path, manifest, [name])
        except CheckpointError as error:
            problems += error.problems
            bad.add(name)
    read, reader = 0, ChunkReader(path, manifest)
    for name, shard in in_file_order(manifest) if values else ():
        if shard.file in bad:
            continue
        for size, fault in reader.faults(name, shard):
            read += size
            progress(size)
            if fault:
                problems.append(damaged(path, fault))
    return Verified(problems, read)


def bytes_of_values(manifest: Manifest) -> int:
    """Return how many bytes `examine` reads if every file is there."""
    return sum(shard.bytes[1] - shard.bytes[0] for record in manifest.tensors.values() for shard in record.shards)


def misfits(path: Path, manifest: Manifest, wanted: Mapping[str, Collection[Kind]]) -> list[Problem]:
    """Return the differences between a checkpoint's tensors and a model's, in both directions (PP-E502). `wanted` has,
    for each name, the kinds that ranks hold: one if they agree."""
    problems = []
    if missing := wanted.keys() - manifest.tensors.keys():
        problems.append(_misfit(path, "lacks tensors of this model", ranges(missing)))
    if unexpected := manifest.tensors.keys() - wanted.keys():
        problems.append(_misfit(path, "has tensors that this model lacks", ranges(unexpected)))
    different = [
        f"{name}: {text_of(record.shape, record.dtype)} saved, {' and '.join(text_of(*o) for o in sorted(others))} here"
        for name, record in manifest.tensors.items()
        if (others := set(wanted.get(name, ())) - {(record.shape, record.dtype)})
    ]
    if different:
        problems.append(_misfit(path, "has tensors of another shape or dtype", different))
    return problems


def _misfit(path: Path, fault: str, lines: list[str]) -> Problem:
    remedy = f"give the model the sizes that it was saved with: they are in {pasted(path / STATE)}"
    return Problem("PP-E502", f"the checkpoint at {path} {fault}", remedy, place="\n".join(lines))


_CODE = ("implementation", "hf_overrides")
_SOURCE = ("from_", "transformers", *_CODE)
"""Fields of a model that say where it comes from, and are no sizes."""


def with_sizes(problems: Sequence[Problem], saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[Problem]:
    """Return the problems. The remedy of those about tensors that do not fit (PP-E502) becomes the keys that give the
    model `own` the sizes of `saved`; of a transformers model, the keys that name its directory and code."""
    if saved.get("transformers") is not None:
        wanted = {"from": saved["from_"]} | {key: saved[key] for key in _CODE if saved[key] != own.get(key)}
    else:
        wanted = {"from": None} if own.get("transformers") is not None else {}
        wanted |= {key: each for key, each in saved.items() if key not in _SOURCE and own.get(key) != each}
    remedy = " ".join(as_typed(f"model.{key}", value) for key, value in wanted.items())
    return [replace(each, remedy=remedy) if remedy and each.code == "PP-E502" else each for each in problems]


def misplaced(path: Path, state: Mapping[str, Any], config: RunConfig, digest: str | None) -> list[Problem]:
    """Return why the position in the data in a checkpoint's `state` means nothing to a run with this config. `digest`
    is of the run's data; None if the data have not been read."""
    now = {"seq_length": config.data.seq_length, "seed": config.train.seed, "data_digest": digest}
    message = "the checkpoint's position in the data means nothing here: {} was {} and is {}"
    return [*_outgrown(path, state, config)] + [
        Problem("PP-E741", message.format(key, state[key], value), _restoring(key, state, config), place=str(path))
        for key, value in now.items()
        if value is not None and state.get(key, value) != value
    ]


def _outgrown(path: Path, state: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if steps from this position on have other batch sizes than the plan, which counts from step 0."""
    step, consumed = state.get("step", 0), state.get("consumed_samples", 0)
    if not as_from_the_start(config.train, step, consumed):
        would = BatchSizes.of(config.train).position(step)
        message = (
            f"after {step:,} steps the checkpoint has consumed {consumed:,} samples, but a run with train.batch_rampup="
            f"{config.train.batch_rampup} would have consumed {would:,}: the batches that follow are not the plan's"
        )
        yield Problem("PP-E423", message, "train.batch_rampup=null", str(path))


def _restoring(key: str, state: Mapping[str, Any], config: RunConfig) -> str:
    """Return the remedy that gives the run the checkpoint's data again."""
    if key != "data_digest":
        return as_typed({"seq_length": "data.seq_length", "seed": "train.seed"}[key], state[key])
    data = config.data
    own = {"path": data.path, "tokenizer": data.tokenizer, "validation_split": data.validation_split}
    own |= {name: getattr(data, name) for name in READ_AS}
    named = {key: f"data_{key}" for key in ("path", *READ_AS)}
    saved = {key: state.get(named.get(key, key), value) for key, value in own.items()}
    changed = [as_typed(f"data.{key}", value) for key, value in saved.items() if value != own[key]]
    if changed:
        return " ".join(changed)
    return "put back the files that the checkpoint was trained on: they have changed"

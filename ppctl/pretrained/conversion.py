"""What imports and exports share: writing a checkpoint of weights alone, reading a checkpoint's weights, the report."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import run_state
from ppctl.checkpoint.saver import save_streamed
from ppctl.checkpoint.tensor_parts import ranges
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, ConfigError, PpctlError, Problem, pasted, visible
from ppctl.families.directory import model_tensors
from ppctl.geometry.canonical_names import parameter_of
from ppctl.host.files import refused, silence
from ppctl.runs.checkpoint_folder import step_path, sync

Progress = Callable[[str, int, int], None]
"""`progress(canonical name, tensors done, tensors in all)`."""

_EVERY = 2.0
"""Seconds between two lines of progress."""


def printed_progress() -> Progress:
    """Return a Progress that prints a line on stderr, at most every two seconds."""
    printed = time.monotonic()

    def progress(name: str, done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > _EVERY:
            printed = time.monotonic()
            print(visible(f"{done}/{total} {name}"), file=sys.stderr, flush=True)

    return progress


def exit_code_of(work: Callable[[], None]) -> int:
    """Do the work of a command's process; returns its exit code, after printing its problems."""
    try:
        work()
        sys.stdout.flush()
    except PpctlError as error:
        problems, code = error.problems, error.exit_code
    except KeyboardInterrupt:
        print()  # the text, if there is some, has no end of line
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # the reader of the pipe (`| head`) has ended
        return 141
    except OSError as error:
        if (problem := refused(error)) is None:
            raise
        if error.filename is None:
            silence(sys.stdout)
        problems, code = (problem,), 1
    else:
        return 0
    for problem in problems:
        print(f"error {problem}", file=sys.stderr)
    return code


@dataclass(frozen=True, slots=True)
class Done:
    """A conversion that is complete."""

    path: Path
    family: str
    """The model_type of the family; empty if the conversion does not depend on it."""
    parameters: int
    tensors: int
    bytes: int
    tokenizer: str = ""
    """A line about the tokenizer's files, if they are written."""
    settings: str = ""
    """A line about settings kept from the directory that the weights came from, if there is one."""
    left: str = ""
    """A line about left-out tensors that are no weights."""
    quantised: str = ""
    """A line about weights that were not read as their config says."""


def left_out(names: Iterable[str]) -> str:
    """Return the line about tensors that are no weights: a run that begins with the weights begins at step 0."""
    states = sorted(names)
    return f"weights alone; left out: {len(states)} tensors of optimizer states ({states[0]}, …)" if states else ""


def write_weights(
    out: Path,
    specs: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    state: Mapping[str, Any],
    progress: Progress,
    *,
    family: str = "",
    **lines: str,
) -> Done:
    """Write weights as the checkpoint `out`/checkpoints/step-0, with which a run begins. `specs` are on the meta
    device, by canonical name; `read` is called for each once; `lines` are fields of `Done`. Raises ConfigError (PP-E525
    if `out` is taken) and the errors of `read`."""
    counter = count(1)

    def next_one(name: str) -> Tensor:
        progress(name, next(counter), len(specs))
        return read(name.removeprefix("model."))

    beside = {"step": 0, "consumed_samples": 0, "weights_only": True, **state}
    with new_directory(out) as temporary:
        named = {f"model.{name}": spec for name, spec in specs.items()}
        save_streamed(temporary / "checkpoints", 0, named, next_one, beside)
    parameters = sum(spec.numel() for spec in specs.values())
    size = sum(spec.numel() * spec.itemsize for spec in specs.values())
    return Done(step_path(out / "checkpoints", 0), family, parameters, len(specs), size, **lines)


class SavedWeights:
    """The weights in a checkpoint, by canonical name (without `mtp` none of multi-token prediction); in `dtype` if it
    is not None, except biases that balance experts."""

    def __init__(self, path: Path, *, dtype: torch.dtype | None, mtp: bool) -> None:
        self.path, self.dtype, self.manifest = path, dtype, read_manifest(path)
        self.state = run_state(path, self.manifest)
        known = {field.name for field in fields(ModelConfig)}
        model = ModelConfig(**{key: value for key, value in self.state["model"].items() if key in known})
        self.model = model if mtp else replace(model, mtp_num_layers=None)
        self.shapes = model_tensors(self.model)
        self._reader = CheckpointReader(path, self.manifest)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name, in the dtype that `dtypes` has for it."""
        return self._reader.tensor(f"model.{name}").to(self.dtypes[name])

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> wanted dtype. Raises CheckpointError (PP-E502) if the checkpoint lacks a tensor."""
        records = {name: self.manifest.tensors.get(f"model.{name}") for name in self.shapes}
        wrong = [name for name, shape in self.shapes.items() if getattr(records[name], "shape", None) != shape]
        if wrong:
            message = f"the checkpoint at {self.path} lacks tensors of the model that its state.json describes"
            raise CheckpointError(Problem("PP-E502", message, f"ls {pasted(self.path)}", "\n".join(ranges(wrong))))
        saved = {name: getattr(torch, record.dtype) for name, record in records.items() if record is not None}
        if self.dtype is None:
            return saved
        # Biases that balance experts change in steps of a thousandth, which bfloat16 would lose: they keep their dtype.
        kept = {name for name in saved if parameter_of(name, self.model).role == "correction"}
        return {name: dtype if name in kept else self.dtype for name, dtype in saved.items()}


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out`, or what the link `out` leads to, on success, and is then on the disk with all its
    files; else it is removed. Raises ConfigError (PP-E525) if `out` is taken, and if it is a mount point, whose place
    no directory can take."""
    place = Path(os.path.realpath(out))
    mounted = os.path.ismount(place)
    if mounted or (place.exists() and (not place.is_dir() or any(place.iterdir()))):
        fault = "is a mount point: name a new directory in it" if mounted else "exists already and is never overwritten"
        raise ConfigError(Problem("PP-E525", f"{out} {fault}", f"ls {pasted(out)}", "command line"))
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}.tmp")  # no other export's, and not the user's
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        temporary.rename(place)
        sync(place.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

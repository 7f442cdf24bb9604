"""From a Hugging Face directory to a checkpoint and back: each is written under another name, verified and renamed.

Knows the order of the steps. Must not know the command line, ranks or modules.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.parts import ranges
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.saver import save_streamed
from ppctl.checkpoint.state import run_state
from ppctl.checkpoint_folder import step_path
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, ConfigError, Problem, listed, pasted
from ppctl.families.config_json import write_config
from ppctl.families.directory import (
    CONFIG,
    TOKENIZER,
    has_weights,
    model_tensors,
    mtp_tables,
    open_directory,
    stored_names,
    told_quantised,
)
from ppctl.families.safetensors import read_directory
from ppctl.geometry.adapters import is_adapter
from ppctl.geometry.canonical_names import parameter_of
from ppctl.geometry.foreign_model import Adapters, Anatomy, foreign_of
from ppctl.pretrained.companion_files import copy_tokenizer, keep_settings, tokenizer_path
from ppctl.pretrained.safetensors_reader import Reader
from ppctl.pretrained.safetensors_writer import DTYPES, SHARD, Spec, write_shards

Progress = Callable[[str, int, int], None]
"""`progress(canonical name, tensors done, tensors in all)`."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was converted."""

    path: Path
    family: str
    """Its model_type; empty where it did not matter."""
    parameters: int
    tensors: int
    bytes: int
    tokenizer: str = ""
    """A line about the tokenizer's files, where such are written."""
    settings: str = ""
    """A line about what was kept of the directory that the weights came from, where they came from one."""
    left: str = ""
    """A line about what is not weights and was left out."""
    quantised: str = ""
    """A line about weights that were read otherwise than their config says."""


def left_out(names: Iterable[str]) -> str:
    """The line about tensors that are no weights: a run that begins with the weights begins at step 0."""
    found = sorted(names)
    return f"weights alone; left out: {len(found)} tensors of optimizer states ({found[0]}, …)" if found else ""


def import_directory(
    source: Path, out: Path, progress: Progress, *, mtp: bool = True, described: ModelConfig | None = None
) -> Done:
    """Write the weights of a Hugging Face directory as the checkpoint `out`/checkpoints/step-0, in their own dtypes.

    `described` is the model where its code is transformers'. Raises ConfigError (PP-E520, PP-E521, PP-E526; PP-E525
    where `out` is taken) and CheckpointError (PP-E523, PP-E524, PP-E538).
    """
    found = _described(source, described) if described is not None else _of_a_family(source, mtp=mtp)
    specs = {f"model.{name}": spec for name, spec in found.specs.items()}
    counter = count(1)

    def read(name: str) -> Tensor:
        progress(name, next(counter), len(specs))
        return found.read(name.removeprefix("model."))

    state = {"step": 0, "consumed_samples": 0, "weights_only": True, "model": asdict(found.model)}
    state["source"] = str(source.absolute())
    if (source / TOKENIZER).is_file():
        state["tokenizer_path"] = tokenizer_path(str(source))
    with new_directory(out) as temporary:
        save_streamed(temporary / "checkpoints", 0, specs, read, state)
    parameters = sum(spec.numel() for spec in specs.values())
    size = sum(spec.numel() * spec.itemsize for spec in specs.values())
    path, told = step_path(out / "checkpoints", 0), told_quantised(source)
    return Done(path, found.model_type, parameters, len(specs), size, quantised=told)


class _Weights(NamedTuple):
    """A directory's tensors, by canonical name."""

    model: ModelConfig
    model_type: str
    specs: Mapping[str, Tensor]
    """Shapes and dtypes, on meta."""
    read: Callable[[str], Tensor]


def _of_a_family(source: Path, *, mtp: bool) -> _Weights:
    found = open_directory(source, mtp=mtp)
    reader = Reader(found)
    reader.check_copies()
    specs = {name: reader.spec(name) for name in found.names}
    return _Weights(found.model, found.family.model_type, specs, reader.tensor)


def _described(source: Path, model: ModelConfig) -> _Weights:
    """Of a model whose code is transformers'."""
    from ppctl.foreign.library import config_from  # transformers, which other models do without
    from ppctl.foreign.stored import StoredWeights

    if not has_weights(source):
        message = f"{source} has a {CONFIG} and no weights: a run draws them by its seed"
        raise CheckpointError(Problem("PP-E538", message, f"ppctl train {pasted(f'model.from={source}')}", str(source)))
    foreign = foreign_of(model)
    assert foreign is not None  # `model` was described because its code is transformers'
    shapes = {name: shape for name, shape in model_tensors(model).items() if not is_adapter(name)}
    weights = StoredWeights(source, config_from(foreign.config), shapes)
    specs = {name: weights.spec(name) for name in shapes}
    return _Weights(model, json.loads(foreign.config)["model_type"], specs, weights.tensor)


def export_checkpoint(
    checkpoint: Path, out: Path, progress: Progress, *, dtype: torch.dtype | None = None, mtp: bool = True
) -> Done:
    """Write a checkpoint's weights as a directory that transformers loads; `dtype` None keeps that of the checkpoint.

    The files of the tokenizer that it was trained with go beside them, if there are any, and settings of the directory
    that training began with. Raises ConfigError (PP-E522, PP-E525) and CheckpointError (PP-E502, PP-E503).
    """
    manifest = read_manifest(checkpoint)
    state = run_state(checkpoint, manifest)
    model = saved_model(state)
    model = model if mtp else replace(model, mtp_num_layers=None)
    shapes, foreign = model_tensors(model), foreign_of(model)
    if foreign is not None and foreign.adapters is not None:
        return _export_adapters(checkpoint, out, foreign.adapters, foreign.anatomy, shapes, state, progress, dtype)
    if foreign is None:
        family, config = write_config(model)
        model_type, stored = family.model_type, stored_names(family, model)
    else:
        family, config, stored = None, json.loads(foreign.config), {name: name for name in shapes}
        model_type = config["model_type"]
    dtypes = saved_dtypes(checkpoint, manifest, model, dtype)
    order = [(of, name) for of, name in stored.items()] + [(of, name) for name, of in mtp_tables(model).items()]
    specs = [Spec(name, shapes[of], dtypes[of]) for of, name in order]
    reader = CheckpointReader(checkpoint, manifest)

    def tensors() -> Iterator[Tensor]:
        for done, (of, _) in enumerate(order, 1):
            progress(of, done, len(order))
            yield reader.tensor(f"model.{of}").to(dtypes[of])

    with new_directory(out) as temporary:
        tokenizer = copy_tokenizer(state, temporary)
        kept = keep_settings(state, family, temporary)
        total = write_shards(temporary, specs, tensors(), SHARD)
        config = {**kept.keys, **config, "torch_dtype": str(dtypes[order[0][0]]).removeprefix("torch.")}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _verify(temporary, specs, model)
    parameters = sum(spec.bytes // spec.dtype.itemsize for spec in specs)
    return Done(out, model_type, parameters, len(specs), total, tokenizer, kept.line)


def _export_adapters(
    checkpoint: Path,
    out: Path,
    adapters: Adapters,
    anatomy: Anatomy,
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, Any],
    progress: Progress,
    dtype: torch.dtype | None,
) -> Done:
    """Write the adapters alone, as a directory that `peft.PeftModel.from_pretrained` loads beside the base."""
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    names, tensors = [name for name in shapes if is_adapter(name)], {}
    for done, name in enumerate(names, 1):
        progress(name, done, len(names))
        found = reader.tensor(f"model.{name}")
        tensors[f"base_model.model.{name}"] = found if dtype is None else found.to(dtype)
    base = state["model"].get("from_")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": list(adapters.targets),
        "layers_to_transform": list(adapters.layers) or None,
        "layers_pattern": anatomy.layers.rpartition(".")[2] if adapters.layers else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None if base is None else str(Path(base).expanduser().absolute()),
    }
    with new_directory(out) as temporary:
        tokenizer = copy_tokenizer(state, temporary)
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    return Done(out, "", parameters, len(tensors), total, tokenizer)


def saved_model(state: Mapping[str, Any]) -> ModelConfig:
    """The model that a checkpoint's state describes."""
    known = {field.name for field in fields(ModelConfig)}
    return ModelConfig(**{key: value for key, value in state["model"].items() if key in known})


def saved_dtypes(
    path: Path, manifest: Manifest, model: ModelConfig, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Canonical name -> dtype to write. Raises CheckpointError where the checkpoint lacks a tensor of the model."""
    shapes = model_tensors(model)
    records = {name: manifest.tensors.get(f"model.{name}") for name in shapes}
    wrong = [name for name, shape in shapes.items() if getattr(records[name], "shape", None) != shape]
    if wrong:
        message = f"the checkpoint at {path} lacks tensors of the model that its state.json describes"
        raise CheckpointError(Problem("PP-E502", message, f"ls {pasted(path)}", "\n".join(ranges(wrong))))
    saved = {name: getattr(torch, record.dtype) for name, record in records.items() if record is not None}
    if dtype is None:
        return saved
    # What balances experts moves in steps of a thousandth, which bfloat16 would lose: it keeps its dtype.
    kept = {name for name in saved if parameter_of(name, model).role == "correction"}
    return {name: found if name in kept else dtype for name, found in saved.items()}


def _verify(directory: Path, specs: list[Spec], model: ModelConfig) -> None:
    """Read back what was written: config.json, and every name, shape, dtype and number of bytes.

    Raises CheckpointError (PP-E523) where it is not what was to be written.
    """
    stored = open_directory(directory).stored if foreign_of(model) is None else read_directory(directory)
    found = {name: (each.shape, each.dtype, each.bytes) for name, each in stored.items()}
    wanted = {spec.name: (spec.shape, DTYPES[spec.dtype], spec.bytes) for spec in specs}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if wrong:
        message = f"the files in {directory} differ from what was written there; they are deleted"
        raise CheckpointError(Problem("PP-E523", message, f"df -h {pasted(directory.parent)}", listed(wrong)))


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` if all goes well, and is removed if not.

    Raises ConfigError (PP-E525) where `out` is taken.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        message = f"{out} exists already, and is not overwritten"
        raise ConfigError(Problem("PP-E525", message, f"ls {pasted(out)}", "command line"))
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise

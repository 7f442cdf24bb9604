"""Hugging Face directories, both ways: weights, config.json, settings and the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.disk import header_of
from ppctl.checkpoint.run_state import lineage
from ppctl.checkpoint.shards import values_of, whole_shards
from ppctl.checkpoint.tensor_parts import DTYPES, TensorPart
from ppctl.config.schema import ModelConfig
from ppctl.data.tokenizer import HuggingFaceTokenizer, tokenizer_path
from ppctl.errors import CheckpointError, PpctlError, Problem, listed, pasted
from ppctl.families.config_json import foreign_keys, write_config
from ppctl.families.directory import (
    CONFIG,
    SCALE,
    TOKENIZER,
    ModelDirectory,
    has_weights,
    model_tensors,
    mtp_tables,
    open_directory,
    quantised_note,
    read_config_file,
    stored_names,
)
from ppctl.families.family_table import Family
from ppctl.families.safetensors import INDEX, SINGLE, read_directory
from ppctl.geometry.adapters import is_adapter, trained_whole
from ppctl.geometry.foreign_model import Adapters, Anatomy, foreign_of
from ppctl.host.files import MOST_READ_OF_A_MODEL, expanded, is_file, read_whole
from ppctl.pretrained.conversion import Done, Progress, SavedWeights, new_directory, write_weights
from ppctl.runs.checkpoint_folder import STATE

if TYPE_CHECKING:
    from ppctl.foreign.stored import StoredWeights

_READ_AS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.bfloat16,
}
"""Stored dtype -> dtype after reading: 8-bit matrices are multiplied by their blocks' scales."""


class DirectoryReader:
    """Reads tensors by canonical name; files are mapped, not loaded."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}

    def spec(self, name: str) -> Tensor:
        """Return the shape and dtype of what `tensor` will return, as a tensor on the meta device."""
        stored = self.directory.stored[self.directory.names[name]]
        return torch.empty(stored.shape, dtype=_READ_AS[stored.dtype], device="meta")

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name, on the CPU."""
        return self.stored(self.directory.names[name])

    def stored(self, name: str) -> Tensor:
        """Return the tensor of a stored name, on the CPU; 8-bit floats multiplied by their scales."""
        tensor = self._get(name)
        if self.directory.stored[name].dtype == "F8_E4M3":
            return dequantised(tensor, self._get(name + SCALE), self.directory.block)
        return tensor

    def check_copies(self) -> None:
        """Raise CheckpointError (PP-E524) naming the stored copies of tables that differ from their originals: training
        keeps only one of them."""
        directory = self.directory
        unequal = [
            name for name, first in directory.copies.items() if not torch.equal(self.stored(name), self.tensor(first))
        ]
        if unequal:
            message = f"{directory.path} holds copies of the embedding or the output that differ from them"
            remedy = "leave multi-token prediction out: --no-mtp, or model.mtp_num_layers=null"
            raise CheckpointError(Problem("PP-E524", message, remedy, "\n".join(unequal)))

    def _get(self, name: str) -> Tensor:
        file = self.directory.stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._files[file].get_tensor(name)
        return tensor


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return in bfloat16 a matrix [r, c] of 8-bit floats, which has a float32 scale for each `block` of R x C."""
    rows, columns = weight.shape
    factors = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).bfloat16()


# Writing


SHARD = 5 * 10**9
"""The most bytes of one file, as Hugging Face splits them."""
_PLACE = 64
"""Values begin at multiples of this many bytes, a processor's widest read, as tensors in memory do: programs that map
the file use weights in place, and alignment decides how a product of equal numbers is rounded."""


def write_shards(directory: Path, parts: Sequence[TensorPart], tensors: Iterable[Tensor], shard: int = SHARD) -> int:
    """Write whole `tensors`, which come in the order of `parts`, into files of at most `shard` bytes if possible, then
    the index; return the bytes of all tensors. Raises ValueError if a tensor does not fit its part."""
    files = list(_cut(parts, shard))
    values = iter(tensors)
    places: dict[str, str] = {}
    for number, inside in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(directory / file, inside, values)
        places |= dict.fromkeys((part.name for part in inside), file)
    total = sum(part.bytes for part in parts)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _cut(parts: Sequence[TensorPart], shard: int) -> Iterator[list[TensorPart]]:
    inside: list[TensorPart] = []
    for part in parts:
        if inside and sum(other.bytes for other in inside) + part.bytes > shard:
            yield inside
            inside = []
        inside.append(part)
    yield inside


def _write(file: Path, parts: Sequence[TensorPart], tensors: Iterator[Tensor]) -> None:
    """Write one file of these tensors. Raises ValueError if a tensor does not fit its part."""
    with file.open("wb") as stream:
        stream.write(header_of(parts, aligned=_PLACE)[0])
        for part in parts:
            (given,) = whole_shards({part.name: next(tensors)})
            if given.part != part:
                raise ValueError(f"{part.name} is {given.part}, not {part}")
            stream.write(values_of(given.tensor))


GENERATION = "generation_config.json"
_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""The files of a tokenizer's directory that are copied with its tokenizer.json."""


def import_directory(
    source: Path, out: Path, progress: Progress, *, mtp: bool = True, described: ModelConfig | None = None
) -> Done:
    """Write the weights of a Hugging Face directory as the checkpoint `out`/checkpoints/step-0, in their own dtypes.
    `described` is the model if it runs with transformers' code. Raises ConfigError (PP-E520, PP-E521, PP-E526; PP-E525
    if `out` is taken) and CheckpointError (PP-E523, PP-E524, PP-E538)."""
    if described is not None and not has_weights(source):
        message = f"{source} has a {CONFIG} but no weights: a run draws them by its seed"
        raise CheckpointError(Problem("PP-E538", message, f"ppctl train {pasted(f'model.from={source}')}", str(source)))
    model, model_type, names, reader = open_weights(source, mtp=mtp, model=described)
    specs = {name: reader.spec(name) for name in names}
    state: dict[str, Any] = {"model": asdict(model), "source": str(source.absolute())}
    if (source / TOKENIZER).is_file():
        state["tokenizer_path"] = tokenizer_path(str(source))
    note = quantised_note(source)
    return write_weights(out, specs, reader.tensor, state, progress, family=model_type, quantised=note)


class OpenedWeights(NamedTuple):
    """The weights in a directory, by canonical name."""

    model: ModelConfig
    model_type: str
    names: Collection[str]
    reader: DirectoryReader | StoredWeights


def open_weights(source: Path, *, mtp: bool = True, model: ModelConfig | None = None) -> OpenedWeights:
    """Open the weights in a directory: those of `model`, or if it is None those of the model in config.json, which must
    be of a known family. Raises ConfigError and CheckpointError as `import_directory`."""
    foreign = None if model is None else foreign_of(model)
    if model is None or foreign is None:
        directory = open_directory(source, model=model, mtp=mtp)
        reader = DirectoryReader(directory)
        reader.check_copies()
        return OpenedWeights(directory.model, directory.family.model_type, directory.names, reader)
    from ppctl.foreign.library import config_from  # transformers, which other models do without
    from ppctl.foreign.stored import StoredWeights

    shapes = {name: shape for name, shape in model_tensors(model).items() if not is_adapter(name)}
    stored = StoredWeights(source, config_from(foreign.config), shapes)
    return OpenedWeights(model, json.loads(foreign.config)["model_type"], shapes, stored)


def export_checkpoint(
    checkpoint: Path, out: Path, progress: Progress, *, dtype: torch.dtype | None = None, mtp: bool = True
) -> Done:
    """Write a checkpoint's weights as a directory that transformers loads; of a model with adapters write only what was
    trained, as a directory that peft loads. `dtype` None keeps the checkpoint's. Also copies the training's tokenizer
    files, if there are any, and, of whole models, settings of the directory that training began with. Raises
    ConfigError (PP-E522, PP-E525) and CheckpointError (PP-E502, PP-E503, PP-E523)."""
    weights = SavedWeights(checkpoint, dtype=dtype, mtp=mtp)
    foreign = foreign_of(weights.model)
    if foreign is not None and foreign.adapters is not None:
        return _export_adapters(weights, out, foreign.adapters, foreign.anatomy, progress)
    if foreign is None:
        family, config = write_config(weights.model)
        model_type, stored = family.model_type, stored_names(family, weights.model)
    else:
        family, config, stored = None, json.loads(foreign.config), {name: name for name in weights.shapes}
        model_type = config["model_type"]
    order = [(of, name) for of, name in stored.items()] + [(of, name) for name, of in mtp_tables(weights.model).items()]
    parts = [
        TensorPart(name, shape, str(weights.dtypes[of]).removeprefix("torch."), Box.whole(shape))
        for of, name in order
        for shape in [weights.shapes[of]]
    ]

    def tensors() -> Iterator[Tensor]:
        for done, (of, _) in enumerate(order, 1):
            progress(of, done, len(order))
            yield weights.tensor(of)

    with new_directory(out) as temporary:
        tokenizer = copy_tokenizer(weights.state, temporary)
        keys, line = keep_settings(weights.state, family, temporary)
        total = write_shards(temporary, parts, tensors(), SHARD)
        config = {**keys, **config, "torch_dtype": parts[0].dtype}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _verify(temporary, parts, weights.model)
    parameters = sum(part.box.size for part in parts)
    return Done(out, model_type, parameters, len(parts), total, tokenizer, line)


def _export_adapters(
    weights: SavedWeights, out: Path, adapters: Adapters, anatomy: Anatomy, progress: Progress
) -> Done:
    """Write the adapters and modules that were trained whole as a directory for `peft.PeftModel.from_pretrained`."""
    names, tensors = [n for n in weights.shapes if is_adapter(n) or trained_whole(n, adapters)], {}
    for done, name in enumerate(names, 1):
        progress(name, done, len(names))
        tensors[f"base_model.model.{name}"] = weights.tensor(name)
    base = weights.state["model"].get("from_")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": list(adapters.targets),
        "layers_to_transform": list(adapters.layers) or None,
        "layers_pattern": anatomy.layers.rpartition(".")[2] if adapters.layers else None,
        "lora_dropout": adapters.dropout,
        "modules_to_save": list(adapters.modules_to_save) or None,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None if base is None else str(expanded(base).absolute()),
    }
    with new_directory(out) as temporary:
        tokenizer = copy_tokenizer(weights.state, temporary)
        parts = [shard.part for shard in whole_shards(tensors)]
        _write(temporary / "adapter_model.safetensors", parts, iter(tensors.values()))
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    return Done(out, "", parameters, len(tensors), total, tokenizer)


def _verify(directory: Path, parts: list[TensorPart], model: ModelConfig) -> None:
    """Read the output back: config.json, and every name, shape, dtype and number of bytes. Raises CheckpointError
    (PP-E523) if it differs from the model."""
    stored = open_directory(directory).stored if foreign_of(model) is None else read_directory(directory)
    written = {name: (each.shape, each.dtype, each.bytes) for name, each in stored.items()}
    wanted = {part.name: (part.whole, DTYPES[part.dtype][0], part.bytes) for part in parts}
    wrong = sorted(name for name in written.keys() | wanted.keys() if written.get(name) != wanted.get(name))
    if wrong:
        message = f"the files in {directory} differ from what was written there; they are deleted"
        raise CheckpointError(Problem("PP-E523", message, f"df -h {pasted(directory.parent)}", listed(wrong)))


# Beside the weights


def keep_settings(state: Mapping[str, Any], family: Family | None, out: Path) -> tuple[Mapping[str, Any], str]:
    """Copy the source's generation_config.json into `out`; return (the keys of the source's config.json that are not
    ours, a line for people, which is empty if the weights came from no directory).

    Without a `family` the model's code is transformers', and all keys of its config are written already. Token ids
    (`eos_token_id`) are left out if training used another tokenizer than the source's.
    """
    *_, source = (None, *lineage(state))  # where training began, possibly through other checkpoints
    if source is None or is_file(source / STATE):
        return {}, ""
    try:
        config = read_config_file(source)
    except PpctlError:
        return {}, f"no settings of {source}, because its {CONFIG} is not there any more, or not readable"
    if family is not None and config.get("model_type") not in (family.model_type, *family.also):
        return {}, f"no settings of {source}, because it is no {family.model_type} any more"
    keys = {} if family is None else foreign_keys(config, family)
    named = state.get("tokenizer_path")
    if named is not None and source not in (Path(named), Path(named).parent):
        keys = {key: value for key, value in keys.items() if not key.endswith("_token_id")}
        return keys, f"{len(keys)} settings of {source}, but no token ids, because training had another tokenizer"
    files = [CONFIG]
    if _copied(source / GENERATION, out):
        files.append(GENERATION)
    return keys, f"{len(keys)} settings of {source} ({', '.join(files)})"


def _copied(file: Path, out: Path, name: str = "") -> bool:
    """Copy a file into the directory `out`, if it is there and this user may read it; returns whether."""
    try:
        content = read_whole(file, MOST_READ_OF_A_MODEL)
    except OSError:
        return False
    (out / (name or file.name)).write_bytes(content)
    return True


def copy_tokenizer(state: Mapping[str, Any], out: Path) -> str:
    """Copy the files of the tokenizer that a checkpoint's state names into `out`; returns a line for people.

    A tokenizer.json without a tokenizer_config.json gets one, which makes readers use the tokenizer as it is, with the
    training's end-of-document token; without that file readers would choose a tokenizer by the model's kind.
    """
    named = state.get("tokenizer_path")
    if named is None:
        return "no tokenizer, because training knew none that has files"
    path = Path(named)
    file = next((each for each in (path / TOKENIZER, path) if _copied(each, out, TOKENIZER)), None)
    if file is None:
        return f"no tokenizer, because that of {path} is not there any more, or not readable"
    for other in _BESIDE:
        _copied(file.parent / other, out)
    if not (out / "tokenizer_config.json").exists():
        end = HuggingFaceTokenizer.open(file).end_token
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **({} if end is None else {"eos_token": end})}
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return f"the tokenizer of {file.parent}"

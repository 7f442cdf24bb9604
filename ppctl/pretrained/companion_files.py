"""What an export writes beside the weights: settings of the directory that training began with, and the tokenizer.

Knows where a checkpoint's state names both. Must not know weights or what trained them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.checkpoint.state import lineage
from ppctl.checkpoint_folder import STATE
from ppctl.errors import PpctlError
from ppctl.families.config_json import foreign_keys
from ppctl.families.directory import CONFIG, TOKENIZER, read_config_file
from ppctl.families.table import Family

GENERATION = "generation_config.json"
_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""The files of a tokenizer's directory that are copied with its tokenizer.json."""


class Kept(NamedTuple):
    """What was taken over."""

    keys: Mapping[str, Any]
    """Of the source's config.json."""
    line: str
    """A line for people; empty where the weights came from no directory."""


def keep_settings(state: Mapping[str, Any], family: Family | None, out: Path) -> Kept:
    """Copy the source's generation_config.json into `out`, and return the keys of its config.json that are not ours.

    Without a `family` the model's code is transformers', and all keys of its config are written already.
    Numbers of tokens (`eos_token_id`) are left out where training took another tokenizer than the source's.
    """
    source = _source(state)
    if source is None:
        return Kept({}, "")
    try:
        config = read_config_file(source)
    except PpctlError:
        return Kept({}, f"no settings of {source}, because its {CONFIG} is not there any more")
    if family is not None and config.get("model_type") not in (family.model_type, *family.also):
        return Kept({}, f"no settings of {source}, because it is no {family.model_type} any more")
    keys = {} if family is None else foreign_keys(config, family)
    if not _takes_its_tokens(state, source):
        keys = {key: value for key, value in keys.items() if not key.endswith("_token_id")}
        return Kept(
            keys, f"{len(keys)} settings of {source}, none of them its tokens', because the tokenizer is another"
        )
    files = [CONFIG]
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, out / GENERATION)
        files.append(GENERATION)
    return Kept(keys, f"{len(keys)} settings of {source} ({', '.join(files)})")


def _source(state: Mapping[str, Any]) -> Path | None:
    """The directory with which training began, also where that was by way of other checkpoints."""
    *_, last = (None, *lineage(state))
    return None if last is None or (last / STATE).is_file() else last


def _takes_its_tokens(state: Mapping[str, Any], source: Path) -> bool:
    named = state.get("tokenizer_path")
    return named is None or source in (Path(named), Path(named).parent)


def tokenizer_path(name: str) -> str | None:
    """What a checkpoint remembers of `data.tokenizer`: where its files are, from anywhere; None for `byte`."""
    return None if name == "byte" else str(Path(name).expanduser().absolute())


def copy_tokenizer(state: Mapping[str, Any], out: Path) -> str:
    """Copy the files of the tokenizer that a checkpoint's state names into `out`; returns a line for people.

    A tokenizer.json alone gets a tokenizer_config.json that makes it be read as it is, with the mark that training took
    for a document's end: without one, a reader goes by the model's kind.
    """
    named = state.get("tokenizer_path")
    if named is None:
        return "no tokenizer, because training knew none that has files"
    path = Path(named)
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        return f"no tokenizer, because {file} is not there any more"
    shutil.copyfile(file, out / TOKENIZER)
    for other in _BESIDE:
        if (file.parent / other).is_file():
            shutil.copyfile(file.parent / other, out / other)
    if not (out / "tokenizer_config.json").exists():
        (out / "tokenizer_config.json").write_text(json.dumps(_config(file), indent=2) + "\n")
    return f"the tokenizer of {file.parent}"


def _config(file: Path) -> dict[str, str]:
    from ppctl.data.huggingface import HuggingFaceTokenizer

    end = HuggingFaceTokenizer.open(file).end_token
    return {"tokenizer_class": "PreTrainedTokenizerFast", **({} if end is None else {"eos_token": end})}

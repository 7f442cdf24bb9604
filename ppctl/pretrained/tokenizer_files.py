"""The tokenizer's files beside exported weights, so that a directory is a model that text can be put into.

Knows which files of a tokenizer's directory belong to it. Must not know weights or what trained them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppctl.families.directory import TOKENIZER

_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip


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

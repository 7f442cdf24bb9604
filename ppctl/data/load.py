"""From the `data` section of a config to what a run reads: samples to train on and samples held out.

Knows which keys name which data. Must not know steps, ranks or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ppctl.config.data_paths import quotas, read_sources
from ppctl.config.schema import DataConfig
from ppctl.data.blend import Blend
from ppctl.data.corpus import Corpus, load_corpus
from ppctl.data.huggingface import HuggingFaceTokenizer
from ppctl.data.tokenizer import ByteTokenizer, Tokenizer, end_mark
from ppctl.errors import DataError, Problem

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")

Samples = Corpus | Blend
"""What batches are drawn from."""


class DocumentEnd(NamedTuple):
    """The token that ends a document, and what follows from it (Megatron's names in `config.data`)."""

    token: int
    masks_loss: bool = False
    """What follows it is another document, which nothing foretells: that label does not count (eod_mask_loss)."""
    restarts_positions: bool = False
    """Positions count from 0 in every document (reset_position_ids)."""
    separates: bool = False
    """No token attends to another document, nor looks ahead into one (reset_attention_mask)."""


NO_END = DocumentEnd(-1)
"""Nothing follows from where a document ends: no token is searched for."""


class Data(NamedTuple):
    """What a run reads."""

    training: Samples
    held_out: Samples | None
    """What evaluation reads, if the config names any. No sample of it is among those trained on."""
    end: DocumentEnd
    """What ends a document, and what follows from it."""


def load_data(data: DataConfig) -> Data:
    """Read (or map) everything that `data` names. Raises DataError naming each file that is at fault."""
    tokenizer = load_tokenizer(data.tokenizer)
    end = document_end(data, tokenizer)
    if data.validation_path is not None:
        training, held_out = _every((data.path, data.validation_path), lambda path: load_samples(path, tokenizer))
        return Data(training, held_out, end)
    training = load_samples(data.path, tokenizer)
    if data.validation_split:
        kept, held_out = training.split(data.seq_length, data.validation_split)
        return Data(kept, held_out, end)
    return Data(training, None, end)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `byte`, or a directory with a tokenizer.json (or that file).

    Raises DataError where it cannot be read, ConfigError where the library for it is missing.
    """
    if name == "byte":
        return ByteTokenizer()
    return HuggingFaceTokenizer.open(Path(name).expanduser())


def document_end(data: DataConfig, tokenizer: Tokenizer) -> DocumentEnd:
    """What the config lets follow from documents' ends.

    Raises DataError (PP-E410) where something follows from a mark that the tokenizer does not name.
    """
    asked = of_document_ends(data)
    if not asked:
        return NO_END
    mark = end_mark(tokenizer, " and ".join(asked))
    return DocumentEnd(mark, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def of_document_ends(data: DataConfig) -> list[str]:
    """The keys that are on and let something follow from a document's end."""
    keys = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    return [f"data.{key}" for key in keys if getattr(data, key)]


def load_samples(path: str | list[Any] | None, tokenizer: Tokenizer) -> Samples:
    """The corpus that a value of `data.path` names, or the blend."""
    sources = read_sources(path)
    if not sources:
        return load_corpus(None, tokenizer)
    corpora = _every(sources, lambda source: load_corpus(source.path, tokenizer))
    weights = [source.weight for source in sources if source.weight is not None]
    return corpora[0] if len(corpora) == 1 else Blend(corpora, quotas(weights) if weights else None)


def _every(items: Iterable[Item], load: Callable[[Item], Loaded]) -> tuple[Loaded, ...]:
    """Each item loaded; a DataError with what is wrong with all of them."""
    found: list[Loaded] = []
    problems: list[Problem] = []
    for item in items:
        try:
            found.append(load(item))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(dict.fromkeys(problems))
    return tuple(found)

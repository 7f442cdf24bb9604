"""From a config's `data` section to the samples to train on and those held out, and the launcher's check of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ppctl.config.data_paths import quotas, read_sources
from ppctl.config.schema import DataConfig, RunConfig
from ppctl.config.training_config import CHAT, TEXT
from ppctl.data.blend import Blend
from ppctl.data.chat_template import ChatTemplate, open_template
from ppctl.data.conversation_rows import ConversationRows, make_rows
from ppctl.data.conversations import encode_conversations, kept_conversations
from ppctl.data.corpus import Corpus, load_corpus
from ppctl.data.indexed import as_prefix, bin_path
from ppctl.data.prompts import prompts_of
from ppctl.data.text import matching
from ppctl.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, end_mark
from ppctl.errors import DataError, PpctlError, Problem
from ppctl.host.files import cache_directory, expanded

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


class DocumentEnd(NamedTuple):
    """The token that ends a document, and its effects (Megatron's names in `config.data`)."""

    token: int
    masks_loss: bool = False
    """Whether the label after the end does not count: nothing predicts the next document (eod_mask_loss)."""
    restarts_positions: bool = False
    """Whether positions count from 0 in every document (reset_position_ids)."""
    separates: bool = False
    """Whether no token attends to another document, or predicts tokens of a later one (reset_attention_mask)."""


NO_END = DocumentEnd(-1)
"""No effects of documents' ends: no token is searched for."""


class Data(NamedTuple):
    """The data of a run."""

    training: Blend
    held_out: Blend | None
    """The samples of evaluation, if the config names any; none of them is trained on."""
    end: DocumentEnd
    """The token that ends a document, and what follows from it."""


def load_data(data: DataConfig) -> Data:
    """Read (or map) everything that `data` names. Raises DataError naming each file that is at fault."""
    tokenizer = load_tokenizer(data.tokenizer)
    end = document_end(data, tokenizer)
    load = loader_of(data, tokenizer)
    if data.validation_path is not None:
        training, held_out = load_all((data.path, data.validation_path), lambda path: load_samples(path, load))
        return Data(training, held_out, end)
    training = load_samples(data.path, load)
    if data.validation_split:
        kept, held_out = training.split(data.seq_length, data.validation_split)
        return Data(kept, held_out, end)
    return Data(training, None, end)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `byte`, or a directory with a tokenizer.json (or that file). Raises
    DataError if it cannot be read, ConfigError if the library for it is missing."""
    if name == "byte":
        return ByteTokenizer()
    return HuggingFaceTokenizer.open(expanded(name))


def document_end(data: DataConfig, tokenizer: Tokenizer) -> DocumentEnd:
    """The token that ends a document, and the effects that the config gives it. Raises DataError (PP-E410) if there are
    effects but the tokenizer names no such token."""
    asked = of_document_ends(data)
    if not asked:
        return NO_END
    if data.format != TEXT:  # rows know where their conversations end
        return NO_END._replace(restarts_positions=data.reset_position_ids, separates=data.reset_attention_mask)
    mark = end_mark(tokenizer, " and ".join(asked))
    return DocumentEnd(mark, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def of_document_ends(data: DataConfig) -> list[str]:
    """The switched-on keys that give a document's end effects."""
    keys = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    return [f"data.{key}" for key in keys if getattr(data, key)]


def loader_of(data: DataConfig, tokenizer: Tokenizer) -> Callable[[str | None], Corpus | ConversationRows]:
    """Return the function that reads one path of `data.path`, as `data.format` says. Raises as `open_template`."""
    cache = None if data.cache is None or data.tokenizer == "byte" else expanded(data.cache)
    if data.cache == "auto" and cache is not None:
        cache = cache_directory() / "tokens"
    if data.format == TEXT:
        return lambda path: load_corpus(path, tokenizer, data.text_key, cache)
    template = open_template(data.tokenizer, data.chat_template) if data.format == CHAT else None
    return lambda path: load_conversations(path, data, tokenizer, template, cache)


def load_conversations(
    path: str | None, data: DataConfig, tokenizer: Tokenizer, template: ChatTemplate | None, cache: Path | None
) -> ConversationRows:
    """The rows of the files that one path names. Raises DataError as `encode_conversations` and `make_rows`."""
    prefix = None if path is None else as_prefix(path)
    if path is None or prefix is not None:
        message = f"data.format={data.format} reads .jsonl files and tables, but data.path={path} names none"
        raise DataError(Problem("PP-E418", message, "data.path='chats/*.jsonl'", place=str(bin_path(prefix or ""))))
    files, description = matching(path)
    kept = kept_conversations(files, tokenizer, template, cache)
    with suppress(DataError):
        return make_rows(kept, description, data, tokenizer)
    placed = list(encode_conversations(files, tokenizer, template))  # for messages
    return make_rows(placed, description, data, tokenizer)


def load_samples(path: str | list[Any] | None, load: Callable[[str | None], Corpus | ConversationRows]) -> Blend:
    """The corpora that a value of `data.path` names, with their proportions. Raises DataError with all problems."""
    sources = read_sources(path)
    if not sources:
        return Blend((load(None),))
    corpora = load_all(sources, lambda source: load(source.path))
    weights = [source.weight for source in sources if source.weight is not None]
    return Blend(corpora, quotas(weights) if weights and len(corpora) > 1 else None)


def load_all(items: Iterable[Item], load: Callable[[Item], Loaded]) -> tuple[Loaded, ...]:
    """The result of `load` for each item. Raises DataError with the problems of all items, once all are tried."""
    loaded: list[Loaded] = []
    problems: list[Problem] = []
    for item in items:
        try:
            loaded.append(load(item))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(dict.fromkeys(problems))
    return tuple(loaded)


# Before a run


def examine(config: RunConfig) -> tuple[dict[str, Any], list[Problem]]:
    """(the record of the data for env.json, the data's problems). Reads all text, maps the rest, and checks tokens
    against the vocabulary as the ranks will (`check_vocabulary`)."""
    try:
        data = load_data(config.data)
    except PpctlError as error:
        return {}, list(error.problems)
    problems = list(_unmarked(data, config))
    try:
        prompts_of(config, load_tokenizer(config.data.tokenizer))
    except PpctlError as error:
        problems += error.problems
    training = _record(data.training, config, problems)
    held_out = None if data.held_out is None else _record(data.held_out, config, problems)
    return training | {"held_out": held_out}, list(dict.fromkeys(problems))


def _unmarked(data: Data, config: RunConfig) -> Iterator[Problem]:
    for corpus in data.training.corpora:
        if isinstance(corpus, Corpus) and data.end != NO_END and not corpus.holds(data.end.token):
            asked = of_document_ends(config.data)
            message = (
                f"no document ends in the data: it holds no token {data.end.token}, so {' and '.join(asked)} would do "
                "nothing; `ppctl data tokenize --append-eod` writes one after every document"
            )
            yield Problem("PP-E416", message, " ".join(f"{key}=false" for key in asked), corpus.description)


def _record(samples: Blend, config: RunConfig, problems: list[Problem]) -> dict[str, Any]:
    number = 0
    try:
        number = samples.num_samples(config.data.seq_length)
    except PpctlError as error:
        problems += error.problems
    try:
        samples.check_vocabulary(config.model.vocab_size)
    except PpctlError as error:
        problems += error.problems
    return {"description": samples.description, "digest": samples.digest, "samples": number}

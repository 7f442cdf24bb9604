"""The forms of `data.path`: one path, or a blend of several with weights, in Megatron's spelling.

texts/**/*.txt                    text, by name or glob
corpus/web                        a prefix: corpus/web.bin and corpus/web.idx
[0.3,corpus/web,0.7,corpus/code]  a blend: weight, path, weight, path
[corpus/web,corpus/code]          as if they were one: each sample is as likely as any other
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ppctl.config.keys import Finding, as_typed
from ppctl.config.schema import DataConfig, RunConfig
from ppctl.config.training_config import TEXT

LONGEST_CYCLE = 65536
"""Largest number of samples in a blend's cycle, in which each source has at least one sample."""


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """A finding for each rule on `data` and on evaluation that the config breaks."""
    data = config.data
    for key, value in (("data.path", data.path), ("data.validation_path", data.validation_path)):
        try:
            read_sources(value)
        except ValueError as error:
            yield (key,), str(error), f"{key}=null"
    if data.validation_path is not None and data.validation_split:
        keys = ("data.validation_split", "data.validation_path")
        yield keys, "evaluation reads data.validation_path or a share of data.path, not both", "data.validation_split=0"
    yield from _conversations(data)
    yield from _evaluation(config)


def _conversations(data: DataConfig) -> Iterator[Finding]:
    if data.format == TEXT:
        if data.text_key != TEXT and data.path is None:
            message = "data.text_key applies to .jsonl files; without data.path ppctl reads plain text"
            yield ("data.text_key", "data.path"), message, f"data.text_key={TEXT}"
        return
    if data.path is None:
        message = f"data.format={data.format} reads .jsonl files; without data.path ppctl reads plain text"
        yield ("data.path", "data.format"), message, "data.path='chats/*.jsonl'"
    apart = data.reset_attention_mask, data.reset_position_ids
    if apart != (data.pack, data.pack):
        keys = ("data.pack", "data.reset_attention_mask", "data.reset_position_ids")
        why = "packed conversations must be kept separate" if data.pack else "unpacked, a row is one conversation"
        message = f"{why}: these three keys must be all true or all false"
        yield keys, message, " ".join(f"{key}={str(any(apart) or data.pack).lower()}" for key in keys)


def _evaluation(config: RunConfig) -> Iterator[Finding]:
    data, train = config.data, config.train
    if train.eval_interval > 0:
        if data.validation_path is None and not data.validation_split:
            keys = ("train.eval_interval", "data.validation_split", "data.validation_path")
            message = "an evaluation needs data.validation_path or data.validation_split, but neither is set"
            yield keys, message, "data.validation_split=0.05"
        if not train.eval_steps:
            message = "an evaluation needs at least one batch"
            yield ("train.eval_steps", "train.eval_interval"), message, "train.eval_steps=8"
        return
    for name, unset in (("train.eval_steps", 0), ("data.validation_path", None)):
        if config[name] != unset:
            message = "with train.eval_interval=0 there is no evaluation"
            yield (name, "train.eval_interval"), message, as_typed(name, unset)


class DataSource(NamedTuple):
    """One part of a blend; without a weight its share is its number of samples."""

    path: str
    weight: Fraction | None = None


def read_sources(value: str | Sequence[Any] | None) -> tuple[DataSource, ...]:
    """The sources that a value of `data.path` names; none for None. Raises ValueError saying what is wrong."""
    if value is None:
        return ()
    if isinstance(value, str):
        text = value.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return (DataSource(value),)
        value = [word.strip().strip("'\"") for word in text[1:-1].split(",")]
    if not value or any(item in ("", None) for item in value):
        raise ValueError("a blend lists weights and paths, but one of them is empty")
    if str(value[0]).startswith("{"):
        raise ValueError("a blend is weight, path, weight, path, such as [0.3,a,0.7,b], not mappings")
    if _number(value[0]) is None:
        return tuple(DataSource(_path(item)) for item in value)
    if len(value) % 2:
        raise ValueError(f"a blend is weight, path, weight, path; {_path(value[-1])} has no partner")
    sources = [(_path(path), _weight(w)) for w, path in zip(value[::2], value[1::2], strict=True)]
    quotas([weight for _, weight in sources])
    return tuple(DataSource(*source) for source in sources)


def quotas(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """How many samples of each source one cycle of the blend holds. Exact if the weights have a common denominator of
    at most LONGEST_CYCLE, else the nearest that a cycle of that length allows. Raises ValueError for a weight so small
    that its source would never be read."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_CYCLE:
        return tuple(int(share * length) for share in shares)
    exact = [share * LONGEST_CYCLE for share in shares]
    counts = [math.floor(number) for number in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: LONGEST_CYCLE - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        least = float(min(weights))
        raise ValueError(f"a weight of {least:g} is less than one sample in {LONGEST_CYCLE}: leave that path out")
    return tuple(counts)


def _path(item: Any) -> str:
    if not isinstance(item, str) or _is_number(item):
        raise ValueError(f"a blend is weight, path, weight, path; {item} is in the place of a path")
    return item


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _weight(item: Any) -> Fraction:
    weight = _number(item)
    if weight is None or not weight > 0:
        raise ValueError(f"a weight is a number greater than 0, not {item}")
    return weight


def _number(item: Any) -> Fraction | None:
    """The exact value of what was written, so that 0.1 is a tenth; None if it is no finite number."""
    if isinstance(item, bool) or not isinstance(item, int | float | str):
        return None
    try:
        value = float(item)
        if not math.isfinite(value):
            return None
        # the exact value of 1e-999999999 would have a billion digits
        return Fraction(str(item)) if value else Fraction(0)
    except (ValueError, OverflowError):
        return None

"""A look at a run's data before any rank starts: a record of it, and all problems that would stop the run.

Knows what training asks of its data. Must not know torch: the launcher calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppctl.config.schema import RunConfig
from ppctl.data.blend import Blend
from ppctl.data.corpus import Corpus
from ppctl.data.load import NO_END, Data, load_data, of_document_ends
from ppctl.errors import PpctlError, Problem


def examine(config: RunConfig) -> tuple[dict[str, Any], list[Problem]]:
    """What env.json says of the data, and its problems.

    Reads all text and maps the rest; looks for tokens beyond the vocabulary as the ranks will (`check_vocabulary`).
    """
    try:
        data = load_data(config.data)
    except PpctlError as error:
        return {}, list(error.problems)
    problems = list(_unmarked(data, config))
    training = _record(data.training, config, problems)
    held_out = None if data.held_out is None else _record(data.held_out, config, problems)
    return training | {"held_out": held_out}, list(dict.fromkeys(problems))


def _unmarked(data: Data, config: RunConfig) -> Iterator[Problem]:
    """A problem for each corpus without a document's end, although something is to follow from it."""
    for corpus in data.training.corpora:
        if isinstance(corpus, Corpus) and data.end != NO_END and not corpus.holds(data.end.token):
            asked = of_document_ends(config.data)
            message = (
                f"no document ends in the data: it holds no token {data.end.token}, and {' and '.join(asked)} would do "
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

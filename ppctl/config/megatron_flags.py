"""Flags of Megatron's `pretrain_gpt` that are no keys, from the page `megatron_flags`, and how its defaults differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppctl.config import name_tables

TABLES = name_tables.tables("megatron_flags")
LATER, MEANINGLESS, WRITE = (
    TABLES.entries[heading] for heading in (name_tables.LATER, name_tables.MEANINGLESS, name_tables.OTHERWISE)
)
"""A feature that this release does not have, why nothing follows from a flag here, and the key by which something like
it is said -> the flags."""

FIXED = {flag: entry for entry, flags in TABLES.entries[name_tables.SAME].items() for flag in flags.split()}
"""Flags of other systems that mean one value of a key -> the override; of several keys, with blanks between."""

SEVERAL = (
    "--cuda-graph-scope --cuda-graph-modules --gtp-remat-opt-in-modules --mrope-section --offload-modules "
    "--rl-inference-parsers --profile-ranks --iterations-to-skip --high-priority-stream-groups "
    "--ddp-param-name-patterns-for-fp32-local-accumulation --validation-set-names --tokenizer-special-tokens "
    "--test-data-path --retriever-report-topk-accuracies --spec"
)
"""The flags above that take one value or more."""


def _feed_forward(given: Mapping[str, str]) -> str:
    """Four times the width; with a gate two thirds of it, rounded down to a multiple of 64. Empty for no number."""
    width, gated = given["model.hidden_size"], given.get("model.gated_linear_unit") == "true"
    if not width.isdigit():
        return ""
    return str(int(4 * int(width) * 2 / 3) // 64 * 64 if gated else 4 * int(width))


DEFAULTS = [
    (key, value, where)
    for entry, value in TABLES.entries[name_tables.DEFAULTS].items()
    for key, _, where in [entry.partition(" ")]
]
"""A key, Megatron's default of it as text, and a key that has to be set for it to matter."""


def defaults_left(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(key, Megatron's default) of the keys that a command line with the values `given` leaves at another default."""
    for key, theirs, where in DEFAULTS:
        value = _feed_forward(given) if theirs == "computed" and where in given else theirs
        if key not in given and (not where or where in given) and value:
            yield key, value

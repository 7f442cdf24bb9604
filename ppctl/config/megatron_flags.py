"""The flags of Megatron's `pretrain_gpt` that set no key: why each is left out, and how Megatron's defaults differ.

The flags and the reasons are a page for people, `ppctl/pages/megatron_flags.md`, which is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def _read_page() -> list[dict[str, str]]:
    """The tables of the page, in order: each entry and the flags that it is about, with blanks between them."""
    page = Path(__file__).resolve().parent.parent / "pages" / "megatron_flags.md"
    tables = []
    for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = (entry.split("\n", 1) for entry in section.split("\n* ")[1:])
        tables.append({entry: " ".join(flags.split()) for entry, flags in rows})
    return tables


LATER, MEANINGLESS, WRITE = _read_page()
"""A feature that this release does not have, why nothing follows from a flag here, and the key by which something like
it is said -> the flags."""

SEVERAL = (
    "--cuda-graph-scope --cuda-graph-modules --gtp-remat-opt-in-modules --mrope-section --offload-modules "
    "--rl-inference-parsers --profile-ranks --iterations-to-skip --high-priority-stream-groups "
    "--ddp-param-name-patterns-for-fp32-local-accumulation --validation-set-names --tokenizer-special-tokens "
    "--test-data-path --retriever-report-topk-accuracies --spec"
)
"""The flags above that take one value or more."""


def found_in(table: dict[str, str], flag: str) -> str | None:
    """The entry of one of the tables that lists `flag`, by name or by how it begins."""
    return next((entry for entry, flags in table.items() if any(_means(name, flag) for name in flags.split())), None)


def _means(name: str, flag: str) -> bool:
    head, star, tail = name.partition("*")
    return flag.startswith(head) and flag.endswith(tail) and len(flag) >= len(head + tail) if star else flag == name


def _feed_forward(given: Mapping[str, str]) -> int | None:
    """Four times the width; with a gate two thirds of it, rounded down to a multiple of 64."""
    width = given["model.hidden_size"]
    if not width.isdigit():
        return None
    gated = given.get("model.gated_linear_unit") == "true"
    return int(4 * int(width) * 2 / 3) // 64 * 64 if gated else 4 * int(width)


DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("model.ffn_hidden_size", _feed_forward, "model.hidden_size"),
    ("model.make_vocab_size_divisible_by", 128, ""),
    ("model.hidden_dropout", 0.1, ""),
    ("model.attention_dropout", 0.1, ""),
    ("model.normalization", "LayerNorm", ""),
    ("model.position_embedding_type", "learned_absolute", ""),
    ("model.gated_linear_unit", False, ""),
    ("model.add_bias_linear", True, ""),
    ("model.share_embeddings_and_output_weights", True, ""),
    ("model.kv_lora_rank", 32, "model.multi_latent_attention"),
    ("model.rotary_scaling_factor", 8, "model.rotary_scaling_type"),
    ("optim.lr_decay_style", "linear", ""),
    ("optim.beta2", 0.999, ""),
    ("optim.weight_decay", 0.01, ""),
    ("data.validation_split", 0.03, "data.path"),
    ("train.eval_steps", 100, "train.eval_interval"),
    ("checkpoint.keep", 0, ""),
)
"""A key, Megatron's default of it (or what makes it of the keys and values that are set), and a key that has to be set
for it to matter. Source: Megatron-LM's argument parser, August 2026."""


def defaults_left(given: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(key, Megatron's default) of the keys that a command line with the values `given` leaves at another default."""
    for key, theirs, where in DEFAULTS:
        if key not in given and (not where or where in given):
            value = theirs(given) if callable(theirs) else theirs
            if value is not None:
                yield key, value

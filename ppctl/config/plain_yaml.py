"""YAML as ppctl writes it: mappings, lists and values, without the names by which a small file has no end.

Must not know files, nor what the keys mean.
"""

from __future__ import annotations

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST, _MOST = 32, 2**16


def parse(text: str) -> dict[str, Any]:
    """The mapping in a text. Raises ValueError for anything else."""
    depth = 0
    try:
        # Before anything is built: what builds it calls itself for every level, in C.
        for number, event in enumerate(yaml.parse(text, _LOADER)):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"*{event.anchor}: ppctl writes no aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or number > _MOST:
                raise ValueError("it is nested too deeply, or has too many values")
        tree = yaml.load(text, _LOADER)
    except (yaml.YAMLError, TypeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError("it holds no mapping of keys")
    return tree

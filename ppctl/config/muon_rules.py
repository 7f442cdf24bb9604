"""What Muon cannot be combined with: it needs a weight, its gradient and its momentum whole on one rank.

Must not know how an update is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import as_typed, text_keys, value_of
from ppctl.config.schema import RunConfig

NAME = "optim.name"
_ALONE = "optim.muon_"


def broken_rules(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(keys, what is wrong, remedy) of what splits matrices, and of Muon's keys beside another optimizer."""
    if config.optim.name != "muon":
        for name, info in text_keys().items():
            if name.startswith(_ALONE) and value_of(config, name) != info.default:
                message = f"{name} is a key of Muon alone, and {NAME} is {config.optim.name}"
                yield (name, NAME), message, f"{as_typed(name, info.default)}\n{NAME}=muon"
        return
    parallel = config.parallel
    for axis in ("tensor_model", "expert_tensor"):
        key = f"parallel.{axis}_parallel_size"
        if (getattr(parallel, f"{axis}_parallel_size") or 1) > 1:
            yield (key, NAME), "Muon needs whole matrices, and tensor parallelism splits them", f"{key}=1\n{NAME}=adamw"
    if config.model.lora:
        message = "Muon orthogonalises whole weights, and of these adapters are a product of two factors"
        yield (NAME, "model.lora"), message, f"{NAME}=adamw"

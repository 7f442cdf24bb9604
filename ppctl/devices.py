"""Which kind of device the ranks of one machine take.

Knows the rule alone. Must not know how GPUs are counted (the launcher asks the driver, a rank asks torch), nor configs.
"""

from __future__ import annotations


def device_type(asked: str, gpus: int, ranks: int) -> str:
    """`cuda` or `cpu` for all `ranks` of a machine that has `gpus`; `asked` is one of them, or `any`.

    `any` is cuda where every rank has a GPU of its own. The answer is the same for every rank of a machine: were each
    to look for its own GPU alone, the first ranks would wait in NCCL for others that are on gloo.
    """
    if asked != "any":
        return asked
    return "cuda" if gpus >= ranks else "cpu"

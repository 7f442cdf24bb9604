"""Which kind of device the ranks of one machine use.

Knows the rule alone. Must not know how GPUs are counted (the launcher asks the driver, a rank asks torch), nor configs.
"""

from __future__ import annotations


def machines(nodes: int | None, per_node: int | None, world: int) -> tuple[int, int]:
    """(machines, ranks on each) of `world` ranks, where one of the two numbers, or both, may be left open."""
    if nodes is None:
        nodes = 1 if per_node is None else -(-world // per_node)
    return nodes, -(-world // nodes) if per_node is None else per_node


def device_type(asked: str, gpus: int, ranks: int) -> str:
    """`cuda` or `cpu`, for all `ranks` of a machine with `gpus`; `asked` is one of these, or `any`.

    `any` is cuda if every rank has a GPU of its own. All ranks of a machine get the same: if each one looked for its
    own GPU alone, the first ranks would wait in NCCL for others that use gloo.
    """
    if asked != "any":
        return asked
    return "cuda" if gpus >= ranks else "cpu"

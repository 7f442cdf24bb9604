"""Megatron's P2P vectors on real ranks: one rank makes the recorded call, the others are its other ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ppctl.megatron.p2p_communication import P2PCommunicator, is_single_shape

GOLDEN = Path(__file__).parents[1] / "golden" / "p2p.json"
RECORDS = dict(enumerate(json.loads(GOLDEN.read_text())["records"]))
METHODS = {i: r for i, r in RECORDS.items() if r["fn"].startswith("P2PCommunicator.")}


def changed(record):
    """What ppctl gives on purpose where Megatron gives something else (DESIGN section 3); None for other records."""
    if not record["ok"] or record["fn"].partition(".")[2] not in ("send_forward_recv_backward", SEND_BACKWARD):
        return None
    tensors, shapes, end = record["args"]["positional"]
    if end or shapes is None:
        return None
    (kind, items), *_ = shapes.items()
    # EDGE, facts 3.5: a flat list is one shape, where the original takes it for several and receives the first number.
    flat = kind != "list" or (items and all(isinstance(item, int) for item in items))
    if flat and kind == "list" and "tensor" in tensors:
        return record["result"] | {"tensor": items}
    # EDGE, facts 3.5: surplus tensors or shapes are an error, where the original drops them.
    return "MessageError" if len(tensors.get("list", [0])) != (1 if flat else len(items)) else None


SEND_BACKWARD = "send_backward_recv_forward"
CHANGED = {i: wanted for i, record in METHODS.items() if (wanted := changed(record)) is not None}

FOUR = "send_forward_backward_recv_forward_backward"
MOVES = {
    "recv_forward": ("recv_prev",),
    "recv_backward": ("recv_next",),
    "send_forward": ("send_next",),
    "send_backward": ("send_prev",),
    "send_forward_recv_backward": ("send_next", "recv_next"),
    "send_backward_recv_forward": ("send_prev", "recv_prev"),
    "send_forward_recv_forward": ("send_next", "recv_prev"),
    "send_backward_recv_backward": ("send_prev", "recv_next"),
    FOUR: ("send_next", "send_prev", "recv_prev", "recv_next"),
}
"""What each method moves, in the order of its tensors."""

OPPOSITE = {"send_next": "recv_prev", "send_prev": "recv_next", "recv_prev": "send_next", "recv_next": "send_prev"}


def config_of(record):
    fields = dict(batch_p2p_comm=True, batch_p2p_sync=True, overlap_p2p_comm=False, pipeline_dtype=torch.float32)
    given = dict(record["args"]["config"])
    if given.pop("dtype_none", False):
        fields["pipeline_dtype"] = None
    return SimpleNamespace(**fields | given)


def build(value):
    """A recorded argument. Tensors are filled with their number of elements."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.full(value["tensor"], float(len(value["tensor"])), requires_grad=value["requires_grad"])
    (kind, items), *_ = value.items()
    return {"tuple": tuple, "list": list, "Size": torch.Size}[kind](build(item) for item in items)


def shown(value):
    """A result in the recorded form."""
    if isinstance(value, torch.Tensor):
        return {"tensor": list(value.shape), "requires_grad": value.requires_grad, "dtype": str(value.dtype)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [shown(item) for item in value]}
    if isinstance(value, dict):
        for handle in value.values():
            handle.wait()
        return {"dict": dict.fromkeys(sorted(value), "Req")}
    return value


def tensors_in(shown_value):
    """The tensors of a recorded value, in order."""
    if isinstance(shown_value, dict) and "tensor" in shown_value:
        return [shown_value]
    if isinstance(shown_value, dict):
        items = next(iter(shown_value.values()))
        return [t for item in (items if isinstance(items, list) else []) for t in tensors_in(item)]
    return []


def steps(index, record):
    """What travels in the call: a list of {move: shape}, one entry for each single exchange."""
    expected = CHANGED.get(index, record.get("result"))
    if not record["ok"] or isinstance(expected, str):
        return []
    method = record["fn"].partition(".")[2]
    arguments = record["args"]["positional"]
    if method in list(MOVES)[:6] and arguments[-1] is True:  # the end of the pipeline: nothing travels
        return []
    sent = [t["tensor"] for argument in arguments for t in tensors_in(argument)]
    got = [t["tensor"] for t in tensors_in(expected)]
    sends = [move for move in MOVES[method] if move.startswith("send")]
    receives = [move for move in MOVES[method] if move.startswith("recv")]
    if len(sends) == 2:
        return [dict(zip((*sends, *receives), (*sent, *got), strict=True))]
    sends, receives = sends * bool(sent), receives * bool(got)
    count = max(len(sent), len(got))
    sent, got = sent or [None] * count, got or [None] * count
    return [
        {move: shape for move, shape in ((*sends, a), (*receives, b)) if shape is not None}
        if sends and receives
        else {(sends or receives)[0]: a or b}
        for a, b in zip(sent, got, strict=True)
    ]


def other_end(communicator, record, moves):
    """The other end of one exchange, if this rank is one. Returns the shapes of what it received."""
    rank, size, caller = communicator.current_stage, communicator.total_stages, record["args"]["pp_rank"]
    peers = {"next": (caller + 1) % size, "prev": (caller - 1) % size}
    mine = {OPPOSITE[move]: shape for move, shape in moves.items() if peers[move[5:]] == rank}
    if not mine:
        return []
    tensors = {move: torch.full(shape, 7.0) for move, shape in mine.items() if move.startswith("send")}
    receiving = [shape for move, shape in mine.items() if move.startswith("recv")]
    got = getattr(communicator, FOUR)(
        tensors.get("send_next"),
        tensors.get("send_prev"),
        "recv_prev" in mine,
        "recv_next" in mine,
        tuple(receiving[0] if receiving else ()),
    )
    return [list(t.shape) for t in got if t is not None and (t == len(t.shape)).all()]


def replay(indices):
    """On every rank: the caller's results, and what the other ends received, by record."""
    outcomes = {}
    for index in indices:
        record = METHODS[index]
        communicator = P2PCommunicator(dist.group.WORLD, config_of(record))
        if dist.get_rank() == record["args"]["pp_rank"]:
            outcomes[index] = called(communicator, record)
        else:
            outcomes[index] = [s for moves in steps(index, record) for s in other_end(communicator, record, moves)]
    return outcomes


def called(communicator, record):
    """The recorded call: its result and whether values came from the other end, or the names of its error's classes."""
    method = getattr(communicator, record["fn"].partition(".")[2])
    arguments = [build(value) for value in record["args"]["positional"]]
    try:
        result = method(*arguments, **record["args"]["keyword"])
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    form = shown(result)
    tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, torch.Tensor)]
    value = 7.0 if communicator.total_stages > 1 else 3.0
    return form, all(bool((t == value).all()) for t in tensors)


def single_shape(text):
    return is_single_shape(eval(text, {"torch": torch}))

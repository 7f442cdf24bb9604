"""The measurements of one rehearsed rank, which its process hands to the command that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

FORWARD, BACKWARD, MESSAGE, STEP = PHASES = ("forward", "backward", "message", "step")
"""Activities of a rank; `step` is all around the schedule. The others grow with the number of microbatches."""


@dataclass(frozen=True, slots=True)
class HostWait:
    """A line at which the host would wait for the device."""

    file: str
    line: int
    during: str
    """One of PHASES."""
    count: int


@dataclass(frozen=True, slots=True)
class MeasuredTraffic:
    """Messages or collectives of one kind over one group in a step."""

    kind: str
    group: str
    during: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Operations:
    """Torch's operations in a step."""

    during: str
    count: int
    launches: int
    """Operations that launch a kernel, which are all that make or change values on the device."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Kernels of all layers of one kind in a step, of their forwards or of their backwards."""

    kind: str
    """`decoder`, `decoder with experts`, `mtp`, ..."""
    during: str
    """FORWARD or BACKWARD; the second forward of what is recomputed is a part of the backward."""
    passes: int
    """Layers times microbatches: divided by it, the counts are those of one layer and microbatch."""
    kernels: int
    """Operations of torch's that launch one; exchanges between ranks are none."""
    others: int
    """The operations that are neither products nor attention."""
    other_bytes: int
    """Bytes that the other operations read and write, each operand and result once."""
    host_waits: int

    COUNTED: ClassVar = ("kernels", "others", "other_bytes", "host_waits")
    """The fields after `passes`, in their order."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one microbatch on a stage, the state of which is not counted."""

    stage: int
    kept: int
    """From its forward to its backward."""
    in_forward: int
    """At most, beside what was there when its forward began."""
    in_backward: int
    """At most, beside what was there when its backward began."""
    received: int = 0
    """The part of `kept` that is the received message, whose memory returns to a pool."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An action of the list: bytes at its end, and the most since the one before."""

    index: int
    bytes: int
    most: int


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One rank, measured over one step."""

    rank: int
    weight_bytes: int
    """At most: `full` sharding holds them only while a stage computes."""
    gradient_bytes: int
    """At most."""
    optimizer_bytes: int
    peak_bytes: int
    """Peak of what the rank's own code allocates; workspaces of libraries are not seen."""
    peak_action: str
    """The action at the peak; `update` after the schedule."""
    stages: tuple[StageMemory, ...]
    moments: tuple[Moment, ...]
    in_update: int
    """The most bytes after the schedule: sums, norm, clipping and the optimizer."""
    host_waits: tuple[HostWait, ...]
    operations: tuple[Operations, ...]
    traffic: tuple[MeasuredTraffic, ...]
    seconds: float
    """The step took here."""
    layers: tuple[LayerKernels, ...] = ()
    """By kind of layer; empty for a model whose layers are not called as modules."""

"""The measurements of one rehearsed rank, which its process hands to the command that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

FORWARD, BACKWARD, MESSAGE, STEP = PHASES = ("forward", "backward", "message", "step")
"""Activities of a rank; `step` is everything outside the schedule. The others grow with the number of microbatches."""


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
    """Operations that launch a kernel: all that make or change values on the device."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Kernels of all layers of one kind in a step, of their forwards or of their backwards."""

    kind: str
    """`decoder`, `decoder with experts`, `mtp`, ..."""
    during: str
    """FORWARD or BACKWARD; a recomputed forward counts as backward."""
    passes: int
    """Layers times microbatches: what to divide a count by for one layer and one microbatch."""
    kernels: int
    """torch's operations that launch a kernel, without exchanges between ranks."""
    others: int
    """The operations that are neither products nor attention."""
    other_bytes: int
    """Bytes that the other operations read and write, each operand and result once."""
    host_waits: int

    COUNTED: ClassVar = ("kernels", "others", "other_bytes", "host_waits")
    """The fields after `passes`, in their order."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one microbatch on a stage, without the stage's state."""

    stage: int
    kept: int
    """From its forward to its backward."""
    in_forward: int
    """The most further bytes while the forward runs."""
    in_backward: int
    """The most further bytes while the backward runs."""
    received: int = 0
    """The part of `kept` that is the received message, whose memory returns to a pool."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory at an action of the list: bytes at its end, and the most since the previous action's end."""

    index: int
    bytes: int
    most: int


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One rank, measured over one step."""

    rank: int
    weight_bytes: int
    """The most bytes of weights: `full` sharding holds them only while a stage computes."""
    gradient_bytes: int
    """The most bytes of gradients."""
    optimizer_bytes: int
    peak_bytes: int
    """The peak of bytes that the rank's own code allocates, without libraries' workspaces."""
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
    """Seconds of the step on this machine."""
    layers: tuple[LayerKernels, ...] = ()
    """By kind of layer; empty for a model whose layers are not called as modules."""

"""The values that a plan consists of: a stage, its messages, a rank's costs, an equation; each with its JSON."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from ppctl.geometry.layers import Layer
from ppctl.records.json_reader import read
from ppctl.schedule.action import Schedule


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of one level of a dataclass; `asdict` copies every leaf and takes ten times as long."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


_Price = TypeVar("_Price")
_Stage = TypeVar("_Stage")


def once_a_kind(kinds: Sequence[Hashable], stages: Sequence[_Stage], price: Callable[[_Stage], _Price]) -> list[_Price]:
    """The price of every stage; stages of one kind (`geometry.layers.alike`) are priced once."""
    known = {kind: price(stage) for kind, stage in dict(zip(kinds, stages, strict=True)).items()}
    return [known[kind] for kind in kinds]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype name (`float32`, `bfloat16`) of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: its layers and messages, enough to build it."""

    stage: int
    pp_rank: int
    vpp_rank: int
    layers: tuple[Layer, ...]
    """In model order: embedding, decoder, mtp, loss; empty for a stage that only passes messages on."""
    receives: tuple[TensorSpec, ...]
    """The activation message that comes in (empty on the first stage); its gradient goes back in the same shape."""
    sends: tuple[TensorSpec, ...]
    params: int
    """Parameters built here, tied copies included."""
    replicated_params: int
    """How many of these are tied copies of a parameter with an earlier use (tied output, MTP's embedding)."""
    flops_forward: int
    """Model FLOPs of one microbatch's forward (matrix products; causal attention halved; active experts only)."""
    flops_backward: int | None = None
    """Operations of a backward if some weights are frozen; None: twice the forward's."""

    @property
    def flops(self) -> int:
        """Model FLOPs of one microbatch's forward and backward, without recomputation."""
        return self.flops_forward + (2 * self.flops_forward if self.flops_backward is None else self.flops_backward)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the layers by name."""
        edges = {edge: [fields_of(spec) for spec in getattr(self, edge)] for edge in ("receives", "sends")}
        entries = {**fields_of(self), "layers": list(map(str, self.layers)), **edges}
        return {key: value for key, value in entries.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RankCost:
    """Bytes that one pp_rank holds, per device."""

    pp_rank: int
    params: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """The peak of activations over the schedule of this rank."""
    peak_bytes: int
    in_flight: int
    """Most (stage, microbatch) activations alive at once, from the start of F to the end of B (or of W)."""
    buffer_bytes: int = 0
    """Permanent bytes beside state: the libraries' workspaces, buffers of the chunks."""
    message_bytes: int = 0
    """Receives that are posted ahead, at the channels' capacities."""
    host_bytes: int = 0
    """The peak of offloaded activations in host memory."""

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


class Exchange(NamedTuple):
    """The exchanges of one kind along one axis that a rank makes in a step."""

    axis: str
    kind: str
    """A collective by torch's name, or `send`."""
    number: int
    bytes: int
    """Bytes sent in a ring: other ranks' parts for a gather or a scatter, twice as many for an all_reduce."""


class DeviceLimit(NamedTuple):
    """Bytes of a device that one rank may use."""

    limit_bytes: int
    """Memory of the device; if ranks share it, one rank's part."""
    reserve_bytes: int
    """Reserved for memory outside torch: CUDA's context, communicators."""
    ranks: int = 1
    """How many ranks share the device."""

    @property
    def available_bytes(self) -> int:
        """Bytes for a plan's peak; below 0 if the reserve is larger than the device."""
        return self.limit_bytes - self.reserve_bytes

    def is_tight(self, peak_bytes: int) -> bool:
        """Whether a peak that fits leaves less than 5 % free: plans do not count fragmentation."""
        return self.available_bytes >= peak_bytes > 0.95 * self.available_bytes


class StageCost(NamedTuple):
    """One microbatch on one stage, on one device."""

    forward_s: float
    input_grad_s: float
    """The input gradient's seconds, recomputation included."""
    weight_grad_s: float
    message_s: float
    """Seconds of the activation message that the stage sends; 0 for the last stage."""
    message_bytes: int
    activation_bytes: int
    """Bytes of one microbatch that the stage keeps from its forward to its backward."""
    reduce_s: float = 0.0
    """Seconds of summing the stage's gradients over data-parallel ranks, once a step."""
    offloaded_bytes: int = 0
    """Bytes that move to the host in the stage's forward, and back in its backward."""
    copy_s: float = 0.0
    """Seconds of moving `offloaded_bytes` one way; a forward or backward takes at least as long."""
    exchange_s: float = 0.0
    """The part of `forward_s` in which rows are sent to experts and back."""
    exchange_back_s: float = 0.0
    """The part of `input_grad_s` in which rows are sent to experts and back, also in recomputation."""
    overlapped_link: float = 1.0
    """The share of a link's rate that an exchange reaches beside the other half of a pair."""

    @property
    def backward_s(self) -> float:
        """Seconds of both halves of a backward."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def seconds(self) -> float:
        """A forward and both halves of a backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, slots=True)
class Timing:
    """Predicted seconds of a step and its parts. Not part of what is run."""

    priced_by: str = ""
    """The device preset's name, or the profile's file."""
    pipeline_s: float = 0.0
    """Seconds of one schedule call, from the first action's start to the last action's end."""
    optimizer_s: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_s_per_device: float = 0.0
    tflops_per_device: float = 0.0
    """Model FLOPs per second, as in metrics.jsonl."""
    mfu: float | None = None
    """The share of the preset's dense bf16 peak; None if that is unknown."""
    bubbles: tuple[float, ...] = ()
    """pp_rank -> the share of the pipeline's time in which it does not compute."""
    critical: tuple[tuple[str, float], ...] = ()
    """The seconds of a call's longest chain by kind: forward, backward, messages, gradients."""
    stages: tuple[StageCost, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        stages = [cost._asdict() for cost in self.stages]
        return {**fields_of(self), "stages": stages, "critical": dict(self.critical), "bubbles": list(self.bubbles)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """Return the Timing of data from `to_json`. Raises ValueError for any other data."""
        return read(cls, {**data, "critical": list(read(dict[str, float], data.get("critical")).items())})


class SmallerBatch(NamedTuple):
    """Steps of a batch that still grows, all of one size."""

    step: int
    """Completed steps before the first step of this size, in a run from its first step."""
    steps: int
    """The number of steps of this size in an endless run."""
    sample: int
    """Samples consumed before the first step of this size."""
    size: int
    """Samples of each step."""
    num_microbatches: int
    """Microbatches of one schedule call."""
    gradient_accumulation_steps: int
    bubble_fraction: float
    step_time_s: float
    schedule: Schedule
    """Lowered."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that follows from others, with the equation that is printed."""

    key: str
    value: Any
    equation: str

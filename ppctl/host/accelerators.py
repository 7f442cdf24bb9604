"""Device presets, as data: peak rates, bandwidths, and the share that real kernels reach.

Rates are for dense matrix products; the vendors' figures with sparsity are twice as much.
"""

from __future__ import annotations

from typing import Any, NamedTuple

TERA, GIGA = 1e12, 1e9


class Device(NamedTuple):
    """One accelerator, or one CPU process."""

    name: str
    title: str
    bf16_flops: float
    """Operations per second of dense products in 16 bits, the base of mfu."""
    fp8_flops: float
    """Operations per second of dense products in 8 bits; the 16-bit rate if the device has no 8-bit products."""
    memory_bandwidth: float
    """Bytes per second."""
    fast_link: float
    """Bytes per second one way to a rank of the same domain (NVLink)."""
    domain: int
    """The most ranks in a domain of fast links; unless `wide`, a domain ends with its machine."""
    network: float
    """Bytes per second one way and per rank to other domains."""
    latency: float
    """Seconds per message or collective."""
    te_workspace_mib: float = 32.0
    """One workspace of Transformer Engine."""
    cublas_workspace_mib: float = 32.0
    sustained: float = 1.0
    """Share of the rates of products that the device sustains under its power limit."""
    fp4_flops: float = 0.0
    """Operations per second of dense products in 4 bits; 0 if the device has none."""
    host_link: float = 63 * GIGA
    """Bytes per second one way to the host's memory. 63 GB/s: PCIe 5.0 with 16 lanes."""
    wide: bool = False
    """Whether domains span machines, as those of a rack do."""


PPCTL, MEGATRON = STACKS = ("ppctl", "megatron")
"""The systems whose program a plan may price."""


class Efficiency(NamedTuple):
    """The shares of peaks that kernels reach, and the least cost of a kernel; equal for all models."""

    matmul: float
    fp8_matmul: float
    """The share of the peak that products in 8 bits or less reach."""
    grouped: float
    """Rate of the experts' grouped products, relative to other products."""
    attention: float
    attention_backward: float
    memory: float
    link: float
    tensor_exposed: float
    """Share of tensor parallelism's collectives that products do not hide."""
    dispatch: float
    """Share of a link's bandwidth that kernels for expert dispatch reach."""
    kernel: float
    """Seconds per kernel that cannot be hidden."""


# Vendors' data sheets: A100 (2020), H100 and H200 SXM, B200/HGX, GB200 NVL72, B300/HGX, GB300 NVL72. H800: the H100
# with NVLink at 400 GB/s both ways (DeepSeek-V3 report, section 3.1). Networks: 200 Gbit/s for A100, 400 Gbit/s for
# Hopper, B200 and GB200, 800 Gbit/s for B300 and GB300, one card per GPU. Latencies: facts/performance.md, section 5.
# To the host: PCIe 4.0 with 16 lanes for A100, NVLink-C2C at 900 GB/s both ways for GB200 and GB300.
# `sustained` is fitted (benchmarks/results-plan-2026-11-26.md): B200 and GB200 sustain less of their rates than B300
# and GB300 of the same data sheet; torchtitan's H100 of 96 GB HBM2e, limited to 500 W, sustains less than an H100.
_HOPPER = (989.4 * TERA, 1978.9 * TERA)
_BLACKWELL, _GB = (2250 * TERA, 4500 * TERA, 8.0 * TERA), (2500 * TERA, 5000 * TERA, 8.0 * TERA)
_BOARD, _RACK = (900 * GIGA, 8), (900 * GIGA, 72)
_KEPT, _AT_500_W = 0.77, 0.57
_GRACE: dict[str, Any] = {"host_link": 450 * GIGA, "wide": True}
_GPUS = (
    Device(
        *("a100", "A100", 312 * TERA, 312 * TERA, 2.039 * TERA, 300 * GIGA, 8, 25 * GIGA, 10e-6, 4.0),
        host_link=31.5 * GIGA,
    ),
    Device("h100", "H100", *_HOPPER, 3.35 * TERA, 450 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("h100_500w", "H100 of 500 W", *_HOPPER, 2.4 * TERA, 450 * GIGA, 8, 50 * GIGA, 10e-6, sustained=_AT_500_W),
    Device("h800", "H800", *_HOPPER, 3.35 * TERA, 200 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("h200", "H200", *_HOPPER, 4.8 * TERA, 450 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("b200", "B200", *_BLACKWELL, *_BOARD, 50 * GIGA, 10e-6, sustained=_KEPT, fp4_flops=9000 * TERA),
    Device("b300", "B300", *_BLACKWELL, *_BOARD, 100 * GIGA, 10e-6, fp4_flops=13500 * TERA),
    Device("gb200", "GB200", *_GB, *_RACK, 50 * GIGA, 10e-6, sustained=_KEPT, fp4_flops=10000 * TERA, **_GRACE),
    Device("gb300", "GB300", *_GB, *_RACK, 100 * GIGA, 10e-6, fp4_flops=15000 * TERA, **_GRACE),
)
# One process with one thread on a server's core; messages over gloo's loopback (facts/performance.md, section 5).
_CPU = Device(
    *("cpu", "CPU", 50 * GIGA, 50 * GIGA, 10 * GIGA, 2.1 * GIGA, 1_000_000, 2.1 * GIGA, 200e-6, 0.0, 0.0),
    host_link=5 * GIGA,
    wide=True,
)

DEVICES = {device.name: device for device in (*_GPUS, _CPU)}


def preset(name: str) -> Device:
    """The preset of this name, in capital or small letters. Raises KeyError if there is none."""
    return DEVICES[name.lower()]


def device_called(text: str) -> Device | None:
    """The preset of the accelerator that a driver calls `text` ("NVIDIA H100 80GB HBM3"); None if there is none."""
    words = text.upper().replace("-", " ").split()
    return next((device for device in _GPUS if device.title in words), None)


def efficiency_of(device: Device, stack: str = PPCTL) -> Efficiency:
    """The efficiencies of a stack's kernels: one set for all GPUs, and 1 for the CPU, whose rates are measured."""
    if device.name == _CPU.name:
        return _CPU_EFFICIENCY
    return EFFICIENCY[stack]


def whose_prices(device: Device, stack: str) -> str:
    """A text that says what the planned seconds are of, and how well they are known."""
    if stack == MEGATRON:
        return "what Megatron-core's kernels and overlaps take, which ppctl does not run; fitted to published steps"
    known = MEASURED.get(device.name, f"no {device.title} has run it")
    return f"what ppctl executes, uncalibrated: {known}"


MEASURED = {
    "h100": "measured once, on one H100 alone, on 2026-11-26: a dense step took 0.97 times as long as planned, one "
    "with experts 1.07 times",
    "cpu": "rates of one core of one server",
}
"""What is known of ppctl's own steps, by device."""

# Fitted to published steps: attention, the memory traffic of fused kernels, and the cost of a kernel; products have
# what cuBLAS reaches (all in benchmarks/results-plan-2026-11-26.md). ppctl's share for memory is from its two steps on
# an H100; its 8-bit products are scaled row by row. Not fitted: links and ppctl's dispatch (NCCL's bus bandwidth),
# Megatron's dispatch (DeepEP's: 41 to 58 GB/s over a card of 50, arXiv 2505.09343), grouped products, and the half of
# tensor parallelism's collectives that Transformer Engine's overlap leaves.
EFFICIENCY = {
    PPCTL: Efficiency(0.75, 0.60, 0.70, 0.43, 0.32, 0.55, 0.75, 1.0, 0.75, 10e-6),
    MEGATRON: Efficiency(0.75, 0.75, 0.70, 0.43, 0.32, 0.90, 0.75, 0.5, 1.0, 10e-6),
}
"""By stack, for all GPUs."""
_CPU_EFFICIENCY = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-6)

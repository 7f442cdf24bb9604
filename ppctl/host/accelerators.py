"""Device presets: peak rates, bandwidths, and the share of them that real kernels reach. Data.

Rates are those of dense matrix products; the vendors' figures with sparsity are twice as much.
"""

from __future__ import annotations

from typing import NamedTuple

TERA, GIGA = 1e12, 1e9


class Device(NamedTuple):
    """One accelerator, or one CPU process."""

    name: str
    title: str
    bf16_flops: float
    """Dense matrix products per second in 16 bits: what mfu is measured against."""
    fp8_flops: float
    """Dense matrix products per second in 8 bits; the 16-bit rate if the device has no 8-bit one."""
    memory_bandwidth: float
    """Bytes per second."""
    fast_link: float
    """Bytes per second one way to a rank of the same domain (NVLink)."""
    domain: int
    """Ranks that the fast links reach."""
    network: float
    """Bytes per second one way and per rank to other domains."""
    latency: float
    """Seconds per message or collective."""
    te_workspace_mib: float = 32.0
    """One workspace of Transformer Engine."""
    cublas_workspace_mib: float = 32.0
    host_link: float = 63 * GIGA
    """Bytes per second one way to the host's memory. 63 GB/s: PCIe 5.0 with 16 lanes."""


class Efficiency(NamedTuple):
    """The share of a peak that kernels reach, and what a kernel costs however small it is. The same for every model."""

    matmul: float
    fp8_matmul: float
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
_GPUS = (
    Device(
        "a100",
        "A100",
        312 * TERA,
        312 * TERA,
        2.039 * TERA,
        300 * GIGA,
        8,
        25 * GIGA,
        10e-6,
        4.0,
        host_link=31.5 * GIGA,
    ),
    Device("h100", "H100", 989.4 * TERA, 1978.9 * TERA, 3.35 * TERA, 450 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("h800", "H800", 989.4 * TERA, 1978.9 * TERA, 3.35 * TERA, 200 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("h200", "H200", 989.4 * TERA, 1978.9 * TERA, 4.8 * TERA, 450 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("b200", "B200", 2250 * TERA, 4500 * TERA, 8.0 * TERA, 900 * GIGA, 8, 50 * GIGA, 10e-6),
    Device("b300", "B300", 2250 * TERA, 4500 * TERA, 8.0 * TERA, 900 * GIGA, 8, 100 * GIGA, 10e-6),
    Device(
        "gb200", "GB200", 2500 * TERA, 5000 * TERA, 8.0 * TERA, 900 * GIGA, 72, 50 * GIGA, 10e-6, host_link=450 * GIGA
    ),
    Device(
        "gb300", "GB300", 2500 * TERA, 5000 * TERA, 8.0 * TERA, 900 * GIGA, 72, 100 * GIGA, 10e-6, host_link=450 * GIGA
    ),
)
# One process with one thread on a server's core; messages over gloo's loopback (facts/performance.md, section 5).
_CPU = Device(
    "cpu", "CPU", 50 * GIGA, 50 * GIGA, 10 * GIGA, 2.1 * GIGA, 1_000_000, 2.1 * GIGA, 200e-6, 0.0, 0.0, 5 * GIGA
)

DEVICES = {device.name: device for device in (*_GPUS, _CPU)}


def preset(name: str) -> Device:
    """The preset of this name, in capital or small letters. Raises KeyError if there is none."""
    return DEVICES[name.lower()]


def device_called(text: str) -> Device | None:
    """The preset of the accelerator that a driver calls by this name ("NVIDIA H100 80GB HBM3"); None for others."""
    words = text.upper().replace("-", " ").split()
    return next((device for device in _GPUS if device.title in words), None)


def efficiency_of(device: Device) -> Efficiency:
    """The stated efficiencies: one set for all GPUs, and all of the peak for the CPU, whose rates are measured."""
    return _CPU_EFFICIENCY if device is _CPU else _GPU_EFFICIENCY


_GPU_EFFICIENCY = Efficiency(0.75, 0.60, 0.70, 0.60, 0.45, 0.80, 0.75, 0.5, 0.95, 5e-6)
_CPU_EFFICIENCY = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-6)

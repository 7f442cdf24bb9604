"""How a config wants messages to travel, and which of these modes this machine does not have."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ppctl.errors import ConfigError, Problem

BACKENDS = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "ucc": dist.is_ucc_available}
"""parallel.pipeline_model_parallel_comm_backend -> whether this build of torch has it."""

_SHORT = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "single": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Modes(NamedTuple):
    """The message modes of a pipeline."""

    batched: bool = False
    """Neighbouring messages are waited for together, on NCCL fused by batch_isend_irecv (batch_p2p_comm)."""
    sync: bool = False
    """The device is synchronised after each fused exchange (batch_p2p_sync)."""
    variable: bool = False
    """Shapes differ between microbatches; they are sent before tensors (variable_seq_lengths, mtp_standalone)."""
    dtype: torch.dtype | None = None
    """The dtype of received tensors (pipeline_dtype); None if the config does not say."""

    @classmethod
    def of(cls, config: Any) -> Modes:
        """Read a config. Raises ConfigError with all contradictions, and all modes that this machine does not have."""
        problems = _problems(config)
        if problems:
            raise ConfigError(problems)
        return cls(
            batched=bool(getattr(config, "batch_p2p_comm", False)),
            sync=bool(getattr(config, "batch_p2p_sync", False)),
            variable=bool(getattr(config, "variable_seq_lengths", False) or getattr(config, "mtp_standalone", False)),
            dtype=torch_dtype(getattr(config, "pipeline_dtype", None), "pipeline_dtype"),
        )


def pipeline_backend(name: str | None, device: torch.device) -> str | None:
    """The backend for a pipeline's process group; None is the world's own. Raises ConfigError before any group exists.

    `nccl` moves CUDA tensors only. `gloo` moves them through pinned host memory, so that ranks can share one GPU.
    """
    problems = _backend_problems(name)
    if name == "nccl" and device.type != "cuda":
        message = "parallel.pipeline_model_parallel_comm_backend=nccl moves a GPU's tensors, but the device is the CPU"
        problems = [Problem("PP-E111", message, "parallel.pipeline_model_parallel_comm_backend=null")]
    if problems:
        raise ConfigError(problems)
    return name


def _problems(config: Any) -> list[Problem]:
    problems = _backend_problems(getattr(config, "pipeline_model_parallel_comm_backend", None))
    if getattr(config, "use_ring_exchange_p2p", False):
        message = "parallel.use_ring_exchange_p2p=True needs ring_exchange, which only a custom build of torch has"
        problems.append(Problem("PP-E111", message, "parallel.use_ring_exchange_p2p=false"))
    if getattr(config, "overlap_p2p_comm", False) and getattr(config, "batch_p2p_comm", False):
        message = (
            "overlap_p2p_comm and batch_p2p_comm exclude each other: a batch is waited for before the rank goes on"
        )
        problems.append(Problem("PP-E117", message, "parallel.batch_p2p_comm=false"))
    return problems


def _backend_problems(name: str | None) -> list[Problem]:
    key, remedy = "parallel.pipeline_model_parallel_comm_backend", "parallel.pipeline_model_parallel_comm_backend=null"
    if name is None:
        return []
    if name not in BACKENDS:
        return [Problem("PP-E103", f"{key} must be one of {', '.join(BACKENDS)}, not {name!r}", remedy)]
    if not BACKENDS[name]():
        return [Problem("PP-E111", f"{key}={name} needs a build of torch with {name}", remedy)]
    return []


def torch_dtype(value: Any, field: str) -> torch.dtype | None:
    """The dtype `value`, or the one named so (`bf16`, `torch.bfloat16`). Raises ConfigError naming `field`."""
    if value is None:
        return None
    name = str(value).removeprefix("torch.").lower()
    dtype = _SHORT.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        message = f"parallel.{field} must be a floating point dtype or its name, not {value!r}"
        raise ConfigError(Problem("PP-E103", message, f"parallel.{field}=float32"))
    return dtype

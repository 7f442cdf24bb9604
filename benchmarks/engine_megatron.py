"""megatron-core's own forward-backward functions as a contender, on the CPU.

Needs the package in a directory of its own (`HOW`); nothing of ppctl depends on it. Two of its modules ask for a CUDA
device by name: they get a `torch` that answers with the host. Everything else runs as it is shipped.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from engine_workloads import Cell, Gpt, Sleep
from torch import Tensor, nn

VERSION = "0.16.1"
HOW = f"pip install --no-deps --target DIR megatron-core=={VERSION}; benchmarks/engine.py --megatron DIR"


class _HostTorch:
    """torch, with the host in place of the current CUDA device."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"), synchronize=lambda: None)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def zeros(self, *sizes: object, device: object = None, **options: object) -> Tensor:
        return torch.zeros(*sizes, **options)


class _Model(nn.Module):
    """What Megatron's functions ask of a model: a config, a type (of no effect), a place for what was received."""

    model_type = None

    def __init__(self, module: nn.Module, config: object, stage: int) -> None:
        super().__init__()
        self.module, self.config, self.stage = module, config, stage
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.received = tensors[0]


class Megatron:
    """1F1B with fused messages, as Megatron's command line sets it."""

    def __init__(self, rank: int, work: Sleep | Gpt) -> None:
        from megatron.core import ModelParallelConfig
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        schedules.torch = p2p_communication.torch = _HostTorch()
        cell, self.work, shape = work.cell, work, work.spec().shape
        group = dist.new_group(list(range(cell.pp)), backend="gloo")
        alone = [dist.new_group([other], backend="gloo") for other in range(cell.pp)][rank]
        config = ModelParallelConfig(
            pipeline_model_parallel_size=cell.pp,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=False,
            batch_p2p_comm=True,
            batch_p2p_sync=False,
            deallocate_pipeline_outputs=True,
        )
        config.hidden_size = shape[-1]
        config.fine_grained_activation_offloading = False  # a TransformerConfig would have the field
        self.modules = {rank: work.module(rank)}
        self.model = _Model(self.modules[rank], config, rank)
        self.inputs, self.targets = work.inputs(), work.targets()
        self.losses: list[Tensor] = []
        self.options = {
            "num_microbatches": cell.microbatches,
            "seq_length": shape[0],
            "micro_batch_size": math.prod(shape[1:-1]),
            "p2p_communicator": p2p_communication.P2PCommunicator(group, config),
            "pg_collection": SimpleNamespace(tp=alone, cp=alone, dp_cp=alone, pp=group, embd=None, pos_embd=None),
        }
        self.run = schedules.forward_backward_pipelining_without_interleaving

    def step(self) -> None:
        self.losses.clear()
        data = iter(range(self.work.cell.microbatches))
        self.run(forward_step_func=self._forward, data_iterator=data, model=self.model, **self.options)

    def _forward(self, microbatches: object, model: _Model) -> tuple[Tensor, object]:
        mb = next(microbatches)
        x = self.inputs[mb] if model.stage == 0 else model.received
        if model.stage == 0 and isinstance(self.work, Sleep):
            x = x.unsqueeze(0)  # Megatron's messages have three dims
        return model.module(x), lambda output: self._loss(output, mb)

    def _loss(self, output: Tensor, mb: int) -> tuple[Tensor, Tensor]:
        loss = self.work.loss(output, self.targets[mb])
        self.losses.append(loss.detach().clone())
        return loss, self.losses[-1]

    def result(self) -> list[float]:
        return [float(loss) for loss in self.losses]

    def close(self) -> None:
        """Nothing to hand back."""


def takes_part(cell: Cell) -> bool:
    """Whether Megatron runs a cell: its interleaved function did not finish a step here, with overlapped messages."""
    return not cell.memory and cell.vpp == 1

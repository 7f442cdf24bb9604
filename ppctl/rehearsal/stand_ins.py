"""What stands in for the other ranks, the data and the initial weights while one rank is rehearsed.

Knows which seams `build_session` has. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ppctl.comm.channel_ends import other_end
from ppctl.comm.channels import DirectEnd
from ppctl.comm.communicator import Communicator
from ppctl.comm.modes import Modes
from ppctl.config.schema import DataConfig, RunConfig
from ppctl.data.batches import StepBatch
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan import Plan
from ppctl.rehearsal.fused_kernels import capability
from ppctl.rehearsal.ledger import Ledger
from ppctl.train.session import SessionParts


class _Done(Work):
    """A message that is there."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True


class CountedTransport:
    """Carries nothing: every message is there at once, and is noted."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Note a message that leaves."""
        self._note("send", tensors)
        return _Done()

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Note a message that comes."""
        self._note("receive", tensors)
        return _Done()

    def _note(self, kind: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.ledger.message(kind, "pp", tensor.numel() * tensor.element_size())


class EvenExchange(ExpertExchange):
    """Every rank's experts get as many rows as the others': what a router aims at."""

    def sizes(self, sent: Tensor, received: Tensor, all_received: Tensor) -> tuple[list[int], list[int], list[int]]:
        """The rows of this rank, spread evenly, and as many back; the host waits for them as it would in a run."""
        super().sizes(sent, received, all_received)
        even = [len(part) for part in torch.arange(self.rows).chunk(len(sent))]
        return even, list(even), [self.rows] * len(all_received)

    def __call__(
        self, make_rows: Callable[[], Tensor], counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """As in a run."""

        def counted() -> Tensor:
            rows = make_rows()
            self.rows = len(rows)
            return rows

        return super().__call__(counted, counts, experts)


class Samples:
    """Batches without values, on the device: what a step reads of them is their shapes."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self.count = plan.gradient_accumulation_steps * plan.num_microbatches
        self.config = config
        self.dp = plan.sizes.dp

    def step(self, step: int) -> StepBatch:
        """The batch of any step; where documents are kept apart, each row is one."""
        data, b = self.config.data, self.config.train.micro_batch_size
        shape = (self.count, b, data.seq_length)
        whole = ((data.seq_length,),) * b
        return StepBatch(
            tokens=torch.empty(shape, dtype=torch.int64, device="meta"),
            labels=torch.empty(shape, dtype=torch.int64, device="meta"),
            loss_mask=torch.empty(shape, device="meta"),
            total_tokens=self.count * b * data.seq_length * self.dp,
            checksum=0,
            positions=torch.empty(shape, dtype=torch.int64, device="meta") if data.reset_position_ids else None,
            documents=(whole,) * self.count if data.reset_attention_mask else None,
        )


def rehearsal_parts(ledger: Ledger, make_recorder: Callable[..., object]) -> SessionParts:
    """The parts of a session that is rehearsed."""

    def connect(config: RunConfig, plan: Plan, pp_group: ProcessGroup, device: torch.device) -> Communicator:
        rank, transport = pp_group.rank(), CountedTransport(ledger)
        own = [channel for channel in sorted(plan.schedule.capacities) if rank in channel[:2]]
        ends = {channel: DirectEnd(channel, transport, other_end(channel, rank), 0) for channel in own}
        return Communicator(pp_group, Modes.of(config.parallel), device=device, ends=ends)

    def no_data(data: DataConfig) -> None:
        return None

    return SessionParts(
        connect=connect,
        exchange=EvenExchange,
        initialize=lambda parameters, model, seed, experts: None,
        load_data=no_data,
        capability=capability,
        clock_offset=lambda: 0.0,
        make_recorder=make_recorder,  # type: ignore[arg-type]  # Recorder's own type is not known here
    )

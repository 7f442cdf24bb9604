"""Stand-ins while one rank is rehearsed: for other ranks, the data, the initial weights and a GPU's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.overrides import TorchFunctionMode

from ppctl.comm.channels import DirectEnd
from ppctl.comm.communicator import Communicator
from ppctl.comm.connections import other_end
from ppctl.comm.modes import Modes
from ppctl.config.schema import RunConfig
from ppctl.data.batches import StepBatch
from ppctl.geometry.expert_reach import reached
from ppctl.model.kernels import Capability
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan import Plan
from ppctl.rehearsal.ledger import DeviceLedger
from ppctl.train.session import SessionParts

_aten = torch.ops.aten

HOPPER = (9, 0)
CUDA = (12, 9)
"""The least version with all kernels that ppctl uses."""


def capability(device: torch.device, *, packed: bool) -> Capability:
    """The kernels that a run on H100s could choose from."""
    return Capability("cuda", HOPPER, attend_documents if packed else None, cuda=CUDA)


class FusedKernels(TorchFunctionMode):
    """While it is entered, calls fused kernels in place of the functions that choose them on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel in place of the function if there is one, else the function."""
        kernel: Callable[..., Any] | None = _KERNELS.get(func)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(func, *args, **(kwargs or {}))


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """cuDNN's or flash attention, which saves queries, keys, values, the result and a float32 per row and head for the
    backward. Other calls (with a mask, not on meta, or with both kernels switched off) run `func` itself."""
    fuses = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()  # sdpa_kernel's switches
    if not (query.is_meta and fuses) or attn_mask is not None:
        out: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    keeps = torch.is_grad_enabled()
    made = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, keeps, dropout_p, is_causal, scale=scale)
    fused: Tensor = made[0]
    return fused


def attend_documents(query: Tensor, key: Tensor, value: Tensor, *bounds: object, **options: object) -> Tensor:
    """Stand in for varlen_attn: [tokens, heads, width], all documents in a call; keeps what the other kernels keep."""
    heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    made = _aten._scaled_dot_product_cudnn_attention(*heads, None, torch.is_grad_enabled(), 0.0, True)
    out: Tensor = made[0][0].transpose(0, 1)
    return out


def _norm(func: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if not x.is_meta:
        stepwise: Tensor = func(x, shape, weight, eps)
        return stepwise
    fused: Tensor = _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own
    return fused


class _FusedNorm(torch.autograd.Function):
    """A norm over the last dimension that saves the input and a float32 per row for the backward, where torch would run
    unfused. Calls LayerNorm, which is one kernel everywhere, and reads and writes as RMSNorm's does, except for a mean
    per row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        made: tuple[Tensor, ...] = _aten.native_layer_norm(x, x.shape[-1:], weight, None, 1e-5)
        ctx.save_for_backward(x, weight, made[2])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, scales = ctx.saved_tensors
        needed = [True, weight is not None, False]
        backward = _aten.native_layer_norm_backward
        of_x, of_weight, _ = backward(gradients[0], x, x.shape[-1:], scales, scales, weight, None, needed)
        return of_x, of_weight


_KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _norm,
    torch.rms_norm: _norm,
}


class _Delivered(Work):
    """A message that is there."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class CountedTransport:
    """Carries nothing: every message is there immediately, and is counted."""

    def __init__(self, ledger: DeviceLedger) -> None:
        self.ledger = ledger

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Count a message that leaves."""
        self._note("send", tensors)
        return _Delivered()

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Count a message that comes."""
        self._note("receive", tensors)
        return _Delivered()

    def _note(self, kind: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.ledger.message(kind, "pp", tensor.numel() * tensor.element_size())


class EvenExchange(ExpertExchange):
    """All ranks' experts get equally many rows, as a router aims at."""

    def sizes(self, *numbers: Tensor) -> list[list[int]]:
        """This rank's rows, spread evenly, and as many back; the host waits for the numbers as in a run. By node, rows
        go to the expected number of nodes (`reached`), and as many sums come back."""
        super().sizes(*numbers)
        copies = self.rows * self.model.moe_router_topk
        totals = [copies] * len(numbers)
        if self.outer is not None:
            out, back = (round(self.rows * reached(self.model, n)) for n in (self.outer.size(), self.runs.number))
            totals[:4] = out, out, back, back
        totals[-1] *= len(numbers[-1])
        shares = [range(len(each)) for each in numbers]
        return [[(n + part) // len(own) for part in own] for n, own in zip(totals, shares, strict=True)]

    def __call__(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, experts: Any) -> Tensor:
        """Exchange as in a run, and keep the number of rows."""
        self.rows = len(rows)
        return super().__call__(rows, chosen, weights, counts, experts)


class Samples:
    """Batches without values, on the device: a step reads only their shapes."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self.count = plan.gradient_accumulation_steps * plan.num_microbatches
        self.config = config
        self.dp = plan.sizes.dp

    def step(self, step: int) -> StepBatch:
        """The batch of any step; if documents are kept apart, each row is one document."""
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


def rehearsal_parts(ledger: DeviceLedger, make_recorder: Callable[..., object]) -> SessionParts:
    """The parts of a session that is rehearsed."""

    def connect(config: RunConfig, plan: Plan, pp_group: ProcessGroup, device: torch.device) -> Communicator:
        rank, transport = pp_group.rank(), CountedTransport(ledger)
        own = [channel for channel in sorted(plan.schedule.capacities) if rank in channel[:2]]
        ends = {channel: DirectEnd(channel, transport, other_end(channel, rank), 0) for channel in own}
        return Communicator(pp_group, Modes.of(config.parallel), device=device, ends=ends)

    return SessionParts(
        connect=connect,
        exchange=EvenExchange,
        initialize=lambda parameters, model, seed, experts: None,
        load_data=lambda data: None,
        capability=capability,
        clock_offset=lambda: 0.0,
        make_recorder=make_recorder,  # type: ignore[arg-type]  # Recorder's own type is not known here
    )

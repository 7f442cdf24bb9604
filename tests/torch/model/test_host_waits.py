"""What of a model would make the host of a GPU wait for its device, counted on the CPU, with the line that does it."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cuts import tiny
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import ppctl
from ppctl.model.feed_forward import MixtureOfExperts
from ppctl.parallel.dispatch import ExpertExchange

PPCTL = Path(ppctl.__file__).parent
aten = torch.ops.aten

SIZES_FROM_VALUES = {aten.bincount, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive}
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        repeats = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in SIZES_FROM_VALUES | READS or repeats:
            self.found[_line()] += 1
        return func(*args, **kwargs)


class HostWaits:
    """Counts, by `file: function`, what reads a tensor's values on the host or needs them for a size."""

    READS = ("tolist", "numpy")  # they read memory: no operation shows it on a CPU

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.operations = _Operations(self.found)

    def __enter__(self) -> HostWaits:
        self.originals = {name: getattr(torch.Tensor, name) for name in self.READS}
        for name, original in self.originals.items():
            setattr(torch.Tensor, name, self._counting(original))
        self.operations.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.operations.__exit__(*failure)
        for name, original in self.originals.items():
            setattr(torch.Tensor, name, original)

    def _counting(self, original):
        def read(tensor, *args, **kwargs):
            self.found[_line()] += 1
            return original(tensor, *args, **kwargs)

        return read


def _line() -> str:
    own = [frame for frame in traceback.extract_stack() if PPCTL in Path(frame.filename).parents]
    return f"{Path(own[-1].filename).name}: {own[-1].name}" if own else "torch"


EACH_GROUP = "linear.py: for_each_group"
"""Takes sizes to the host on the CPU alone: bfloat16 on CUDA goes through one kernel."""

MODELS = {
    "softmax": dict(num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=10),
    "sigmoid": dict(
        num_moe_experts=8,
        moe_router_topk=3,
        moe_ffn_hidden_size=10,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-2,
    ),
}


def waits_of(kind, recomputed):
    """Host waits of a layer's forward and backward on this rank, experts spread over all ranks."""
    model = tiny(**MODELS[kind])
    moe = MixtureOfExperts(model)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.4)
    world = dist.get_world_size()
    if world > 1:
        for name, stack in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, torch.nn.Parameter(stack.detach().chunk(world)[dist.get_rank()].clone()))
        moe.exchange = ExpertExchange({"ep": dist.group.WORLD}, model)
    x = torch.randn(2, 7, model.hidden_size, requires_grad=True)
    with HostWaits() as counted:
        if recomputed:
            out = torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=False, preserve_rng_state=False)
        else:
            out = moe(x)
        out.sum().backward()
    counted.found.pop(EACH_GROUP)
    return dict(counted.found)


@pytest.mark.parametrize("kind", MODELS)
def test_experts_on_one_rank_never_wait(kind):
    assert run_ranks(waits_of, 1, kind, False) == [{}]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("recomputed", "times"), [(False, 1), (True, 2)], ids=["kept", "recomputed"])
def test_experts_over_ranks_wait_once_a_forward_for_the_sizes_of_their_exchange(kind, recomputed, times):
    assert run_ranks(waits_of, 2, kind, recomputed) == [{"dispatch.py: sizes": times}] * 2

"""A rehearsed rank is a real one: the same operators, and nothing of it stays in the process."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import TINY
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ppctl.data.batches import StepBatch
from ppctl.errors import ConfigError
from ppctl.launch.planning import planned
from ppctl.records.rehearsal_record import STEP
from ppctl.rehearsal import rank as rehearsal
from ppctl.rehearsal.stand_ins import Samples
from ppctl.tensors import host_numbers
from ppctl.train import replica
from ppctl.train.grad_norm import GradientNorm, Location
from ppctl.train.optimizer import AdamW
from ppctl.train.session import SessionParts, build_session
from ppctl.train.step import Trainer

CPU = torch.device("cpu")
ON_GPU = (*(each for each in TINY if not each.startswith("launch.device")), "launch.device=cuda")
ONE = ("+recipe=quickstart", *ON_GPU, "pp=1", "vpp=1")
EXPERTS = (
    "+recipe=quickstart", *ON_GPU, "pp=2", "vpp=1", "dp=2", "ep=2", "model.num_moe_experts=4",
    "parallel.bf16=true", "model.ffn_hidden_size=32",
)  # fmt: skip
NO_VALUES = {
    **dict.fromkeys(("aten.le.Scalar", "aten.bitwise_not.default"), 1),
    **{"aten._to_copy.default": 2, "aten.empty.memory_format": 3},
}
"""A step's numbers on their way to the host, whether the device leaves it out, and a batch without values."""
FUSED = {
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten.native_layer_norm.default",  # what a fused norm is called, and its backward
    "aten.native_layer_norm_backward.default",
    "aten._fused_adamw_.default",
    *("aten._foreach_add_.Scalar", "aten._foreach_sub_.List"),  # its counts of steps
    *NO_VALUES,
}
"""What a GPU's fused kernels are called, where the CPU goes step by step."""


class Names(TorchDispatchMode):
    """The names of operators."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Drawn(Samples):
    """Batches with values."""

    def __init__(self, config, plan):
        super().__init__(config, plan)
        shapes = super().step(0)
        tokens = torch.randint(config.model.vocab_size, shapes.tokens.shape)
        ones = torch.ones(tokens.shape)
        self.made = StepBatch(tokens, tokens.roll(-1, -1), ones, total_tokens=shapes.total_tokens, checksum=0)

    def step(self, step):
        return self.made


def composed(*overrides):
    config, plan, problems = planned(overrides, for_training=True)
    assert plan is not None, problems
    return config.config, plan


def real_step(config, plan):
    """A step of the only rank on the CPU, with data, weights and kernels of its own."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        session = build_session(config, plan, 0, CPU, parts=SessionParts(load_data=lambda data: None))
        result = Trainer(session, Drawn(config, plan)).step(0)
    finally:
        dist.destroy_process_group()
    assert result.record["loss"] > 0


@pytest.fixture
def operators(monkeypatch):
    """`operators(work)`: the names of what the one step of `work()` hands to torch."""
    whole = Trainer.step

    def of(work):
        with monkeypatch.context() as patch, Names() as outside:
            names = Names()

            def step(self, number):
                with names:
                    return whole(self, number)

            patch.setattr(Trainer, "step", step)
            work()
        assert outside.seen
        return names.seen

    return of


def test_a_rehearsed_step_calls_the_operators_of_a_real_one(operators, monkeypatch):
    """Without the stand-ins for fused kernels, and without what torch does by kind of device: the update."""
    config, plan = composed(*ONE, "model.attention_backend=unfused")
    monkeypatch.setattr(rehearsal, "FusedKernels", nullcontext)
    monkeypatch.setattr(AdamW, "step", lambda self, left_out=None: None)
    monkeypatch.setattr(replica, "clip_gradients", lambda *_: None)
    rehearsed = operators(lambda: rehearsal.rehearse(config, plan, 0))
    real = operators(lambda: real_step(config, plan))
    assert sum(real.values()) > 10_000
    assert rehearsed - real == Counter(NO_VALUES)
    assert real - rehearsed == Counter()


def test_what_a_gpu_fuses_has_its_own_names_and_nothing_else_has(operators):
    config, plan = composed(*ONE)
    rehearsed = operators(lambda: rehearsal.rehearse(config, plan, 0))
    real = operators(lambda: real_step(config, plan))
    assert {name for name in rehearsed if rehearsed[name] > real[name]} == FUSED


def left_behind():
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    return modes, dist.is_initialized(), torch.get_default_device().type


def test_nothing_of_a_rehearsal_stays_in_the_process(monkeypatch):
    config, plan = composed(*ONE)
    rehearsal.rehearse(config, plan, 0)
    assert left_behind() == ([], False, "cpu")
    assert torch.ones(2).sum().item() == 2.0
    monkeypatch.setattr(Trainer, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rehearsal.rehearse(config, plan, 0)
    assert left_behind() == ([], False, "cpu")


def test_experts_without_a_grouped_product_are_refused():
    config, plan = composed(*(each for each in EXPERTS if each != "parallel.bf16=true"))
    with pytest.raises(ConfigError, match=r"PP-E128.*grouped"):
        rehearsal.rehearse(config, plan, 0)


AUXILIARY = ("model.moe_aux_loss_coeff=1e-2", "model.mtp_num_layers=1", "model.moe_router_enable_expert_bias=true")
TWO_CALLS = ("pipeline.pp_batch_size=2",)


@pytest.mark.parametrize(
    ("more", "rank"),
    [
        (AUXILIARY, 1),
        *(
            pytest.param(more, rank, marks=pytest.mark.whole)
            for rank in (0, 1)
            for more in ((), AUXILIARY, TWO_CALLS, ("parallel.bf16=false", "parallel.fp16=true"))
        ),
    ],
)
def test_a_step_waits_for_all_of_its_numbers_once(more, rank):
    """Beside the exchanges' sizes. Rank 1 has the loss, its tokens and whatever is added to it."""
    dense = *(each for each in EXPERTS if not each.startswith(("ep=", "model.num_moe"))), "model.mtp_num_layers=1"
    base = EXPERTS if not more or more == AUXILIARY else dense
    config, plan = composed(*base, *more)
    own = plan.sizes.dp * rank  # of this pp_rank, the first
    waits = [wait for wait in rehearsal.rehearse(config, plan, own).host_waits if wait.during == STEP]
    lines = Path(host_numbers.__file__).read_text().splitlines()
    assert [wait.count for wait in waits] == [1]
    assert lines[waits[0].line - 1].strip() == "numbers = iter(self._flat.tolist())"


def test_kernels_are_counted_by_kind_of_layer_and_a_forward_with_experts_waits_for_their_rows():
    config, plan = composed(*EXPERTS)
    layers = rehearsal.rehearse(config, plan, 0).layers
    (stage,) = plan.for_rank(0).stages
    passes = sum(layer.kind == "decoder" for layer in stage.layers) * plan.num_microbatches
    assert [(each.kind, each.during, each.passes) for each in layers] == [
        ("decoder with experts", during, passes) for during in ("forward", "backward")
    ]
    assert [each.host_waits for each in layers] == [passes, 0]
    assert all(each.kernels > each.others > 0 and each.other_bytes > 0 for each in layers)


@pytest.mark.parametrize("sharding", ["optimizer_gradients", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_dense_step_whose_state_is_shared_waits_for_nothing_else(sharding, optimizer):
    more = f"parallel.data_parallel_sharding={sharding}", f"optim.name={optimizer}", "model.hidden_dropout=0.1"
    config, plan = composed("+recipe=quickstart", *ON_GPU, "pp=2", "vpp=1", "dp=2", *more, "parallel.bf16=true")
    for rank in (0, 2):  # of each stage
        waits = rehearsal.rehearse(config, plan, rank).host_waits
        assert [(Path(wait.file).name, wait.count) for wait in waits] == [("host_numbers.py", 1)]


def test_the_places_of_experts_norms_are_made_once():
    """A list as an index is a copy to the device at every step, made where no ledger sees it."""
    masters = {name: nn.Parameter(torch.ones(2)) for name in ("dense", "experts")}
    for parameter in masters.values():
        parameter.grad = torch.ones(2)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        parameters = [Location(name, 0, 0) for name in masters]
        norm = GradientNorm(parameters, device=CPU, parts=[(["experts"], dist.group.WORLD)])
        with Names() as names:
            norm.measure(masters)
    finally:
        dist.destroy_process_group()
    assert names.seen["aten.index.Tensor"] == 2
    assert names.seen["aten.lift_fresh.default"] == 0


def test_both_halves_of_pairs_are_counted_each_as_its_own():
    """The backward of a pair runs in a thread of its own, in turns with the forward."""
    overlapped = ("launch.transport=channels", "parallel.overlap_moe_expert_parallel_comm=true")
    config, paired = composed(*EXPERTS, "gbs=8", "mbs=1", *overlapped)
    alone = replace(paired, schedule=replace(paired.schedule, pairs=frozenset()))
    assert paired.schedule.pairs
    beside, behind = (rehearsal.rehearse(config, plan, 0) for plan in (paired, alone))
    assert (beside.operations, beside.traffic, beside.host_waits) == (
        behind.operations, behind.traffic, behind.host_waits,
    )  # fmt: skip
    assert beside.layers == behind.layers
    kept = [[(stage.stage, stage.kept) for stage in each.stages] for each in (beside, behind)]
    assert kept[0] == kept[1]

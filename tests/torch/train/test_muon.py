"""Muon beside AdamW, against torch's own two optimizers over a whole model."""

from typing import NamedTuple

import pytest
import torch
from cuts import cut, tiny

from ppctl.config.checks import check
from ppctl.config.schema import OptimConfig, RunConfig
from ppctl.cost.times import optimizer_seconds
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.matrix_owners import Matrices, owned_runs
from ppctl.host.accelerators import efficiency_of
from ppctl.model.stage import build_stage
from ppctl.plan import build_plan
from ppctl.plan.memory import device_of
from ppctl.train.optimizer import AdamW, Muon, make_optimizer, newton_schulz, orthogonalised
from ppctl.train.trained_weights import ShardedWeights

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}


def masters(changes, layout="EttttL", stage=0):
    model = tiny(**changes)
    spec = cut(layout, 1)[stage]
    stage_of = build_stage(spec, model, seed=5, dtype=torch.float32, device="cpu")
    return stage_of.canonical_parameters(), stage_parameters(model, cut("EttttL", 1)[0].layers)


def give_gradients(own, seed):
    for name, parameter in own.items():
        # By name, so that any cut has the same ones.
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("changes", [{}, {"share_embeddings_and_output_weights": True}, EXPERTS])
@pytest.mark.parametrize(
    "optim", [OptimConfig(name="muon"), OptimConfig(name="muon", muon_nesterov=False, muon_adjust_lr="original")]
)
def test_steps_have_the_bits_of_torchs_own_muon_and_adamw(changes, optim):
    (own, rows), (twin, _) = masters(changes), masters(changes)
    ours = make_optimizer(own, optim, rows)
    assert isinstance(ours, Muon)
    ends = ("norm.weight", "tok_embeddings.weight", "output.weight", ".bias")
    hidden = {n: p for n, p in twin.items() if p.dim() > 1 and not n.endswith(ends)}
    stacks = {n: [torch.nn.Parameter(part.clone()) for part in p.detach()] for n, p in hidden.items() if p.dim() == 3}
    assert bool(stacks) == bool(changes.get("num_moe_experts"))
    flat = [p for n, p in hidden.items() if n not in stacks] + [p for parts in stacks.values() for p in parts]
    theirs = torch.optim.Muon(
        flat, lr=0.0, weight_decay=optim.weight_decay, nesterov=optim.muon_nesterov, adjust_lr_fn=optim.muon_adjust_lr
    )
    rest = {n: p for n, p in twin.items() if n not in hidden}
    decayed = [p for n, p in rest.items() if n == "output.weight" and "share" not in str(changes)]
    spared = [p for p in rest.values() if not any(p is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    beside = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.95))
    for step in range(3):
        give_gradients(own, step)
        give_gradients(twin, step)
        for name, parts in stacks.items():
            for part, gradient in zip(parts, twin[name].grad, strict=True):
                part.grad = gradient
        ours.lr = 0.01 * (step + 1)
        for group in (*theirs.param_groups, *beside.param_groups):
            group["lr"] = ours.lr
        ours.step()
        theirs.step()
        beside.step()
    for name, parameter in own.items():
        expected = torch.stack([*stacks[name]]) if name in stacks else twin[name]
        assert torch.equal(parameter, expected), name
    assert ours.updates == 3


def test_a_matrix_has_one_moment_and_its_state_moves_by_name_into_another_cut():
    optim = OptimConfig(name="muon", lr=1e-2)
    whole, rows = masters(EXPERTS)
    optimizer = Muon(whole, optim, rows)
    give_gradients(whole, 0)
    optimizer.step()
    for name, entry in optimizer.state.items():
        assert set(entry) == {"step", "momentum_buffer"} if rows[name].hidden_matrix else {"exp_avg"} < set(entry)
    assert list(optimizer.state) == list(whole)
    part, _ = masters(EXPERTS, "Ett|ttL", 1)
    resumed = Muon(part, optim, rows)
    with torch.no_grad():
        for name, parameter in part.items():
            parameter.copy_(whole[name])
            for key, tensor in resumed.state[name].items():
                tensor.copy_(optimizer.state[name][key])
    for own, each in ((whole, optimizer), (part, resumed)):
        give_gradients(own, 1)
        each.step()
    assert all(torch.equal(part[name], whole[name]) for name in part)
    assert resumed.updates == 2


def test_the_plan_counts_one_moment_of_a_matrix_and_the_time_of_its_iteration():
    model = tiny(**EXPERTS)
    plans = {name: build_plan(RunConfig(model=model, optim=OptimConfig(name=name))) for name in ("adamw", "muon")}
    own, rows = masters(EXPERTS)
    held = {name: (AdamW if name == "adamw" else Muon)(own, OptimConfig(name=name), rows).state for name in plans}
    for name, state in held.items():
        moments = sum(t.numel() * 4 for entry in state.values() for key, t in entry.items() if key != "step")
        assert plans[name].pp_ranks[0].optimizer_bytes == moments
    flops = 0
    for name, parameter in own.items():
        if rows[name].hidden_matrix:
            small, large = sorted(parameter.shape[-2:])
            flops += (rows[name].experts or 1) * 5 * (4 * small * small * large + 2 * small**3)
    device, cost = device_of(RunConfig()), plans["muon"].pp_ranks[0]
    moved = optimizer_seconds(cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes, device)
    products = flops / (device.bf16_flops * efficiency_of(device).matmul)
    assert plans["muon"].timing.optimizer_s == pytest.approx(moved + products, rel=1e-9)


class Replica(NamedTuple):
    """What of a process group sharing asks before anything is sent."""

    own: int
    ranks: int

    def rank(self):
        return self.own

    def size(self):
        return self.ranks


@pytest.mark.parametrize("ranks", [2, 3, 8, 200])
def test_the_plan_has_the_state_of_the_rank_that_owns_most_and_the_time_of_the_slowest(ranks):
    model, optim = tiny(**EXPERTS), OptimConfig(name="muon")
    config = RunConfig(model=model, optim=optim)
    config.train.global_batch_size = ranks
    config.parallel.data_parallel_size, config.parallel.data_parallel_sharding = ranks, "optimizer_gradients"
    plan, (whole, rows) = build_plan(config), masters(EXPERTS)
    owned = owned_runs({name: tuple(p.shape) for name, p in whole.items() if rows[name].hidden_matrix}, ranks)
    held, operations = [], []
    for rank in range(ranks):
        weights = ShardedWeights({0: whole}, whole, lambda _, rank=rank: Replica(rank, ranks), owned)
        state = make_optimizer(weights.master, optim, rows).state
        tensors = [t for entry in state.values() for t in entry.values() if t.dim()]
        held.append(sum(4 * t.numel() for t in (*tensors, *weights.master.values())))
        runs = {name: runs[rank] for name, runs in owned.items() if rank in runs}
        assert all(weights.master[name].numel() == len(runs.get(name, ())) for name in owned)
        own = [(Matrices(*rows[name].shape), len(run)) for name, run in runs.items()]
        operations.append(sum(one.operations * (length // one.size) for one, length in own))
    padding = 3 * 4 * (len(whole) - len(owned))
    assert plan.pp_ranks[0].optimizer_bytes <= max(held) <= plan.pp_ranks[0].optimizer_bytes + padding
    device, cost = device_of(RunConfig()), plan.pp_ranks[0]
    moved = optimizer_seconds(cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes, device)
    products = 5 * max(operations) / (device.bf16_flops * efficiency_of(device).matmul)
    assert plan.timing.optimizer_s == pytest.approx(moved + products, rel=1e-9)
    (said,) = [each.equation for each in plan.derived if each.key == "matrix owners"]
    assert f"dp {ranks} x cp 1" in said and f"{1e3 * products:.3g} ms" in said


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("tensor_model_parallel_size", 2, "parallel.tensor_model_parallel_size=1\noptim.name=adamw"),
        ("expert_tensor_parallel_size", 2, "parallel.expert_tensor_parallel_size=1\noptim.name=adamw"),
    ],
)
def test_what_splits_matrices_is_refused(key, value, remedy):
    config = RunConfig(optim=OptimConfig(name="muon"))
    setattr(config.parallel, key, value)
    assert remedy in [problem.remedy for problem in check(config, {}) if "Muon" in problem.message]


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 32), (4, 7, 97), (1, 24, 24)])
def test_matrices_that_go_through_the_iteration_together_come_out_as_each_by_itself(shape):
    """What a GPU runs; products of several round otherwise, which five steps in bfloat16 multiply."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = orthogonalised(x.clone(), 5).float()
    assert (newton_schulz(x.clone(), 5).float() - alone).abs().max() <= 0.05 * alone.abs().max()
    values = torch.linalg.svdvals(alone)
    assert values.min() > 0.5 and values.max() < 1.5


def test_adapters_are_refused():
    config = RunConfig(optim=OptimConfig(name="muon"))
    config.model.lora = {"rank": "4", "targets": "[q_proj]"}
    assert "optim.name=adamw" in [problem.remedy for problem in check(config, {}) if "Muon" in problem.message]

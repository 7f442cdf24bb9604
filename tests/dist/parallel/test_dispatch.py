"""Experts on other ranks, reached straight or node by node: the bits of one process that has everybody's tokens."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from cuts import tiny
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.comm.groups import make_group
from ppctl.geometry.expert_reach import expert_runs
from ppctl.model.feed_forward import MixtureOfExperts
from ppctl.model.recompute import _recompute_modules
from ppctl.model.router import Routing
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.parallel.exchange_counts import watch
from ppctl.topology import levels

WORLD, TOKENS = 4, (2, 7)
MODELS = {
    "two of eight": dict(num_moe_experts=8, moe_router_topk=2),
    "four of sixteen": dict(num_moe_experts=16, moe_router_topk=4),
    "in groups": dict(num_moe_experts=16, moe_router_topk=6, moe_router_num_groups=4, moe_router_group_topk=3),
    "all": dict(num_moe_experts=8, moe_router_topk=8),
    "without a gate": dict(num_moe_experts=8, moe_router_topk=3, gated_linear_unit=False),
}  # fmt: skip
BIASES = {"spread": [], "a rank gets nothing": [4.0] * 6, "one node gets nothing": [9.0] * 4}
"""What is added to the first experts' scores. Eight experts: ranks 0 and 1 have the first four."""
NODES = [1, 2, 4]


def layer(model, bias):
    moe, dice = MixtureOfExperts(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.4, generator=dice)
        moe.router.expert_bias[: len(bias)] = torch.tensor(bias)
    return moe, torch.randn(WORLD, *TOKENS, model.hidden_size, generator=dice)


def model_of(kind):
    common = dict(moe_ffn_hidden_size=10, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    return tiny(**common, **MODELS[kind])


def results(moe, x):
    """The output and the gradients of the tokens and of the experts' weights."""
    x = x.clone().requires_grad_()
    out = moe(x)
    own = list(moe.experts.parameters())
    direction = torch.linspace(-1, 1, x.shape[-1])
    return [out.detach(), *torch.autograd.grad((out * direction).square().sum(), [x, *own])]


class _ByRank(torch.nn.Module):
    """A router that multiplies each rank's tokens by themselves: of more rows a product may have other bits."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, x):
        parts = [self.router(part) for part in x.chunk(WORLD)]
        experts, weights = (torch.cat([getattr(part, name) for part in parts]) for name in ("experts", "weights"))
        return Routing(experts, weights, sum(part.counts for part in parts), None, x)


@cache
def whole(kind, bias):
    """Of one process: all ranks' tokens in a row."""
    moe, x = layer(model_of(kind), BIASES[bias])
    moe.router = _ByRank(moe.router)
    return results(moe, x.flatten(0, 1))


def groups_of(nodes):
    found = {"ep": dist.group.WORLD}
    if nodes > 1:
        for name, level in zip(("ep-inner", "ep-outer"), levels(range(WORLD), WORLD // nodes), strict=True):
            if len(level[0]) > 1:
                found[name] = make_group(level)
    return found


def on_ranks(cases):
    return in_own_worlds(_on_rank, cases)


def _on_rank(case):
    """(results, exchanges by group) on this rank."""
    kind, bias, nodes, modules = case
    model, rank = model_of(kind), dist.get_rank()
    moe, x = layer(model, BIASES[bias])
    for name, stack in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, torch.nn.Parameter(stack.detach().chunk(WORLD)[rank].clone()))
    groups = groups_of(nodes)
    moe.exchange = ExpertExchange(groups, model)
    owner = _Layer(moe)
    if modules:
        _recompute_modules(owner, modules)
    counts = dict.fromkeys(groups, 0)

    def count(name):
        counts[name] += 1

    watch({group: lambda name=name: count(name) for name, group in groups.items()})
    found = results(owner, x[rank])
    watch({})
    return [each.numpy() for each in found], counts


class _Layer(torch.nn.Module):
    """What recomputation takes for a layer."""

    def __init__(self, moe):
        super().__init__()
        self.moe, self.experts = moe, moe.experts

    def forward(self, x):
        return self.moe(x)


CASES = [(kind, bias, nodes, ()) for kind in MODELS for bias in BIASES for nodes in NODES]
AGAIN = [("four of sixteen", "spread", nodes, (name,)) for nodes in NODES for name in ("moe", "experts", "moe_act")]


@cache
def every():
    cases = [*CASES, *AGAIN]
    ranks = run_ranks(on_ranks, WORLD, cases, timeout=200)
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(cases)}


@pytest.mark.timeout(250)
@pytest.mark.shows("parallel.expert_dispatch")
@pytest.mark.parametrize("case", [*CASES, *AGAIN], ids=lambda case: ", ".join(map(str, case)))
def test_every_way_to_the_experts_gives_the_bits_of_one_process(case):
    expected = whole(*case[:2])
    ranks = [found for found, _ in every()[case]]
    tokens = TOKENS[0]
    for number, value in enumerate(expected):
        for rank, found in enumerate(ranks):
            own = value[rank * tokens :][:tokens] if number < 2 else value.chunk(WORLD)[rank]
            assert torch.equal(torch.from_numpy(found[number]), own), (number, rank)


def test_some_rank_gets_no_row():
    for bias, empty in (("a rank gets nothing", [3]), ("one node gets nothing", [2, 3])):
        for rank in empty:
            of_weights = every()["two of eight", bias, 2, ()][rank][0][2:]
            assert all((each == 0).all() for each in of_weights)


def test_by_node_has_fewer_sums_than_copies():
    runs = expert_runs(model_of("in groups"))
    assert (runs.number, runs.size, runs.most) == (4, 4, 3)


EXCHANGES = {
    # of one microbatch's forward and backward: counts; weights ahead and back; rows four times
    1: {"ep": 1 + 2 + 4},
    2: {"ep": 1, "ep-outer": 1 + 2 + 4, "ep-inner": 2 + 4},
    4: {"ep": 1, "ep-outer": 1 + 2 + 4},
}
"""Nodes -> exchanges by group; across nodes the experts of each row are one more."""
AGAIN_IN_FORWARD = {
    1: {"ep": 1 + 1 + 2},
    2: {"ep": 1, "ep-outer": 2 + 2, "ep-inner": 1 + 2},
    4: {"ep": 1, "ep-outer": 4},
}


@pytest.mark.parametrize("nodes", NODES)
def test_no_exchange_is_repeated_where_experts_are_made_again_from_the_rows_that_they_got(nodes):
    for modules in ((), ("experts",), ("moe_act",)):
        for _, counts in every()["four of sixteen", "spread", nodes, modules]:
            assert counts == EXCHANGES[nodes], modules


@pytest.mark.parametrize("nodes", NODES)
def test_a_whole_block_that_is_made_again_repeats_those_of_its_forward(nodes):
    expected = {name: number + AGAIN_IN_FORWARD[nodes][name] for name, number in EXCHANGES[nodes].items()}
    for _, counts in every()["four of sixteen", "spread", nodes, ("moe",)]:
        assert counts == expected

"""The auxiliary losses of a rank's routers go by router, and biases stay where a device leaves a step out."""

from types import SimpleNamespace

import pytest
import torch

from ppctl.config.schema import ModelConfig
from ppctl.model.router import RouterLedger
from ppctl.parallel.tensor import SharedTokens
from ppctl.train.programs import RouterBalance


def test_losses_go_by_router():
    ledgers = [
        RouterLedger(losses=[torch.tensor(x) for x in losses]) for losses in ([0.5, 0.25], [], [2.0], [1.0, 4.0, 8.0])
    ]
    routers = [SimpleNamespace(ledger=ledger) for ledger in ledgers]
    balance = RouterBalance(routers, ModelConfig(), weight=1.0, others=SharedTokens([]))
    assert [torch.stack(losses).tolist() for losses in balance.losses()] == [[0.5, 0.25], [2.0], [1.0, 4.0, 8.0]]
    assert RouterBalance(routers[1:2], ModelConfig(), weight=1.0, others=SharedTokens([])).losses() == []


@pytest.mark.parametrize("left_out", [None, 0.0, 1.0])
def test_biases_move_unless_the_device_leaves_the_step_out(left_out):
    model = ModelConfig(num_moe_experts=3, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    router = SimpleNamespace(expert_bias=torch.zeros(3), counts_of_step=lambda: torch.tensor([1, 5, 3]))
    balance = RouterBalance([router], model, weight=1.0, others=SharedTokens([]))
    balance.move_biases(None if left_out is None else torch.tensor(left_out))
    assert router.expert_bias.tolist() == ([0.0, 0.0, 0.0] if left_out else [0.25, -0.25, 0.0])

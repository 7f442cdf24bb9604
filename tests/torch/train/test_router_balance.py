"""The auxiliary losses of a rank's routers are summed by router, and read from the device at once."""

from types import SimpleNamespace

import torch

from ppctl.config.schema import ModelConfig
from ppctl.model.router import RouterLedger
from ppctl.parallel.tensor import SharedTokens
from ppctl.train.programs import RouterBalance


def test_losses_are_read_at_once_and_summed_by_router(monkeypatch):
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or read(tensor))
    ledgers = [
        RouterLedger(losses=[torch.tensor(x) for x in losses]) for losses in ([0.5, 0.25], [], [2.0], [1.0, 4.0, 8.0])
    ]
    routers = [SimpleNamespace(ledger=ledger) for ledger in ledgers]
    balance = RouterBalance(routers, ModelConfig(), weight=1.0, others=SharedTokens([]))
    assert balance.losses() == [0.75, 2.0, 13.0]
    assert len(reads) == 1
    assert RouterBalance(routers[1:2], ModelConfig(), weight=1.0, others=SharedTokens([])).losses() == []
    assert len(reads) == 1

"""Activation checkpointing in a user's forward, at a cut: the same gradients, or an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ppctl
from ppctl.errors import PpctlError

PARTS = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


class Block(nn.Module):
    """Begins with a norm: recomputed from zeros it gives no gradient of its first weights, and no error."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Calls its layers one by one through `call(layer, x)`; with `twice` every layer twice."""

    def __init__(self, call: Callable[..., Tensor], twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.call, self.times = call, 1 + twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.times):
                x = self.call(layer, x)
        return x


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def by_name(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda state: layer(x=state), x, use_reentrant=False)


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def with_code_before(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda state: layer(state * state), x, use_reentrant=False)


def pipeline_of(model: nn.Module) -> Any:
    config = ppctl.PipelineConfig(
        pp_microbatch_size=2,
        pp_schedule="interleaved_1f1b",
        module_fqns_per_model_part=PARTS,
        loss_fn=nn.functional.mse_loss,
    )
    return ppctl.pipeline(model, config)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("call", [checkpointed, by_name])
def test_a_checkpointed_layer_behind_a_cut_has_the_gradients_of_a_plain_one(
    call: Callable[..., Tensor], twice: bool
) -> None:
    made = []
    for each in (plainly, call):
        pipeline = pipeline_of(Net(each, twice))
        made.append((pipeline.step(batch()), {name: p.grad for name, p in pipeline.named_parameters()}))
    (loss, gradients), (again, recomputed) = made
    assert torch.equal(loss, again)
    assert [name for name, each in gradients.items() if not torch.equal(each, recomputed[name])] == []


@pytest.mark.parametrize(
    ("call", "text"), [(reentrant, "layers.2 begins part 1, but runs without"), (with_code_before, "recomputes code")]
)
def test_checkpointing_that_would_begin_from_nothing_is_refused(call: Callable[..., Tensor], text: str) -> None:
    with pytest.raises(PpctlError, match=f"PP-E132: .*{text}"):
        pipeline_of(Net(call)).step(batch())


def test_what_arrived_is_kept_no_longer_than_its_backward() -> None:
    pipeline, arrived = pipeline_of(Net(checkpointed)), []
    norm = pipeline.parts[1].model.layers[2].norm
    norm.register_forward_pre_hook(lambda module, arguments: arrived.append(weakref.ref(arguments[0])))
    gc.disable()
    try:
        pipeline.step(batch())
        assert len(arrived) == 4  # two microbatches, each computed twice
        assert [each for each in arrived if each() is not None] == []
    finally:
        gc.enable()

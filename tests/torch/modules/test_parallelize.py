"""What `parallelize` may do with a stage: nothing in names, losses and gradients changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import ppctl
from ppctl.errors import ConfigError


class Net(nn.Module):
    """Two layers of several modules, with saved buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Around(nn.Module):
    """Asks what it is around for its length, as torch.compile's module does."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def __len__(self) -> int:
        raise TypeError("a stage has no length")

    def forward(self, *arguments: Any) -> Any:
        return self.stage(*arguments)


def compiled(stage: nn.Module) -> Any:
    return torch.compile(stage, backend="eager")


def layer_by_layer(wrap: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    def change(stage: Any) -> None:
        for name, layer in [*stage.model.layers.named_children()]:
            stage.model.layers.register_module(name, wrap(layer))

    return change


def checkpointed(stage: nn.Module) -> None:
    apply_activation_checkpointing(stage, check_fn=lambda each: isinstance(each, nn.Sequential))


def run(parallelize: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, torch.Size]]:
    config = ppctl.PipelineConfig(
        pp_schedule="interleaved_1f1b",
        pp_microbatch_size=2,
        module_fqns_per_model_part=[["layers.0", "layers.1"], ["layers.2", "layers.3"]],
        loss_fn=nn.functional.mse_loss,
    )
    pipeline = ppctl.pipeline(Net(), config, parallelize=parallelize)
    x = torch.arange(16.0).view(4, 4).sin()
    loss = pipeline.step((x, x.flip(0)))
    state = pipeline.state_dict()
    pipeline.load_state_dict(state)
    return loss, {n: p.grad for n, p in pipeline.named_parameters()}, {n: each.shape for n, each in state.items()}


@pytest.mark.parametrize(
    "parallelize",
    [
        pytest.param(Around, id="around"),
        pytest.param(checkpointed, id="checkpointed"),
        pytest.param(layer_by_layer(checkpoint_wrapper), id="layers checkpointed"),
        pytest.param(compiled, id="compiled", marks=pytest.mark.whole),
        pytest.param(layer_by_layer(compiled), id="layers compiled", marks=pytest.mark.whole),
    ],
)
def test_wrapped_modules_keep_their_names_and_their_bits(parallelize: Any) -> None:
    (loss, gradients, shapes), (again, found, named) = run(None), run(parallelize)
    assert torch.equal(loss, again) and shapes == named
    assert [name for name, each in gradients.items() if not torch.equal(each, found[name])] == []


@pytest.mark.parametrize(
    ("parallelize", "text"),
    [
        (lambda stage: 1 / 0, "PP-E553: rank 0 failed to parallelize the stages: ZeroDivisionError"),
        (
            lambda stage: stage.register_forward_hook(print),
            "PP-E130: parallelize returns a module or None, not a R",
        ),
    ],
)
def test_what_goes_wrong_in_it_is_an_error_of_all_ranks(parallelize: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(parallelize)
